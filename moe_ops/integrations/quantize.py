"""MXFP4 quantisation that knows the inputs: what rounding one weight loses, the weights after it make up for.

The method is GPTQ (Frantar et al., 2023, arXiv:2210.17323); the scale of a block is fixed when its first column is
reached.
"""

from __future__ import annotations

import torch

from moe_ops.reference.mxfp4 import BLOCK, E2M1_VALUES, decode_e8m0, quantize_mxfp4


def quantize_for_inputs(
    weights: torch.Tensor, inputs: torch.Tensor, *, damping: float = 0.05
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise matrices so that `inputs @ weights.T` changes as little as a column by column choice can achieve.

    weights: [N, rows, columns] float; columns a multiple of 32.
    inputs:  [N, T, columns] float, or [T, columns] for all matrices.
    damping: added to the diagonal of the inputs' second moments, relative to its mean.
    Returns (codes [N, rows, columns / 2] uint8, scales [N, rows, columns / 32] uint8).
    """
    # Columns come first: the loop below goes through them one by one.
    rest = weights.to(torch.float32).transpose(1, 2).contiguous()  # [N, columns, rows]
    inputs = inputs.to(torch.float32)
    moments = inputs.transpose(-2, -1) @ inputs  # [(N,) columns, columns]
    diagonal = moments.diagonal(dim1=-2, dim2=-1)
    diagonal += damping * diagonal.mean(dim=-1, keepdim=True)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moments))
    factor = torch.linalg.cholesky(inverse, upper=True).expand(weights.shape[0], -1, -1)
    table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=weights.device)
    midpoints = (table[1:8] + table[:7]) / 2
    codes = torch.empty(rest.shape, dtype=torch.uint8, device=weights.device)
    scales = []
    for start in range(0, rest.shape[1], BLOCK):
        stop = start + BLOCK
        block = rest[:, start:stop].clone()  # [N, 32, rows], with the errors of all earlier blocks in it
        scale = quantize_mxfp4(block.transpose(1, 2), search=True)[1]  # [N, rows, 1]
        scales.append(scale)
        step = decode_e8m0(scale).squeeze(-1)  # [N, rows]
        errors = torch.empty_like(block)
        for column in range(BLOCK):
            values = block[:, column]
            scaled = values / step
            code = torch.bucketize(scaled.abs(), midpoints).to(torch.uint8)
            code |= torch.signbit(scaled).to(torch.uint8) << 3
            codes[:, start + column] = code
            row = factor[:, start + column, start:stop]  # [N, 32]
            error = (values - table[code.to(torch.int64)] * step) / row[:, column, None]
            errors[:, column] = error
            block[:, column + 1 :].baddbmm_(row[:, column + 1 :, None], error.unsqueeze(1), alpha=-1)
        rest[:, stop:].baddbmm_(factor[:, start:stop, stop:].transpose(1, 2), errors, alpha=-1)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return packed.transpose(1, 2).contiguous(), torch.cat(scales, dim=-1)
