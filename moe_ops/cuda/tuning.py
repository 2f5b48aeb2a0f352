"""Warm-up and tuning of the Hopper kernels over prepared weights."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from moe_ops._errors import require
from moe_ops.cuda import plans
from moe_ops.cuda.prepare import ALL_SCALES, E4M3, LAYOUT

SEED = 1234
REPLAYS = 7


def geometry_of(arguments: dict[str, Any], top_k: int, dtype: torch.dtype = torch.bfloat16) -> plans.Geometry:
    """arguments: of PreparedExperts.arguments(); dtype: of the rows."""
    layout = arguments["weight_layout"]
    require(
        layout in (LAYOUT, ALL_SCALES, E4M3),
        "geometry_of",
        "weight_layout",
        f"'{LAYOUT}', '{ALL_SCALES}' or '{E4M3}'",
        f"'{layout}'",
    )
    w13, w2 = arguments["w13"], arguments["w2"]
    grouped = plans.grouped_serves(layout, dtype)
    return plans.Geometry(w13.shape[0], w2.shape[1] * w2.shape[2], w13.shape[1] * 8, top_k, grouped)


def _inputs(
    geometry: plans.Geometry, num_tokens: int, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(device).manual_seed(SEED + num_tokens)
    x = torch.randn(num_tokens, geometry.hidden_size, device=device, generator=generator).to(dtype)
    scores = torch.randn(num_tokens, geometry.num_experts, device=device, generator=generator)
    values, ids = scores.topk(geometry.top_k, dim=1)
    return x, ids.to(torch.int32), torch.softmax(values, 1)


def warm_up(
    arguments: dict[str, Any],
    top_k: int,
    *,
    token_counts: tuple[int, ...] = plans.LADDER,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> None:
    """Take the tuned plans of the geometry into use, where the file has them, run a batch of each size once, on rows
    without experts, and wait: afterwards a capture of such batches has nothing left to load or compile. Name the sizes
    that will be captured. options: of fused_mxfp4_moe, such as the activation."""
    from moe_ops import fused_mxfp4_moe

    geometry, device = geometry_of(arguments, top_k, dtype), arguments["w13"].device
    plans.load_tuned(plans.device_kind(device.index or 0), geometry)
    for count in sorted(set(token_counts)):
        x = torch.zeros(count, geometry.hidden_size, dtype=dtype, device=device)
        ids = torch.full((count, top_k), -1, dtype=torch.int32, device=device)
        fused_mxfp4_moe(x, ids, torch.zeros(count, top_k, device=device), **arguments, **options)
    torch.cuda.synchronize(device)


def autotune(
    arguments: dict[str, Any],
    top_k: int,
    *,
    token_counts: tuple[int, ...] = plans.LADDER,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> dict[int, str]:
    """Race the kernels on the capacities that hold `token_counts`, with fixed inputs; capacity -> kernel. The result is
    used from now on by every layer of the geometry, and kept in `plans.cache_file()`."""
    from moe_ops.cuda._fused_mxfp4_moe_sm90 import run_kernel

    # Which kernel rounds activations is part of what "sm90_v1_e4m3" promises, not of what is fastest.
    layout = arguments["weight_layout"]
    require(layout != E4M3, "autotune", "weight_layout", f"'{LAYOUT}' or '{ALL_SCALES}'", f"'{layout}'")

    geometry, device = geometry_of(arguments, top_k, dtype), arguments["w13"].device
    kind = plans.device_kind(device.index or 0)

    def measure(kernel: str, num_tokens: int) -> float:
        inputs = _inputs(geometry, num_tokens, device, dtype)
        out = torch.empty_like(inputs[0])

        def call() -> None:
            run_kernel(kernel, *inputs, out=out, **arguments, **options)

        call()
        times = []
        flush = torch.empty(128 << 20, dtype=torch.uint8, device=device)
        for _ in range(REPLAYS):
            flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e-3)
        return statistics.median(times)

    capacities = sorted({plans.capacity_of(count) for count in token_counts})
    with torch.cuda.device(device):
        return plans.race(geometry, kind, capacities, measure)
