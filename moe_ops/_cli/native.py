"""What the native CPU library chose at run time."""

from __future__ import annotations

import os

import torch


def cpu_lines() -> list[str]:
    wanted = os.environ.get("MOE_OPS_CPU_ISA")
    isa = torch.backends.cpu.get_cpu_capability()
    return [f"torch sees {isa}; MOE_OPS_CPU_ISA={wanted or 'unset'}; {torch.get_num_threads()} torch threads"]
