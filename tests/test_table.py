"""The table, the dispatcher, the files, the documentation and the README name the same ops with the same arguments."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

import moe_ops
from moe_ops import reference, schema
from moe_ops._register import PACKAGE, has_kernel, overload
from tests.samples import samples

ROOT = PACKAGE.parent
PUBLIC = [op for op in schema.OPS if op.public]
FORWARD = [op for op in PUBLIC if not op.name.endswith("_backward")]


@pytest.mark.parametrize("op", schema.OPS, ids=lambda op: op.name)
def test_dispatcher_has_the_schema_and_a_kernel_per_key(op):
    parsed = torch._C.parse_schema(f"moe_ops::{op.name}{op.schema}")
    assert str(overload(op.name)._schema) == str(parsed)
    for key in op.kernels:
        assert has_kernel(op.name, key), key


@pytest.mark.parametrize("op", PUBLIC, ids=lambda op: op.name)
def test_files_exist(op):
    for file in (*op.kernels.values(), op.fake, op.reference):
        assert (PACKAGE / file).exists(), file
    for file in (path for path in op.kernels.values() if not path.endswith(".py")):
        assert f'"{op.name}"' in (PACKAGE / file).read_text(), f"{file} does not register {op.name}"


def names(signature: inspect.Signature) -> list[str]:
    return [
        p.name for p in signature.parameters.values() if p.kind is not p.VAR_POSITIONAL and p.kind is not p.VAR_KEYWORD
    ]


@pytest.mark.parametrize("op", FORWARD, ids=lambda op: op.name)
def test_public_function_has_the_arguments_of_the_schema(op):
    arguments = overload(op.name)._schema.arguments
    function = getattr(moe_ops, op.name)
    signature = inspect.signature(function)
    assert names(signature) == [argument.name for argument in arguments]
    for argument in arguments:
        parameter = signature.parameters[argument.name]
        assert (parameter.kind is parameter.KEYWORD_ONLY) == argument.kwarg_only, argument.name
        default = argument.default_value if argument.has_default_value() else parameter.empty
        assert parameter.default == default, argument.name
        assert argument.name in function.__doc__ or "as in" in function.__doc__, f"{argument.name} is not documented"


@pytest.mark.parametrize("op", PUBLIC, ids=lambda op: op.name)
def test_every_argument_is_exercised(op):
    """Some sample gives each argument a value other than its default."""
    used = set()
    for sample in samples(torch.device("cpu")):
        if sample.op == op.name:
            arguments = overload(op.name)._schema.arguments
            used |= {argument.name for argument, _ in zip(arguments, sample.args, strict=False)} | set(sample.options)
    assert used == {argument.name for argument in overload(op.name)._schema.arguments}


@pytest.mark.parametrize("op", FORWARD, ids=lambda op: op.name)
def test_documentation_names_every_argument(op):
    name = op.name.removesuffix("_out")
    text = (ROOT / "docs" / "ops" / f"{name}.md").read_text()
    assert op.name in text
    for argument in overload(op.name)._schema.arguments:
        assert f"`{argument.name}`" in text, f"docs/ops/{name}.md does not describe {argument.name}"
    for result in overload(op.name)._schema.returns:
        if result.name:
            assert f"`{result.name}`" in text, f"docs/ops/{name}.md does not describe {result.name}"


def test_no_documentation_of_ops_that_do_not_exist():
    known = {op.name for op in schema.OPS}
    files = {path.stem for path in (ROOT / "docs" / "ops").glob("*.md")}
    assert files == {op.name.removesuffix("_out") for op in FORWARD}
    mentioned = set(re.findall(r"torch\.ops\.moe_ops\.(\w+)", (ROOT / "README.md").read_text()))
    assert mentioned <= known


def test_readme_names_every_op():
    text = (ROOT / "README.md").read_text()
    for op in FORWARD:
        assert f"`{op.name}`" in text, op.name


def test_every_public_name_is_documented():
    for name in moe_ops.__all__:
        if name != "__version__":
            assert inspect.getdoc(getattr(moe_ops, name)), name


def test_reference_has_every_op():
    assert {op.name for op in PUBLIC} <= set(dir(reference))


def test_file_sizes():
    """A reader can hold a file in the head."""
    for pattern in ("**/*.py", "**/*.cpp", "**/*.cu", "**/*.h"):
        for folder in ("moe_ops", "tests", "benchmarks"):
            for path in Path(ROOT / folder).glob(pattern):
                assert len(path.read_text().splitlines()) <= 500, path
