"""A transformers model whose experts run through moe_ops: its own weights first, then quantised to MXFP4."""

from __future__ import annotations

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moe_ops.integrations.transformers as moe_transformers  # registers the experts implementation "moe_ops"

torch.manual_seed(0)
config = Qwen3MoeConfig(
    hidden_size=128,
    intermediate_size=128,
    moe_intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=8,
    num_experts_per_tok=2,
    vocab_size=256,
)
model = Qwen3MoeForCausalLM._from_config(config, experts_implementation="eager").eval()
tokens = torch.randint(0, 256, (1, 12))


@torch.no_grad()
def logits() -> torch.Tensor:
    return model(tokens, use_cache=False).logits


eager = logits()
model.set_experts_implementation("moe_ops")
print("moe_ops against eager:", f"{(logits() - eager).norm() / eager.norm():.1e}")
print("layers quantised:", moe_transformers.quantize_experts(model))
print("MXFP4 against eager:", f"{(logits() - eager).norm() / eager.norm():.1e}")
print(model.model.layers[0].mlp.experts)
