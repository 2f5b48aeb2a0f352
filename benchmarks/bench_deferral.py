"""What deferring CPU experts costs in accuracy: perplexity of SmolLM2-135M-Instruct, the demo's model.

    python -m benchmarks.bench_deferral

Each feed-forward layer is cut into 8 experts of consecutive neurons and quantised to MXFP4; all 8 run for every token
at weight 1, so that without deferral the model is the dense one up to quantisation. Experts 0 to 3 are on the device, 4
to 7 on the CPU. With max_deferred = d the last d of the CPU experts of every layer (equal weights: the higher slots)
arrive one layer late; the last layer defers nothing.
"""

from __future__ import annotations

import torch

import moe_ops
from moe_ops._cli import smollm2
from moe_ops.reference.mxfp4 import quantize_mxfp4

EXPERTS = 8


class Layer(torch.nn.Module):
    def __init__(self, mlp: torch.nn.Module, engine: moe_ops.CpuMoeEngine, number: int, chain: dict) -> None:
        super().__init__()
        gate, up, down = (getattr(mlp, f"{name}_proj").weight.detach().float() for name in ("gate", "up", "down"))
        inter, hidden = gate.shape
        w13 = torch.cat([gate.view(EXPERTS, -1, hidden), up.view(EXPERTS, -1, hidden)], dim=1)
        w2 = down.view(hidden, EXPERTS, -1).transpose(0, 1).contiguous()
        codes = dict(zip(("w13", "w13_scale"), quantize_mxfp4(w13), strict=True))
        codes |= dict(zip(("w2", "w2_scale"), quantize_mxfp4(w2), strict=True))
        experts = engine.add_experts(f"layer{number}", EXPERTS, hidden, inter // EXPERTS, w13_layout="gate_up")
        self.hybrid = moe_ops.HybridExperts(experts.load(codes), EXPERTS // 2)
        self.hybrid.place(range(EXPERTS // 2))
        self.chain = chain

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.flatten(0, -2)
        ids = torch.arange(EXPERTS).expand(x.shape[0], EXPERTS)
        out, self.chain["deferred"] = self.hybrid(x, ids, torch.ones(ids.shape), self.chain["deferred"])
        return out.view_as(hidden_states)


def main() -> None:
    model, tokenizer = smollm2.load()
    ids = tokenizer(smollm2.text("evaluation"), return_tensors="pt").input_ids
    with moe_ops.CpuMoeEngine("deferral") as engine, torch.inference_mode():
        print(f"dense, bfloat16: perplexity {smollm2.perplexity(model, ids):.2f} on {ids.shape[1]} tokens")
        chain: dict = {}
        layers = []
        for number, layer in enumerate(model.model.layers):
            layer.mlp = Layer(layer.mlp, engine, number, chain)
            layers.append(layer.mlp.hybrid)
        for max_deferred in range(EXPERTS // 2 + 1):
            for layer in layers[:-1]:
                layer.max_deferred = max_deferred
            chain["deferred"] = layers[0].no_deferred()
            value = smollm2.perplexity(model, ids)
            print(f"max_deferred {max_deferred} of {EXPERTS // 2} CPU experts: perplexity {value:.2f}", flush=True)


if __name__ == "__main__":
    main()
