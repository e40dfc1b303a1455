"""Junk: the unit vectors that an injection adds to quiet reads."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from quant_bench.diagnostics.reads import Reads, ReadSite
from quant_bench.errors import NotApplicable
from quant_bench.mechanisms.gates import ProjectionGate

Junk = Literal["structured", "gaussian", "random_direction", "gate_direction"]
Directions = Float[Tensor, "kv_head #key dim"]


def unit(vectors: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
    """Vectors of norm 1, in float32; a zero vector has no direction and stays zero."""
    return torch.nn.functional.normalize(vectors.float(), dim=-1)


def donor_places(
    seed: int, layer: int, item: int, members: Sequence[int], shape: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Where each head and position of a sequence takes its donor: (which member, which position).

    Uniform over all positions of the other members, and the same for every model with as many heads and layers.

    Args:
        seed: of the cell.
        layer: decoder layer.
        item: the sequence, one of `members`.
        members: sequences among which donors are drawn.
        shape: key/value heads and positions.
    """
    generator = np.random.default_rng([seed, layer, item])
    owners = generator.integers(0, len(members) - 1, shape)
    # the sequence itself is left out
    owners += owners >= list(members).index(item)
    return owners, generator.integers(0, shape[1], shape)


def fixed_directions(sites: Sequence[ReadSite], junk: Junk, seed: int) -> list[Directions] | None:
    """One direction a layer and head, where junk has one; None where it is drawn for each read.

    Raises:
        NotApplicable: `gate_direction` without a projection gate, or with one that has not left its start (w = 0).
    """
    if junk == "random_direction":
        drawn = [np.random.default_rng([seed, site.layer]).standard_normal(site.shape) for site in sites]
        return [unit(torch.from_numpy(vectors))[:, None] for vectors in drawn]
    if junk != "gate_direction":
        return None
    gates = [site.gate or site.router for site in sites]
    weights = [gate.weight.detach() for gate in gates if isinstance(gate, ProjectionGate)]
    if len(weights) != len(sites):
        raise NotApplicable("junk=gate_direction needs an arm with a projection gate: no other gate has a direction")
    if not any(bool(weight.any()) for weight in weights):
        raise NotApplicable("junk=gate_direction: every w of this model's projection gates is still 0")
    return [unit(weight)[:, None].cpu() for weight in weights]


def gaussian_directions(seed: int, layer: int, item: int, shape: tuple[int, int, int]) -> Reads:
    """A direction for each read, uniform on the sphere."""
    return unit(torch.from_numpy(np.random.default_rng([seed, layer, item]).standard_normal(shape, np.float32)))


def donor_directions(
    seed: int, layer: int, item: int, members: Sequence[int], reads: Float[Tensor, "member kv_head key dim"]
) -> Reads:
    """The direction of another sequence's read for each read: see `donor_places`."""
    _, heads, positions, _ = reads.shape
    owners, places = donor_places(seed, layer, item, members, (heads, positions))
    head = torch.arange(heads)[:, None]
    return unit(reads[torch.from_numpy(owners), head, torch.from_numpy(places)])
