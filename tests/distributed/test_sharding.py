"""What is promised of expert tensors under FSDP and DTensor (docs/distributed.md)."""

from __future__ import annotations

import sharding_cases as cases
from cluster import Cluster


def test_frozen_experts_in_buffers_are_left_alone_by_fsdp(pair: Cluster) -> None:
    pair.run(cases.frozen_experts_under_fsdp)


def test_trained_experts_are_ignored_parameters(pair: Cluster) -> None:
    pair.run(cases.trained_experts_under_fsdp)


def test_experts_from_dtensors(pair: Cluster) -> None:
    for errors in pair.run(cases.experts_from_dtensors):
        assert "local_experts: tensor must be sharded as Shard(0) on a mesh of one dimension" in errors[0]
        assert errors[1] == "local_experts: tensor must be a multiple of 2 experts, got 3"
        assert len(errors) == 3 and "DTensor" in errors[2]
