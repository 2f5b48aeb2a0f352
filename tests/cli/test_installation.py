"""Files that are not the ones that were installed, and the other distribution of the same import name."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moe_ops import _installation


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site-packages folder with an installation of two files."""
    package, record = tmp_path / "moe_ops", []
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "_installation.py").write_text(Path(_installation.__file__).read_text())
    for file in sorted(package.iterdir()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).rstrip(b"=").decode()
        record.append(f"moe_ops/{file.name},sha256={digest},{file.stat().st_size}")
    add_distribution(tmp_path, "torch-moe-ops", [*record, "torch_moe_ops-1.0.dist-info/RECORD,,"])
    return tmp_path


def add_distribution(site: Path, name: str, record: list[str]) -> None:
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "RECORD").write_text("\n".join(record) + "\n")


def ask(site: Path, expression: str) -> str:
    code = f"import sys; sys.path.insert(0, {str(site)!r}); from moe_ops import _installation as i; print({expression})"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_an_untouched_installation(site: Path) -> None:
    assert ask(site, "(i.foreign_files(), i.clash())") == "([], '')"
    assert ask(site, "i.source()") == f"torch-moe-ops 1.0 in {site}"


def test_changed_and_missing_files(site: Path) -> None:
    (site / "moe_ops" / "__init__.py").write_text("x = 1\n")
    assert ask(site, "[f.replace(chr(92), '/') for f in i.foreign_files()]") == "['moe_ops/__init__.py']"


def test_the_other_distribution(site: Path) -> None:
    add_distribution(site, "moe-ops", ["moe_ops/__init__.py,,"])
    assert "'moe-ops' is installed in the same place" in ask(site, "i.clash()")


def test_a_source_tree_has_no_record(site: Path) -> None:
    for file in (site / "torch_moe_ops-1.0.dist-info").iterdir():
        file.unlink()
    (site / "torch_moe_ops-1.0.dist-info").rmdir()
    assert ask(site, "(i.foreign_files(), i.clash())") == "([], '')"
    assert ask(site, "i.source()").startswith("source tree")


def test_import_warns_of_the_other_distribution(tmp_path: Path) -> None:
    shutil.copytree(_installation.PACKAGE, tmp_path / "moe_ops", ignore=shutil.ignore_patterns("csrc", "__pycache__"))
    add_distribution(tmp_path, "moe-ops", ["moe_ops/__init__.py,,"])
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import moe_ops; print(moe_ops.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "moe_ops" / "__init__.py")
    assert "the distribution 'moe-ops' is installed in the same place" in done.stderr
