"""Builds the simulated CANN runtime and loads torch_npu over it, into this process.

    from tests.npu.sim import loader
    torch_npu = loader.load(soc="Ascend910B3")

The libraries are loaded by path before torch_npu; the dynamic loader then finds them by SONAME, so neither
LD_LIBRARY_PATH nor any ASCEND_* variable is needed. See README.md for the settings.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

_SOURCES = Path(__file__).resolve().parent
# In the order in which they are loaded. Those without sources are bound by SONAME only.
_STUBS = ("acl_op_compiler", "hccl")
_EMPTY_LIBRARIES = ("ge_runner", "graph", "acl_tdt_channel")
_LIBRARIES = ("ascendcl", *_STUBS, *_EMPTY_LIBRARIES, "opapi")
_WARNINGS = ("-Wall", "-Wextra", "-Wno-deprecated-declarations")
_runtime: ctypes.CDLL | None = None

SOC_NAMES = {"A2": "Ascend910B3", "A3": "Ascend910_9382", "A5": "Ascend950PR_9579"}


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"the simulation needs the package {name}, which is not installed")
    return Path(spec.origin).parent


def _source_files() -> list[Path]:
    return sorted(path for path in _SOURCES.rglob("*") if path.suffix in {".h", ".c", ".cpp"})


def _cache_folder() -> Path:
    """One folder per version of the wheels and state of the sources."""
    digest = hashlib.sha256()
    for package in ("torch", "torch_npu"):
        digest.update(importlib.metadata.version(package).encode())
    for path in (*_source_files(), Path(__file__)):
        digest.update(path.read_bytes())
    root = os.environ.get("CANN_SIM_CACHE") or _SOURCES / "build"
    return Path(root) / digest.hexdigest()[:16]


def build() -> Path:
    """Compiles what is missing (about 30 s the first time) and returns the folder of the libraries."""
    folder = _cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            _compile(folder)
            (folder / "complete").touch()
    return folder


def _compile(folder: Path) -> None:
    torch, torch_npu = _package_folder("torch"), _package_folder("torch_npu")
    compiler = os.environ.get("CXX", "c++")
    shared = ["-O1", "-fPIC", "-fvisibility=hidden", *_WARNINGS]
    acl = ["-isystem", str(torch_npu / "include/third_party/acl/inc")]
    aten = ["-isystem", str(torch / "include"), "-isystem", str(torch / "include/torch/csrc/api/include")]

    def run(*command: str) -> None:
        subprocess.run(command, check=True)

    def compile_object(source: Path) -> str:
        target = folder / f"{source.parent.name}_{source.stem}.o"
        headers = aten if source.parent.name == "opapi" else []
        run(compiler, "-std=c++20", *shared, *acl, *headers, "-c", str(source), "-o", str(target))
        return str(target)

    def link(name: str, objects: list[str], *extra: str) -> None:
        target = folder / f"lib{name}.so"
        run(compiler, "-shared", f"-Wl,-soname,lib{name}.so", *objects, "-o", str(target), *extra)

    with ThreadPoolExecutor(max_workers=2) as pool:
        opapi = pool.map(compile_object, sorted((_SOURCES / "opapi").glob("*.cpp")))
        runtime = pool.map(compile_object, sorted((_SOURCES / "runtime").glob("*.cpp")))
        opapi_objects, runtime_objects = list(opapi), list(runtime)
    link("ascendcl", runtime_objects, "-lpthread")
    for name in _STUBS:
        run(os.environ.get("CC", "cc"), *shared, "-c", str(_SOURCES / f"stubs/{name}.c"), "-o", f"{folder}/{name}.o")
        link(name, [f"{folder}/{name}.o"])
    for name in _EMPTY_LIBRARIES:
        link(name, [])
    libraries = [f"-L{folder}", "-lascendcl", f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
    link("opapi", opapi_objects, "-Wl,--no-undefined", *libraries, "-lpthread")


def load(soc: str | None = None, **settings: object) -> ModuleType:
    """Loads torch_npu over the simulation. ``settings``: names of README.md without CANN_SIM_, in lower case.

    A process holds one runtime: the first call decides, and must come before anybody imports torch_npu.
    """
    global _runtime
    if _runtime is None:
        if "torch_npu" in sys.modules:
            raise RuntimeError("the simulation must be loaded before torch_npu is imported")
        if soc is not None:
            os.environ["CANN_SIM_SOC"] = SOC_NAMES.get(soc, soc)
        for name, value in settings.items():
            os.environ[f"CANN_SIM_{name.upper()}"] = str(value)
        folder = build()
        # `import torch` would load torch_npu by itself, before the libraries below are there.
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        import torch  # noqa: F401  libopapi.so is linked against libtorch_cpu.so

        loaded = [ctypes.CDLL(str(folder / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL) for name in _LIBRARIES]
        _runtime = loaded[0]
        _runtime.cann_sim_trace_read.restype = ctypes.c_char_p
    import torch_npu

    return torch_npu


@contextlib.contextmanager
def task_delay(microseconds: int) -> Iterator[None]:
    """Every device task waits this long before it runs: host code that does not synchronise then reads old data."""
    _loaded().cann_sim_set_task_delay(ctypes.c_long(microseconds))
    try:
        yield
    finally:
        _loaded().cann_sim_set_task_delay(ctypes.c_long(0))


def _loaded() -> ctypes.CDLL:
    if _runtime is None:
        raise RuntimeError("the simulation is not loaded")
    return _runtime


class Trace:
    """What the runtime did while it was recorded: lines of ``ACTION stream kind name``."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def names(self, action: str) -> list[str]:
        """The names of the tasks of one action: QUEUE, RUN, CAPTURE or REPLAY; for HOST what made the host wait."""
        fields = [line.split(" ", 3) for line in self.lines]
        return [name or kind for what, _, kind, name in fields if what == action]


@contextlib.contextmanager
def trace() -> Iterator[Trace]:
    """Records tasks from entry to exit. Queued operators reach the runtime late: synchronise before leaving."""
    record = Trace()
    runtime = _loaded()
    runtime.cann_sim_trace_record(1)
    try:
        yield record
    finally:
        runtime.cann_sim_trace_record(0)
        record.lines = runtime.cann_sim_trace_read().decode().splitlines()
