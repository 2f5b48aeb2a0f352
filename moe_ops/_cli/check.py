"""`python -m moe_ops check`: every op against its reference, on every device that is present, in under a minute."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moe_ops._cli.check_cases import CASES, Comparison
from moe_ops._cli.info import KEYS, missing
from moe_ops.schema import OPS


@dataclass
class Outcome:
    op: str
    device: str
    status: str  # "ok", "failed" or "missing"
    detail: str


def present_devices() -> list[str]:
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices.append("cuda")
    if hasattr(torch, "npu") and torch.npu.is_available():
        devices.append("npu")
    return devices


def _worst(comparisons: Iterator[Comparison]) -> tuple[bool, str]:
    """(all within tolerance, a description of the worst)."""
    count, worst, worst_ratio = 0, "", -1.0
    for comparison in comparisons:
        count += 1
        ratio = comparison.ratio()
        if ratio > worst_ratio:
            worst, worst_ratio = comparison.describe(), ratio
    return worst_ratio <= 1.0, f"{count} comparisons, {f'worst: {worst}' if worst_ratio > 0 else 'all equal'}"


def check_op(op: str, device: str, cases: Callable[[torch.device], Iterator[Comparison]]) -> Outcome:
    key = next(key for key, name in KEYS.items() if name == device)
    if reason := missing(op, key):
        return Outcome(op, device, "missing", reason)
    try:
        good, detail = _worst(cases(torch.device(device)))
    except Exception as error:  # whatever a kernel raises here is the finding
        return Outcome(op, device, "failed", f"{type(error).__name__}: {error}")
    return Outcome(op, device, "ok" if good else "failed", detail)


def run(console: Console, devices: list[str]) -> int:
    started = time.perf_counter()
    unknown = [device for device in devices if device not in KEYS.values()]
    if unknown:
        console.print(f"check: device must be one of {', '.join(KEYS.values())}, got {unknown[0]!r}", style="red")
        return 2
    outcomes = [
        check_op(op.name, device, CASES[op.name])
        for device in devices or present_devices()
        for op in OPS
        if op.name in CASES
    ]
    table = Table()
    for heading in ("op", "device", "", "detail"):
        table.add_column(heading)
    colours = {"ok": "green", "failed": "red", "missing": "yellow"}
    for outcome in outcomes:
        colour = colours[outcome.status]
        table.add_row(outcome.op, outcome.device, f"[{colour}]{outcome.status}[/{colour}]", escape(outcome.detail))
    console.print(table)
    counts = {status: sum(outcome.status == status for outcome in outcomes) for status in colours}
    console.print(
        f"{counts['ok']} ok, {counts['failed']} failed, {counts['missing']} without a kernel, "
        f"in {time.perf_counter() - started:.0f} s",
        highlight=False,
    )
    # A missing CPU kernel is a failure: every op has one, and without it the library cannot do its work here.
    bad = counts["failed"] + sum(o.status == "missing" and o.device == "cpu" for o in outcomes)
    return 1 if bad or not counts["ok"] else 0
