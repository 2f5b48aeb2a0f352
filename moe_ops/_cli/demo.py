"""Real text through the operators.

The feed-forward layers of SmolLM2-135M-Instruct are cut into eight experts each, quantised to MXFP4, written to a
safetensors checkpoint under the names of gpt-oss and loaded back. Half of the experts run in `fused_mxfp4_moe`, the
other half on the CPU engine through `cpu_moe_submit` and `cpu_moe_sync`.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from moe_ops._cli import smollm2
from moe_ops._cli.feed_forward import Constant, CutFeedForward
from moe_ops._cli.info import KEYS, missing
from moe_ops.engine import CpuMoeEngine
from moe_ops.hybrid import HybridExperts
from moe_ops.integrations.checkpoints import Checkpoint, CheckpointWriter
from moe_ops.integrations.dense import cut_dense

NUM_EXPERTS = 8
ON_DEVICE = 4  # experts in fused_mxfp4_moe; the others are in the CPU engine
DEFAULT_PROMPT = "Why is the sky blue? Explain it to a curious child."
SPEED_TOKENS = 32


@dataclass
class Options:
    prompt: str = DEFAULT_PROMPT
    max_new_tokens: int = 120
    top_k: int = 6
    device: str = "auto"
    checkpoint: Path | None = None


def _prefix(layer: int) -> str:
    return f"model.layers.{layer}.mlp"


def write_checkpoint(model: Any, inputs: list[torch.Tensor], folder: Path, console: Console) -> int:
    """Cut, quantise and write every layer; returns the bytes written."""
    # Thousands of small steps: waking threads for each costs more than they save, on a busy machine many times more.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with CheckpointWriter(folder, metadata={"base_model": "SmolLM2-135M-Instruct"}) as writer:
        layers = list(model.model.layers)
        for number, layer in enumerate(track(layers, "cutting and quantising", console=console, transient=True)):
            mlp, prefix = layer.mlp, _prefix(number)
            cut = cut_dense(
                mlp.gate_proj.weight.detach().cpu(),
                mlp.up_proj.weight.detach().cpu(),
                mlp.down_proj.weight.detach().cpu(),
                inputs[number].cpu(),
                NUM_EXPERTS,
            )
            writer.add_experts(f"{prefix}.experts", cut.experts)
            writer.add(f"{prefix}.router.weight", cut.router_weight)
            writer.add(f"{prefix}.router.bias", cut.router_bias)
            writer.add(f"{prefix}.output_bias", cut.output_bias)
    torch.set_num_threads(threads)
    return writer.total_bytes


def replace_feed_forward(
    model: Any, folder: Path, engine: CpuMoeEngine, device: torch.device, console: Console
) -> list[CutFeedForward]:
    """Load the checkpoint layer by layer into the model, half of the experts on `device`, half in the CPU engine."""
    replaced = []
    with Checkpoint(folder) as checkpoint:
        layers = list(model.model.layers)
        for number, layer in enumerate(track(layers, "loading experts", console=console, transient=True)):
            prefix = _prefix(number)
            hidden_size, intermediate_size = model.config.hidden_size, model.config.intermediate_size // NUM_EXPERTS
            in_engine = engine.add_experts(
                prefix, NUM_EXPERTS, hidden_size, intermediate_size, w13_layout="interleaved", w2_bias=True
            )
            experts = HybridExperts(
                in_engine, ON_DEVICE, device=device, shared_experts=Constant(checkpoint.read(f"{prefix}.output_bias"))
            )
            for expert in range(NUM_EXPERTS):
                tensors = checkpoint.read_expert(f"{prefix}.experts", expert)
                place = experts.load_resident if expert < ON_DEVICE else in_engine.load_expert
                place(expert, **tensors)
            router_weight, router_bias = (checkpoint.read(f"{prefix}.router.{part}") for part in ("weight", "bias"))
            layer.mlp = CutFeedForward(experts, router_weight, router_bias).to(device)
            replaced.append(layer.mlp)
    return replaced


def set_top_k(layers: list[CutFeedForward], top_k: int) -> None:
    for layer in layers:
        layer.top_k = top_k


def pick_device(name: str) -> torch.device:
    """The device to use; raises where it lacks one of the kernels."""
    device = torch.device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    key = next((key for key, kind in KEYS.items() if kind == device.type), "CPU")
    for op in ("fused_mxfp4_moe", "cpu_moe_submit", "cpu_moe_sync"):
        if reason := missing(op, key):
            if name == "auto" and device.type != "cpu":
                return pick_device("cpu")
            raise RuntimeError(f"the demo needs {op} on {device}, which has no kernel here: {reason}")
    return device


def answer(model: Any, tokenizer: Any, options: Options, top_k: int, max_new_tokens: int, console: Console) -> float:
    """Print one answer as it comes; returns tokens per second."""
    console.print(f"\n[bold]> {escape(options.prompt)}[/bold]  (top {top_k} of {NUM_EXPERTS} experts)\n")
    stream = smollm2.generate(model, tokenizer, options.prompt, max_new_tokens)
    console.print(f"\n{len(stream.ids)} tokens, [bold]{stream.tokens_per_second:.1f} tokens/s[/bold]", highlight=False)
    return stream.tokens_per_second


def run(options: Options, console: Console) -> None:
    started = time.perf_counter()
    smollm2.find_gguf()  # raises what to install before anything slow
    device = pick_device(options.device)
    with console.status("loading SmolLM2-135M-Instruct"):
        model, tokenizer = smollm2.load()
        model.to(device)
    config = model.config
    console.print(
        f"SmolLM2-135M-Instruct on {device}: {config.num_hidden_layers} layers, H {config.hidden_size}, "
        f"I {config.intermediate_size}, bfloat16, loaded in {time.perf_counter() - started:.0f} s"
    )

    def tokens(name: str) -> torch.Tensor:
        return tokenizer(smollm2.text(name), return_tensors="pt").input_ids.to(device)

    evaluation, calibration = tokens("evaluation"), tokens("calibration")

    def measure() -> tuple[float, float]:
        """(perplexity, tokens per second of decoding)."""
        speed = smollm2.generate(model, tokenizer, options.prompt, SPEED_TOKENS, show=False).tokens_per_second
        return smollm2.perplexity(model, evaluation), speed

    with console.status("measuring the dense model"):
        dense, dense_speed = measure()
        inputs = smollm2.layer_inputs(model, calibration)

    with CpuMoeEngine("demo") as engine, tempfile.TemporaryDirectory(prefix="moe_ops_demo_") as temporary:
        folder = options.checkpoint or Path(temporary)
        begun = time.perf_counter()
        dense_bytes = sum(p.numel() * 2 for layer in model.model.layers for p in layer.mlp.parameters())
        written = write_checkpoint(model, inputs, folder, console)
        console.print(
            f"cut into {NUM_EXPERTS} experts of {config.intermediate_size // NUM_EXPERTS} neurons, grouped by "
            f"co-activation on {calibration.shape[1]} tokens, in MXFP4: {dense_bytes / 2**20:.0f} MiB -> "
            f"{written / 2**20:.0f} MiB, in {time.perf_counter() - begun:.0f} s"
        )
        begun = time.perf_counter()
        layers = replace_feed_forward(model, folder, engine, device, console)
        console.print(
            f"loaded from {options.checkpoint or 'the checkpoint'} in {time.perf_counter() - begun:.1f} s: experts "
            f"0-{ON_DEVICE - 1} in fused_mxfp4_moe on {device}, {ON_DEVICE}-{NUM_EXPERTS - 1} in "
            f"cpu_moe_submit/cpu_moe_sync"
        )

        set_top_k(layers, NUM_EXPERTS)
        answer(model, tokenizer, options, NUM_EXPERTS, options.max_new_tokens, console)
        if options.top_k < NUM_EXPERTS:
            set_top_k(layers, options.top_k)
            answer(model, tokenizer, options, options.top_k, options.max_new_tokens // 2, console)

        table = Table(title=f"Perplexity on {evaluation.shape[1]} tokens of prose, and what a smaller top-k costs")
        for heading in ("experts per token", "perplexity", "against dense", "tokens/s"):
            table.add_column(heading, justify="right")
        table.add_row("dense, bfloat16", f"{dense:.1f}", "", f"{dense_speed:.1f}")
        for top_k in track(range(NUM_EXPERTS, NUM_EXPERTS // 2 - 1, -1), "measuring", console=console, transient=True):
            set_top_k(layers, top_k)
            value, speed = measure()
            table.add_row(f"{top_k} of {NUM_EXPERTS}, MXFP4", f"{value:.1f}", f"x {value / dense:.2f}", f"{speed:.1f}")
        console.print(table)
        jobs = engine.stats()
        console.print(
            f"CPU engine: {jobs['completed']} jobs, {jobs['busy_ns'] / 1e9:.1f} s busy, "
            f"{jobs['sync_wait_ns'] / 1e9:.1f} s waited for; {time.perf_counter() - started:.0f} s in all"
        )
