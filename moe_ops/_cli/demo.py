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
from rich.progress import track
from rich.table import Table

from moe_ops._cli import smollm2
from moe_ops._cli.feed_forward import CutFeedForward
from moe_ops.integrations.checkpoints import Checkpoint, CheckpointWriter
from moe_ops.integrations.dense import cut_dense

NUM_EXPERTS = 8
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
    return writer.total_bytes


def replace_feed_forward(model: Any, folder: Path, device: torch.device, console: Console) -> list[CutFeedForward]:
    """Load the checkpoint layer by layer into the model, half of the experts on `device`, half in the CPU engine."""
    here, there = list(range(NUM_EXPERTS // 2)), list(range(NUM_EXPERTS // 2, NUM_EXPERTS))
    replaced = []
    with Checkpoint(folder) as checkpoint:
        layers = list(model.model.layers)
        for number, layer in enumerate(track(layers, "loading experts", console=console, transient=True)):
            prefix = _prefix(number)
            layer.mlp = CutFeedForward(
                checkpoint.load_experts(f"{prefix}.experts", here, device=device),
                checkpoint.load_experts(f"{prefix}.experts", there),
                checkpoint.read(f"{prefix}.router.weight"),
                checkpoint.read(f"{prefix}.router.bias"),
                checkpoint.read(f"{prefix}.output_bias"),
                device_experts=here,
                cpu_experts=there,
            ).to(device)
            replaced.append(layer.mlp)
    return replaced


def set_top_k(layers: list[CutFeedForward], top_k: int) -> None:
    for layer in layers:
        layer.top_k = top_k


def pick_device(name: str) -> torch.device:
    if name != "auto":
        return torch.device(name)
    if torch.cuda.is_available():
        from moe_ops._cli.info import missing

        if not any(missing(op, "CUDA") for op in ("fused_mxfp4_moe", "cpu_moe_submit", "cpu_moe_sync")):
            return torch.device("cuda")
    return torch.device("cpu")


def run(options: Options, console: Console) -> None:
    started = time.perf_counter()
    device = pick_device(options.device)
    with console.status("loading SmolLM2-135M-Instruct"):
        model, tokenizer = smollm2.load()
        model.to(device)
    config = model.config
    console.print(
        f"[bold]SmolLM2-135M-Instruct[/bold] on {device}: {config.num_hidden_layers} layers, "
        f"H {config.hidden_size}, I {config.intermediate_size}, bfloat16 ({time.perf_counter() - started:.0f} s)"
    )

    evaluation = tokenizer(smollm2.text("evaluation"), return_tensors="pt").input_ids.to(device)
    calibration = tokenizer(smollm2.text("calibration"), return_tensors="pt").input_ids.to(device)
    dense = smollm2.perplexity(model, evaluation)
    dense_speed = smollm2.generate(model, tokenizer, options.prompt, SPEED_TOKENS, show=False).tokens_per_second
    inputs = smollm2.layer_inputs(model, calibration)

    with tempfile.TemporaryDirectory(prefix="moe_ops_demo_") as temporary:
        folder = options.checkpoint or Path(temporary)
        begun = time.perf_counter()
        written = write_checkpoint(model, inputs, folder, console)
        bytes_before = sum(p.numel() * 2 for layer in model.model.layers for p in layer.mlp.parameters())
        console.print(
            f"cut into {NUM_EXPERTS} experts of {config.intermediate_size // NUM_EXPERTS} neurons, grouped by "
            f"co-activation on {calibration.shape[1]} tokens, in MXFP4: {bytes_before / 2**20:.0f} MiB -> "
            f"{written / 2**20:.0f} MiB in {time.perf_counter() - begun:.0f} s"
        )
        begun = time.perf_counter()
        layers = replace_feed_forward(model, folder, device, console)
        console.print(
            f"loaded from {folder if options.checkpoint else 'its checkpoint'} in {time.perf_counter() - begun:.1f} s: "
            f"experts 0-3 in fused_mxfp4_moe on {device}, experts 4-7 in cpu_moe_submit/cpu_moe_sync"
        )

    console.print(f"\n[bold]> {options.prompt}[/bold]  (all {NUM_EXPERTS} experts)\n")
    set_top_k(layers, NUM_EXPERTS)
    answer = smollm2.generate(model, tokenizer, options.prompt, options.max_new_tokens)
    console.print(
        f"\n{len(answer.ids)} tokens, [bold]{answer.tokens_per_second:.1f} tokens/s[/bold] "
        f"(dense bfloat16 in PyTorch: {dense_speed:.1f})"
    )

    set_top_k(layers, options.top_k)
    console.print(f"\n[bold]> {options.prompt}[/bold]  (top {options.top_k} of {NUM_EXPERTS} experts)\n")
    sparse = smollm2.generate(model, tokenizer, options.prompt, options.max_new_tokens // 2)
    console.print(f"\n{len(sparse.ids)} tokens, [bold]{sparse.tokens_per_second:.1f} tokens/s[/bold]\n")

    table = Table(title=f"Perplexity on {evaluation.shape[1]} tokens of prose, and what a smaller top-k costs")
    for heading in ("experts", "weights read", "perplexity", "against dense"):
        table.add_column(heading, justify="right")
    table.add_row("dense, bfloat16", "", f"{dense:.1f}", "")
    for top_k in range(NUM_EXPERTS, NUM_EXPERTS // 2 - 1, -1):
        set_top_k(layers, top_k)
        value = smollm2.perplexity(model, evaluation)
        table.add_row(
            f"{top_k} of {NUM_EXPERTS}, MXFP4", f"{top_k / NUM_EXPERTS:.0%}", f"{value:.1f}", f"x {value / dense:.2f}"
        )
    console.print(table)
    console.print(f"{time.perf_counter() - started:.0f} s in all")
