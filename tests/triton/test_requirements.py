"""What the CUDA path needs of its surroundings: NVIDIA's devices, and of Triton only what it documents."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest
import torch

from moe_ops._register import PACKAGE
from moe_ops.schema import OPS
from tests.samples import Sample, samples

pytest.importorskip("triton")
MODULES = {op.name: op.kernels.get("CUDA", "") for op in OPS}
SAMPLES = {s.op: s for s in samples(torch.device("cpu")) if MODULES[s.op].startswith("triton/")}
FILES = sorted([*(PACKAGE / "triton").glob("*.py"), *(PACKAGE / "cuda").glob("*.py")])


def test_every_triton_op_has_a_sample():
    public = {name for name, file in MODULES.items() if file.startswith("triton/") and not name.startswith("_")}
    assert public == set(SAMPLES)


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=list(SAMPLES))
def test_hip_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, sample: Sample):
    module = importlib.import_module(f"moe_ops.{MODULES[sample.op].removesuffix('.py').replace('/', '.')}")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(RuntimeError, match="for NVIDIA devices; this build of PyTorch is for HIP"):
        getattr(module, sample.op)(*sample.args, **sample.options)


def names_of_triton(tree: ast.Module) -> set[str]:
    """Every dotted name that begins at a module of Triton, and every module of it that is imported."""
    known = {"triton": "triton"}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "triton":
                    found.add(alias.name)
                    known[alias.asname or "triton"] = alias.name if alias.asname else "triton"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "triton":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        parts: list[str] = []
        value: ast.AST = node
        while isinstance(value, ast.Attribute):
            parts.insert(0, value.attr)
            value = value.value
        if parts and isinstance(value, ast.Name) and value.id in known:
            found.add(".".join([known[value.id], *parts]))
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_no_private_name_of_triton(file: Path):
    names = names_of_triton(ast.parse(file.read_text()))
    private = {name for name in names if any(part.startswith("_") for part in name.split("."))}
    allowed = ("triton.language", "triton.jit", "triton.cdiv", "triton.next_power_of_2")
    assert not private
    assert {name for name in names if name != "triton" and not name.startswith(allowed)} == set()


def test_private_names_are_found():
    code = "import triton\nimport triton.language as tl\nfrom triton.runtime import jit\ntl.core._x\ntriton.compiler.f"
    assert {"triton.language.core._x", "triton.compiler.f", "triton.runtime.jit"} <= names_of_triton(ast.parse(code))


def test_native_kernels_are_built_for_every_architecture():
    setup = PACKAGE.parent / "setup.py"
    if not setup.exists():
        pytest.skip("installed without its sources")
    tree = ast.parse(setup.read_text())
    tables = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "CUDA_ARCHS"]
    archs = ast.literal_eval(tables[0])
    assert {"80", "89", "90", "100"} <= set(archs[""])
    assert archs["_sm90"] == ["90a"]
