"""Runs a Python module over the simulated runtime, as `python -m` would.

python -m tests.npu.sim moe_ops info
python -m tests.npu.sim --soc A5 moe_ops check --device npu
"""

from __future__ import annotations

import argparse
import runpy
import sys

from tests.npu.sim import loader


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.npu.sim", description=__doc__)
    parser.add_argument("--soc", default="A2", help="A2, A3, A5 or a full device name")
    parser.add_argument("module", help="as for python -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the module")
    options = parser.parse_args()
    loader.load(soc=options.soc)
    sys.argv = [options.module, *options.arguments]
    runpy.run_module(options.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
