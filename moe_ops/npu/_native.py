"""The C functions behind cpu_moe_submit and cpu_moe_sync, by ctypes: CANN's runtime and the engine.

Nothing is built against CANN: the runtime's functions are looked up in the library that torch_npu has loaded. ctypes
releases the GIL around each call.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache
from typing import Any

from moe_ops._register import NATIVE_LIBRARIES, PACKAGE

# ACL constants.
SUCCESS = 0
HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3
CALLBACK_BLOCKS_STREAM = 1
STREAM_NOT_SUBSCRIBED = 107015
STREAM_SUBSCRIBED_OTHERWISE = 107011
CAPTURE_ACTIVE = 1

ENGINE_ABI = 1

_RUNTIME_FUNCTIONS: dict[str, list[Any]] = {
    "aclrtMallocHost": [POINTER(c_void_p), c_size_t],
    "aclrtMemcpyAsync": [c_void_p, c_size_t, c_void_p, c_size_t, c_int, c_void_p],
    "aclrtSynchronizeStream": [c_void_p],
    "aclrtGetCurrentContext": [POINTER(c_void_p)],
    "aclrtSetCurrentContext": [c_void_p],
    "aclmdlRICaptureGetInfo": [c_void_p, POINTER(c_int), POINTER(c_void_p)],
    # Absent from older versions of CANN: looked up when used.
    "aclmdlRIDestroyRegisterCallback": [c_void_p, c_void_p, c_void_p],
    "aclrtLaunchHostFunc": [c_void_p, c_void_p, c_void_p],
    "aclrtLaunchCallback": [c_void_p, c_void_p, c_int, c_void_p],
    "aclrtSubscribeReport": [c_uint64, c_void_p],
    "aclrtUnSubscribeReport": [c_uint64, c_void_p],
    "aclrtProcessReport": [c_int32],
}
_ENGINE_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "moe_ops_engine_abi": (c_int64, []),
    "moe_ops_last_error": (c_char_p, []),
    "moe_ops_arena_create": (c_void_p, []),
    "moe_ops_arena_set_parallel": (None, [c_void_p]),
    "moe_ops_arena_destroy": (None, [c_void_p]),
    "moe_ops_set_flag": (None, [c_void_p]),
    "moe_ops_submit_call_create": (c_void_p, [c_void_p, *[c_int64] * 5, *[c_void_p] * 5]),
    "moe_ops_sync_call_create": (c_void_p, [c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p]),
    "moe_ops_submit_call_run": (None, [c_void_p]),
    "moe_ops_sync_call_run": (None, [c_void_p]),
    "moe_ops_call_destroy": (None, [c_void_p]),
    "moe_ops_take_error": (c_int64, [c_int64, c_char_p, c_int64]),
    "moe_ops_synchronous": (c_int64, []),
    "moe_ops_wait_ticket": (None, [c_int64]),
    "moe_ops_check_handle": (c_int64, [c_int64, c_int64]),
}


class Library:
    """The typed functions that a loaded library has; asking for another raises AttributeError."""

    def __init__(self, handle: ctypes.CDLL, types: dict[str, tuple[Any, list[Any]]]) -> None:
        self._functions: dict[str, Any] = {}
        for name, (result, arguments) in types.items():
            function = getattr(handle, name, None)
            if function is not None:
                function.restype, function.argtypes = result, arguments
                self._functions[name] = function

    def has(self, name: str) -> bool:
        return name in self._functions

    def __getattr__(self, name: str) -> Any:
        try:
            return self._functions[name]
        except KeyError:
            raise AttributeError(name) from None

    def address(self, name: str) -> int:
        address = ctypes.cast(self._functions[name], c_void_p).value
        assert address is not None
        return address


@cache
def runtime() -> Library:
    """CANN's runtime, as torch_npu has loaded it: never a second copy."""
    handle = ctypes.CDLL("libascendcl.so", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    return Library(handle, {name: (c_int, arguments) for name, arguments in _RUNTIME_FUNCTIONS.items()})


@cache
def engine(op: str = "cpu_moe_submit") -> Library:
    path = PACKAGE / NATIVE_LIBRARIES["CPU"]
    if not path.exists():
        raise RuntimeError(f"{op}: no PrivateUse1 kernel here: moe_ops/{path.name} holds the engine and is not built")
    library = Library(ctypes.CDLL(str(path)), _ENGINE_FUNCTIONS)
    found = library.moe_ops_engine_abi() if library.has("moe_ops_engine_abi") else 0
    if found != ENGINE_ABI:
        raise RuntimeError(
            f"{op}: moe_ops/{path.name} has engine interface {found}, and this package needs {ENGINE_ABI}"
        )
    return library


def require_success(op: str, call: str, code: int) -> None:
    if code != SUCCESS:
        raise RuntimeError(f"{op}: {call} failed with ACL error {code}")
