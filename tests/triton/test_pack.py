"""The Hopper layout by kernel."""

from __future__ import annotations

import pytest
import torch

from moe_ops.cuda._pack import pack
from moe_ops.cuda.layout import pack_codes, pack_scales, w13_row_order


@pytest.mark.parametrize("k", [96, 2080])
@pytest.mark.parametrize("layout", [None, "gate_up", "up_gate", "interleaved"])
def test_packing_is_the_layout(layout, k):
    codes = torch.randint(0, 256, (32, k // 2), dtype=torch.uint8)
    scales = torch.randint(0, 256, (32, k // 32), dtype=torch.uint8)
    order = torch.arange(32) if layout is None else w13_row_order(16, layout)
    packed = pack_codes(codes[order]).view(2, 16, -1), pack_scales(scales[order]).view(2, 16, -1)
    found = torch.empty_like(packed[0]), torch.empty_like(packed[1])
    pack(codes, scales, *found, layout)
    assert torch.equal(found[0], packed[0]) and torch.equal(found[1], packed[1])
