"""npu_grouped_matmul: products of consecutive rows with the weights of their group.

Rows past the groups are left unwritten. The sizes of the groups stay on the device.
"""

from __future__ import annotations

import torch

# Limits of aclnnGroupedMatmul.
MAX_GROUPS = 1024
MAX_INNER = 65535


def _groups(counts: torch.Tensor) -> dict[str, torch.Tensor | int]:
    """CANN takes no list of counts of length 1; there the count is the running sum as well, which it takes."""
    kind = 1 if counts.numel() > 1 else 0
    return {"group_list": counts, "split_item": 3, "group_type": 0, "group_list_type": kind}


def grouped_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, counts: torch.Tensor
) -> torch.Tensor:
    """x [M, C], weight [G, N, C] of one float dtype, bias [G, N]: [M, N] of that dtype."""
    biases = None if bias is None else [bias.to(torch.float32)]
    return torch.ops.npu.npu_grouped_matmul([x], [weight.transpose(1, 2)], bias=biases, **_groups(counts))[0]


def mx_product(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, counts: torch.Tensor
) -> torch.Tensor:
    """x [M, C] bfloat16, weight and scales as `mx.prepare_mx` packs them, bias [G, N]: [M, N] bfloat16."""
    biases = None if bias is None else [bias.to(torch.float32)]
    weight = packed.view(packed.shape[1:])
    return torch.ops.npu.npu_grouped_matmul([x], [weight], bias=biases, antiquant_scale=[scales], **_groups(counts))[0]
