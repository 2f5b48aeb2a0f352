"""Which Hopper kernel serves a batch: pinned by a table, tuned on the card, or by rule.

Kernels, by name:
    decode    one persistent launch, for at most 512 routed slots at a time
    narrow    grouped matmul with tiles of up to 64 or 96 tokens
    wide      grouped matmul with tiles of up to 152 tokens
    unpacked  the portable kernels over experts that are unpacked into a buffer; any rows, any scale codes

A plan belongs to a geometry (experts, sizes, top-k) and a capacity, a number of tokens from LADDER; layers of the same
geometry share it, and a batch uses the plan of the smallest capacity that holds it. Above the last capacity a batch
runs in chunks of it.

MOE_OPS_SM90_PLANS pins plans: entries `lo-hi[@k<top_k>]=<kernel>` or `=rule`, separated by commas; the first that holds
the capacity wins, and wins over tuning. Where its kernel does not compute the batch, the rule decides. Tuned plans are
kept in a file (`cache_file`) under a key of everything that they depend on. MOE_OPS_SM90_TUNE=cache: `autotune` takes
what the file has and measures nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from moe_ops._version import __version__
from moe_ops.cuda.prepare import E4M3, LAYOUT

KERNELS = ("decode", "narrow", "wide", "unpacked")
# Of one decode launch, as in sm90_decode.cu: slots, experts, slots times blocks of a matrix, and what surely fits in
# shared memory of a row. And the most tokens for which the rule takes it.
DECODE_SLOTS = 512
DECODE_EXPERTS = 6144
DECODE_UNITS = 1 << 24
DECODE_WIDTH = 32768
DECODE_TOKENS = 64
# Where the grouped kernels do not serve: so many tokens 64 at a time, more over unpacked experts.
DECODE_TOKENS_ALONE = 192
# Above this many rows per expert the rule takes tiles of up to 152 tokens.
NARROW_ROWS = 80
LADDER = (*range(1, 9), 10, 12, 14, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)
# Of a batch's hidden activations and unsummed results.
WORKSPACE_BYTES = 2 << 30
CACHE_VERSION = 2
INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Geometry:
    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int
    # Whether the grouped kernels serve: bfloat16 rows, and scale codes that such weights take by one multiplication.
    grouped: bool = True

    @property
    def bytes_per_token(self) -> int:
        return self.top_k * (4 * self.hidden_size + 2 * self.intermediate_size)

    @property
    def decode_slots(self) -> int:
        """Of one decode launch; 0 where it does not serve."""
        strips = self.intermediate_size // 8, self.hidden_size // 16
        units = max(strips[0] * -(-self.hidden_size // 128), strips[1] * -(-self.intermediate_size // 128))
        fits = self.num_experts <= DECODE_EXPERTS and max(self.hidden_size, self.intermediate_size) <= DECODE_WIDTH
        return min(DECODE_SLOTS, (DECODE_UNITS - 1) // units) if fits else 0


def grouped_serves(weight_layout: str, dtype: torch.dtype) -> bool:
    """The grouped kernels have bfloat16 operands, which weights become by one multiplication."""
    return weight_layout in (LAYOUT, E4M3) and dtype == torch.bfloat16


@dataclass(frozen=True)
class Pin:
    low: int
    high: int
    top_k: int | None
    kernel: str | None  # None: by rule


@dataclass(frozen=True)
class Plan:
    """kernel: of KERNELS. chunk: tokens of one launch. source: "pinned", "tuned" or "rule"."""

    kernel: str
    chunk: int
    source: str


_ENTRY = re.compile(r"(\d+)(?:-(\d+))?(?:@k(\d+))?=([a-z]+)")


def parse_pins(text: str) -> tuple[Pin, ...]:
    pins = []
    for entry in "".join(text.split()).split(","):
        if not entry:
            continue
        match = _ENTRY.fullmatch(entry)
        low = int(match[1]) if match else 0
        high = int(match[2] or low) if match else 0
        known = match is not None and (match[4] in KERNELS or match[4] == "rule")
        if match is None or not known or low < 1 or high < low:
            raise RuntimeError(
                f"MOE_OPS_SM90_PLANS: entry '{entry}' must be lo[-hi][@k<top_k>]=<{'|'.join(KERNELS)}|rule>"
            )
        pins.append(Pin(low, high, int(match[3]) if match[3] else None, None if match[4] == "rule" else match[4]))
    return tuple(pins)


def pins_from(text: str) -> tuple[Pin, ...]:
    """parse_pins, with one warning for the pins that hold no capacity: no batch has their plan."""
    pins = parse_pins(text)
    unused = [pin for pin in pins if not any(pin.low <= capacity <= pin.high for capacity in LADDER)]
    if unused:
        names = ", ".join(f"{pin.low}-{pin.high}={pin.kernel or 'rule'}" for pin in unused)
        text = (
            f"moe_ops: MOE_OPS_SM90_PLANS: no batch is planned by {names}: capacities are {', '.join(map(str, LADDER))}"
        )
        warnings.warn(text, stacklevel=2)
    return pins


PINS = pins_from(os.environ.get("MOE_OPS_SM90_PLANS", ""))

# (device kind, geometry) -> capacity -> kernel
_tuned: dict[tuple[str, Geometry], dict[int, str]] = {}


def capacity_of(num_tokens: int) -> int:
    """The smallest capacity that holds the batch, or the last."""
    return next((capacity for capacity in LADDER if capacity >= num_tokens), LADDER[-1])


def serves(geometry: Geometry, kernel: str) -> bool:
    """Whether `kernel` computes batches of this geometry."""
    if kernel == "decode":
        return geometry.decode_slots >= geometry.top_k
    return geometry.grouped or kernel == "unpacked"


def by_rule(geometry: Geometry, capacity: int) -> str:
    if capacity <= (DECODE_TOKENS if geometry.grouped else DECODE_TOKENS_ALONE) and serves(geometry, "decode"):
        return "decode"
    if not geometry.grouped:
        return "unpacked"
    return "wide" if capacity * geometry.top_k > NARROW_ROWS * geometry.num_experts else "narrow"


def chunk_of(geometry: Geometry, kernel: str) -> int:
    """The most tokens of one launch."""
    if kernel == "decode":
        return max(1, min(DECODE_TOKENS, geometry.decode_slots // geometry.top_k))
    if kernel == "unpacked":  # which divides a batch itself
        return INT32_MAX // geometry.top_k
    return max(1, min(LADDER[-1], WORKSPACE_BYTES // geometry.bytes_per_token))


def plan_for(geometry: Geometry, num_tokens: int, device_kind: str) -> Plan:
    capacity = capacity_of(num_tokens)
    pin = next((p for p in PINS if p.low <= capacity <= p.high and p.top_k in (None, geometry.top_k)), None)
    tuned = None if pin else _tuned.get((device_kind, geometry), {}).get(capacity)
    kernel = pin.kernel if pin else tuned
    if kernel is None or not serves(geometry, kernel):
        kernel = by_rule(geometry, capacity)
        return Plan(kernel, chunk_of(geometry, kernel), "rule")
    return Plan(kernel, chunk_of(geometry, kernel), "pinned" if pin else "tuned")


@functools.lru_cache(maxsize=4096)
def cached_plan(geometry: Geometry, num_tokens: int, device: int) -> Plan:
    return plan_for(geometry, num_tokens, device_kind(device))


@functools.lru_cache(maxsize=64)
def device_kind(device: int) -> str:
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.multi_processor_count} multiprocessors"


# ---------------------------------------------------------------- tuned plans on disk


def cache_file() -> Path:
    folder = os.environ.get("MOE_OPS_CACHE_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "moe_ops"
    )
    return Path(folder) / "sm90_plans.json"


def cache_key(kind: str, geometry: Geometry) -> str:
    """Everything that the fastest kernel depends on."""
    parts = [
        f"cache {CACHE_VERSION}",
        f"moe_ops {__version__}",
        f"torch {torch.__version__}",
        f"cuda {torch.version.cuda}",
    ]
    return "; ".join([*parts, kind, ", ".join(f"{name} {value}" for name, value in asdict(geometry).items())])


def _read_cache() -> dict[str, dict[str, str]]:
    try:
        content = json.loads(cache_file().read_text())
    except (OSError, ValueError):
        return {}
    content = content if isinstance(content, dict) else {}
    return {key: entry for key, entry in content.items() if isinstance(entry, dict)}


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "sm90_plans.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def load_tuned(kind: str, geometry: Geometry) -> dict[int, str]:
    """Take the file's plans of a geometry into use; capacity -> kernel."""
    entry = _read_cache().get(cache_key(kind, geometry), {})
    found = {int(capacity): kernel for capacity, kernel in entry.items() if capacity.isdigit() and kernel in KERNELS}
    if found:
        _tuned.setdefault((kind, geometry), {}).update(found)
        cached_plan.cache_clear()
    return found


def store_tuned(kind: str, geometry: Geometry, chosen: dict[int, str]) -> None:
    """Use these plans from now on, and add them to the file."""
    _tuned.setdefault((kind, geometry), {}).update(chosen)
    cached_plan.cache_clear()
    file = cache_file()
    try:
        with _locked(file.parent):
            content = _read_cache()
            entry = content.setdefault(cache_key(kind, geometry), {})
            entry.update({str(capacity): kernel for capacity, kernel in chosen.items()})
            partial = file.with_name(f"{file.name}.{os.getpid()}")
            partial.write_text(json.dumps(content, indent=1, sort_keys=True))
            partial.replace(file)
    except OSError as error:
        warnings.warn(f"moe_ops: tuned plans are not kept: {file}: {error}", stacklevel=2)


def forget_tuned() -> None:
    """Back to pins and rules; the file stays."""
    _tuned.clear()
    cached_plan.cache_clear()


def race(geometry: Geometry, kind: str, capacities: list[int], measure: Callable[[str, int], float]) -> dict[int, str]:
    """The fastest kernel per capacity. `measure` gives the seconds of one call with a kernel and a number of tokens.
    Capacities that the file knows, or a pin decides, are not measured; with MOE_OPS_SM90_TUNE=cache none is."""
    chosen = {capacity: kernel for capacity, kernel in load_tuned(kind, geometry).items() if capacity in capacities}
    missing = [
        capacity
        for capacity in capacities
        if capacity not in chosen and plan_for(geometry, capacity, kind).source != "pinned"
    ]
    if os.environ.get("MOE_OPS_SM90_TUNE", "") == "cache":
        if missing:
            warnings.warn(f"moe_ops: no tuned plan for {missing} tokens: by rule", stacklevel=2)
        return chosen
    measured = {}
    for capacity in missing:
        # A decode launch reads the weights once per chunk: not worth a race far above its limit. Unpacking is for what
        # the grouped kernels do not compute.
        limit = (2 if geometry.grouped else 8) * chunk_of(geometry, "decode")
        kernels = [kernel for kernel in KERNELS if serves(geometry, kernel)]
        kernels = [kernel for kernel in kernels if kernel != ("unpacked" if geometry.grouped else "")]
        kernels = [kernel for kernel in kernels if kernel != "decode" or capacity <= limit]
        measured[capacity] = min(kernels, key=lambda kernel: measure(kernel, capacity))
    if measured:
        store_tuned(kind, geometry, measured)
    return chosen | measured


def report(geometry: Geometry, kind: str | None = None) -> list[dict[str, object]]:
    """What every capacity uses: tokens, kernel, chunk, source. kind: of the device; the current one unless told."""
    if kind is None:
        kind = device_kind(torch.cuda.current_device())
    return [{"tokens": capacity, **asdict(plan_for(geometry, capacity, kind))} for capacity in LADDER]


def report_text(geometry: Geometry, kind: str | None = None) -> str:
    """The report for people, a line for each run of capacities with the same plan."""
    sizes = f"{geometry.num_experts} experts, {geometry.hidden_size} x {geometry.intermediate_size}"
    lines = [f"{sizes}, top {geometry.top_k}{'' if geometry.grouped else ', without the grouped kernels'}"]
    rows = report(geometry, kind)
    for plan, group in itertools.groupby(rows, key=lambda row: (row["kernel"], row["chunk"], row["source"])):
        last = list(group)[-1]["tokens"]
        bound = "any" if last == LADDER[-1] else f"<= {last}"
        lines.append(f"{bound:>8} tokens  {plan[0]:<9} at most {plan[1]} at a time  ({plan[2]})")
    return "\n".join(lines)
