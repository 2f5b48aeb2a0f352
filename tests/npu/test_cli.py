"""`python -m moe_ops` where torch_npu is: on a device, and without one."""

from __future__ import annotations

import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
import torch

from moe_ops.schema import OPS

pytest.importorskip("torch_npu")
pytest.importorskip("typer")
from rich.console import Console

from moe_ops._cli import check, info
from moe_ops.npu._device import family

ROOT = Path(__file__).resolve().parents[2]


def printed(function, *arguments) -> tuple[object, str]:
    console = Console(file=StringIO(), width=200)
    result = function(console, *arguments)
    return result, console.file.getvalue()


def in_a_process(*arguments: str) -> str:
    environment = {**os.environ, "COLUMNS": "200", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_table(text: str) -> None:
    """Every public op has a kernel for the NPU."""
    for op in OPS:
        if op.public:
            (row,) = (line for line in text.splitlines() if line.startswith(f"│ {op.name} "))
            assert row.split("│")[-2].strip() == "Python", row


def test_info() -> None:
    _, text = printed(info.run)
    name, kind = torch.npu.get_device_name(0), family(torch.device("npu", 0))
    assert f"npu:0 {name}, {kind}: fused routing, grouped matmul" in text
    assert "CPU experts: aclrtLaunchHostFunc" in text and "PrivateUse1: " not in text
    assert ("npu_mx_v1" in text) == (kind == "A5")
    check_table(text)


def test_check_finds_every_op_right() -> None:
    code, text = printed(check.run, ["npu"])
    assert code == 0, text
    assert f"{sum(op.public for op in OPS)} ok, 0 failed, 0 without a kernel" in text


@pytest.mark.simulation
def test_info_over_the_simulation_in_a_process_of_its_own() -> None:
    text = in_a_process("tests.npu.sim", "--soc", "A3", "moe_ops", "info")
    assert "npu:0 Ascend910_9382, A3: " in text
    check_table(text)


def test_info_where_torch_npu_is_not_imported() -> None:
    text = in_a_process("moe_ops", "info")
    assert "not imported (TORCH_DEVICE_BACKEND_AUTOLOAD=0): no NPU is seen" in text and "npu:0" not in text
