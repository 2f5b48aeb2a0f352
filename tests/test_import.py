"""The package imports and explains itself without a compiler's library, without Triton and without a GPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moe_ops._register import PACKAGE
from tests.conftest import BACKEND

pytestmark = pytest.mark.skipif(BACKEND != "cpu", reason="about importing the package")


def run(code: str, folder: Path) -> str:
    """Run `code` in a fresh interpreter that sees the copy of the package in `folder`."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env={"PYTHONPATH": str(folder)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def python_only(tmp_path: Path) -> Path:
    shutil.copytree(PACKAGE, tmp_path / "moe_ops", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path


def test_without_the_native_library(python_only):
    out = run(
        "import torch, moe_ops\n"
        "x, ids = torch.zeros(2, 4), torch.zeros(2, 1, dtype=torch.int32)\n"
        "try: moe_ops.topk_permute(x, ids, 2)\n"
        "except RuntimeError as error: print(error)\n"
        "print(moe_ops.topk_permute(x.to('meta'), ids.to('meta'), 2)[0].shape)\n"
        "print(moe_ops.reference.topk_permute(x, ids, 2)[1].tolist())\n",
        python_only,
    )
    assert "topk_permute: no CPU kernel here: moe_ops/_C.abi3.so is not installed" in out
    assert "torch.Size([2, 4])" in out
    assert "[[0], [1]]" in out


def test_with_a_library_that_does_not_load(python_only):
    (python_only / "moe_ops" / "_C.abi3.so").write_bytes(b"not a library")
    out = run(
        "import warnings\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    import torch, moe_ops\n"
        "print([str(w.message) for w in caught if w.category is RuntimeWarning])\n"
        "try: moe_ops.ep_remap(torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 1), expert_offset=0,"
        " num_local_experts=1)\n"
        "except RuntimeError as error: print(error)\n",
        python_only,
    )
    assert out.count("moe_ops/_C.abi3.so could not be loaded") == 2  # the warning at import, the error of the call


def test_without_triton(python_only):
    out = run(
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'triton' else find(name, *a)\n"
        "import moe_ops\n"
        "from moe_ops._register import MISSING\n"
        "print(MISSING['topk_unpermute', 'CUDA'])\n",
        python_only,
    )
    assert "triton" in out


def test_importing_does_not_import_backends(python_only):
    out = run(
        "import sys, moe_ops\nprint([n for n in ('triton', 'torch_npu', 'transformers') if n in sys.modules])",
        python_only,
    )
    assert out.strip() == "[]"
