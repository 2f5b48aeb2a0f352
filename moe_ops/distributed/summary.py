"""The header that every rank contributes, and the checks that all ranks make alike on the gathered table.

A table row is `[flags, tokens, autograd_mask, counts...]`. `flags` holds a refusal code in its low 4 bits (0: none)
and the fingerprint of the rank's spec above. A rank that must refuse joins the collective all the same, with zero
counts; since every rank then checks the same table, all of them raise the same error and nothing has been written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_ops._errors import dtype_name
from moe_ops.distributed.collectives import require_equal
from moe_ops.distributed.placement import first_experts
from moe_ops.distributed.spec import ALIGNMENT, INT32_MAX, RouteSpec, align
from moe_ops.meta._checks import FLOATS

OP = "prepare_topk_route"
HEADER_WORDS = 3
_CODE_BITS = 4
_DTYPE_SHIFT = 16
TOO_MANY_TOKENS = 1
BAD_ARGUMENT = {
    2: "hidden_states must be [num_tokens, hidden_size] of a floating dtype",
    3: "topk_ids must be [num_tokens, top_k] int32 or int64",
    4: "topk_weights must be [num_tokens, top_k] of a floating dtype",
    5: "hidden_states, topk_ids and topk_weights must be on one device",
    6: "tokens_per_expert must be [num_experts] int32 or int64 on the device of hidden_states",
    7: "workspace must be initialised, and claimed by the caller, in pull mode",
}


def flags_word(spec: RouteSpec, code: int) -> int:
    return spec.fingerprint << _CODE_BITS | code


def dtype_bits(rows: torch.dtype, combined: torch.dtype | None) -> int:
    """Of the mask: what rows travel as, out and back. A transport does not notice that its ends count other sizes."""
    codes = {dtype: code for code, dtype in enumerate(FLOATS, start=1)}
    return (codes.get(rows, 0) | codes.get(combined or rows, 0) << 2) << _DTYPE_SHIFT


def _dtypes(mask: int) -> str:
    names = ["another dtype", *(dtype_name(dtype) for dtype in FLOATS)]
    return f"{names[mask >> _DTYPE_SHIFT & 3]} and {names[mask >> _DTYPE_SHIFT + 2 & 3]}"


def header_values(spec: RouteSpec, tokens: int, autograd_mask: int, code: int) -> tuple[int, int, int]:
    return flags_word(spec, code), min(tokens, INT32_MAX) if spec.auto else tokens, autograd_mask


def token_code(spec: RouteSpec, tokens: int) -> int:
    """The refusal code of a token count: native limits with automatic capacity, else the configured limit."""
    if spec.auto:
        return TOO_MANY_TOKENS if tokens * max(spec.hidden_size, spec.top_k) > INT32_MAX else 0
    return TOO_MANY_TOKENS if tokens > (spec.max_local_tokens or 0) else 0


@dataclass(frozen=True)
class Summary:
    """What the host knows of a gathered table: per rank `flags, tokens, masks, sums, lows, highs, loads`, and this
    rank's `send_rows`, `receive_rows`, `source_offsets` (see Route)."""

    flags: tuple[int, ...]
    tokens: tuple[int, ...]
    masks: tuple[int, ...]
    sums: tuple[int, ...]
    lows: tuple[int, ...]
    highs: tuple[int, ...]
    loads: tuple[int, ...]
    send_rows: tuple[int, ...]
    receive_rows: tuple[int, ...]
    source_offsets: tuple[int, ...]

    @property
    def maximum(self) -> int:
        return max(self.loads)

    @property
    def plan_tokens(self) -> int:
        return max(ALIGNMENT, align(max(self.tokens)))


def summarise(table: torch.Tensor, spec: RouteSpec) -> Summary:
    """Reduce `table` [R, 3 + E] where it lies (host or device) and read the result: one transfer of [10, R]."""
    counts = table[:, HEADER_WORDS:].to(torch.int64)
    # Prefix sums over experts, with a leading 0, give every block of a rank's experts as a difference.
    prefix = torch.nn.functional.pad(counts.cumsum(1), (1, 0))
    edges = prefix.index_select(1, first_experts(spec.shards, table.device))  # [R, R + 1]
    pairs = edges.diff(dim=1)  # [source, destination]
    columns = torch.stack(
        (
            table[:, 0].to(torch.int64),
            table[:, 1].to(torch.int64),
            table[:, 2].to(torch.int64),
            counts.sum(1),
            counts.amin(1),
            counts.amax(1),
            pairs.sum(0),
            pairs[spec.ep_rank],
            pairs[:, spec.ep_rank],
            edges[:, spec.ep_rank],
        )
    )
    return Summary(*(tuple(column) for column in columns.tolist()))


def check(summary: Summary, spec: RouteSpec) -> None:
    """Raise on every rank alike if the table describes no route that all can follow."""
    _check_agreement(summary, spec)
    tokens, maximum = summary.tokens, summary.maximum
    refused = any(_code(word) == TOO_MANY_TOKENS for word in summary.flags)
    if spec.auto:
        if refused or min(tokens) < 0:
            raise RuntimeError(f"{OP}: the tokens per rank exceed native INT32 size limits, got {list(tokens)}")
    elif refused or not all(0 <= count <= (spec.max_local_tokens or 0) for count in tokens):
        limit = spec.max_local_tokens
        raise RuntimeError(f"{OP}: token capacity overflow: at most {limit} tokens per rank, got {list(tokens)}")
    if spec.tokens == "static" and len(set(tokens)) > 1:
        raise RuntimeError(f"{OP}: static routes need the same number of tokens on every rank, got {list(tokens)}")
    dtypes = [_dtypes(mask) for mask in summary.masks]
    if len(set(dtypes)) > 1:
        raise RuntimeError(f"{OP}: the dtypes of hidden_states and combined rows differ between ranks, got {dtypes}")
    masks = [mask & ~(15 << _DTYPE_SHIFT) for mask in summary.masks]
    if len(set(masks)) > 1:
        raise RuntimeError(f"{OP}: autograd participation differs between ranks, got masks {masks}")
    for rank, count in enumerate(tokens):
        _check_counts(summary, spec, rank, count * spec.top_k)
    most = max(tokens) if spec.max_local_tokens is None else spec.max_local_tokens
    limit = align(spec.ep_size * most * spec.top_k)
    if maximum > limit:
        raise RuntimeError(f"{OP}: receive capacity overflow: at most {limit} rows, got {maximum}")
    if summary.plan_tokens * max(spec.hidden_size, spec.top_k) > INT32_MAX or maximum > INT32_MAX:
        raise RuntimeError(
            f"{OP}: the plan exceeds native INT32 size limits: {summary.plan_tokens} tokens, {maximum} received rows"
        )


def _code(word: int) -> int:
    return word & (2**_CODE_BITS - 1)


def _check_agreement(summary: Summary, spec: RouteSpec) -> None:
    for rank, word in enumerate(summary.flags):
        if _code(word) in BAD_ARGUMENT:
            raise RuntimeError(f"{OP}: rank {rank} refused its arguments: {BAD_ARGUMENT[_code(word)]}")
    require_equal([word >> _CODE_BITS for word in summary.flags], OP, "RouteSpec")


def _check_counts(summary: Summary, spec: RouteSpec, rank: int, slots: int) -> None:
    total, low, high = summary.sums[rank], summary.lows[rank], summary.highs[rank]
    fits = low >= 0 and total <= slots
    if spec.distinct_experts:
        fits = fits and total == slots and high <= summary.tokens[rank]
    if not fits:
        what = "actual distinct Top-K routes" if spec.distinct_experts else "actual Top-K routes"
        raise RuntimeError(
            f"{OP}: counts must describe the {what}: rank {rank} has {summary.tokens[rank]} tokens of"
            f" {spec.top_k} slots, got {total} rows in total, between {low} and {high} per expert"
        )
