"""Runs the NPU tests, each module in a process of its own, and counts the cases.

    python -m tests.npu.run                        # simulated A2, all modules; those of A5 alone as A5
    python -m tests.npu.run FILE --soc A2 A3 A5    # or full names such as Ascend910B3
    python -m tests.npu.run --hardware             # the device and CANN of this machine
    python -m tests.npu.run tests/ops/test_topk_permute.py -- -k empty

A process per module, because a process holds one runtime, and an error of a device poisons what comes after it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_SOC_NAMES = {"A2": "Ascend910B3", "A3": "Ascend910_9382", "A5": "Ascend950PR_9579"}
_FOLDERS = ("npu", "ops", "autograd", "meta")
_ONLY_A5 = ["tests/npu/test_mx.py"]
_TIMEOUT_S = 900


@dataclass
class Result:
    module: str
    soc: str
    passed: int
    skipped: int
    failed: int
    seconds: float
    output: str

    @property
    def line(self) -> str:
        counts = f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"
        return f"{self.soc:17} {self.module:40} {counts}, {self.seconds:.0f} s"


def modules() -> list[str]:
    """The NPU's own tests, and those that are written once for all backends."""
    return sorted(
        str(path.relative_to(_ROOT)) for folder in _FOLDERS for path in (_ROOT / "tests" / folder).glob("test_*.py")
    )


def run_module(module: str, soc: str, pytest_arguments: list[str]) -> Result:
    environment = {
        **os.environ,
        "MOE_OPS_TEST_BACKEND": "npu",
        "MOE_OPS_TEST_NPU": "hardware" if soc == "hardware" else "simulation",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "OMP_NUM_THREADS": "1",
    }
    if soc != "hardware":
        environment["CANN_SIM_SOC"] = soc
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        try:
            done = subprocess.run(
                [*command, module, *pytest_arguments],
                cwd=_ROOT, env=environment, timeout=_TIMEOUT_S, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            output, code = done.stdout, done.returncode
        except subprocess.TimeoutExpired as expired:
            output, code = f"{expired.stdout!r}\ntimed out after {_TIMEOUT_S} s", 1
        tests = skipped = failed = 0
        if report.exists():
            for suite in ElementTree.parse(report).getroot().iter("testsuite"):
                tests += int(suite.get("tests", 0))
                skipped += int(suite.get("skipped", 0))
                failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    passed = tests - skipped - failed
    no_tests_selected = code == 5
    if code != 0 and failed == 0 and not no_tests_selected:
        failed = 1  # the process died
    return Result(module, soc, passed, skipped, failed, time.monotonic() - start, output)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="test files; all of those above where none is given")
    parser.add_argument("--soc", nargs="+", default=[], help="simulated devices: A2, A3, A5 or full names")
    parser.add_argument("--hardware", action="store_true", help="run on the real device")
    parser.add_argument("--jobs", type=int, default=2, help="modules at a time")
    own, rest = _split(sys.argv[1:])
    arguments = parser.parse_args(own)
    unknown = [name for name in arguments.soc if name not in _SOC_NAMES and not name.startswith("Ascend")]
    if unknown:
        parser.error(f"--soc takes {', '.join(_SOC_NAMES)} or full names, got {unknown[0]}; name test files before it")
    names = ["hardware"] if arguments.hardware else [_SOC_NAMES.get(name, name) for name in arguments.soc or ["A2"]]
    if not arguments.hardware:
        from tests.npu.sim import loader

        start = time.monotonic()
        loader.build()
        print(f"simulation built in {time.monotonic() - start:.0f} s", flush=True)
    work = [(module, name) for name in names for module in arguments.modules or modules()]
    if not (arguments.hardware or arguments.soc or arguments.modules):
        work = [pair for pair in work if pair[0] not in _ONLY_A5] + [(module, _SOC_NAMES["A5"]) for module in _ONLY_A5]
        names.append(_SOC_NAMES["A5"])
    results = []
    with ThreadPoolExecutor(max_workers=1 if arguments.hardware else arguments.jobs) as pool:
        for result in pool.map(lambda pair: run_module(*pair, rest), work):
            print(result.line, flush=True)
            if result.failed:
                print(result.output, flush=True)
            results.append(result)
    for name in names:
        mine = [result for result in results if result.soc == name]
        print(f"{name}: {_summary(mine)}, {len(mine)} modules")
    print(_summary(results))
    return 1 if any(result.failed for result in results) else 0


def _summary(results: list[Result]) -> str:
    passed, failed, skipped = (
        sum(getattr(result, key) for result in results) for key in ("passed", "failed", "skipped")
    )
    return f"{passed} passed, {failed} failed, {skipped} skipped"


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What stands before and after `--`; argparse would take both for its own."""
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


if __name__ == "__main__":
    sys.exit(main())
