"""One set of processes per world size, kept for all tests of that size."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cluster import Cluster


@pytest.fixture(scope="session", params=[2, 3, 4, 8], ids=lambda size: f"R{size}")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    made = Cluster(request.param)
    yield made
    made.stop()


@pytest.fixture(scope="session")
def pair() -> Iterator[Cluster]:
    made = Cluster(2)
    yield made
    made.stop()
