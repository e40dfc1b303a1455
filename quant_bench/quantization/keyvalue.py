"""Rounding of keys and values, per token and head, before they are attended to and cached."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from quant_bench.model import LanguageModel
from quant_bench.numerics.integers import Grid
from quant_bench.rebuild import rebuildable

States = Float[Tensor, "batch kv_head key dim"]


@rebuildable("bits")
class KeyValueRounding(nn.Module):
    """Rounds each token's key and value of a head on the symmetric grid of that vector's largest magnitude.

    Rounding what is rounded changes nothing, bit for bit: the codes are divided by the grid's end first, so the largest
    magnitude m comes back as exactly m, and so does the scale. So it does not matter whether a cache holds the
    rounded vectors (a packed forward) or hands the float ones over again (transformers' own cache).
    """

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits
        self.end = Grid(bits, symmetric=True).high

    def forward(self, key: States, value: States) -> tuple[States, States]:
        return self._round(key), self._round(value)

    def _round(self, states: States) -> States:
        values = states.float()
        largest = values.abs().amax(-1, keepdim=True)
        # a zero vector keeps its zeros
        unit = torch.where(largest == 0, torch.ones_like(largest), largest)
        codes = torch.div(values, unit / self.end).round_().clamp_(-self.end, self.end)
        return codes.div_(self.end).mul_(largest).to(states.dtype)


def key_value_notes(bits: int) -> tuple[str, ...]:
    """What a coverage report says of attention products in scope `linear`."""
    if bits == 16:
        return ("attention products run in float",)
    held = f"keys and values are rounded to {bits} bits per token and head, and held in float"
    return ("attention products run in float on rounded keys and values", held)


def round_key_values(model: LanguageModel, bits: int) -> None:
    """Let every attention of a model round its new keys and values."""
    for path in model.layout.attentions:
        model.module.get_submodule(path).key_value_transform = KeyValueRounding(bits)
