"""What submit and sync compute, and what they refuse."""

from __future__ import annotations

import pytest
import torch

import moe_ops
from moe_ops import reference
from tests.engine.support import E, H, I, K, add_layer, expected, make_batch, new_engine
from tests.support import FLOATS, assert_close, assert_same, make_experts, make_rows

TOLERANCE = {torch.float32: (3e-5, 3e-6), torch.float16: (4e-3, 7e-4), torch.bfloat16: (2.5e-2, 5e-3)}


@pytest.fixture(scope="module")
def engine():
    with new_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def layer(engine):
    return add_layer(engine)


def close(actual, wanted, dtype=torch.float32):
    max_tol, rms_tol = TOLERANCE[dtype]
    assert_close(actual, wanted, max_tol=max_tol, rms_tol=rms_tol)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("tokens", [0, 1, 2, 33])
def test_sum(layer, tokens, dtype):
    batch = make_batch(tokens, dtype=dtype, seed=tokens)
    device_out = make_rows(tokens, H, dtype, seed=9)
    ticket, deferred = layer.submit(*batch)
    assert int(deferred) == 0
    actual = layer.sync(ticket, device_out, out_dtype=torch.float32)
    close(actual, expected(layer, batch, device_out), dtype)


def test_one_rounding(layer):
    """The result is the float32 sum rounded once, whatever the dtypes."""
    batch = make_batch(7, dtype=torch.bfloat16)
    device_out = make_rows(7, H, torch.float32, seed=3)
    exact = layer.sync(layer.submit(*batch)[0], device_out)
    assert exact.dtype == torch.float32
    for dtype in (torch.bfloat16, torch.float16):
        assert_same(layer.sync(layer.submit(*batch)[0], device_out, out_dtype=dtype), exact.to(dtype))
    narrow = layer.sync(layer.submit(*batch)[0], device_out.bfloat16())
    wide = layer.sync(layer.submit(*batch)[0], device_out.bfloat16().float())
    assert_same(narrow, wide.bfloat16())


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_strides_and_dtypes_of_inputs(layer, id_dtype, weight_dtype):
    x, ids, weights = make_batch(9)
    weights = weights.to(weight_dtype)
    plain = layer.sync(layer.submit(x, ids, weights)[0], torch.zeros(9, H))
    wide = torch.full((9, 3 * H), float("nan"))
    wide[:, 1 : 2 * H : 2] = x
    spaced = wide[:, 1 : 2 * H : 2]
    assert not spaced.is_contiguous()
    turned = ids.to(id_dtype).t().contiguous().t()
    out = torch.zeros(H, 9).t()
    assert_same(layer.sync(layer.submit(spaced, turned, weights.t().contiguous().t())[0], out), plain)
    rows = torch.zeros(9, 2 * H)[:, :H]
    rows.copy_(x)
    assert_same(layer.sync(layer.submit(rows, ids, weights)[0], out), plain)


def test_ids_that_name_no_expert(layer):
    x, ids, weights = make_batch(5)
    device_out = make_rows(5, H, torch.float32, seed=1)
    for none in (-1, -(2**40), E, 2**40):
        nobody = torch.full_like(ids, none)
        assert_same(layer.sync(layer.submit(x, nobody, weights)[0], device_out), device_out)
    bad = torch.full_like(weights, float("nan"))
    assert_same(layer.sync(layer.submit(x, torch.full_like(ids, -1), bad)[0], device_out), device_out)
    twice = torch.tensor([[2, 2, -1]]).expand(5, 3)
    once = torch.tensor([[2, -1, -1]]).expand(5, 3)
    weights = torch.tensor([[0.25, 0.5, 9.0]]).expand(5, 3)
    summed = torch.tensor([[0.75, 9.0, 9.0]]).expand(5, 3)
    close(
        layer.sync(layer.submit(x, twice, weights)[0], device_out),
        layer.sync(layer.submit(x, once, summed)[0], device_out),
    )


def test_inputs_are_copied_and_results_are_fresh(engine, layer):
    batch = make_batch(6)
    wanted = layer.sync(layer.submit(*batch)[0], torch.zeros(6, H))
    with engine.hold():
        copies = [tensor.clone() for tensor in batch]
        ticket, _ = layer.submit(*copies)
        copies[0].fill_(float("nan"))
        copies[1].fill_(0)
        copies[2].fill_(7.0)
    device_out = torch.zeros(6, H)
    out = layer.sync(ticket, device_out)
    assert_same(out, wanted)
    assert not device_out.any()
    again = layer.sync(layer.submit(*batch)[0], device_out)
    assert again.data_ptr() != out.data_ptr()
    assert_same(out, wanted)


def test_a_ticket_is_data(layer):
    """A clone of a ticket is as good as the ticket, once."""
    batch = make_batch(4)
    ticket, _ = layer.submit(*batch)
    twin = torch.stack([torch.zeros_like(ticket), ticket])[1]
    close(layer.sync(twin, torch.zeros(4, H)), expected(layer, batch))
    with pytest.raises(RuntimeError, match="cpu_moe_sync: ticket must be a ticket that no sync has taken, got 0x"):
        layer.sync(ticket, torch.zeros(4, H))


@pytest.mark.parametrize("value", [0, 1, -1, 2**62, 0x4D54 << 48 | 1 << 40])
def test_numbers_that_are_no_tickets(layer, value):
    with pytest.raises(RuntimeError, match="cpu_moe_sync: ticket must be a ticket of "):
        layer.sync(torch.tensor([value]), torch.zeros(4, H))


def test_sizes_of_sync(layer):
    batch = make_batch(4)
    ticket, _ = layer.submit(*batch)
    with pytest.raises(ValueError, match=r"cpu_moe_sync: device_out must be \[4, 64\] as the submit"):
        layer.sync(ticket, torch.zeros(5, H))
    with pytest.raises(ValueError, match="cpu_moe_sync: deferred_ticket must be another ticket"):
        layer.sync(ticket, torch.zeros(4, H), deferred_ticket=ticket)
    close(layer.sync(ticket, torch.zeros(4, H)), expected(layer, batch))  # an argument error leaves the ticket good


def test_handles_that_name_nothing(layer):
    x, ids, weights = make_batch(2)
    for value in (0, -1, int(layer.handle) + 1):
        with pytest.raises(ValueError, match="cpu_moe_submit: engine must be the handle of experts in a living"):
            moe_ops.cpu_moe_submit(x, ids, weights, torch.tensor([value]))
    with pytest.raises(ValueError, match=r"hidden_states must be \[num_tokens, 64\] for 'test-\d+/layer', got a width"):
        layer.submit(torch.zeros(2, 32), ids, weights)


@pytest.mark.parametrize("max_deferred", [0, 1, 2, K, K + 1])
def test_deferral(layer, max_deferred):
    """Now and later together are everything; each is what the rule says; a token's split is its own."""
    x, ids, weights = make_batch(11, seed=4)
    weights[::3, 0] = 0  # no work: another slot is deferred
    now, later = moe_ops.select_deferred_experts(torch.where(ids < E, ids, -1), weights, max_deferred)
    ticket, deferred = layer.submit(x, ids, weights, max_deferred=max_deferred)
    assert (int(deferred) != 0) == (max_deferred > 0)
    zeros = torch.zeros(11, H)
    first = layer.sync(ticket, zeros)
    close(first, expected(layer, (x, now, weights)))
    if max_deferred:
        second = layer.sync(deferred, zeros)
        close(second, expected(layer, (x, later, weights)))
        close(first + second, expected(layer, (x, ids, weights)))
    one = layer.submit(x[3:4], ids[3:4], weights[3:4], max_deferred=max_deferred)
    close(layer.sync(one[0], zeros[:1]), first[3:4])
    if int(one[1]):
        layer.sync(one[1], zeros[:1])


def test_nothing_to_defer(layer):
    x, ids, weights = make_batch(3)
    ticket, deferred = layer.submit(x, torch.full_like(ids, -1), weights, max_deferred=2)
    assert int(deferred) == 0
    assert_same(layer.sync(ticket, torch.ones(3, H), deferred_ticket=deferred), torch.ones(3, H))


@pytest.mark.parametrize("layout", ["gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize("weight_format", ["mxfp4", "bfloat16"])
def test_formats(engine, layout, weight_format):
    g = torch.Generator().manual_seed(0)
    stacked = {
        "w13": torch.randn(E, 2 * I, H, generator=g) / 8,
        "w2": torch.randn(E, H, I, generator=g) / 8,
        "w13_bias": torch.randn(E, 2 * I, generator=g),
        "w2_bias": torch.randn(E, H, generator=g),
    }
    options = {"activation": "swiglu_oai", "swiglu_limit": 2.0, "swiglu_alpha": 1.3}
    layer = engine.add_experts(
        f"{layout}-{weight_format}", E, H, I, w13_layout=layout, weight_format=weight_format, w13_bias=True,
        w2_bias=True, **options,
    ).load(stacked)  # fmt: skip
    batch = make_batch(5)
    actual = layer.sync(layer.submit(*batch)[0], torch.zeros(5, H))
    close(actual, expected(layer, batch))
    if weight_format == "mxfp4":  # floats were quantised on the way in
        codes = {}
        for name in ("w13", "w2"):
            codes[name], codes[f"{name}_scale"] = reference.quantize_mxfp4(stacked[name])
        direct = reference.fused_mxfp4_moe(
            *batch, codes["w13"], codes["w13_scale"], codes["w2"], codes["w2_scale"], w13_layout=layout,
            w13_bias=stacked["w13_bias"], w2_bias=stacked["w2_bias"], **options,
        )  # fmt: skip
        close(actual, direct)


def test_gradient_goes_to_device_out_only(layer):
    x, ids, weights = make_batch(4)
    device_out = torch.randn(4, H, dtype=torch.bfloat16, requires_grad=True)
    out = layer.sync(layer.submit(x, ids, weights)[0], device_out, out_dtype=torch.float32)
    assert out.requires_grad
    grad = torch.randn(4, H)
    out.backward(grad)
    assert_same(device_out.grad, grad.bfloat16())


@pytest.mark.parametrize("index", [0, 2])
def test_submit_of_a_gradient_is_refused_before_it_runs(engine, layer, index):
    batch = list(make_batch(4))
    batch[index] = batch[index].requires_grad_()
    before = engine.stats()["submitted"]
    with pytest.raises(ValueError, match=r"cpu_moe_submit: \w+ must be detached"):
        layer.submit(*batch)
    assert engine.stats()["submitted"] == before
    with torch.no_grad():
        close(layer.sync(layer.submit(*batch)[0], torch.zeros(4, H)), expected(layer, batch))


def test_synchronous_mode_gives_the_same_bits(layer):
    batch = make_batch(9, dtype=torch.bfloat16)
    device_out = make_rows(9, H, torch.bfloat16, seed=2)

    def run():
        ticket, deferred = layer.submit(*batch, max_deferred=1)
        return ticket, layer.sync(ticket, device_out, deferred_ticket=deferred)

    _, asynchronous = run()
    moe_ops.engine.set_synchronous(True)
    try:
        ticket, _ = layer.submit(*batch)
        assert torch.ops.moe_ops._engine_is_done(int(ticket))  # submit has waited
        layer.sync(ticket, device_out)
        _, synchronous = run()
    finally:
        moe_ops.engine.set_synchronous(False)
    assert_same(synchronous, asynchronous)


def test_determinism(layer):
    batch = make_batch(17, dtype=torch.bfloat16)
    outs = [layer.sync(layer.submit(*batch)[0], torch.zeros(17, H, dtype=torch.bfloat16)) for _ in range(5)]
    for out in outs[1:]:
        assert_same(out, outs[0])


def test_threads_do_not_change_bits():
    batch = make_batch(17, dtype=torch.bfloat16)
    outs = []
    for threads in (1, 2):
        with new_engine(threads=threads) as engine:
            layer = add_layer(engine)
            outs.append(layer.sync(layer.submit(*batch)[0], torch.zeros(17, H)))
    assert_same(outs[1], outs[0])


def test_weights_come_back_as_they_went_in(engine):
    tensors = make_experts(E, I, H, seed=5)
    layer = engine.add_experts("read", E, H, I, w13_layout="interleaved").load(tensors)
    for expert in range(E):
        read = layer.read_expert(expert)
        assert set(read) == set(tensors)
        for name, tensor in tensors.items():
            assert_same(read[name], tensor[expert], name)
