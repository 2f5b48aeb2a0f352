"""`python -m moe_ops info`."""

from __future__ import annotations

import importlib.util
import os
import platform
from importlib import metadata

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import moe_ops
from moe_ops import _installation, _register
from moe_ops.schema import OPS, SCHEMA_VERSION

KEYS = {"CPU": "cpu", "CUDA": "cuda", "PrivateUse1": "npu"}


def missing(op: str, key: str) -> str:
    """Why an op has no kernel for a dispatch key here, or ''."""
    return _register.MISSING.get((op, key), "")


def version_of(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def accelerators() -> list[str]:
    lines = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            lines.append(f"cuda:{index} {torch.cuda.get_device_name(index)}, CUDA {torch.version.cuda}")
    else:
        lines.append("no CUDA device" if torch.version.cuda else "no CUDA device (a CPU build of torch)")
    if importlib.util.find_spec("torch_npu") is None:
        lines.append("no NPU (torch_npu is not installed)")
    else:
        lines += npu_lines()
    return lines


def npu_lines() -> list[str]:
    name = f"torch_npu {version_of('torch_npu')}"
    if not hasattr(torch, "npu"):
        off = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0"
        return [f"{name}, not imported{' (TORCH_DEVICE_BACKEND_AUTOLOAD=0)' if off else ''}: no NPU is seen"]
    if not torch.npu.is_available():
        return [f"{name}, no NPU is present"]
    from moe_ops.npu import support

    return [f"{name}, device present", *support.lines()]


def installation() -> list[str]:
    lines = [_installation.source()]
    if clash := _installation.clash():
        lines.append(f"[red]{escape(clash)}[/red]")
    foreign = _installation.foreign_files()
    if foreign:
        shown = ", ".join(foreign[:5]) + (f" and {len(foreign) - 5} more" if len(foreign) > 5 else "")
        lines.append(f"[red]{len(foreign)} files are not the ones that were installed: {escape(shown)}[/red]")
    return lines


def kernel_table() -> tuple[Table, dict[str, list[str]]]:
    """Op x dispatch key, and reason -> what is missing for it."""
    table = Table(title="Kernels")
    table.add_column("op")
    for key in KEYS:
        table.add_column(key)
    reasons: dict[str, list[str]] = {}
    for op in OPS:
        if not op.public and set(op.kernels) - set(KEYS):
            continue  # management of engines: no kernels of a device
        cells = []
        for key in KEYS:
            if not op.public and key not in op.kernels:
                cells.append("")
                continue
            reason = missing(op.name, key) if key in op.kernels else "the op has no kernel for it"
            if reason:
                # One line for the same reason of several ops, though each names its own file.
                general = reason.replace(f"/{op.name}.", "/<op>.")
                reasons.setdefault(f"{key}: {general}", []).append(op.name)
            cells.append("[dim]-[/dim]" if reason else f"[green]{_language(op.kernels[key])}[/green]")
        if op.public:
            table.add_row(op.name, *cells)
    return table, reasons


def _language(file: str) -> str:
    if file.startswith("triton/"):
        return "Triton"
    return "Python" if file.endswith(".py") else "C++"


def native() -> list[str]:
    from moe_ops._cli.native import cpu_lines

    lines = cpu_lines()
    for name in _register.NATIVE_LIBRARIES.values():
        path = _register.PACKAGE / name
        lines.append(f"{name}: {path.stat().st_size / 2**20:.1f} MiB" if path.exists() else f"{name}: not built")
    return lines


def run(console: Console) -> None:
    facts = Table.grid(padding=(0, 2))
    facts.add_row("moe_ops", f"{moe_ops.__version__}, schema version {SCHEMA_VERSION}")
    for number, line in enumerate(installation()):
        facts.add_row("installation" if number == 0 else "", line)
    facts.add_row("torch", f"{torch.__version__}, Python {platform.python_version()}, {platform.platform()}")
    facts.add_row("triton", version_of("triton"))
    facts.add_row("processor", f"{processor()}, {usable_cores()} cores usable")
    for line in native():
        facts.add_row("", line)
    for number, line in enumerate(accelerators()):
        facts.add_row("accelerators" if number == 0 else "", line)
    console.print(facts)
    table, reasons = kernel_table()
    console.print(table)
    for reason, ops in reasons.items():
        console.print(f"[dim]-[/dim] {escape(reason)}: {', '.join(ops)}", highlight=False, soft_wrap=True)
