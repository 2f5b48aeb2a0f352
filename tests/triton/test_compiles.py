"""Kernels compile for sm_80 and sm_90 with the Triton that is installed.

No device is needed. What runs elsewhere is tests/ops, in the interpreter and on a device.
"""

from __future__ import annotations

import re

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language

try:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
except ImportError:
    pytest.skip("this Triton compiles only for the device at hand", allow_module_level=True)

from moe_ops.cuda import _repack  # noqa: E402
from moe_ops.triton import _combine_rows, _expert_gradient, _expert_matmul, _expert_words  # noqa: E402

INT, FLOAT = "i32", "fp32"
TILES = dict.fromkeys(("row_slot", "tiles", "num_tiles", "starts", "counts"), "*i32")


def compiles(kernel, signature, constants, capability, blocks=None):
    names = kernel.arg_names
    missing = [name for name in names if name not in signature and name not in constants]
    assert not missing, missing
    types = {name: "constexpr" if name in constants else signature[name] for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name, kind in types.items() if kind.startswith("*")}
    options = {} if blocks is None else blocks.options
    compiled = triton.compile(
        ASTSource(kernel, types, values, aligned), target=GPUTarget("cuda", capability, 32), options=options
    )
    assert compiled.metadata.shared <= {80: 163, 90: 227}[capability] * 1024
    return compiled.asm["ptx"]


def constants(blocks, rows, dtype):
    numbers = _expert_matmul.arithmetic(dtype)
    return {
        "BLOCK_M": rows, "BLOCK_N": blocks.columns, "DEPTH": blocks.depth, "COMPUTE": numbers.compute,
        "PRECISION": numbers.precision,
    }  # fmt: skip


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("dtype", "rows"), [(torch.bfloat16, 16), (torch.bfloat16, 128), (torch.float16, 64)])
def test_gate_up(capability, dtype, rows):
    size = 2 if dtype == torch.bfloat16 else 4
    split = capability < 90 or rows < 64 or size == 4
    blocks = _expert_matmul.GATE_UP_BLOCKS[size, rows, split]
    kind = {2: "bf16", 4: "fp16"}[size]
    sizes = ("top_k", "groups", "x_stride_units", "intermediate", "row_step", "gate_first", "up_first")
    signature = {
        **TILES, "x": f"*{kind}", "w13": "*u8", "w13_scale": "*u8", "hidden": "*bf16" if size == 2 else "*fp32",
        **dict.fromkeys(sizes, INT), **dict.fromkeys(("limit", "alpha", "shift"), FLOAT),
    }  # fmt: skip
    fixed = constants(blocks, rows, dtype) | {
        "w13_bias": None, "gate_out": None, "up_out": None, "WIDTH": 8, "TF32": size == 4,
        "SPLIT": split,
    }  # fmt: skip
    ptx = compiles(_expert_matmul._gate_up, signature, fixed, capability, blocks)
    assert "mma" in ptx
    assert ("fma.rn.bf16x2" in ptx) == (size == 2)
    assert split or "wgmma" in ptx


@pytest.mark.parametrize("capability", [80, 90])
def test_down_and_its_gradient(capability):
    blocks = _expert_matmul.DOWN_BLOCKS[2, 64, capability < 90]
    signature = {
        **TILES, "hidden": "*bf16", "w2": "*u8", "w2_scale": "*u8", "w2_bias": "*bf16", "out": "*fp32",
        "groups": INT, "hidden_size": INT,
    }  # fmt: skip
    fixed = constants(blocks, 64, torch.bfloat16) | {"SPLIT": capability < 90}
    assert "mma" in compiles(_expert_matmul._down, signature, fixed, capability, blocks)
    blocks = _expert_gradient.BY_ROWS_BLOCKS[2, 64]
    sizes = ("top_k", "num_weight_rows", "groups", "stride_units")
    signature = {
        **TILES, "value": "*bf16", "codes": "*u8", "scales": "*u8", "out": "*fp32", **dict.fromkeys(sizes, INT)
    }  # fmt: skip
    fixed = constants(blocks, 64, torch.bfloat16) | {"GATHER": True, "WIDTH": 8}
    assert "mma" in compiles(_expert_gradient._by_rows, signature, fixed, capability, blocks)


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("narrow", [False, True])
def test_words(narrow, even):
    sizes = ("top_k", "groups", "units", "intermediate", "row_step", "gate_first", "up_first", "hidden_size")
    signature = {
        **TILES, "x": "*bf16", "w13": "*i16", "w13_scale": "*u8", "hidden": "*bf16", "w2": "*i16", "w2_scale": "*u8",
        "out": "*fp32", **dict.fromkeys(sizes, INT), **dict.fromkeys(("limit", "alpha", "shift"), FLOAT),
    }  # fmt: skip
    for kernel, name in ((_expert_words._gate_up, "GATE_UP_BLOCKS"), (_expert_words._down, "DOWN_BLOCKS")):
        blocks = getattr(_expert_words, f"NARROW_{name}") if narrow else getattr(_expert_words, name)[even]
        fixed = {
            "WIDTH": 8, "BLOCK_M": _expert_words.ROWS, "BLOCK_N": blocks.columns, "WORDS": blocks.depth // 4,
            "EVEN": even, "COMPUTE": tl.bfloat16, "w13_bias": None, "w2_bias": None,
        }  # fmt: skip
        fixed = {name: value for name, value in fixed.items() if name in kernel.arg_names}
        ptx = compiles(kernel, signature, fixed, 90, blocks)
        # Weights come from registers: four of them in front of the descriptor of the activations.
        assert re.search(r"wgmma\.mma_async[^;]*\}, *\{[^;]*\}, *%rd\d+", ptx)


def test_rows_are_put_in_the_order_of_words_in_whole_vectors():
    signature = {"x": "*bf16", "out": "*bf16", "stride_units": INT, "units": INT}
    fixed = {"WIDTH": 8, "BLOCK": _expert_words.BLOCK_WORDS}
    ptx = compiles(_expert_words._order, signature, fixed, 90)
    assert "ld.global.v4" in ptx and "st.global.v4" in ptx


def test_rows_are_loaded_in_whole_vectors():
    signature = {
        "rows": "*bf16", "row_map": "*i32", "weights": "*fp32", "out": "*bf16",
        **dict.fromkeys(("num_rows", "units", "stride_units", "top_k"), INT),
    }  # fmt: skip
    fixed = {"UNROLLED": 8, "WIDTH": 8, "BLOCK": _combine_rows.BLOCK_COLUMNS, "EMULATED": False}
    ptx = compiles(_combine_rows._combine_rows, signature, fixed, 90)
    assert ptx.count("ld.global.v4") == 8 and ptx.count("st.global.v4") == 1


@pytest.mark.parametrize("pack", [False, True])
def test_repacking_for_hopper(pack):
    sizes = ("groups", "rows", "half_first", "half_second", "row_step", "strip_step")
    signature = {
        "raw": "*i32", "packed": "*i32", "raw_scale": "*u8", "packed_scale": "*u8", "counts": "*i32",
        **dict.fromkeys(sizes, INT)
    }  # fmt: skip
    ptx = compiles(_repack._repack, signature, {"PACK": pack, "GROUPS": _repack.GROUPS}, 90)
    assert pack or "st.global.v4" in ptx
