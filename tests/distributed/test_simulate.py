"""The simulation of large groups: its checks can fail, and its bytes are those of a hand-counted exchange."""

from __future__ import annotations

import pytest
import torch

from moe_ops.distributed import simulate as simulation
from moe_ops.distributed.simulate import Setting, check_exchange, count, simulate, traffic


@pytest.mark.parametrize(("ep_size", "num_experts"), [(64, 256), (96, 256), (64, 64)])
@pytest.mark.parametrize("skew", [0.0, 1.2])
def test_large_groups_are_consistent(ep_size: int, num_experts: int, skew: float) -> None:
    setting = Setting(ep_size, num_experts, tokens=16, top_k=8, skew=skew)
    found, checked = simulate(setting)
    assert checked >= 8
    assert int(found.loads.sum()) == ep_size * 16 * 8
    assert 0 < found.once_per_rank <= 1
    assert found.gather_bytes == ep_size * (3 + num_experts) * 4


def test_a_thousand_ranks() -> None:
    found, checked = simulate(Setting(1024, 1024, tokens=4), checked_ranks=3)
    assert checked == 4 and int(found.loads.sum()) == 1024 * 4 * 8


def test_bytes_of_a_small_exchange() -> None:
    """Two nodes of one rank: rank 0 sends 2 rows away, rank 1 sends 3; each comes back."""
    ids = torch.tensor([[[0, 2], [1, 3]], [[0, 1], [2, 0]]])
    setting = Setting(2, 4, tokens=2, top_k=2, hidden_size=10, ranks_per_node=1)
    found = traffic(setting, ids, count(ids, 4))
    assert found.loads.tolist() == [5, 3]
    assert found.out_of_rank.tolist() == [2 * 10 * 6, 3 * 10 * 6]
    assert (found.link_mean, found.link_max) == (150.0, 180.0)
    assert found.node_out.tolist() == [120.0, 180.0]
    assert found.once_per_rank == 7 / 8  # only the third token has both experts on one rank
    together = traffic(Setting(2, 4, tokens=2, top_k=2, hidden_size=10, ranks_per_node=2), ids, count(ids, 4))
    assert together.node_out.tolist() == [0.0]


def test_an_inconsistent_exchange_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = count(simulation.draw_ids(Setting(4, 8, tokens=4, top_k=2), torch.Generator().manual_seed(0)), 8)
    check_exchange(counts, range(4))
    real = simulation.ops.route_metadata

    def shifted(counts: torch.Tensor, ep_rank: int, *, mode: str) -> tuple[torch.Tensor, ...]:
        fields = list(real(counts, ep_rank, mode=mode))
        if ep_rank == 2 and mode == "push":
            fields[1] = fields[1] + 1
        return tuple(fields)

    monkeypatch.setattr(simulation.ops, "route_metadata", shifted)
    with pytest.raises(AssertionError):
        check_exchange(counts, range(4))


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    simulation.main(["--ranks", "4", "--experts", "8", "--tokens", "4", "--top-k", "2", "--skew", "0"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[2].startswith("| 4 | 8 | 0 | 8 |")
