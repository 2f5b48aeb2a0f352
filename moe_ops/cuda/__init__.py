"""Kernels for NVIDIA Hopper: their packed weight layout, and what calls them.

Importing this touches no device.
"""

from moe_ops.cuda.prepare import LAYOUT, prepare_sm90, sm90_reason

__all__ = ["LAYOUT", "prepare_sm90", "sm90_reason"]
