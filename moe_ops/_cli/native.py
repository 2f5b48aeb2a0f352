"""What the native CPU library chose at run time."""

from __future__ import annotations

import ctypes
import os

import torch

from moe_ops._register import NATIVE_LIBRARIES, PACKAGE


def cpu_lines() -> list[str]:
    path = PACKAGE / NATIVE_LIBRARIES["CPU"]
    wanted = os.environ.get("MOE_OPS_CPU_ISA")
    limit = f", MOE_OPS_CPU_ISA={wanted}" if wanted else ""
    if not path.exists():
        return [f"no native kernels{limit}"]
    library = ctypes.CDLL(str(path))
    library.moe_ops_row_isa.restype = library.moe_ops_expert_isa.restype = ctypes.c_char_p
    experts = library.moe_ops_expert_isa().decode() or "none: MOE_OPS_CPU_ISA must be one of its kernels"
    return [
        f"kernels: {library.moe_ops_row_isa().decode()} for rows, {experts} for experts{limit}",
        f"{library.moe_ops_usable_cpus()} CPUs granted by affinity and quota, {torch.get_num_threads()} torch threads",
    ]
