"""The simulated operators against the CPU: what torch_npu dispatches must come back exactly as ATen computes it."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.simulation

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64]


def make(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 9).to(dtype)


def check(function, *arguments: object) -> None:
    """The same call on both devices gives the same values and dtypes, exactly."""
    on_device = [a.npu() if isinstance(a, torch.Tensor) else a for a in arguments]
    expected, actual = function(*arguments), function(*on_device)
    many = isinstance(expected, (tuple, list))
    for want, got in zip(expected if many else [expected], actual if many else [actual], strict=True):
        if isinstance(want, torch.Tensor):
            assert got.device.type == "npu" or got.dim() == 0
            torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)
        else:
            assert got == want


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "maximum", "minimum", "eq", "ne", "gt", "ge", "lt", "le"])
def test_binary(name: str, dtype: torch.dtype) -> None:
    check(getattr(torch, name), make(5, 7, dtype=dtype), make(7, dtype=dtype, seed=1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scalars(dtype: torch.dtype) -> None:
    x = make(5, 7, dtype=dtype)
    check(lambda x: (x + 3, x - 2, 2 - x, x * 3, x == 1, x != 1, x > 1, x >= 1, x < 1, x <= 1), x)
    check(lambda x: (x.clamp(-2, 3), x.clamp(max=1), x.clamp(min=1), x.clamp_min(1), x.clamp_max(1)), x)


def test_integer_arithmetic() -> None:
    a, b = make(40, dtype=torch.int64), make(40, dtype=torch.int64, seed=1).abs() + 1
    check(lambda a, b: (a // b, a // 4, a % b, a % 5, a & b, a | b, a ^ b, a & 7, ~a), a, b)
    check(lambda a, b: (torch.div(a, b, rounding_mode="floor"), torch.div(a, 3, rounding_mode="trunc")), a, b)


@pytest.mark.parametrize(
    "name",
    ["abs", "neg", "exp", "floor", "ceil", "round", "trunc", "sign", "sigmoid", "tanh", "relu", "isfinite", "isnan"],
)
def test_unary(name: str) -> None:
    check(getattr(torch, name), torch.cat([make(30), torch.tensor([float("nan"), float("inf")])]))


def test_logic() -> None:
    a, b = make(20) > 0, make(20, seed=1) > 0
    check(lambda a, b: (a & b, a | b, ~a, torch.logical_xor(a, b), a.all(), b.any(), a.any(0)), a, b)


def test_in_place() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y.add_(1).mul_(x).sub_(2).div_(4)
        y[1:3, ::2].copy_(torch.ones(2, 3, device=x.device))
        y.masked_fill_(x > 5, 0.5)
        y[0].zero_()
        return y

    check(function, make(4, 6))


def test_copies_and_casts() -> None:
    x = make(4, 6)
    check(lambda x: (x.t().contiguous(), x[::2, 1::2].contiguous(), x.expand(3, 4, 6).contiguous()), x)
    check(lambda x: tuple(x.to(dtype) for dtype in DTYPES), x)
    check(lambda x: (torch.cat([x, x * 2], 1), torch.stack([x, x]), x.repeat(2, 1), x.flip(0)), x)
    check(lambda x: torch.nn.functional.pad(x, (0, 0, 0, 1)), x)


def test_foreach_copy() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        targets = [torch.zeros_like(x), torch.zeros_like(x[0])]
        torch._foreach_copy_(targets, [x, x[1]])
        return tuple(targets)

    check(function, make(4, 6))


def test_reductions_and_scans() -> None:
    x = make(6, 9, dtype=torch.int64)
    check(lambda x: (x.sum(), x.sum(0), x.cumsum(0), x.cumsum(1, dtype=torch.int32), x.max(), x.min(), x.amax(1)), x)
    check(lambda x: (*x.max(1), *torch.sort(x, dim=1, stable=True), *torch.topk(x.float(), 3, 1)), x)
    check(lambda x: (x.float().mean(0), torch.softmax(x.float(), 1)), x)


def test_indexing() -> None:
    x, rows = make(6, 9), torch.tensor([5, 0, 0, 3])
    check(lambda x, rows: (x.index_select(0, rows), x.index_select(0, rows.int()), x[rows]), x, rows)
    check(lambda x, rows: x.gather(1, rows.expand(6, 4).contiguous()), x, rows)
    check(lambda x, rows: torch.zeros_like(x).index_add(0, rows, x[:4].contiguous()), x, rows)
    check(lambda x, rows: torch.zeros_like(x[0]).scatter(0, rows[[0, 1, 3]], x[0, :3].contiguous()), x, rows)
    check(lambda x, rows: torch.zeros_like(x[0]).scatter(0, rows, 7.0), x, rows)
    check(lambda x, rows: torch.zeros_like(rows).scatter_add(0, rows.clamp_max(3), rows), x, rows)
    check(lambda x, rows: (x.masked_select(x > 0), (x > 0).nonzero(), x[x > 0]), x, rows)
    check(lambda x, rows: torch.where(x > 0, x, torch.zeros_like(x)), x, rows)


def test_matrix_products() -> None:
    a, b = make(3, 4, 5, dtype=torch.bfloat16), make(3, 5, 6, dtype=torch.bfloat16, seed=1)
    expected = (a.double() @ b.double()).bfloat16()
    torch.testing.assert_close((a.npu() @ b.npu()).cpu(), expected, rtol=0, atol=0)
    torch.testing.assert_close((a[0].npu() @ b[0].npu()).cpu(), expected[0], rtol=0, atol=0)


def test_factories() -> None:
    assert torch.arange(3, 9, 2, device="npu").tolist() == [3, 5, 7]
    assert torch.full((2,), 7, dtype=torch.int32, device="npu").tolist() == [7, 7]
    assert torch.zeros(2, device="npu").tolist() == [0, 0] and torch.ones(2, device="npu").tolist() == [1, 1]


def test_random() -> None:
    normal, uniform = torch.randn(4000, device="npu").cpu(), torch.rand(4000, device="npu").cpu()
    assert abs(normal.mean()) < 0.1 and abs(normal.std() - 1) < 0.1
    assert uniform.min() >= 0 and uniform.max() <= 1 and abs(uniform.mean() - 0.5) < 0.05


def routing(tokens: int = 7, top_k: int = 2, experts: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, 16, generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)]).int()
    return x, ids, torch.sort(ids.flatten(), stable=True)[1]


def init_routing(x: torch.Tensor, ids: torch.Tensor, experts: int, low: int, high: int):
    return torch.ops.npu.npu_moe_init_routing_v2(
        x.npu(), ids.npu(), active_num=ids.numel(), expert_num=experts, expert_tokens_num_type=1,
        expert_tokens_num_flag=True, active_expert_range=[low, high], quant_mode=-1, row_idx_type=0,
    )  # fmt: skip


def test_init_routing() -> None:
    x, ids, order = routing()
    expanded, rows, counts, _ = init_routing(x, ids, 4, 0, 4)
    assert torch.equal(expanded.cpu(), x[order // 2])
    assert torch.equal(rows.cpu().long(), torch.argsort(order))
    assert torch.equal(counts.cpu(), torch.bincount(ids.flatten(), minlength=4))


def test_init_routing_leaves_rows_unwritten() -> None:
    x, ids, _ = routing()
    expanded, rows, counts, _ = init_routing(x, ids, 4, 1, 3)
    active = int(((ids >= 1) & (ids < 3)).sum())
    assert int(counts.sum()) == active and int((rows >= 0).sum()) == active
    assert expanded.cpu()[active:].isnan().all() and not expanded.cpu()[:active].isnan().any()


def test_init_routing_refuses_ids_outside_its_contract() -> None:
    x, ids, _ = routing()
    ids[2, 1] = -1
    init_routing(x, ids, 4, 0, 4)
    with pytest.raises(RuntimeError, match="507015"):
        torch.npu.synchronize()


def test_token_permute_and_unpermute() -> None:
    x, ids, order = routing()
    permuted, rows = torch.ops.npu.npu_moe_token_permute(x.npu(), ids.npu())
    assert torch.equal(permuted.cpu(), x[order // 2])
    weights = torch.rand(7, 2)
    restored = torch.ops.npu.npu_moe_token_unpermute(permuted, rows, weights.bfloat16().npu())
    expected = (x.float() * weights.bfloat16().float().sum(1, keepdim=True)).bfloat16()
    torch.testing.assert_close(restored.cpu(), expected, rtol=1e-2, atol=1e-2)


def test_grouped_matmul() -> None:
    x, weight = make(8, 16, dtype=torch.bfloat16), make(3, 32, 16, dtype=torch.bfloat16, seed=1)
    bias = make(3, 32, seed=2)
    counts = torch.tensor([2, 0, 4])

    def product(bias: torch.Tensor) -> torch.Tensor:
        return torch.ops.npu.npu_grouped_matmul(
            [x.npu()], [weight.npu().transpose(1, 2)], bias=[bias.npu()], group_list=counts.npu(),
            split_item=3, group_type=0, group_list_type=1,
        )[0]  # fmt: skip

    y = product(bias).cpu()
    for row, expert in enumerate([0, 0, 2, 2, 2, 2]):
        expected = (weight[expert].double() @ x[row].double() + bias[expert].double()).bfloat16()
        torch.testing.assert_close(y[row], expected, rtol=0, atol=0)
    assert y[6:].isnan().all()
    if not torch.npu.get_device_name(0).startswith("Ascend950"):
        with pytest.raises(RuntimeError, match="161002"):
            product(bias.bfloat16())


def test_activations() -> None:
    x = make(4, 32, dtype=torch.bfloat16) / 3
    gate, up = x.float().chunk(2, -1)
    swiglu = torch.ops.npu.npu_swiglu(x.npu()).cpu()
    torch.testing.assert_close(swiglu, (torch.nn.functional.silu(gate) * up).bfloat16(), rtol=0, atol=0)
    gate, up = x.float()[:, ::2].clamp(max=7), x.float()[:, 1::2].clamp(-7, 7)
    clipped = torch.ops.npu.npu_clipped_swiglu(x.npu(), alpha=1.702, limit=7.0, bias=1.0, interleaved=True).cpu()
    torch.testing.assert_close(
        clipped, (gate * torch.sigmoid(1.702 * gate) * (up + 1)).bfloat16(), rtol=1e-2, atol=1e-2
    )


def test_missing_operator_is_an_error() -> None:
    x = make(8).npu()
    with pytest.raises(RuntimeError):
        torch.cosh(x)
        torch.npu.synchronize()
