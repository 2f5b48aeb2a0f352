"""Memory in 2 MiB pages: a core that reads weights once, from end to end, spends less time on translations."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

HUGE_PAGE = 2 << 20
MADV_HUGEPAGE = 14
MADV_COLLAPSE = 25  # Linux 6.1
POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _allowed() -> bool:
    """Whether the system leaves huge pages to those who ask; pages of this size are those of a 4 KiB base page."""
    if os.environ.get("MOE_OPS_HUGE_PAGES", "1") in ("0", ""):
        return False
    if not sys.platform.startswith("linux") or os.sysconf("SC_PAGE_SIZE") != 4096:
        return False
    try:
        return "[never]" not in POLICY.read_text()
    except OSError:
        return False


def move_to_huge_pages(tensors: Iterable[Tensor]) -> None:
    """Move the whole 2 MiB pieces of CPU tensors' memory, in place; what the system refuses stays where it is.

    One page is copied at a time, so that peak memory is one page more.
    """
    if not _allowed():
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for tensor in tensors:
        begin = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
        end = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // HUGE_PAGE * HUGE_PAGE
        if begin < end and madvise(begin, end - begin, MADV_HUGEPAGE) == 0:
            madvise(begin, end - begin, MADV_COLLAPSE)
