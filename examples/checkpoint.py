"""Write an MXFP4 checkpoint under the names of gpt-oss and read back only the experts that are wanted."""

from __future__ import annotations

import tempfile

import torch

from moe_ops.experts import Mxfp4Experts
from moe_ops.integrations.checkpoints import Checkpoint, CheckpointWriter
from moe_ops.reference.mxfp4 import quantize_mxfp4

E, H, I = 8, 128, 64  # noqa: E741
generator = torch.Generator().manual_seed(0)


def layer() -> Mxfp4Experts:
    w13, w13_scale = quantize_mxfp4(torch.randn(E, 2 * I, H, generator=generator))
    w2, w2_scale = quantize_mxfp4(torch.randn(E, H, I, generator=generator))
    return Mxfp4Experts(w13, w13_scale, w2, w2_scale, w13_layout="gate_up")


with tempfile.TemporaryDirectory() as folder:
    with CheckpointWriter(folder) as writer:
        for number in range(2):
            writer.add_experts(f"model.layers.{number}.mlp.experts", layer())
            writer.add(f"model.layers.{number}.mlp.router.weight", torch.randn(E, H, generator=generator))

    with Checkpoint(folder) as checkpoint:
        for prefix, found in checkpoint.layers().items():
            print(f"{prefix}: {found.num_experts} experts in the names of {found.scheme.name}")
        experts = checkpoint.load_experts("model.layers.1.mlp.experts", [6, 2])
        print(f"read {experts.num_experts} experts, {experts.nbytes} bytes, rows {experts.w13_layout}")
        print("ready for the op:", ", ".join(experts.arguments()))
