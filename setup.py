"""Builds the native libraries with ninja, next to what setuptools does for the Python files.

moe_ops/_C.abi3.so        csrc/cpu and csrc/engine, with the C++ compiler ($CXX, else g++ or clang++)
moe_ops/_C_cuda.abi3.so   csrc/cuda, wherever nvcc is found (also beside a CPU build of torch)

Both use the LibTorch stable ABI at target 2.11 and no Python headers, so that one build serves torch 2.11 and later
and every Python from 3.10 on. A library whose compiler is missing is left out with one line; MOE_OPS_REQUIRE_NATIVE=1
makes that an error. Other switches: MOE_OPS_BUILD_CUDA=0, MOE_OPS_WERROR=1, MOE_OPS_DEBUG=1, MAX_JOBS.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CSRC = Path("moe_ops/csrc")

AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]
AVX512 = [
    *AVX2,
    *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "cd", "vnni", "vbmi")),
    "-mprefer-vector-width=512",
]
# Flags of the kernels written for one instruction set, by the end of the file's name. Only these files get them.
ISA_FLAGS = {
    "x86_64": {"_avx2": AVX2, "_avx512": AVX512, "_amx": [*AVX512, "-mamx-tile", "-mamx-bf16"]},
    "aarch64": {"_neon": ["-march=armv8.2-a+dotprod+fp16"]},
}
ALL_ISA_SUFFIXES = ("_avx2", "_avx512", "_amx", "_neon")

# Device code of *_sm90.cu uses instructions that exist on Hopper only.
CUDA_ARCHS = {"": ["80", "89", "90", "100"], "_sm90": ["90a"]}


def flag(name: str, default: str = "0") -> bool:
    return os.environ.get(name, default) not in ("", "0")


def isa_suffix(source: Path) -> str:
    return next((suffix for suffix in ALL_ISA_SUFFIXES if source.stem.endswith(suffix)), "")


def cpu_sources() -> list[tuple[Path, list[str]]]:
    """(source, extra flags) of every file that belongs on this processor family."""
    machine = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    flags = ISA_FLAGS.get(machine, {})
    sources = sorted([*(ROOT / CSRC / "cpu").rglob("*.cpp"), *(ROOT / CSRC / "engine").glob("*.cpp")])
    return [
        (source, flags.get(isa_suffix(source), []))
        for source in sources
        if not isa_suffix(source) or isa_suffix(source) in flags
    ]


class Ninja:
    """A build.ninja in the making."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines = ["ninja_required_version = 1.8"]
        folder.mkdir(parents=True, exist_ok=True)

    def rule(self, name: str, command: str, *, depfile: bool = False) -> None:
        self.lines += [f"rule {name}", f"  command = {command}", "  description = $out"]
        if depfile:
            self.lines += ["  depfile = $out.d", "  deps = gcc"]

    def build(self, out: Path | str, rule: str, inputs: list[Path], **variables: str) -> Path:
        escaped = " ".join(str(path).replace(" ", "$ ") for path in inputs)
        self.lines.append(f"build {out}: {rule} {escaped}")
        self.lines += [f"  {name} = {value}" for name, value in variables.items()]
        return Path(out)

    def run(self) -> None:
        (self.folder / "build.ninja").write_text("\n".join(self.lines) + "\n")
        executable = shutil.which("ninja") or [sys.executable, "-m", "ninja"]
        command = [executable] if isinstance(executable, str) else executable
        jobs = os.environ.get("MAX_JOBS")
        subprocess.check_call([*command, *(["-j", jobs] if jobs else [])], cwd=self.folder)


def objects(ninja: Ninja, rule: str, sources: list[tuple[Path, list[str]]]) -> list[Path]:
    result = []
    for source, flags in sources:
        name = str(source.relative_to(ROOT / CSRC)).replace(os.sep, "_") + ".o"
        result.append(ninja.build(name, rule, [source], flags=" ".join(flags)))
    return result


class BuildNative(build_ext):
    def run(self) -> None:
        # Imported here: metadata commands work without torch.
        import torch
        from torch.utils.cpp_extension import include_paths

        self.includes = " ".join(f"-isystem {path}" for path in include_paths())
        self.torch_lib = Path(torch.__file__).parent / "lib"
        self.common = f"-std=c++17 -I{ROOT / CSRC} {self.includes} -DTORCH_TARGET_VERSION=0x020b000000000000ULL"
        self.optimise = "-O0 -g" if flag("MOE_OPS_DEBUG") else "-O3"
        self.werror = "-Werror" if flag("MOE_OPS_WERROR") else ""
        if self.build_cpu():
            self.build_cuda()

    def output(self, name: str) -> Path:
        base = ROOT if self.inplace or self.editable_mode else Path(self.build_lib).resolve()
        path = base / "moe_ops" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def left_out(self, name: str, reason: str) -> bool:
        if flag("MOE_OPS_REQUIRE_NATIVE"):
            raise SystemExit(f"moe_ops/{name} cannot be built: {reason}")
        print(f"moe_ops/{name} is left out: {reason}", file=sys.stderr)
        return False

    def build_cpu(self) -> bool:
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
        if not compiler:
            return self.left_out("_C.abi3.so", "no C++ compiler was found")
        if not (shutil.which("ninja") or importlib.util.find_spec("ninja")):
            return self.left_out("_C.abi3.so", "ninja was not found (pip install ninja)")
        ninja = Ninja(Path(self.build_temp).resolve() / "cpu")
        warnings = f"-Wall -Wextra {self.werror}"
        ninja.rule(
            "cxx",
            f"{compiler} {self.common} {self.optimise} {warnings} -fPIC -fvisibility=hidden -ffp-contract=off $flags "
            "-MMD -MF $out.d -c $in -o $out",
            depfile=True,
        )
        ninja.rule("link", f"{compiler} -shared $in -o $out -L{self.torch_lib} -ltorch_cpu -lpthread -ldl")
        library = self.output("_C.abi3.so")
        ninja.build(library, "link", objects(ninja, "cxx", cpu_sources()))
        ninja.run()
        return True

    def build_cuda(self) -> bool:
        name = "_C_cuda.abi3.so"
        sources = sorted([*(ROOT / CSRC / "cuda").glob("*.cu"), *(ROOT / CSRC / "cuda").glob("*.cpp")])
        if not sources or not flag("MOE_OPS_BUILD_CUDA", "1"):
            return False
        home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
        nvcc = str(Path(home) / "bin" / "nvcc") if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
        if not Path(nvcc).exists():
            return self.left_out(name, "nvcc was not found")
        if os.environ.get("HIP_PLATFORM") == "amd":
            return self.left_out(name, "HIP is not supported")
        ninja = Ninja(Path(self.build_temp).resolve() / "cuda")
        ninja.rule(
            "nvcc",
            f"{nvcc} {self.common} {self.optimise} -DUSE_CUDA $flags "
            f"-Xcompiler -fPIC,-fvisibility=hidden,-Wall,-Wextra {'-Werror all-warnings' if self.werror else ''} "
            "-MD -MF $out.d -c $in -o $out",
            depfile=True,
        )
        # Beside a CPU build of torch there is no libtorch_cuda.so to link with, yet the name must be among the needed
        # libraries, so that the loader binds to the one of the torch that is present at run time.
        ninja.rule("stub", "cc -shared -x c /dev/null -Wl,-soname,libtorch_cuda.so -o $out")
        ninja.rule(
            "link",
            f"{nvcc} -shared $in -o $out -L{self.torch_lib} -Xlinker --no-as-needed,-ltorch_cuda,--as-needed -L. "
            f"-L{self.output('_C.abi3.so').parent} -l:_C.abi3.so -ltorch_cpu -Xlinker -rpath,\\$$ORIGIN",
        )
        has_cuda = (self.torch_lib / "libtorch_cuda.so").exists()
        built = []
        for source in sources:
            archs = CUDA_ARCHS["_sm90" if "sm90" in source.stem else ""]
            arch_flags = [f"-gencode arch=compute_{arch},code=sm_{arch}" for arch in archs]
            built += objects(ninja, "nvcc", [(source, arch_flags if source.suffix == ".cu" else [])])
        if not has_cuda:
            built.append(ninja.build("libtorch_cuda.so", "stub", []))
        ninja.build(self.output(name), "link", built)
        ninja.run()
        return True

    def get_outputs(self) -> list[str]:
        return [str(path) for path in self.output("").glob("*.abi3.so")]


setup(
    # The sources are named in the build above; the entry makes the wheel a platform wheel.
    ext_modules=[Extension("moe_ops._C", sources=[], py_limited_api=True)],
    cmdclass={"build_ext": BuildNative},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
