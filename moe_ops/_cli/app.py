"""The commands and their options; each does its work in a module of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    name="python -m moe_ops",
    help="Mixture-of-experts operators for PyTorch: what is here, does it work, how fast is it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def info() -> None:
    """Which ops have which kernels here, why others are missing, and on what they run."""
    from moe_ops._cli.info import run

    run(Console())


@app.command()
def check(
    device: Annotated[list[str] | None, typer.Option(help="cpu, cuda or npu; by default every one present.")] = None,
) -> None:
    """Compare every op with its reference on this machine; the exit code is 1 where one fails."""
    from moe_ops._cli.check import run

    raise typer.Exit(run(Console(), device or []))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench(
    context: typer.Context,
    op: Annotated[str, typer.Argument(help="An op, such as topk_permute; without it, lists the benchmarks.")] = "",
) -> None:
    """Run the benchmark of an op; what follows its name goes to the benchmark (try --help)."""
    from moe_ops._cli.bench import run

    raise typer.Exit(run(Console(), op, context.args))


@app.command()
def demo(
    prompt: Annotated[str, typer.Argument(help="What to ask the model.")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Length of the answer.")] = 120,
    top_k: Annotated[int, typer.Option(min=1, max=8, help="Experts per token of the sparse answer.")] = 6,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    checkpoint: Annotated[Path | None, typer.Option(help="Keep the MXFP4 checkpoint in this new folder.")] = None,
) -> None:
    """Generate text with a real model whose feed-forward layers run through moe_ops."""
    from moe_ops._cli.demo import Options, run

    options = Options(max_new_tokens=max_new_tokens, top_k=top_k, device=device, checkpoint=checkpoint)
    if prompt:
        options.prompt = prompt
    try:
        run(options, Console())
    except RuntimeError as error:
        Console(stderr=True).print(str(error), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error


def main() -> None:
    # A pipe that closes early (`| head`) is no error of ours.
    try:
        app()
    except BrokenPipeError:
        sys.exit(0)
