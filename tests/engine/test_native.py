"""The engine without torch, under ThreadSanitizer and AddressSanitizer: built here with g++, driven by stress.cpp."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "moe_ops/csrc"
# The weights store is left out: it needs the kernels, which have tests of their own.
SOURCES = [
    *sorted(path for path in (CSRC / "engine").glob("*.cpp") if path.name != "weights.cpp"),
    CSRC / "cpu/kernels/thread_team.cpp",
    Path(__file__).with_name("stress.cpp"),
]
SANITIZERS = {
    "thread": ["-fsanitize=thread"],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
}


def build(folder: Path, sanitizer: str) -> Path:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: the engine's sanitizer builds cannot be made")
    flags = SANITIZERS[sanitizer]
    probe = folder / "probe.cpp"
    probe.write_text("int main() { return 0; }\n")
    works = subprocess.run([compiler, *flags, str(probe), "-o", str(folder / "probe")], capture_output=True)
    if works.returncode or subprocess.run([str(folder / "probe")], capture_output=True).returncode:
        pytest.skip(f"{compiler} has no working {sanitizer} sanitizer here")
    program = folder / f"stress-{sanitizer}"
    command = [compiler, "-std=c++17", "-g", "-O1", "-fno-omit-frame-pointer", *flags, f"-I{CSRC}"]
    subprocess.run([*command, *map(str, SOURCES), "-lpthread", "-o", str(program)], check=True)
    return program


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("stress"), {}

    def program(sanitizer: str) -> Path:
        if sanitizer not in made:
            made[sanitizer] = build(folder, sanitizer)
        return made[sanitizer]

    return program


def run(program: Path, seconds: int, seed: int) -> dict[str, int]:
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1 exitcode=66", "ASAN_OPTIONS": "detect_leaks=1"}
    done = subprocess.run(
        [str(program), str(seconds), str(seed)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds * 3 + 120,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    print(f"{program.name}, {seconds} s: {done.stdout.strip()}")
    words = done.stdout.split()
    return dict(zip(words[::2], map(int, words[1::2]), strict=True))


@pytest.mark.parametrize("sanitizer", SANITIZERS)
@pytest.mark.parametrize("seconds", [6, pytest.param(300, marks=pytest.mark.heavy)])
def test_stress(programs, sanitizer, seconds):
    """Random submits, syncs, cancels, shutdowns, injected failures, replays and moves; every result is compared."""
    counts = run(programs(sanitizer), seconds, seed=seconds)
    assert all(counts[name] > 0 for name in ("synced", "failed", "cancelled", "closed", "replays", "moved")), counts
