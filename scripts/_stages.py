"""The stages of scripts/test and scripts/test-full: runs them all, then says what passed, failed and was skipped.

A stage whose tool is missing is a skip with its name and reason. The last line counts every test, and every stage that
is no test run of its own.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable


@dataclass
class Result:
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    note: str = ""


@dataclass
class Stage:
    name: str
    run: Callable[[], Result]
    full_only: bool = False


def command(*arguments: str, **environment: str) -> Result:
    """One command is one test: it passes where it exits with 0."""
    code = subprocess.call(arguments, cwd=ROOT, env={**os.environ, **environment})
    return Result(passed=1) if code == 0 else Result(failed=1, note=f"exit code {code}: {' '.join(arguments)}")


def tool(name: str, *arguments: str) -> Result:
    if shutil.which(name) is None:
        return Result(skipped=1, note=f"{name} is not installed")
    return command(name, *arguments)


def pytest(*arguments: str, **environment: str) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        code = subprocess.call(
            [PYTHON, "-m", "pytest", "-q", f"--junitxml={report}", *arguments],
            cwd=ROOT,
            env={**os.environ, **environment},
        )
        if not report.exists():
            return Result(failed=1, note=f"pytest stopped with exit code {code}")
        suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    count = {key: sum(int(suite.get(key, 0)) for suite in suites) for key in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    passed = count["tests"] - failed - count["skipped"]
    if code not in (0, 1, 5) or (code == 1 and failed == 0):
        failed += 1
    note = "no tests" if code == 5 else f"pytest stopped with exit code {code}" if code not in (0, 1) else ""
    return Result(passed, failed, count["skipped"], note)


def script(name: str, *arguments: str) -> Result:
    """A script of its own that ends with pytest's summary or `N passed, N failed, N skipped`."""
    path = ROOT / "scripts" / name
    if not path.exists():
        return Result(skipped=1, note=f"scripts/{name} does not exist")
    process = subprocess.Popen(
        ["bash", str(path), *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, errors="replace"
    )
    summary = ""
    assert process.stdout is not None
    for line in process.stdout:
        sys.stdout.write(line)
        sys.stdout.flush()
        if re.search(r"\d+ (passed|failed|skipped|error)", line):
            summary = line
    code = process.wait()

    def number(word: str) -> int:
        return sum(int(n) for n in re.findall(rf"(\d+) {word}", summary))

    failed = number("failed") + number("errors?")
    if code != 0 and failed == 0:
        failed = 1
    return Result(number("passed"), failed, number("skipped"), f"exit code {code}" if code else "")


def tracked(*patterns: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        return [name for name in listed.stdout.split() if (ROOT / name).exists()]
    return [str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.rglob(pattern)]


def clang_format() -> Result:
    files = tracked("*.cpp", "*.h", "*.cu", "*.cuh")
    return tool("clang-format", "--dry-run", "-Werror", *files) if files else Result(skipped=1, note="no C++ files")


def build() -> Result:
    if not (os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")):
        return Result(skipped=1, note="no C++ compiler: the native libraries are not built")
    return command(PYTHON, "setup.py", "-q", "build_ext", "--inplace")


def has_module(name: str) -> bool:
    return subprocess.call([PYTHON, "-c", f"import {name}"], stderr=subprocess.DEVNULL) == 0


def triton_interpreter() -> Result:
    if not has_module("triton"):
        return Result(skipped=1, note="triton is not installed")
    return pytest("tests/ops", "tests/triton", "-m", FAST, MOE_OPS_TEST_BACKEND="triton-interpret")


def other_isa(isa: str) -> Callable[[], Result]:
    return lambda: pytest("tests/ops", "-m", FAST, MOE_OPS_CPU_ISA=isa)


FAST = "not heavy and not gpu"

STAGES = [
    Stage("ruff check", lambda: tool("ruff", "check", ".")),
    Stage("ruff format", lambda: tool("ruff", "format", "--check", ".")),
    Stage("clang-format", clang_format),
    Stage("mypy", lambda: tool("mypy")),
    Stage("build", build),
    Stage("tests", lambda: pytest("tests", "-m", FAST)),
    Stage("tests of the reference", lambda: pytest("tests/ops", "-m", FAST, MOE_OPS_TEST_BACKEND="reference")),
    Stage("tests of the scalar kernels", other_isa("scalar")),
    Stage("tests of the Triton kernels, interpreted", triton_interpreter),
    Stage("tests of the NPU backend", lambda: script("test-npu")),
    Stage("self-check", lambda: command(PYTHON, "-m", "moe_ops", "check")),
    Stage("tests of the AVX2 kernels", other_isa("avx2"), full_only=True),
    Stage("tests of the AVX-512 kernels", other_isa("avx512"), full_only=True),
    Stage("tests of the NPU backend as A3 and A5", lambda: script("test-npu", "--soc", "A3", "A5"), full_only=True),
    Stage("heavy tests", lambda: pytest("tests", "-m", "heavy and not gpu"), full_only=True),
    Stage("demo", lambda: command("bash", "scripts/demo", "--max-new-tokens", "48"), full_only=True),
    Stage("tests on a GPU", lambda: script("test-gpu"), full_only=True),
]


@dataclass
class Options:
    full: bool
    list: bool
    stages: list[str] = field(default_factory=list)


def parse() -> Options:
    parser = argparse.ArgumentParser(prog="scripts/test")
    parser.add_argument("stages", nargs="*", metavar="stage", help="run those whose names contain one of these words")
    parser.add_argument("--full", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true", help="print the stages and stop")
    return Options(**vars(parser.parse_args()))


def main() -> int:
    options = parse()
    chosen = [
        stage
        for stage in STAGES
        if (options.full or not stage.full_only)
        and (not options.stages or any(word.lower() in stage.name.lower() for word in options.stages))
    ]
    if options.list:
        print("\n".join(stage.name for stage in chosen))
        return 0
    # For the tests that build a wheel too: the same flags, so that they find the objects of the build before them.
    os.environ["MOE_OPS_WERROR"] = "1"
    os.environ["PATH"] = f"{Path(PYTHON).parent}{os.pathsep}{os.environ['PATH']}"
    results: list[tuple[Stage, Result, float]] = []
    for stage in chosen:
        print(f"\n== {stage.name}", flush=True)
        begun = time.monotonic()
        results.append((stage, stage.run(), time.monotonic() - begun))
    print("\n== summary")
    for stage, result, seconds in results:
        word = "FAILED" if result.failed else "skipped" if result.skipped and not result.passed else "ok"
        note = f"  ({result.note})" if result.note else ""
        print(
            f"{word:8}{stage.name:42}{result.passed:6} passed {result.failed:4} failed {result.skipped:4} skipped"
            f"{seconds:7.0f} s{note}"
        )
    total = Result(
        sum(result.passed for _, result, _ in results),
        sum(result.failed for _, result, _ in results),
        sum(result.skipped for _, result, _ in results),
    )
    print(f"{total.passed} passed, {total.failed} failed, {total.skipped} skipped", flush=True)
    return 1 if total.failed or not total.passed else 0


if __name__ == "__main__":
    sys.exit(main())
