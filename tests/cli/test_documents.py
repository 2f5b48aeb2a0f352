"""The code in the README and the examples runs, and what the documents link to exists."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import moe_ops

ROOT = Path(moe_ops.__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def python(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=None, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def code_of(document: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), re.S)


def test_code_of_the_readme() -> None:
    blocks = code_of("README.md")
    assert len(blocks) >= 2
    assert python("-c", "\n".join([*blocks, "print(tuple(out.shape))"])) == "(16, 512)\n"


def test_code_of_expert_parallelism() -> None:
    check = "torch.testing.assert_close(by_stages, output.float(), rtol=1e-2, atol=1e-2); print(output.abs().max() > 0)"
    assert python("-c", "\n".join([*code_of("docs/distributed.md"), check])) == "tensor(True)\n"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example: Path) -> None:
    if example.stem == "transformers_experts":
        pytest.importorskip("transformers")
    code = f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); runpy.run_path({str(example)!r})"
    text = python("-c", code)
    numbers = [float(number) for number in re.findall(r"(?:stages|eager|place): ([\d.e+-]+)", text)]
    assert all(number < 0.3 for number in numbers)
    assert "False" not in text
    if example.stem == "train_router":
        losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", text)]
        assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("script", ["demo", "test", "test-full", "test-gpu", "test-npu"])
def test_scripts_explain_themselves(script: str, tmp_path: Path) -> None:
    """Before they make an environment or build anything."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    command = ["bash", str(tmp_path / "scripts" / script), "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and f"usage: scripts/{script}".removesuffix("-full") in done.stdout, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["scripts"]


def test_every_example_is_listed() -> None:
    listed = set(re.findall(r"\]\((\w+\.py)\)", (ROOT / "examples" / "README.md").read_text(encoding="utf-8")))
    assert listed == {path.name for path in EXAMPLES}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text(encoding="utf-8")):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_settings_are_those_that_are_read() -> None:
    in_code = r'(?:environ(?:\.get\(|\[)|getenv\(|flag\()"(MOE_OPS_[A-Z0-9_]+)'
    in_shell = r"\$\{(MOE_OPS_[A-Z0-9_]+):-"
    folders = ("moe_ops", "tests", "benchmarks", "scripts")
    paths = [ROOT / "setup.py", *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    found = set()
    for path in paths:
        if path.suffix in (".py", ".cpp", ".h", "") and path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            found |= {*re.findall(in_code, text), *re.findall(in_shell, text)}
    listed = set(re.findall(r"^\| `(MOE_OPS_\w+)`", (ROOT / "docs" / "settings.md").read_text(encoding="utf-8"), re.M))
    assert found == listed
