"""Autograd rules, one file per differentiable op. Importing the package's modules registers nothing; `register`
does."""

from __future__ import annotations

from moe_ops.autograd import cpu_moe_sync, ep_remap, fused_mxfp4_moe, topk_permute, topk_unpermute
from moe_ops.autograd._rule import refuse_gradient


def register() -> None:
    topk_permute.register()
    topk_unpermute.register()
    fused_mxfp4_moe.register()
    ep_remap.register()
    cpu_moe_sync.register()
    refuse_gradient(
        "topk_permute_out", ("hidden_states", "out"), "use topk_permute where a gradient is needed", writes=("out",)
    )
    refuse_gradient(
        "fused_mxfp4_moe_out",
        ("hidden_states", "topk_weights", "w13_bias", "w2_bias", "out"),
        "use fused_mxfp4_moe where a gradient is needed",
        writes=("out",),
    )
    once = "second derivatives are not defined"
    refuse_gradient("topk_unpermute_backward", ("grad_output", "permuted_hidden_states", "topk_weights"), once)
    refuse_gradient("fused_mxfp4_moe_backward", ("grad_output", "hidden_states", "topk_weights"), once)
    refuse_gradient(
        "cpu_moe_submit",
        ("hidden_states", "topk_weights"),
        "the CPU experts pass no gradient on; call detach(), and let the gradient flow through device_out",
    )
