from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from moe_ops import reference
from tests.conftest import BACKEND
from tests.support import assert_close, assert_same, make_experts, make_routing, make_rows

pytestmark = pytest.mark.skipif(BACKEND in ("reference", "triton-interpret"), reason="about registered ops")
TIGHT = {"max_tol": 3e-5, "rms_tol": 3e-6}


def leaf(tensor: torch.Tensor, device) -> torch.Tensor:
    return tensor.detach().clone().to(device).requires_grad_()


def numeric_gradient(function, tensor: torch.Tensor, index: tuple[int, ...], step: float) -> float:
    """Central difference of a scalar function; `step` is a power of two, so that it is exact."""
    delta = torch.zeros_like(tensor)
    delta[index] = step
    with torch.no_grad():
        return float((function(tensor + delta).double() - function(tensor - delta).double()) / (2 * step))


@pytest.mark.parametrize("capacity", [None, 20])
def test_permute_gradient(ops, device, capacity):
    x, ids = leaf(make_rows(11, 24, torch.float32), device), make_routing(11, 3, 5, invalid=0.2)[0]
    permuted, row_map, counts = ops.topk_permute(x, ids.to(device), 5, num_out_tokens=capacity)
    assert not row_map.requires_grad
    assert not counts.requires_grad
    grad = make_rows(permuted.shape[0], 24, torch.float32, seed=3)
    permuted.backward(grad.to(device))
    twin = leaf(x, "cpu")
    reference.topk_permute(twin, ids, 5, num_out_tokens=capacity)[0].backward(grad)
    assert_close(x.grad, twin.grad, **TIGHT)


def test_unpermute_gradient(ops, device):
    ids, routing = make_routing(11, 3, 5, invalid=0.2)
    _, row_map, _ = reference.topk_permute(torch.zeros(11, 24), ids, 5)
    rows, weights = leaf(make_rows(33, 24, torch.float32), device), leaf(routing, device)
    grad = make_rows(11, 24, torch.float32, seed=3)
    ops.topk_unpermute(rows, row_map.to(device), weights).backward(grad.to(device))
    twin_rows, twin_weights = leaf(rows, "cpu"), leaf(weights, "cpu")
    reference.topk_unpermute(twin_rows, row_map, twin_weights).backward(grad)
    assert_close(rows.grad, twin_rows.grad, **TIGHT)
    assert_close(weights.grad, twin_weights.grad, **TIGHT)


def test_unpermute_gradient_numerically(ops, device):
    row_map = torch.tensor([[0, 2], [1, -1], [3, 4]], dtype=torch.int32, device=device)
    rows, weights = make_rows(6, 16, torch.float32).to(device), torch.rand(3, 2).to(device)
    mix = make_rows(3, 16, torch.float32, seed=4).to(device)
    some_rows, some_weights = leaf(rows, device), leaf(weights, device)
    (ops.topk_unpermute(some_rows, row_map, some_weights) * mix).sum().backward()
    for index in [(0, 3), (4, 15), (5, 0)]:
        numeric = numeric_gradient(lambda r: (ops.topk_unpermute(r, row_map, weights) * mix).sum(), rows, index, 0.5)
        assert some_rows.grad[index].item() == pytest.approx(numeric, rel=1e-3, abs=1e-4)
    for index in [(0, 1), (2, 0), (1, 1)]:
        numeric = numeric_gradient(lambda w: (ops.topk_unpermute(rows, row_map, w) * mix).sum(), weights, index, 0.5)
        assert some_weights.grad[index].item() == pytest.approx(numeric, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_moe_gradient(ops, device, weight_dtype):
    experts = make_experts(5, 64, 96)
    ids, routing = make_routing(13, 3, 5, invalid=0.2)
    options = {"w13_layout": "interleaved", "activation": "swiglu_oai"}
    moved = [tensor.to(device) for tensor in experts.values()]
    x, weights = leaf(make_rows(13, 96, torch.float32), device), leaf(routing.to(weight_dtype), device)
    grad = make_rows(13, 96, torch.float32, seed=3)
    ops.fused_mxfp4_moe(x, ids.to(device), weights, *moved, **options).backward(grad.to(device))
    expected = reference.fused_mxfp4_moe_backward(
        grad, x.detach().cpu(), ids, weights.detach().cpu(), *experts.values(), **options
    )
    assert_close(x.grad, expected[0], **TIGHT)
    assert weights.grad.dtype == weight_dtype
    tolerance = TIGHT if weight_dtype == torch.float32 else {"max_tol": 2**-8, "rms_tol": 2**-8}
    assert_close(weights.grad, expected[1], **tolerance)


def test_moe_gradient_numerically(ops, device):
    experts = [tensor.to(device) for tensor in make_experts(3, 32, 32).values()]
    ids, routing = (tensor.to(device) for tensor in make_routing(4, 2, 3))
    x, mix = make_rows(4, 32, torch.float32).to(device), make_rows(4, 32, torch.float32, seed=4).to(device)

    def loss(some_x, some_weights):
        return (ops.fused_mxfp4_moe(some_x, ids, some_weights, *experts, w13_layout="gate_up") * mix).sum()

    some_x, some_weights = leaf(x, device), leaf(routing, device)
    loss(some_x, some_weights).backward()
    for index in [(0, 0), (1, 17), (3, 31)]:
        numeric = numeric_gradient(lambda value: loss(value, routing), x, index, 2.0**-6)
        assert some_x.grad[index].item() == pytest.approx(numeric, rel=2e-2, abs=5e-3)
    for index in [(0, 0), (2, 1)]:
        numeric = numeric_gradient(lambda value: loss(x, value), routing, index, 0.25)
        assert some_weights.grad[index].item() == pytest.approx(numeric, rel=1e-3, abs=1e-4)


def test_weight_of_zero_has_a_gradient(ops, device):
    experts = [tensor.to(device) for tensor in make_experts(2, 32, 64).values()]
    ids = torch.tensor([[0, 1]], device=device)
    weights = torch.tensor([[0.5, 0.0]], device=device, requires_grad=True)
    x = make_rows(1, 64, torch.float32).to(device)
    ops.fused_mxfp4_moe(x, ids, weights, *experts, w13_layout="gate_up").sum().backward()
    alone = ops.fused_mxfp4_moe(x, ids[:, 1:], torch.ones(1, 1, device=device), *experts, w13_layout="gate_up").sum()
    assert weights.grad[0, 1].item() == pytest.approx(alone.item(), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("fill", ["reuse", "skip"])
def test_experts_of_no_weight_leave_rows_without_gradient(ops, device, fill):
    """Whatever they do: expert 1, which fills the slots of other ranks' experts, overflows."""
    tensors = make_experts(4, 32, 64)
    tensors["w13_scale"][1] = 254
    experts = [tensor.to(device) for tensor in tensors.values()]
    expert_map = torch.tensor([0, 1, 2, 3, -1, -1, -1, -1], dtype=torch.int32, device=device)
    ids = torch.tensor([[1, 2], [4, 5], [2, 3]], device=device)
    x = make_rows(3, 64, torch.float32).to(device).requires_grad_()
    local, weights = ops.ep_remap(ids, torch.rand(3, 2, device=device), expert_map=expert_map, fill=fill)
    ops.fused_mxfp4_moe(x, local, weights, *experts, w13_layout="gate_up")[1:].sum().backward()
    assert x.grad[1].eq(0).all()
    assert x.grad[2].isfinite().all() and x.grad[2].ne(0).any()


def test_a_row_of_no_weight_has_no_gradient(ops, device):
    experts = [tensor.to(device) for tensor in make_experts(2, 32, 64).values()]
    x = make_rows(2, 64, torch.float32)
    x[0] = float("inf")
    x = x.to(device).requires_grad_()
    weights = torch.tensor([[0.0, 0.0], [0.5, 0.0]], device=device)
    ids = torch.tensor([[0, 1], [1, 0]], device=device)
    ops.fused_mxfp4_moe(x, ids, weights, *experts, w13_layout="gate_up").sum().backward()
    assert x.grad[0].eq(0).all()
    assert x.grad[1].isfinite().all() and x.grad[1].ne(0).any()


def test_nan_under_a_limit_has_no_gradient(ops, device):
    """As in torch.clamp."""
    experts = [tensor.to(device) for tensor in make_experts(2, 32, 64).values()]
    x = make_rows(2, 64, torch.float32)
    x[0, 5] = float("nan")
    x = x.to(device).requires_grad_()
    ids, weights = torch.tensor([[0], [1]], device=device), torch.ones(2, 1, device=device)
    ops.fused_mxfp4_moe(x, ids, weights, *experts, w13_layout="gate_up", swiglu_limit=7.0).sum().backward()
    assert x.grad[0].eq(0).all()
    assert x.grad[1].isfinite().all() and x.grad[1].ne(0).any()


def test_remap_gradient(ops, device):
    ids = torch.tensor([[5, 1], [0, 4], [9, -1]], device=device)
    weights = torch.rand(3, 2, device=device).requires_grad_()
    local, local_weights = ops.ep_remap(ids, weights, expert_offset=4, num_local_experts=4)
    assert not local.requires_grad
    local_weights.backward(torch.full((3, 2), 3.0, device=device))
    assert weights.grad.tolist() == [[3.0, 0.0], [0.0, 3.0], [0.0, 0.0]]


def test_gradient_through_a_whole_layer(ops, device):
    """permute, a dense layer for all experts, unpermute: d of a plain dense layer."""
    x, weights = leaf(make_rows(9, 16, torch.float32), device), leaf(make_routing(9, 2, 4)[1], device)
    ids = make_routing(9, 2, 4)[0].to(device)
    matrix = leaf(make_rows(16, 16, torch.float32, seed=2), device)
    permuted, row_map, _ = ops.topk_permute(x, ids, 4)
    ops.topk_unpermute(permuted @ matrix, row_map, weights).square().sum().backward()
    twins = leaf(x, device), leaf(matrix, device), leaf(weights, device)
    ((twins[0] @ twins[1]) * twins[2].sum(1, keepdim=True)).square().sum().backward()
    for actual, twin in zip((x, matrix, weights), twins, strict=True):
        assert_close(actual.grad, twin.grad, max_tol=1e-4, rms_tol=1e-5)


def test_no_tokens_keep_their_edges(ops, device):
    experts = [tensor.to(device) for tensor in make_experts(2, 32, 64).values()]
    x, weights = torch.empty(0, 64, device=device).requires_grad_(), torch.empty(0, 2, device=device).requires_grad_()
    ids = torch.empty(0, 2, dtype=torch.int64, device=device)
    permuted, row_map, _ = ops.topk_permute(x, ids, 2)
    out = ops.topk_unpermute(permuted, row_map, weights) + ops.fused_mxfp4_moe(
        x, ids, weights, *experts, w13_layout="gate_up"
    )
    out.sum().backward()
    assert x.grad.shape == (0, 64)
    assert weights.grad.shape == (0, 2)


def test_rows_without_experts_have_zero_gradients(ops, device):
    experts = [tensor.to(device) for tensor in make_experts(2, 32, 64).values()]
    x = make_rows(3, 64, torch.float32)
    x[1] = float("nan")
    x = x.to(device).requires_grad_()
    ids = torch.tensor([[0, 1], [-1, 2], [1, 0]], device=device)
    weights = torch.full((3, 2), 0.5, device=device).requires_grad_()
    out = ops.fused_mxfp4_moe(x, ids, weights, *experts, w13_layout="gate_up")
    out.sum().backward()
    assert x.grad[1].eq(0).all()
    assert weights.grad[1].eq(0).all()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(ops, device, use_reentrant):
    experts = [tensor.to(device) for tensor in make_experts(3, 32, 64).values()]
    ids, routing = (tensor.to(device) for tensor in make_routing(6, 2, 3))
    grads = []
    for recompute in (False, True):
        x, weights = leaf(make_rows(6, 64, torch.float32), device), leaf(routing, device)

        def layer(x, weights):
            return torch.tanh(ops.fused_mxfp4_moe(x, ids, weights, *experts, w13_layout="gate_up"))

        out = checkpoint(layer, x, weights, use_reentrant=use_reentrant) if recompute else layer(x, weights)
        out.square().sum().backward()
        grads.append((x.grad, weights.grad))
    for actual, expected in zip(grads[1], grads[0], strict=True):
        assert_same(actual, expected.cpu())


def test_what_has_no_gradient_refuses_before_it_runs(ops, device):
    x = torch.ones(2, 64, device=device, requires_grad=True)
    ids, weights = torch.zeros(2, 1, dtype=torch.int64, device=device), torch.ones(2, 1, device=device)
    out = torch.full((2, 64), 7.0, device=device)
    with pytest.raises(ValueError, match=r"topk_permute_out: hidden_states must be detached .* requires grad"):
        ops.topk_permute_out(x, ids, 2, out=out)
    experts = [tensor.to(device) for tensor in make_experts(2, 32, 64).values()]
    with pytest.raises(ValueError, match="fused_mxfp4_moe_out: hidden_states must be detached"):
        ops.fused_mxfp4_moe_out(x, ids, weights, *experts, w13_layout="gate_up", out=out)
    assert out.eq(7).all()
    with torch.no_grad():
        ops.topk_permute_out(x, ids, 2, out=out)
    assert out.eq(1).all()


def test_what_is_written_may_not_want_a_gradient(ops, device):
    x, ids = torch.ones(2, 64, device=device), torch.zeros(2, 1, dtype=torch.int64, device=device)
    out = torch.zeros(2, 64, device=device, requires_grad=True)
    with pytest.raises(ValueError, match="topk_permute_out: out must be detached"):
        ops.topk_permute_out(x, ids, 2, out=out)
    experts = [tensor.to(device) for tensor in make_experts(2, 32, 64).values()]
    with pytest.raises(ValueError, match="fused_mxfp4_moe_out: out must be detached"):
        ops.fused_mxfp4_moe_out(x, ids, torch.ones(2, 1, device=device), *experts, w13_layout="gate_up", out=out)


@pytest.mark.parametrize("op", ["topk_permute_out", "fused_mxfp4_moe_out"])
def test_writing_a_saved_tensor_is_noticed(ops, device, op):
    """`out` was saved for a backward before it was written: its version tells."""
    x, ids = torch.ones(2, 64, device=device), torch.zeros(2, 1, dtype=torch.int64, device=device)
    factor, out = torch.ones(2, 64, device=device, requires_grad=True), torch.ones(2, 64, device=device)
    product = (factor * out).sum()
    if op == "topk_permute_out":
        ops.topk_permute_out(x, ids, 2, out=out)
    else:
        experts = [tensor.to(device) for tensor in make_experts(2, 32, 64).values()]
        ops.fused_mxfp4_moe_out(x, ids, torch.ones(2, 1, device=device), *experts, w13_layout="gate_up", out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with torch.inference_mode():
        ops.topk_permute_out(x, ids, 2, out=torch.empty(2, 64, device=device))


def test_tangents_are_refused(ops, device):
    x, ids = torch.ones(2, 64, device=device), torch.zeros(2, 1, dtype=torch.int64, device=device)
    for call in (
        lambda rows: ops.topk_permute(rows, ids, 2)[0],
        lambda rows: ops.topk_unpermute(rows, ids.to(torch.int32)),
        lambda rows: ops.topk_permute_out(rows, ids, 2, out=torch.empty(2, 64, device=device))[0],
    ):
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode derivatives"):
            call(forward_ad.make_dual(x, x))
        with pytest.raises(NotImplementedError, match="forward-mode derivatives"):
            torch.func.jvp(call, (x,), (x,))


def test_biases_are_frozen(ops, device):
    x, ids = torch.ones(2, 64, device=device), torch.zeros(2, 1, dtype=torch.int64, device=device)
    experts = [tensor.to(device) for tensor in make_experts(2, 32, 64).values()]
    bias = torch.zeros(2, 64, device=device, requires_grad=True)
    with pytest.raises(ValueError, match="w2_bias must be frozen"):
        ops.fused_mxfp4_moe(x, ids, torch.ones(2, 1, device=device), *experts, w13_layout="gate_up", w2_bias=bias)


def test_second_derivatives_are_refused(ops, device):
    rows = torch.ones(2, 16, device=device, requires_grad=True)
    weights = torch.ones(2, 1, device=device, requires_grad=True)
    row_map = torch.tensor([[0], [1]], dtype=torch.int32, device=device)
    out = ops.topk_unpermute(rows, row_map, weights)
    with pytest.raises(ValueError, match="second derivatives are not defined"):
        torch.autograd.grad(out.sum(), rows, create_graph=True)


def test_function_transforms_are_refused_by_name(ops, device):
    ids = torch.zeros(2, 1, dtype=torch.int64, device=device)
    with pytest.raises(NotImplementedError, match=r"topk_permute: gradients inside torch\.func transforms"):
        torch.func.grad(lambda rows: ops.topk_permute(rows, ids, 2)[0].sum())(torch.ones(2, 64, device=device))
