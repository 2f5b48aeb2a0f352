"""Cut a dense SwiGLU feed-forward layer into experts.

A dense layer is a sum over its neurons, so any partition of the neurons into experts, all of them chosen with weight 1,
gives the same output. Choosing fewer of them is an approximation, whose cost depends on the partition: neurons that are
active for the same tokens belong together, and what an expert contributes on average need not be lost with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from moe_ops.experts import Mxfp4Experts
from moe_ops.integrations.quantize import quantize_for_inputs
from moe_ops.reference.mxfp4 import dequantize_mxfp4


@dataclass
class CutLayer:
    """A dense layer as experts: output(x) = output_bias + sum of the chosen experts, each with weight 1.

    experts:       MXFP4, rows [gate; up]; w2_bias is minus the expert's mean output, so that an expert left out is
                   replaced by its mean.
    router_weight: [E, H] and router_bias: [E] float32: scores whose largest k are the experts to choose.
    output_bias:   [H] float32, the sum of all mean outputs.
    """

    experts: Mxfp4Experts
    router_weight: torch.Tensor
    router_bias: torch.Tensor
    output_bias: torch.Tensor


def group_neurons(
    activity: torch.Tensor, num_experts: int, *, always: int = 2, iterations: int = 6, seed: int = 0
) -> torch.Tensor:
    """Partition neurons into experts of equal size by co-activation.

    The `always` first experts take the neurons of largest mean square activity; the others are clusters of neurons that
    are active for the same tokens (spherical k-means with equal sizes).

    activity: [T, I], how much each neuron adds to the output for each calibration token, not negative.
    Returns [num_experts, I / num_experts] int64, the neurons of each expert.
    """
    num_neurons = activity.shape[1]
    if num_neurons % num_experts:
        raise ValueError(f"group_neurons: num_experts must be a divisor of {num_neurons}, got {num_experts}")
    size = num_neurons // num_experts
    order = activity.square().mean(dim=0).argsort(descending=True, stable=True)
    groups = [order[start * size : (start + 1) * size] for start in range(always)]
    rest = order[always * size :]
    clusters = num_experts - always
    if clusters:
        features = F.normalize(activity[:, rest].t(), dim=1)  # [neurons, T]
        groups.extend(rest[members] for members in _equal_clusters(features, clusters, iterations, seed))
    return torch.stack([group.sort().values for group in groups])


def _equal_clusters(features: torch.Tensor, clusters: int, iterations: int, seed: int) -> list[torch.Tensor]:
    count = features.shape[0]
    generator = torch.Generator().manual_seed(seed)
    centres = features[torch.randperm(count, generator=generator)[:clusters]]
    assigned = torch.zeros(count, dtype=torch.int64)
    for _ in range(iterations):
        similarity = features @ centres.t()  # [neurons, clusters]
        best = similarity.topk(min(2, clusters), dim=1).values
        # Neurons with the clearest preference choose first; each takes the best cluster that has room.
        preferences = similarity.argsort(dim=1, descending=True).tolist()
        room = [count // clusters] * clusters
        for neuron in (best[:, 0] - best[:, -1]).argsort(descending=True).tolist():
            cluster = next(candidate for candidate in preferences[neuron] if room[candidate])
            assigned[neuron] = cluster
            room[cluster] -= 1
        centres = torch.stack([F.normalize(features[assigned == c].mean(dim=0), dim=0) for c in range(clusters)])
    return [torch.nonzero(assigned == cluster).reshape(-1) for cluster in range(clusters)]


def cut_dense(
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    calibration: torch.Tensor,
    num_experts: int,
    *,
    always: int = 2,
) -> CutLayer:
    """Cut one layer, quantise it to MXFP4 and fit its router.

    gate, up:    [I, H]; down: [H, I]: the weights of a layer down(silu(gate(x)) * up(x)).
    calibration: [T, H], inputs of the layer for some text.
    """
    x = calibration.to(torch.float32)
    gate, up, down = gate.to(torch.float32), up.to(torch.float32), down.to(torch.float32)
    hidden = F.silu(x @ gate.t()) * (x @ up.t())  # [T, I]
    groups = group_neurons(hidden.abs() * down.norm(dim=0), num_experts, always=always)
    w13, w13_scale = quantize_for_inputs(torch.cat((gate[groups], up[groups]), dim=1), x)
    # What the experts' second product gets from the quantised first one: [E, T, I / E].
    activated = torch.stack([_activated(*pair, x) for pair in zip(w13, w13_scale, strict=True)])
    w2, w2_scale = quantize_for_inputs(down[:, groups].transpose(0, 1), activated)
    experts = Mxfp4Experts(w13, w13_scale, w2, w2_scale, w13_layout="gate_up")
    outputs = activated @ dequantize_mxfp4(w2, w2_scale).transpose(1, 2)  # [E, T, H]
    means = outputs.mean(dim=1)  # [E, H]
    experts.w2_bias = -means
    strength = (outputs - means.unsqueeze(1)).norm(dim=-1).t()  # [T, E]
    weight, bias = fit_router(x, strength)
    return CutLayer(experts, weight, bias, means.sum(dim=0))


def _activated(w13: torch.Tensor, w13_scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ dequantize_mxfp4(w13, w13_scale).t()).chunk(2, dim=-1)
    return F.silu(gate) * up


def fit_router(x: torch.Tensor, strength: torch.Tensor, *, ridge: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """A linear router that predicts the logarithm of each expert's strength: ridge regression on calibration inputs.

    x: [T, H]; strength: [T, E], positive. Returns (weight [E, H], bias [E]) float32.
    """
    target = (strength + 1e-6).log()
    x_mean, target_mean = x.mean(dim=0), target.mean(dim=0)
    centred = x - x_mean
    covariance = centred.t() @ centred
    covariance.diagonal().add_(ridge * covariance.diagonal().mean())
    weight = torch.linalg.solve(covariance, centred.t() @ (target - target_mean)).t()  # [E, H]
    return weight.contiguous(), target_mean - weight @ x_mean
