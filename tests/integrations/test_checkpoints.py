"""Checkpoints: every naming scheme gives the weights that were put in, one expert at a time."""

from __future__ import annotations

import copy
import json
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from moe_ops.experts import Mxfp4Experts
from moe_ops.integrations.checkpoints import Checkpoint, CheckpointWriter, interleave_rows
from moe_ops.reference.mxfp4 import dequantize_mxfp4

E, H, I = 4, 64, 96  # noqa: E741
PREFIX = "model.layers.3.mlp.experts"


def make_experts(num_experts: int = E, hidden: int = H, intermediate: int = I, *, bias: bool = True) -> Mxfp4Experts:
    generator = torch.Generator().manual_seed(7)

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    def scales(*shape: int) -> torch.Tensor:
        return torch.randint(100, 140, shape, dtype=torch.uint8, generator=generator)

    return Mxfp4Experts(
        codes(num_experts, 2 * intermediate, hidden // 2),
        scales(num_experts, 2 * intermediate, hidden // 32),
        codes(num_experts, hidden, intermediate // 2),
        scales(num_experts, hidden, intermediate // 32),
        "gate_up",
        torch.randn(num_experts, 2 * intermediate, generator=generator) if bias else None,
        torch.randn(num_experts, hidden, generator=generator) if bias else None,
    )


def assert_same(actual: Mxfp4Experts, expected: Mxfp4Experts) -> None:
    assert actual.w13_layout == expected.w13_layout
    assert actual.tensors().keys() == expected.tensors().keys()
    for name, tensor in expected.tensors().items():
        assert torch.equal(actual.tensors()[name], tensor), name


def in_gpt_oss_order(experts: Mxfp4Experts) -> Mxfp4Experts:
    assert experts.w13_bias is not None
    return Mxfp4Experts(
        interleave_rows(experts.w13, "gate_up"),
        interleave_rows(experts.w13_scale, "gate_up"),
        experts.w2,
        experts.w2_scale,
        "interleaved",
        interleave_rows(experts.w13_bias, "gate_up"),
        experts.w2_bias,
    )


def test_gpt_oss_names_shapes_and_row_order(tmp_path: Path) -> None:
    experts = make_experts()
    with CheckpointWriter(tmp_path) as writer:
        writer.add_experts(PREFIX, experts)
        writer.add("model.layers.3.mlp.router.weight", torch.ones(E, H))
    with Checkpoint(tmp_path) as checkpoint:
        blocks = checkpoint.read(f"{PREFIX}.gate_up_proj_blocks")
        assert list(blocks.shape) == [E, 2 * I, H // 32, 16]
        assert list(checkpoint.shape(f"{PREFIX}.down_proj_scales")) == [E, H, I // 32]
        assert torch.equal(blocks[:, 0::2].flatten(2), experts.w13[:, :I])  # even rows are gate
        assert torch.equal(blocks[:, 1::2].flatten(2), experts.w13[:, I:])
        assert torch.equal(checkpoint.read("model.layers.3.mlp.router.weight"), torch.ones(E, H))
        assert_same(checkpoint.load_experts(PREFIX), in_gpt_oss_order(experts))


@pytest.mark.parametrize("layout", ["gate_up", "up_gate", "interleaved"])
def test_interleave_rows_reads_each_layout(layout: str) -> None:
    gate, up = torch.arange(3).view(1, 3, 1), torch.arange(10, 13).view(1, 3, 1)
    rows = {
        "gate_up": torch.cat((gate, up), 1),
        "up_gate": torch.cat((up, gate), 1),
        "interleaved": torch.tensor([0, 10, 1, 11, 2, 12]).view(1, 6, 1),
    }[layout]
    assert interleave_rows(rows, layout).flatten().tolist() == [0, 10, 1, 11, 2, 12]


def test_only_the_named_experts_in_the_named_order(tmp_path: Path) -> None:
    experts = make_experts()
    with CheckpointWriter(tmp_path) as writer:
        writer.add_experts(PREFIX, experts)
    with Checkpoint(tmp_path) as checkpoint:
        done: list[int] = []
        loaded = checkpoint.load_experts(PREFIX, [2, 0, 2], progress=done.append)
        assert_same(loaded, in_gpt_oss_order(experts).select([2, 0, 2]))
        assert done == [1, 2, 3]
        with pytest.raises(ValueError, match=r"load_experts: experts must be in \[0, 4\), got 4"):
            checkpoint.load_experts(PREFIX, [4])
        with pytest.raises(ValueError, match=r"load_experts: prefix must be .*model\.layers\.3.*, got 'nope'"):
            checkpoint.load_experts("nope")


def test_the_file_holds_what_was_given(tmp_path: Path) -> None:
    """Whatever becomes of the weights before they are written."""
    experts = make_experts()
    wanted = copy.deepcopy(in_gpt_oss_order(experts))
    with CheckpointWriter(tmp_path) as writer:
        writer.add_experts(PREFIX, experts)
        bias = torch.ones(3)
        writer.add("bias", bias)
        bias.zero_()
        experts.prepare()
    with Checkpoint(tmp_path) as checkpoint:
        assert_same(checkpoint.load_experts(PREFIX), wanted)
        assert checkpoint.read("bias").tolist() == [1, 1, 1]


def test_shards_and_index(tmp_path: Path) -> None:
    layers = {f"model.layers.{n}.mlp.experts": make_experts(bias=False) for n in (0, 2, 10)}
    with CheckpointWriter(tmp_path, max_shard_bytes=60_000) as writer:
        for prefix, experts in layers.items():
            writer.add_experts(prefix, experts)
        with pytest.raises(ValueError, match="name must be new"):
            writer.add_experts("model.layers.0.mlp.experts", make_experts())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 1 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    with Checkpoint(tmp_path) as checkpoint:
        assert list(checkpoint.layers()) == list(layers)  # 10 after 2
        for prefix, experts in layers.items():
            loaded = checkpoint.load_experts(prefix)
            assert torch.equal(loaded.w13, interleave_rows(experts.w13, "gate_up"))
            assert loaded.w13_bias is None


def test_writer_refuses_a_folder_that_holds_a_checkpoint(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="without safetensors files"):
        CheckpointWriter(tmp_path)


SCHEMES = {
    "deepseek": ("layers.3.ffn.experts", "w1", "w3", "w2", "weight", "scale"),
    "compressed-tensors": (PREFIX, "gate_proj", "up_proj", "down_proj", "weight_packed", "weight_scale"),
    "modelopt": (PREFIX, "gate_proj", "up_proj", "down_proj", "weight", "weight_scale"),
}
SCALE_FORMS = {
    "uint8": lambda scale: scale,
    "float8_e8m0fnu": lambda scale: scale.view(torch.float8_e8m0fnu),
    # The value in the file, not the byte: decoded by an independent implementation.
    "float32": lambda scale: torch.from_numpy(scale.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)),
}


def per_expert_file(experts: Mxfp4Experts, scheme: str, scale_form: str, code_dtype: torch.dtype) -> dict:
    prefix, gate, up, down, weight, scale = SCHEMES[scheme]
    tensors = {}
    for e in range(experts.num_experts):
        parts = {
            gate: (experts.w13[e, :I], experts.w13_scale[e, :I]),
            up: (experts.w13[e, I:], experts.w13_scale[e, I:]),
            down: (experts.w2[e], experts.w2_scale[e]),
        }
        for projection, (codes, scales) in parts.items():
            tensors[f"{prefix}.{e}.{projection}.{weight}"] = codes.contiguous().view(code_dtype)
            tensors[f"{prefix}.{e}.{projection}.{scale}"] = SCALE_FORMS[scale_form](scales.contiguous())
    return tensors


@pytest.mark.parametrize("scale_form", SCALE_FORMS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_per_expert_schemes(tmp_path: Path, scheme: str, scale_form: str) -> None:
    experts = make_experts(bias=False)
    experts.w13_scale[0, 0, 0], experts.w2_scale[1, 3, 1] = 0, 254
    code_dtype = torch.int8 if scheme == "deepseek" else torch.uint8
    save_file(per_expert_file(experts, scheme, scale_form, code_dtype), tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        layers = checkpoint.layers()
        assert [(layer.scheme.name, layer.num_experts) for layer in layers.values()] == [(scheme, E)]
        loaded = checkpoint.load_experts(SCHEMES[scheme][0])
    assert loaded.w13_scale.dtype == torch.uint8
    assert_same(loaded, experts)


def test_nan_scale_is_kept(tmp_path: Path) -> None:
    experts = make_experts(bias=False)
    experts.w2_scale[1, 3, 1] = 255
    for form in ("uint8", "float8_e8m0fnu", "float32"):
        folder = tmp_path / form
        folder.mkdir()
        save_file(per_expert_file(experts, "deepseek", form, torch.int8), folder / "model.safetensors")
        with Checkpoint(folder) as checkpoint:
            loaded = checkpoint.load_experts("layers.3.ffn.experts")
        assert loaded.w2_scale[1, 3, 1] == 255
        assert dequantize_mxfp4(loaded.w2[1], loaded.w2_scale[1])[3, 32:64].isnan().all()


def test_float_scales_that_are_no_powers_of_two_are_refused(tmp_path: Path) -> None:
    tensors = per_expert_file(make_experts(bias=False), "deepseek", "float32", torch.int8)
    tensors["layers.3.ffn.experts.2.w3.scale"][0, 0] = 1.5
    save_file(tensors, tmp_path / "model.safetensors")
    with (
        Checkpoint(tmp_path) as checkpoint,
        pytest.raises(ValueError, match=r"experts\.2\.w3\.scale must be powers of"),
    ):
        checkpoint.load_experts("layers.3.ffn.experts")


def test_fp8_experts_under_the_same_names_are_refused_by_dtype(tmp_path: Path) -> None:
    tensors = per_expert_file(make_experts(bias=False), "deepseek", "uint8", torch.uint8)
    tensors["layers.3.ffn.experts.0.w1.weight"] = torch.zeros(I, H).to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(ValueError, match=r"0\.w1\.weight must be packed.*e4m3"):
        checkpoint.load_experts("layers.3.ffn.experts")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = per_expert_file(make_experts(bias=False), "deepseek", "uint8", torch.int8)
    del tensors["layers.3.ffn.experts.1.w3.scale"]
    save_file(tensors, tmp_path / "model.safetensors")
    text = r"load_experts: layers\.3\.ffn\.experts\.1\.w3\.scale must be in the checkpoint, got no such tensor"
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(ValueError, match=text):
        checkpoint.load_experts("layers.3.ffn.experts")


def test_wrong_shape_is_named(tmp_path: Path) -> None:
    experts = make_experts(bias=False)
    tensors = per_expert_file(experts, "deepseek", "uint8", torch.uint8)
    tensors["layers.3.ffn.experts.1.w2.scale"] = experts.w2_scale[1, :, :2].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(ValueError, match=r"w2_scale of expert 1 must be \[64, 3\]"):
        checkpoint.load_experts("layers.3.ffn.experts")


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    pytest.skip("needs RssAnon in /proc/self/status")


@pytest.mark.parametrize("scheme", ["gpt-oss", "deepseek"])
def test_peak_memory_is_the_weights_plus_one_expert(tmp_path: Path, scheme: str) -> None:
    hidden, intermediate, num_experts = 1024, 1024, 32
    experts = make_experts(num_experts, hidden, intermediate, bias=False)
    if scheme == "gpt-oss":
        prefix = PREFIX
        with CheckpointWriter(tmp_path) as writer:
            writer.add_experts(PREFIX, experts)
    else:
        prefix = "layers.3.ffn.experts"
        tensors = {}
        for e in range(num_experts):
            for name, codes, scales in (
                ("w1", experts.w13[e, :intermediate], experts.w13_scale[e, :intermediate]),
                ("w3", experts.w13[e, intermediate:], experts.w13_scale[e, intermediate:]),
                ("w2", experts.w2[e], experts.w2_scale[e]),
            ):
                tensors[f"{prefix}.{e}.{name}.weight"] = codes.contiguous()
                tensors[f"{prefix}.{e}.{name}.scale"] = scales.contiguous()
        save_file(tensors, tmp_path / "model.safetensors")
        del tensors
    wanted = list(range(0, num_experts, 2))
    one_expert = experts.nbytes // num_experts
    del experts
    with Checkpoint(tmp_path) as checkpoint:
        checkpoint.load_experts(prefix, [0])  # imports and first-use buffers
        before, peak, stop = _anonymous_bytes(), 0, threading.Event()

        def watch() -> None:
            nonlocal peak
            while not stop.wait(0.0002):
                peak = max(peak, _anonymous_bytes())

        watcher = threading.Thread(target=watch)
        watcher.start()
        loaded = checkpoint.load_experts(prefix, wanted)
        peak = max(peak, _anonymous_bytes())
        stop.set()
        watcher.join()
    assert loaded.nbytes == one_expert * len(wanted)
    # Twice one expert: the parts read and their concatenation; 2 MiB for the allocator's own pages.
    assert peak - before <= loaded.nbytes + 2 * one_expert + (2 << 20)
