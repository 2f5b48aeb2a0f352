from __future__ import annotations

import pytest
import torch

from moe_ops import reference
from tests.support import assert_same, generator

FIELDS = (
    "dispatch_src",
    "dispatch_dst",
    "dispatch_size",
    "combine_src",
    "combine_dst",
    "combine_size",
    "group_ends",
    "loads",
)
TWO_RANKS = [[2, 1, 1, 2], [1, 0, 1, 2]]
GOLDEN = [[1, 2, 3, 4], [5, 6, 7, 8]]
# counts, rank, mode -> dispatch src, dst, size; combine src, dst, size; group ends; loads
WORKED = [
    (TWO_RANKS, 0, "push", [0, 2, 3, 4], [0, 3, 0, 2], [2, 1, 1, 2], [0, 3, 2, 4], [0, 2, 0, 1], [2, 1, 1, 0], [3, 4]),
    (TWO_RANKS, 1, "push", [0, 1, 1, 2], [2, 4, 1, 4], [1, 0, 1, 2], [0, 2, 1, 4], [3, 4, 1, 2], [1, 2, 1, 2], [2, 6]),
    (TWO_RANKS, 0, "pull", [0, 2, 0, 1], [0, 3, 2, 4], [2, 1, 1, 0], [0, 3, 2, 4], [0, 2, 0, 1], [2, 1, 1, 0], [3, 4]),
    (TWO_RANKS, 1, "pull", [3, 4, 1, 2], [0, 2, 1, 4], [1, 2, 1, 2], [0, 2, 1, 4], [3, 4, 1, 2], [1, 2, 1, 2], [2, 6]),
    (GOLDEN, 0, "push", [0, 1, 3, 6], [0, 6, 0, 10], [1, 2, 3, 4], [0, 6, 1, 8], [0, 1, 0, 5], [1, 2, 5, 6], [6, 14]),
    (
        GOLDEN, 1, "push",
        [0, 5, 11, 18], [1, 8, 3, 14], [5, 6, 7, 8], [0, 10, 3, 14], [3, 6, 11, 18], [3, 4, 7, 8], [10, 22],
    ),
    (
        GOLDEN, 1, "pull",
        [3, 6, 11, 18], [0, 10, 3, 14], [3, 4, 7, 8], [0, 10, 3, 14], [3, 6, 11, 18], [3, 4, 7, 8], [10, 22],
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", WORKED, ids=lambda case: f"rank{case[1]}-{case[2]}")
def test_worked_examples(ops, device, case):
    counts, rank, mode, *expected = case
    result = ops.route_metadata(torch.tensor(counts, dtype=torch.int32, device=device), rank, mode=mode)
    loads = [sum(row[e] for row in counts for e in (2 * r, 2 * r + 1)) for r in range(2)]
    for name, actual, wanted in zip(FIELDS, result, [*expected, loads], strict=True):
        assert actual.tolist() == wanted, name
        assert actual.dtype == (torch.int32 if name.endswith("size") else torch.int64), name


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize(("ranks", "experts"), [(1, 5), (2, 4), (3, 7), (8, 30), (5, 3), (64, 256)])
def test_matches_reference(ops, device, ranks, experts, mode):
    counts = torch.randint(0, 9, (ranks, experts), generator=generator(ranks)).to(torch.int32)
    counts[:, 0] = 0
    for rank in {0, ranks // 2, ranks - 1}:
        actual = ops.route_metadata(counts.to(device), rank, mode=mode)
        for name, value, wanted in zip(FIELDS, actual, reference.route_metadata(counts, rank, mode=mode), strict=True):
            assert_same(value, wanted, name)


def owned_experts(ranks: int, experts: int, rank: int) -> range:
    """The first experts mod ranks own one more."""
    base, extra = divmod(experts, ranks)
    first = rank * base + min(rank, extra)
    return range(first, first + base + (rank < extra))


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize(("ranks", "experts"), [(2, 4), (4, 6), (3, 2), (8, 30)])
def test_rows_travel_and_return(ops, device, ranks, experts, mode):
    """A simulation of the exchange that knows only what the rows mean: (source, expert, index)."""
    counts = torch.randint(0, 4, (ranks, experts), generator=generator(7)).to(torch.int32)
    sources = [[(s, e, i) for e in range(experts) for i in range(counts[s, e])] for s in range(ranks)]
    loads = [int(counts[:, list(owned_experts(ranks, experts, r))].sum()) for r in range(ranks)]
    receive: list[list] = [[None] * load for load in loads]
    metadata = [[field.tolist() for field in ops.route_metadata(counts.to(device), r, mode=mode)] for r in range(ranks)]
    local = -(-experts // ranks)
    for r in range(ranks):
        src, dst, size = metadata[r][:3]
        for entry in range(ranks * local):
            other = entry // local
            source, owner = (r, other) if mode == "push" else (other, r)
            for i in range(size[entry]):
                assert receive[owner][dst[entry] + i] is None
                receive[owner][dst[entry] + i] = sources[source][src[entry] + i]
    for r in range(ranks):
        ends, start = metadata[r][6], 0
        expected = [
            (s, e, i) for e in owned_experts(ranks, experts, r) for s in range(ranks) for i in range(counts[s, e])
        ]
        assert receive[r] == expected  # expert-major, source-minor, no gaps
        for j, e in enumerate(owned_experts(ranks, experts, r)):
            assert all(row[1] == e for row in receive[r][start : ends[j]])
            start = ends[j]
        assert metadata[r][7] == loads
    back: list[list] = [[None] * len(rows) for rows in sources]
    for r in range(ranks):
        src, dst, size = metadata[r][3:6]
        for entry in range(ranks * local):
            for i in range(size[entry]):
                back[entry // local][dst[entry] + i] = receive[r][src[entry] + i]
    assert back == sources


def test_strided_counts(ops, device):
    counts = torch.randint(0, 9, (4, 3), generator=generator(0)).to(torch.int32).t()
    for actual, expected in zip(
        ops.route_metadata(counts.to(device), 1), reference.route_metadata(counts.contiguous(), 1), strict=True
    ):
        assert_same(actual, expected)


def test_counts_are_not_aliased(ops, device):
    counts = torch.tensor([[3, 4]], dtype=torch.int32, device=device)
    result = ops.route_metadata(counts, 0)
    counts.zero_()
    assert result[2].tolist() == [3, 4]


def test_offsets_past_int32(ops, device):
    counts = torch.full((4, 2), 2**31 - 1, dtype=torch.int32, device=device)
    *_, group_ends, loads = ops.route_metadata(counts, 0)
    assert loads.tolist() == [4 * (2**31 - 1), 4 * (2**31 - 1), 0, 0]
    assert group_ends.tolist() == [4 * (2**31 - 1)]


@pytest.mark.parametrize(
    ("shape", "dtype", "rank", "mode", "message"),
    [
        ((4,), torch.int32, 0, "push", r"tokens_per_source must be \[ep_size, num_experts\] int32, got \[4\] int32"),
        (
            (2, 4),
            torch.int64,
            0,
            "push",
            r"tokens_per_source must be \[ep_size, num_experts\] int32, got \[2, 4\] int64",
        ),
        ((2, 4), torch.int32, 2, "push", r"ep_rank must be in \[0, 2\), got 2"),
        ((2, 4), torch.int32, 0, "shove", r"mode must be 'push' or 'pull', got 'shove'"),
    ],
)
def test_errors(ops, device, backend, shape, dtype, rank, mode, message):
    if backend == "reference":
        pytest.skip("the reference does not check arguments")
    with pytest.raises(ValueError, match="^route_metadata: " + message + "$"):
        ops.route_metadata(torch.zeros(shape, dtype=dtype, device=device), rank, mode=mode)
