"""The wheel: its name, what is in it, and its first call where it is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch

import moe_ops

ROOT = Path(moe_ops.__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source tree")

FIRST_CALL = """
import torch, moe_ops
rows, row_map, counts = moe_ops.topk_permute(torch.arange(6.0).view(3, 2), torch.tensor([[1], [0], [1]]), 2)
assert row_map.tolist() == [[1], [0], [2]] and counts.tolist() == [1, 2]
assert moe_ops.topk_unpermute(rows, row_map).equal(torch.arange(6.0).view(3, 2))
print(moe_ops.__file__)
"""


def call(*command: str, **options: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    call(*pip, "--wheel-dir", str(folder), str(ROOT))
    (file,) = folder.glob("*.whl")
    return file


def test_name_and_contents(wheel: Path) -> None:
    assert re.fullmatch(rf"torch_moe_ops-{re.escape(moe_ops.__version__)}-cp310-abi3-linux_\w+\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert "moe_ops/_C.abi3.so" in names
    assert ("moe_ops/_C_cuda.abi3.so" in names) == (ROOT / "moe_ops" / "_C_cuda.abi3.so").exists()
    for file in ("py.typed", "_cli/data/evaluation.txt", "reference/fused_mxfp4_moe.py", "npu/fused_mxfp4_moe.py"):
        assert f"moe_ops/{file}" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith("tests/") or "/csrc/" in name for name in names)


def test_first_call_beside_this_torch(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    call(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel))
    environment = {**os.environ, "PYTHONPATH": str(site)}
    file = call(sys.executable, "-c", FIRST_CALL, cwd=tmp_path, env=environment)
    assert file.strip() == str(site / "moe_ops" / "__init__.py")
    text = call(sys.executable, "-m", "moe_ops", "info", cwd=tmp_path, env={**environment, "COLUMNS": "200"})
    assert f"torch-moe-ops {moe_ops.__version__} in {site}" in text
    assert "not the ones that were installed" not in text
    (site / "moe_ops" / "ops.py").open("a").write("\n")
    text = call(sys.executable, "-m", "moe_ops", "info", cwd=tmp_path, env={**environment, "COLUMNS": "200"})
    assert "1 files are not the ones that were installed: moe_ops/ops.py" in text


@pytest.mark.heavy
def test_first_call_in_a_fresh_virtual_environment(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    pin = f"torch=={torch.__version__.split('+')[0]}"
    call(python, "-m", "pip", "install", "--quiet", os.environ.get("MOE_OPS_TORCH", pin), "numpy", str(wheel))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    file = call(python, "-c", FIRST_CALL, cwd=tmp_path, env=environment)
    assert file.startswith(str(tmp_path / "venv"))
    call(python, "-m", "moe_ops", "check", "--device", "cpu", cwd=tmp_path, env=environment)
