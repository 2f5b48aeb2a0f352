"""HybridExperts: where an expert lives changes nothing but the time it takes."""

from __future__ import annotations

import copy

import pytest
import torch

import moe_ops
from moe_ops.cuda import prepare_sm90
from tests.engine.support import E, H, I, add_layer, make_batch, new_engine
from tests.support import assert_close, assert_same, make_experts


@pytest.fixture(scope="module")
def engine():
    with new_engine() as engine:
        yield engine


def make_hybrid(engine, name: str, *, slots: int, max_deferred: int = 0, seed: int = 0, **options):
    layer = moe_ops.HybridExperts(add_layer(engine, name, seed=seed), slots, max_deferred=max_deferred, **options)
    layer.place(range(slots))
    return layer


def run_hybrid(layers, x, ids, weights):
    deferred = layers[0].no_deferred()
    for layer in layers:
        y, deferred = layer(x, ids, weights, deferred)
        x = x + y * 0.5
    return x


def all_on_device(batch, seed: int = 0, factor: float = 1.0):
    x, ids, weights = batch
    experts = make_experts(E, I, H, seed)
    return moe_ops.fused_mxfp4_moe(x, ids, weights * factor, *experts.values(), w13_layout="gate_up")


def close(actual, wanted):
    assert_close(actual, wanted, max_tol=5e-5, rms_tol=5e-6)


@pytest.mark.parametrize("slots", [0, 1, 3, E])
def test_any_split_gives_the_same_sum(engine, slots):
    layer = make_hybrid(engine, f"split{slots}", slots=slots)
    batch = make_batch(9, seed=slots)
    assert layer.residents() == list(range(slots))
    assert layer.cpu_experts.loaded().tolist() == [expert >= slots for expert in range(E)]
    close(layer(*batch)[0], all_on_device(batch))


def test_residents_change_between_steps(engine):
    layer = make_hybrid(engine, "moving", slots=2)
    addresses = [layer.w13.data_ptr(), layer.w2_scale.data_ptr(), layer.expert_map.data_ptr()]
    g = torch.Generator().manual_seed(0)
    for step in range(12):
        wanted = torch.randperm(E, generator=g)[: int(torch.randint(0, 3, (1,), generator=g))].tolist()
        layer.place(wanted)
        assert sorted(layer.residents()) == sorted(wanted)
        assert layer.cpu_experts.loaded().tolist() == [expert not in wanted for expert in range(E)]
        batch = make_batch(5, seed=step)
        close(layer(*batch)[0], all_on_device(batch))
    assert [layer.w13.data_ptr(), layer.w2_scale.data_ptr(), layer.expert_map.data_ptr()] == addresses


@pytest.mark.parametrize("w13_layout", ["gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize(("hidden", "inter"), [(64, 32), (160, 96), (256, 128)])
def test_packed_slots_hold_the_same_bytes(engine, w13_layout, hidden, inter):
    """Slots in the Hopper kernels' layout: experts go in and come out bit by bit, and addresses stay."""
    raw = make_experts(E, inter, hidden, seed=3)
    biases = {"w13_bias": torch.randn(E, 2 * inter), "w2_bias": torch.randn(E, hidden)}
    name = f"packed-{w13_layout}-{hidden}"
    experts = engine.add_experts(name, E, hidden, inter, w13_layout=w13_layout, w13_bias=True, w2_bias=True)
    layer = moe_ops.HybridExperts(experts.load(raw | biases), 3, weight_layout="sm90_v1")
    wanted = prepare_sm90(*(tensor.clone() for tensor in raw.values()), w13_layout=w13_layout)
    addresses = [layer.w13.data_ptr(), layer.w2.data_ptr(), layer.w13_scale.data_ptr()]
    for residents in ([0, 1, 2], [2, 4], [5, 1, 3], [], [3, 0]):
        layer.place(residents)
        for slot, expert in enumerate(layer.residents()):
            for buffer, packed in zip((layer.w13, layer.w13_scale, layer.w2, layer.w2_scale), wanted, strict=True):
                assert_same(buffer[slot], packed[expert])
            assert_same(layer.w13_bias[slot], biases["w13_bias"][expert])
    layer.place([])
    assert [layer.w13.data_ptr(), layer.w2.data_ptr(), layer.w13_scale.data_ptr()] == addresses
    for expert in range(E):
        for name, tensor in experts.read_expert(expert).items():
            assert_same(tensor, (raw | biases)[name][expert])


def test_an_expert_that_packed_slots_do_not_hold(engine):
    """Its scales are outside what the Hopper kernels hold: refused by name, before anything moves."""
    raw = make_experts(E, I, H)
    raw["w2_scale"][4, 0, 0] = 200
    experts = engine.add_experts("extreme", E, H, I, w13_layout="gate_up").load(raw)
    layer = moe_ops.HybridExperts(experts, 2, weight_layout="sm90_v1")
    layer.place([0])
    with pytest.raises(ValueError, match=r"experts must be representable .*, got 4: 1 scales of w2_scale are outside"):
        layer.place([1, 4])
    assert layer.residents() == [0]
    assert experts.loaded().tolist() == [expert != 0 for expert in range(E)]
    plain = moe_ops.HybridExperts(add_layer(engine, "plain"), 2)
    assert plain.weight_layout == "checkpoint"  # here is no Hopper card
    with pytest.raises(ValueError, match="weight_layout must be 'auto', 'checkpoint' or 'sm90_v1', got 'x86_v1'"):
        moe_ops.HybridExperts(plain.cpu_experts, 2, weight_layout="x86_v1")


def test_what_placement_refuses(engine):
    layer = make_hybrid(engine, "refusing", slots=2)
    for experts, message in (
        ([0, 0], "experts must be distinct"),
        ([0, 1, 2], "experts must be at most 2, got 3"),
        ([E], rf"experts must be in \[0, {E}\), got {E}"),
        ([-1], "experts must be in"),
    ):
        with pytest.raises(ValueError, match=message):
            layer.place(experts)
    assert layer.residents() == [0, 1]
    with pytest.raises(ValueError, match="num_slots must be in"):
        moe_ops.HybridExperts(layer.cpu_experts, E + 1)


def test_deferral_only_moves_work(engine):
    """The parts that a layer defers arrive in the next one: the sum over all layers is unchanged for equal inputs."""
    batch = make_batch(7)
    sums = []
    for max_deferred in (0, 1, 3):
        layers = [
            make_hybrid(
                engine, f"deferring{max_deferred}-{i}", slots=2, max_deferred=0 if i == 2 else max_deferred, seed=i
            )
            for i in range(3)
        ]
        deferred, total = layers[0].no_deferred(), torch.zeros(7, H)
        for layer in layers:
            y, deferred = layer(*batch, deferred)
            total = total + y
        assert int(deferred) == 0
        sums.append(total)
    close(sums[1], sums[0])
    close(sums[2], sums[0])


def test_scaling_once_and_shared_experts_and_one_rounding(engine):
    torch.manual_seed(0)
    shared = torch.nn.Linear(H, H, bias=False)
    layer = make_hybrid(engine, "scaled", slots=3, routed_scaling_factor=2.5, shared_experts=shared)
    x, ids, weights = make_batch(6)
    with torch.no_grad():
        exact = layer(x, ids, weights)[0]
        close(exact, all_on_device((x, ids, weights), factor=2.5) + shared(x))
        low = x.bfloat16()
        layer.shared_experts = None
        rounded, wide = layer(low, ids, weights)[0], layer(low.float(), ids, weights)[0]
    # bfloat16 rows: the products are bfloat16 on both sides, the sum over device and CPU is rounded once.
    assert rounded.dtype == torch.bfloat16
    assert_close(rounded, wide, max_tol=2.5e-2, rms_tol=5e-3)


def test_gradients_flow_through_the_device_side(engine):
    layer = make_hybrid(engine, "training", slots=3)
    x, ids, weights = make_batch(6)
    x.requires_grad_()
    weights.requires_grad_()
    layer(x, ids, weights)[0].sum().backward()
    device_ids = torch.where(ids < 3, ids, -1)
    x2, w2 = x.detach().clone().requires_grad_(), weights.detach().clone().requires_grad_()
    moe_ops.fused_mxfp4_moe(
        x2, device_ids, w2, *make_experts(E, I, H).values(), w13_layout="gate_up", out_dtype=torch.float32
    ).sum().backward()
    close(x.grad, x2.grad)
    close(weights.grad, w2.grad)


def test_copies_and_moves(engine):
    layer = make_hybrid(engine, "copied", slots=2)
    batch = make_batch(4)
    wanted = layer(*batch)[0]
    close(copy.deepcopy(layer)(*batch)[0], wanted)
    assert not layer.state_dict()
    close(layer.to("cpu", torch.bfloat16)(*batch)[0], wanted)


def test_residents_that_never_were_on_the_cpu(engine):
    tensors = make_experts(E, I, H)
    experts = engine.add_experts("direct", E, H, I, w13_layout="gate_up")
    experts.load(tensors, on_cpu=[expert >= 2 for expert in range(E)])
    layer = moe_ops.HybridExperts(experts, 2)
    for expert in (1, 0):
        layer.load_resident(expert, **{name: tensor[expert] for name, tensor in tensors.items()})
    batch = make_batch(4)
    close(layer(*batch)[0], all_on_device(batch))
    with pytest.raises(ValueError, match="expert must be loaded while a slot is free"):
        layer.load_resident(3, **{name: tensor[3] for name, tensor in tensors.items()})


def test_what_a_resident_must_be(engine):
    layer = moe_ops.HybridExperts(engine.add_experts("resident", E, H, I, w13_layout="gate_up"), 2)
    tensors = {name: tensor[1] for name, tensor in make_experts(E, I, H).items()}
    layer.load_resident(1, **tensors)
    for expert, given, text in (
        (1, tensors, "expert must be none of the residents, got 1"),
        (-1, tensors, rf"expert must be in \[0, {E}\), got -1"),
        (2, {"w13": tensors["w13"]}, rf"w13_scale must be \[{2 * I}, {H // 32}\] uint8, got None"),
        (
            2,
            {name: tensor[:1] for name, tensor in tensors.items()},
            rf"w13 must be \[{2 * I}, {H // 2}\] uint8, got \[1,",
        ),
        (2, tensors | {"w2": tensors["w2"].float()}, r"w2 must be .* uint8, got .* float32"),
        (2, tensors | {"w2_scale": tensors["w2_scale"].int()}, "w2_scale must be uint8, .* got int32"),
        (2, tensors | {"w13_bias": torch.zeros(2 * I)}, "w13_bias must be None, as the experts have none, got"),
        (2, tensors | {"w3": tensors["w2"]}, "tensors must be among w13, .*, got w3"),
    ):
        with pytest.raises(ValueError, match=text):
            layer.load_resident(expert, **given)
    assert layer.residents() == [1]
    for expert, dtype in ((0, torch.float8_e8m0fnu), (2, torch.float32)):
        layer = moe_ops.HybridExperts(layer.cpu_experts, 1)
        as_scales = {n: t.view(torch.float8_e8m0fnu).to(dtype) for n, t in tensors.items() if n.endswith("scale")}
        layer.load_resident(expert, **tensors | as_scales)
        assert torch.equal(layer.w13_scale[0], tensors["w13_scale"])


def test_to_empty_leaves_no_residents(engine):
    tensors = make_experts(E, I, H)
    experts = engine.add_experts("emptied", E, H, I, w13_layout="gate_up")
    experts.load(tensors, on_cpu=[expert >= 2 for expert in range(E)])
    layer = moe_ops.HybridExperts(experts, 2)
    model = torch.nn.Sequential(layer)
    one = [{name: tensor[expert] for name, tensor in tensors.items()} for expert in range(2)]
    for empty in (
        lambda: layer.to_empty(device="cpu"),
        lambda: model.to_empty(device="cpu"),
        lambda: model.to("meta").to_empty(device="cpu"),
    ):
        for expert in range(2):
            layer.load_resident(expert, **one[expert])
        assert layer.to(torch.bfloat16).residents() == [0, 1]
        empty()
        assert layer.residents() == [] and (layer.expert_map == -1).all()


def test_made_on_meta(engine):
    with torch.device("meta"):
        layer = moe_ops.HybridExperts(add_layer_on_cpu(engine), 2, device="meta")
    layer.to_empty(device="cpu")
    layer.place([3, 0])
    assert layer.expert_map.tolist() == [1, -1, -1, 0, -1, -1]
    batch = make_batch(9)
    close(layer(*batch)[0], all_on_device(batch))


def add_layer_on_cpu(engine):
    with torch.device("cpu"):
        return add_layer(engine, "meta")


def test_masks_choose_residents(engine):
    """gpu_expert_masks over layers, and each layer's residents from it."""
    frequencies = torch.tensor([[0.1, 0.5, 0.3, 0.8, 0.0, 0.0], [0.2, 0.4, 0.9, 0.1, 0.0, 0.0]])
    masks = moe_ops.gpu_expert_masks(frequencies, 3)
    for i, mask in enumerate(masks):
        layer = moe_ops.HybridExperts(add_layer(engine, f"masked{i}", seed=i), int(mask.sum()))
        layer.place(mask.nonzero().flatten().tolist())
        batch = make_batch(5)
        close(layer(*batch)[0], all_on_device(batch, seed=i))
