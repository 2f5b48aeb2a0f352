"""Comparison and input makers shared by the tests."""

from __future__ import annotations

import math

import torch

from moe_ops.reference.mxfp4 import BLOCK

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, *, max_tol: float, rms_tol: float, name: str = "result"
) -> None:
    """Bound the worst element and the RMS of the error.

    Errors are relative to the RMS of `expected`, the worst element to the larger of that and its own magnitude. NaN and
    infinities must stand at the same places.
    """
    assert actual.shape == expected.shape, f"{name}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    a, e = actual.detach().cpu().to(torch.float64), expected.detach().cpu().to(torch.float64)
    same = (a == e) | (torch.isnan(a) & torch.isnan(e))
    finite = torch.isfinite(e)
    bad = ~finite & ~same
    assert not bad.any(), f"{name}: {int(bad.sum())} of the non-finite values differ, first at {_first(bad)}"
    lost = finite & ~torch.isfinite(a)
    assert not lost.any(), f"{name}: {int(lost.sum())} values are not finite, first at {_first(lost)}"
    a, e = torch.where(finite, a, 0.0), torch.where(finite, e, 0.0)
    if e.numel() == 0:
        return
    rms = math.sqrt(float(e.square().mean()))
    if rms == 0:
        assert torch.equal(a, e), f"{name}: expected zeros, got up to {float(a.abs().max())}"
        return
    error = (a - e).abs()
    worst = error / e.abs().clamp(min=rms)
    at = int(worst.argmax())
    worst_value, rms_value = float(worst.reshape(-1)[at]), math.sqrt(float(error.square().mean())) / rms
    assert worst_value <= max_tol and rms_value <= rms_tol, (
        f"{name}: worst {worst_value:.3g} (allowed {max_tol:.3g}) at {_index(at, e)}: got {float(a.reshape(-1)[at])}, "
        f"expected {float(e.reshape(-1)[at])}; RMS {rms_value:.3g} (allowed {rms_tol:.3g})"
    )


def assert_same(actual: torch.Tensor, expected: torch.Tensor, name: str = "result") -> None:
    """Exactly equal: dtype, shape and values, where NaN equals NaN."""
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype}, expected {expected.dtype}"
    torch.testing.assert_close(actual.cpu(), expected.cpu(), rtol=0, atol=0, equal_nan=True)


def _first(mask: torch.Tensor) -> list[int]:
    return torch.nonzero(mask)[0].tolist()


def _index(flat: int, like: torch.Tensor) -> list[int]:
    return [int(i) for i in torch.unravel_index(torch.tensor(flat), like.shape)]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_rows(num_tokens: int, hidden_size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_tokens, hidden_size, generator=generator(seed)).to(dtype)


def make_routing(
    num_tokens: int, top_k: int, num_experts: int, seed: int = 0, invalid: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(topk_ids int64, topk_weights float32): distinct experts per token; a share of the slots has none."""
    g = generator(seed)
    scores = torch.rand(num_tokens, num_experts, generator=g)
    ids = scores.topk(min(top_k, num_experts), dim=1).indices
    if top_k > num_experts:
        ids = torch.cat([ids] * math.ceil(top_k / num_experts), dim=1)[:, :top_k]
    weights = torch.rand(num_tokens, top_k, generator=g) + 0.1
    weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=0.1)
    if invalid:
        drop = torch.rand(num_tokens, top_k, generator=g) < invalid
        stale = torch.where(torch.rand(num_tokens, top_k, generator=g) < 0.5, -1, num_experts + 5)
        ids = torch.where(drop, stale, ids)
    return ids.contiguous(), weights


def make_mxfp4(num_experts: int, rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes [E, rows, columns / 2] and scales [E, rows, columns / 32]; products with O(1) inputs are O(1)."""
    g = generator(seed)
    codes = torch.randint(0, 256, (num_experts, rows, columns // 2), generator=g, dtype=torch.uint8)
    middle = 127 - round(math.log2(math.sqrt(columns))) - 1
    scales = torch.randint(middle - 1, middle + 2, (num_experts, rows, columns // BLOCK), generator=g)
    return codes, scales.to(torch.uint8)


def make_experts(num_experts: int, intermediate_size: int, hidden_size: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """w13, w13_scale, w2, w2_scale of fused_mxfp4_moe."""
    w13, w13_scale = make_mxfp4(num_experts, 2 * intermediate_size, hidden_size, seed)
    w2, w2_scale = make_mxfp4(num_experts, hidden_size, intermediate_size, seed + 1)
    return {"w13": w13, "w13_scale": w13_scale, "w2": w2, "w2_scale": w2_scale}
