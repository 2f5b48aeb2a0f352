"""Whether the installed files are this project's.

Another distribution, `moe-ops`, installs a package of the same import name; pip lets two distributions overwrite each
other's files without a word. The RECORD of `torch-moe-ops` says what our files must be.
"""

from __future__ import annotations

import base64
import hashlib
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "torch-moe-ops"
OTHER = "moe-ops"
PACKAGE = Path(__file__).resolve().parent


def _installed_here(name: str) -> metadata.Distribution | None:
    """The installed distribution of that name whose files lie where this package was imported from."""
    for distribution in metadata.distributions(name=name, path=[str(PACKAGE.parent)]):
        if distribution.read_text("RECORD") is not None:  # a source tree that was built in place has none
            return distribution
    return None


def clash() -> str:
    """A sentence where the other distribution is installed over, or under, this one; else ''. Reads one folder."""
    if _installed_here(OTHER) is None:
        return ""
    return (
        f"the distribution '{OTHER}' is installed in the same place and also owns the package moe_ops: "
        f"uninstall both, then install '{DISTRIBUTION}' alone"
    )


def foreign_files() -> list[str]:
    """Files of this installation that differ from its RECORD or are missing; a source tree has no RECORD: []."""
    distribution = _installed_here(DISTRIBUTION)
    if distribution is None:
        return []
    bad = []
    for file in distribution.files or []:
        if file.parts[:1] != ("moe_ops",) or file.hash is None:
            continue
        path = Path(str(distribution.locate_file(file)))
        if not path.is_file():
            bad.append(str(file))
            continue
        digest = hashlib.new(file.hash.mode, path.read_bytes()).digest()
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
            bad.append(str(file))
    return bad


def source() -> str:
    """Where this package comes from, in words."""
    distribution = _installed_here(DISTRIBUTION)
    if distribution is None:
        return f"source tree {PACKAGE.parent}"
    return f"{DISTRIBUTION} {distribution.version} in {PACKAGE.parent}"
