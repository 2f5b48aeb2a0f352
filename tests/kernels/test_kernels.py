"""Builds and runs the torch-free kernel test: on this machine, and for AArch64 under user-mode emulation."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "moe_ops" / "csrc"
KERNELS = CSRC / "cpu" / "kernels"


def isa_flags() -> dict[str, dict[str, list[str]]]:
    """ISA_FLAGS of setup.py, without running it."""
    import ast

    namespace: dict[str, object] = {}
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id in ("AVX2", "AVX512", "ISA_FLAGS"):  # type: ignore[attr-defined]
            exec(compile(ast.Module([node], []), "setup.py", "exec"), namespace)
    return namespace["ISA_FLAGS"]  # type: ignore[return-value]


def build(folder: Path, compiler: str, machine: str, *extra: str) -> Path:
    flags = isa_flags()[machine]
    suffixes = {suffix for table in isa_flags().values() for suffix in table}
    common = ["-std=c++17", f"-I{CSRC}", "-Wall", "-Wextra", "-Wno-psabi", "-ffp-contract=off", *extra]
    objects = []
    sources = [
        *KERNELS.glob("fused_mxfp4_moe_*.cpp"),
        *KERNELS.glob("row_ops_*.cpp"),
        KERNELS / "thread_team.cpp",
        KERNELS / "cpu_features.cpp",
    ]
    for source in [*sorted(sources), ROOT / "tests/kernels/fused_mxfp4_moe_test.cpp"]:
        suffix = next((s for s in suffixes if source.stem.endswith(s)), "")
        if suffix and suffix not in flags:
            continue
        out = folder / f"{source.stem}.o"
        level = "-O1" if source.stem.endswith("_test") else "-O3"
        subprocess.run(
            [compiler, *common, level, *flags.get(suffix, []), "-c", str(source), "-o", str(out)], check=True
        )
        objects.append(str(out))
    program = folder / "kernel_test"
    subprocess.run([compiler, *extra, *objects, "-lpthread", "-o", str(program)], check=True)
    return program


def run(*command: str | Path) -> str:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=400)
    print(result.stdout)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    return result.stdout


@pytest.fixture(scope="module")
def native(tmp_path_factory) -> Path:
    compiler = os.environ.get("CXX") or shutil.which("g++")
    machine = platform.machine()
    if compiler is None or machine not in isa_flags():
        pytest.skip(f"needs g++ on x86_64 or aarch64, this is {machine}")
    return build(tmp_path_factory.mktemp("native"), compiler, machine)


def test_instruction_sets_of_this_machine(native):
    output = run(native)
    assert " 0 failed" in output and "scalar" in output


@pytest.mark.parametrize("processor, isa", [("Nehalem", "scalar"), ("Haswell", "avx2")])
def test_older_x86_processors(native, processor, isa):
    """No instruction of a better set is reached: not by the kernels, not by the choice between them."""
    emulator = shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static")
    if emulator is None or platform.machine() != "x86_64":
        pytest.skip("needs Debian's qemu-user on x86_64")
    output = run(emulator, "-cpu", processor, native, isa)
    assert f" 0 failed, instruction sets: {isa}\n" in output


def test_special_instructions_stay_in_their_files(native):
    """The linker keeps one copy of an inline function for all callers: none may come from a file with special flags."""
    suffixes = tuple(suffix for table in isa_flags().values() for suffix in table)
    objects = [path for path in native.parent.glob("*.o") if path.stem.endswith(suffixes)]
    assert objects
    for path in objects:
        symbols = subprocess.run(["nm", "-C", "--defined-only", "--extern-only", path], capture_output=True, text=True)
        assert symbols.returncode == 0, symbols.stderr
        functions = [line.split(maxsplit=2)[1:] for line in symbols.stdout.splitlines() if "DW.ref." not in line]
        assert len(functions) == 1 and functions[0][0] in "TDR", (path.name, functions)


def test_aarch64(tmp_path):
    compiler, emulator = (
        shutil.which("aarch64-linux-gnu-g++"),
        shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static"),
    )
    if compiler is None or emulator is None:
        pytest.skip("needs Debian's g++-aarch64-linux-gnu and qemu-user")
    program = build(tmp_path, compiler, "aarch64", "-static")
    output = run(emulator, "-cpu", "max", program)
    assert " 0 failed" in output and " neon scalar" in output
