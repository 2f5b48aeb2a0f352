"""Print the requirements of pyproject.toml, one a line: the project's own and those of the extras that are named.

    python scripts/_requirements.py demo test

Where torch is already here, or installed beforehand (scripts/_environment.sh), its line leaves it as it is.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def load(path: Path) -> dict[str, Any]:
    try:
        import tomllib as toml
    except ModuleNotFoundError:  # Python 3.10
        from pip._vendor import tomli as toml
    return toml.loads(path.read_text(encoding="utf-8"))


def main() -> None:
    configuration = load(Path(__file__).resolve().parents[1] / "pyproject.toml")
    project = configuration["project"]
    lines = [*configuration["build-system"]["requires"], *project["dependencies"]]
    for extra in sys.argv[1:]:
        lines += project["optional-dependencies"][extra]
    print("\n".join(dict.fromkeys(lines)))


if __name__ == "__main__":
    main()
