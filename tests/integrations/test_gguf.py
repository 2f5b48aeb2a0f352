"""GGUF MXFP4 blocks against a decoder written from the format, and against the gguf package's own writer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_ops.integrations.gguf import GgufFile, pack_blocks, unpack_blocks
from moe_ops.reference.mxfp4 import dequantize_mxfp4, quantize_mxfp4

DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def test_one_byte_holds_elements_i_and_i_plus_16() -> None:
    block = torch.zeros(17, dtype=torch.uint8)
    block[0], block[1 + 3] = 128, 0xA7
    codes, scales = unpack_blocks(block)
    values = dequantize_mxfp4(codes, scales)
    assert values[3] == 12 and values[19] == -2  # 6 and -1, times 2
    assert values.count_nonzero() == 2


def test_against_a_plain_decoder() -> None:
    blocks = torch.randint(0, 255, (3, 5, 17), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    expected = torch.empty(3, 160)
    for row in range(3):
        for b in range(5):
            data = blocks[row, b].tolist()
            for i in range(16):
                half_scale = 2.0 ** (data[0] - 128)
                expected[row, 32 * b + i] = DOUBLED[data[1 + i] & 15] * half_scale
                expected[row, 32 * b + 16 + i] = DOUBLED[data[1 + i] >> 4] * half_scale
    codes, scales = unpack_blocks(blocks.flatten(1))
    torch.testing.assert_close(dequantize_mxfp4(codes, scales), expected, rtol=0, atol=0)
    assert torch.equal(pack_blocks(codes, scales), blocks.flatten(1))


def test_scale_255_is_refused() -> None:
    block = torch.zeros(17, dtype=torch.uint8)
    block[0] = 255
    with pytest.raises(ValueError, match="below 255"):
        unpack_blocks(block)
    with pytest.raises(ValueError, match="17-byte blocks"):
        unpack_blocks(torch.zeros(18, dtype=torch.uint8))


def test_file_of_the_gguf_package(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    num_experts, hidden, intermediate = 3, 64, 96
    generator = torch.Generator().manual_seed(3)
    dense = {
        "gate": torch.randn(num_experts, intermediate, hidden, generator=generator),
        "up": torch.randn(num_experts, intermediate, hidden, generator=generator),
        "down": torch.randn(num_experts, hidden, intermediate, generator=generator),
    }
    file = tmp_path / "experts.gguf"
    writer = gguf.GGUFWriter(str(file), "test")
    for part, weight in dense.items():
        rows = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.MXFP4)
        writer.add_tensor(f"blk.5.ffn_{part}_exps.weight", rows, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
    writer.add_tensor("blk.5.ffn_down_exps.bias", torch.arange(num_experts * hidden).float().view(3, 64).numpy())
    writer.add_tensor("blk.6.ffn_down_exps.weight", dense["down"].numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    opened = GgufFile(file)
    assert opened.layers() == [5]
    experts = opened.load_experts(5, [2, 0])
    assert experts.w13_layout == "gate_up" and experts.w13_bias is None
    assert experts.w2_bias is not None and experts.w2_bias[0, 0] == 2 * hidden
    w13 = dequantize_mxfp4(experts.w13, experts.w13_scale)
    w2 = dequantize_mxfp4(experts.w2, experts.w2_scale)
    for slot, expert in enumerate((2, 0)):
        for part, ours in (("gate", w13[slot, :96]), ("up", w13[slot, 96:]), ("down", w2[slot])):
            raw = gguf.quants.quantize(dense[part][expert].numpy(), gguf.GGMLQuantizationType.MXFP4)
            theirs = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.MXFP4))
            assert torch.equal(ours, theirs), part


def test_round_trip_of_quantised_values() -> None:
    codes, scales = quantize_mxfp4(torch.randn(4, 64, generator=torch.Generator().manual_seed(2)))
    again = unpack_blocks(pack_blocks(codes, scales))
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales)
