"""Weight containers: repacking, files, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import moe_ops
from moe_ops import _pages
from moe_ops.experts import Mxfp4Experts, PreparedExperts
from tests.engine.support import new_engine
from tests.support import assert_same, make_experts, make_routing, make_rows

LAYOUTS = ("gate_up", "up_gate", "interleaved")


WEIGHTS = ("w13", "w13_scale", "w2", "w2_scale")


def make(layout: str = "gate_up", experts: int = 3, inter: int = 64, hidden: int = 96, bias: bool = True):
    tensors = make_experts(experts, inter, hidden)
    biases = {"w13_bias": torch.randn(experts, 2 * inter), "w2_bias": torch.randn(experts, hidden)} if bias else {}
    return Mxfp4Experts(**tensors, w13_layout=layout, **biases)


def copy_of(experts: Mxfp4Experts) -> Mxfp4Experts:
    arguments = experts.arguments()
    return Mxfp4Experts(**{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()})


def run(experts, x, ids, routing, **options):
    return moe_ops.fused_mxfp4_moe(x, ids, routing, **experts.arguments(), **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_prepared_weights_give_the_same_bits(layout, tokens):
    experts = make(layout)
    x, (ids, routing) = make_rows(tokens, 96, torch.bfloat16), make_routing(tokens, 2, 3)
    expected = run(experts, x, ids, routing, activation="swiglu_oai")
    prepared = experts.prepare()
    assert_same(run(prepared, x, ids, routing, activation="swiglu_oai"), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prepared_backward(layout):
    experts = make(layout)
    ids, routing = make_routing(5, 2, 3)
    results = []
    for weights in (experts, copy_of(experts).prepare()):
        x, w = make_rows(5, 96, torch.float32).requires_grad_(), routing.clone().requires_grad_()
        run(weights, x, ids, w).sum().backward()
        results.append((x.grad, w.grad))
    assert_same(results[1][0], results[0][0])
    assert_same(results[1][1], results[0][1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_preparing_loses_nothing_and_moves_nothing(layout):
    experts = make(layout, inter=32, hidden=160)
    before = copy_of(experts)
    places = [getattr(experts, name).data_ptr() for name in ("w13", "w13_scale", "w2", "w2_scale")]
    prepared = experts.prepare()
    assert [getattr(prepared, name).data_ptr() for name in ("w13", "w13_scale", "w2", "w2_scale")] == places
    for expert in range(3):
        for name, tensor in prepared.checkpoint_expert(expert).items():
            assert_same(tensor, getattr(before, name)[expert], name)


def test_layout_by_hand():
    """Tile 0 holds rows 0 to 15 of gate; dword r of its first vector is the first four bytes of row r."""
    experts = make("interleaved", experts=1, inter=32, hidden=32, bias=False)
    w13, w13_scale, w2 = experts.w13.clone(), experts.w13_scale.clone(), experts.w2.clone()
    prepared = experts.prepare()
    assert prepared.w13.shape == (1, 2, 2, 1, 256) and prepared.w2.shape == (1, 2, 1, 256)
    gate_tile = prepared.w13[0, 0, 0, 0].view(4, 16, 4)
    assert_same(gate_tile[0, 5], w13[0, 2 * 5, 0:4])
    assert_same(gate_tile[3, 2], w13[0, 2 * 2, 12:16])
    assert_same(prepared.w13[0, 1, 1, 0].view(4, 16, 4)[1, 7], w13[0, 2 * (16 + 7) + 1, 4:8])
    assert_same(prepared.w13_scale[0, 1, 1, 0], w13_scale[0, 33::2, 0])
    assert_same(prepared.w2[0, 1, 0].view(4, 16, 4)[2, 9], w2[0, 25, 8:12])


def test_source_is_used_up():
    experts = make()
    experts.prepare()
    # A copy of the bytes would have forgotten that they are packed.
    copies = (lambda: pickle.dumps(experts), lambda: copy.deepcopy(experts))
    for use in (experts.prepare, experts.arguments, *copies):
        with pytest.raises(RuntimeError, match="have been prepared"):
            use()


def test_containers_are_copied_compared_and_shown():
    raw = make()
    for again in (pickle.loads(pickle.dumps(raw)), copy.deepcopy(raw)):
        assert_same(again.w13, raw.w13)
        assert again == again and again != raw and again in {again, raw}
    assert repr(raw) == "Mxfp4Experts(3 experts, hidden_size=96, intermediate_size=64, gate_up)"
    packed = copy_of(raw).prepare()
    assert repr(packed) == "PreparedExperts(3 experts, hidden_size=96, intermediate_size=64, x86_v1)"
    assert_same(pickle.loads(pickle.dumps(packed)).w13, packed.w13)


def test_memory_is_repacked_once():
    """Also through another container over the same tensors; neighbours in the same storage are untouched."""
    first, second = make(), make()
    stacked = {name: torch.stack([getattr(first, name), getattr(second, name)]) for name in WEIGHTS}
    layer = [Mxfp4Experts(**{name: stacked[name][i] for name in WEIGHTS}, w13_layout=first.w13_layout) for i in (0, 1)]
    again = Mxfp4Experts(**{name: stacked[name][0] for name in WEIGHTS}, w13_layout=first.w13_layout)
    layer[0].prepare()
    for use in (again.prepare, again.arguments):
        with pytest.raises(RuntimeError, match="have been prepared"):
            use()
    assert_same(layer[1].w13, second.w13)
    layer[1].prepare()


def test_engines_refuse_used_weights():
    experts = make(bias=False)
    tensors = experts.tensors()
    experts.prepare()
    with new_engine() as engine:
        layer = engine.add_experts("layer", 3, 96, 64, w13_layout="gate_up")
        with pytest.raises(ValueError, match=r"w13 must be checkpoint bytes, got memory that prepare.* has repacked"):
            layer.load(tensors)
        assert not layer.loaded().any()


def test_compiled_code_refuses_used_weights():
    x, (ids, routing) = make_rows(2, 96, torch.bfloat16), make_routing(2, 2, 3)
    experts = make()
    call = torch.compile(lambda x: moe_ops.fused_mxfp4_moe(x, ids, routing, **experts.arguments()), backend="eager")
    call(x)
    experts.prepare()
    with pytest.raises(Exception, match="have been prepared"):
        call(x)


def test_any_place_in_a_storage():
    """Views that start at any byte, as in a file that is read as one tensor."""

    def shifted(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.numel() + 3, dtype=tensor.dtype)[3:].view(tensor.shape).copy_(tensor)

    x, (ids, routing) = make_rows(5, 96, torch.bfloat16), make_routing(5, 2, 3)
    for layout in LAYOUTS:
        raw = make(layout)
        arguments = {k: shifted(v) if isinstance(v, torch.Tensor) else v for k, v in raw.arguments().items()}
        odd, codes = Mxfp4Experts(**arguments), raw.w13[1].clone()
        expected = run(raw, x, ids, routing)
        packed = odd.prepare()
        assert_same(run(packed, x, ids, routing), expected)
        assert_same(packed.checkpoint_expert(1)["w13"], codes)


def test_wrong_layouts_are_refused():
    x, (ids, routing) = make_rows(2, 96, torch.bfloat16), make_routing(2, 2, 3)
    experts = make(bias=False)
    raw = experts.arguments()
    with pytest.raises(ValueError, match=r"w13 must be .* weight_layout 'x86_v1', got"):
        moe_ops.fused_mxfp4_moe(x, ids, routing, **raw, weight_layout="x86_v1")
    packed = experts.prepare().arguments()
    with pytest.raises(ValueError, match=r"w13 must be .* weight_layout 'checkpoint', got"):
        moe_ops.fused_mxfp4_moe(x, ids, routing, **{**packed, "weight_layout": "checkpoint"})
    with pytest.raises(ValueError, match="weight_layout must be"):
        moe_ops.fused_mxfp4_moe(x, ids, routing, **{**packed, "weight_layout": "x86_v0"})
    with pytest.raises(ValueError, match="w2_scale must be a contiguous"):
        moe_ops.fused_mxfp4_moe(x, ids, routing, **{**packed, "w2_scale": packed["w13_scale"]})
    with pytest.raises(
        ValueError, match="prepare: layout must be 'x86_v1', 'sm90_v1' or 'sm90_v1_e4m3', got 'sm90_v0'"
    ):
        make().prepare("sm90_v0")


def test_fake_and_kernel_refuse_alike():
    x, (ids, routing) = make_rows(2, 96, torch.bfloat16), make_routing(2, 2, 3)
    packed = make(bias=False).prepare().arguments()
    for change in ({"w2": packed["w2"][:, :2].contiguous()}, {"w13": packed["w13"][0]}, {"w13": packed["w13"].int()}):
        messages = []
        for device in ("cpu", "meta"):
            arguments = {**packed, **change}
            arguments = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
            with pytest.raises(ValueError) as error:
                moe_ops.fused_mxfp4_moe(x.to(device), ids.to(device), routing.to(device), **arguments)
            messages.append(str(error.value))
        assert messages[0] == messages[1]


def test_from_float():
    g = torch.Generator().manual_seed(3)
    w13, w2 = torch.randn(2, 64, 96, generator=g), torch.randn(2, 96, 32, generator=g)
    experts = Mxfp4Experts.from_float(w13, w2, w13_layout="up_gate")
    from moe_ops.reference.mxfp4 import dequantize_mxfp4, quantize_mxfp4

    codes, scales = quantize_mxfp4(w13[1])
    assert_same(dequantize_mxfp4(experts.w13[1], experts.w13_scale[1]), dequantize_mxfp4(codes, scales))
    assert experts.w2.shape == (2, 96, 16)
    with pytest.raises(ValueError, match=r"from_float: w13 must be \[E, 2I, H\] float, got \[64, 96\] float32"):
        Mxfp4Experts.from_float(torch.randn(64, 96), torch.randn(2, 96, 32), w13_layout="gate_up")
    with pytest.raises(ValueError, match=r"from_float: w2 must be \[E, H, I\] float, got .* int64"):
        Mxfp4Experts.from_float(torch.randn(2, 64, 96), torch.ones(2, 96, 32).long(), w13_layout="gate_up")
    with pytest.raises(ValueError, match=r"Mxfp4Experts: w2_scale must be a contiguous .* uint8, got None"):
        Mxfp4Experts(
            *[torch.zeros(2, 64, 32, dtype=torch.uint8), torch.zeros(2, 64, 2, dtype=torch.uint8)],
            torch.zeros(2, 64, 16, dtype=torch.uint8),
            None,
            w13_layout="gate_up",
        )


@pytest.mark.parametrize("bias", [False, True])
def test_file(tmp_path, bias):
    prepared = make("up_gate", bias=bias).prepare()
    path = tmp_path / "layer.safetensors"
    prepared.save(path)
    loaded = PreparedExperts.load(path)
    assert (loaded.w13_layout, loaded.weight_layout, loaded.hidden_size) == ("up_gate", "x86_v1", 96)
    for name in ("w13", "w13_scale", "w2", "w2_scale", "w13_bias", "w2_bias"):
        if getattr(prepared, name) is None:
            assert getattr(loaded, name) is None
        else:
            assert_same(getattr(loaded, name), getattr(prepared, name), name)
    assert loaded.w13.data_ptr() % 64 == 0 and loaded.w2.data_ptr() % 64 == 0
    assert list(tmp_path.iterdir()) == [path]
    from safetensors.torch import load_file

    assert_same(load_file(path)["w2"], prepared.w2)


def _run_mapped(path, queue):
    loaded = PreparedExperts.load(path)
    x, (ids, routing) = make_rows(4, 96, torch.bfloat16), make_routing(4, 2, 3)
    queue.put(run(loaded, x, ids, routing).float().numpy())


def test_processes_share_a_file(tmp_path):
    prepared = make().prepare()
    path = tmp_path / "layer.safetensors"
    prepared.save(path)
    x, (ids, routing) = make_rows(4, 96, torch.bfloat16), make_routing(4, 2, 3)
    expected = run(prepared, x, ids, routing).float()
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_run_mapped, args=(path, queue))
    process.start()
    assert_same(torch.from_numpy(queue.get(timeout=120)), expected)
    process.join()


def test_bad_files(tmp_path):
    prepared = make(bias=False).prepare()
    path = tmp_path / "layer.safetensors"
    prepared.save(path)
    content = path.read_bytes()
    (tmp_path / "short").write_bytes(content[:-64])
    with pytest.raises(ValueError, match="complete at 'w2_scale'"):
        PreparedExperts.load(tmp_path / "short")
    (tmp_path / "other").write_bytes(content.replace(b'"version": "1"', b'"version": "9"'))
    with pytest.raises(ValueError, match="of version '1', got 9"):
        PreparedExperts.load(tmp_path / "other")
    (tmp_path / "layout").write_bytes(content.replace(b"x86_v1", b"arm_v7"))
    with pytest.raises(ValueError, match=r"weight_layout must be one of .*, got 'arm_v7'"):
        PreparedExperts.load(tmp_path / "layout")
    for old, new, text in (
        (b'"dtype": "U8"', b'"dtype": "X8"', "must be a file that save wrote, got KeyError: 'X8'"),
        (b'"data_offsets"', b'"data_offsetz"', "must be a file that save wrote, got KeyError: 'data_offsets'"),
        (b'"hidden_size"', b'"hidden_sizz"', "must be complete, got no hidden_size"),
        (b'"gate_up"', b'"gate_uq"', "w13_layout must be 'gate_up', 'up_gate' or 'interleaved', got 'gate_uq'"),
    ):
        (tmp_path / "damaged").write_bytes(content.replace(old, new))
        with pytest.raises(ValueError, match=text):
            PreparedExperts.load(tmp_path / "damaged")
    with pytest.raises(ValueError, match=r"PreparedExperts: w2_bias must be \[3, 96\] .*, got \[3, 5\] float32"):
        dataclasses.replace(prepared, w2_bias=torch.zeros(3, 5))
    (tmp_path / "text").write_bytes(b"hello, this is not a model")
    with pytest.raises(ValueError, match="must be a safetensors file"):
        PreparedExperts.load(tmp_path / "text")
    from safetensors.torch import save_file

    save_file({"w13": torch.zeros(3)}, tmp_path / "foreign")
    with pytest.raises(ValueError, match=r"of format 'moe_ops.prepared_experts', got None"):
        PreparedExperts.load(tmp_path / "foreign")
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert header["__metadata__"]["weight_layout"] == "x86_v1"


PEAK = """
import resource, sys, torch
from moe_ops.experts import Mxfp4Experts
E, I, H = 24, 1024, 2048  # 3.2 MiB an expert
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
def make(experts):
    def full(*shape, value):
        return torch.full((experts, *shape), value, dtype=torch.uint8)
    return Mxfp4Experts(
        full(2 * I, H // 2, value=3), full(2 * I, H // 32, value=120), full(H, I // 2, value=3),
        full(H, I // 32, value=120), w13_layout="interleaved")
make(1).prepare()  # what the first call costs is not weights
weights = make(E)
before = peak()
weights.prepare()
one = 3 * I * H * 17 // 32
print(peak() - before, one)
"""


def test_peak_memory_is_the_weights_and_one_expert():
    output = subprocess.run(
        [sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    grown, one_expert = (int(word) for word in output.split())
    # The allocator keeps some of what it got back.
    assert grown <= one_expert + 2**22, f"{grown} bytes more than the weights; an expert is {one_expert}"


QUANTIZE = """
import resource, torch
from moe_ops.reference.mxfp4 import quantize_mxfp4
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
weights = torch.ones(4096, 2048, dtype=torch.bfloat16)
quantize_mxfp4(weights[:128])  # what the first call costs is not weights
before = peak()
quantize_mxfp4(weights)
print(peak() - before, weights.nbytes)
"""


def test_quantising_an_expert_takes_less_than_the_expert():
    output = subprocess.run(
        [sys.executable, "-c", QUANTIZE], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    grown, expert = (int(word) for word in output.split())
    assert grown <= expert, f"{grown} bytes for an expert of {expert}"


def huge_bytes(tensor: torch.Tensor) -> int:
    """Of the mappings that hold a tensor: what lies in huge pages."""
    begin, end, total, inside = tensor.data_ptr(), tensor.data_ptr() + tensor.numel(), 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word = line.split()[0]
        if "-" in word and not word.endswith(":"):
            low, high = (int(part, 16) for part in word.split("-"))
            inside = low < end and begin < high
        elif inside and word == "AnonHugePages:":
            total += int(line.split()[1]) << 10
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="pages of Linux")
def test_prepared_weights_lie_in_huge_pages():
    experts = make(experts=4, inter=1024, hidden=2048, bias=False)
    expected = copy_of(experts).prepare().w13.clone()
    large = experts.w13
    if not _pages._allowed():
        pytest.skip("the system allows no huge pages")
    probe = torch.ones(8 << 20, dtype=torch.uint8)
    _pages.move_to_huge_pages([probe])
    if huge_bytes(probe) == 0:
        pytest.skip("the system gives no huge pages")
    prepared = experts.prepare()
    assert prepared.w13.data_ptr() == large.data_ptr()
    assert huge_bytes(prepared.w13) >= 6 << 20
    assert_same(prepared.w13, expected)


def test_huge_pages_are_asked_for_only_where_allowed(tmp_path, monkeypatch):
    for text, allowed in (("always [madvise] never", True), ("[always] madvise", True), ("always [never]", False)):
        (tmp_path / "enabled").write_text(text)
        monkeypatch.setattr(_pages, "POLICY", tmp_path / "enabled")
        assert _pages._allowed() == (allowed and sys.platform == "linux" and os.sysconf("SC_PAGE_SIZE") == 4096)
    (tmp_path / "enabled").write_text("[always] madvise never")
    monkeypatch.setenv("MOE_OPS_HUGE_PAGES", "0")
    assert not _pages._allowed()
    monkeypatch.delenv("MOE_OPS_HUGE_PAGES")
    monkeypatch.setattr(_pages, "POLICY", tmp_path / "none")
    assert not _pages._allowed()
    _pages.move_to_huge_pages([torch.zeros(3, dtype=torch.uint8)])
