"""The float model's pass over calibration batches, run once for all recipes that ask the same of the same model."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from quant_bench.model import LanguageModel
from quant_bench.quantization.fingerprint import fingerprint
from quant_bench.quantization.layerwise import SPILL_VARIABLE, LayerStream
from quant_bench.quantization.moments import Moments, layer_moments
from quant_bench.quantizer import Calibration

# moments above this are not kept; those of SmolLM2-135M with second moments take 0.4 GB
MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class _Kept:
    key: object
    second: bool
    rows: int
    layers: list[dict[str, Moments]]


# of one model: older ones do not come back
_kept: list[_Kept] = []


def float_moments(
    model: LanguageModel, calibration: Calibration, *, second: bool = False, rows: int = 0
) -> Iterator[dict[str, Moments]]:
    """Moments of what every linear of the float model reads, by path, one layer after the other.

    The layers run once; another recipe that is given an equal model (and the same calibration) gets what was found, if
    it asks for no more. A recipe may change a layer as soon as it has its moments. Models whose arm hooks something in,
    more than `MOST_BYTES`, and second moments where states are spilled are not kept.

    Args:
        model: as loaded; nothing of it is changed yet.
        calibration: token batches.
        second: whether second moments are wanted.
        rows: tokens to keep of each batch.

    Raises:
        QuantizationError: no calibration batches, or an input that is not finite.
    """
    mark = fingerprint(model)
    key = (mark, calibration.sha256, tuple(ids.shape for ids in calibration.batches))
    for kept in _kept:
        if kept.key == key and kept.second >= second and rows in (0, kept.rows):
            yield from map(dict, kept.layers)
            return
    layers: list[dict[str, Moments]] = []
    with LayerStream(model, calibration) as stream:
        for _ in model.layout.layers:
            layers.append(layer_moments(model, stream, second=second, rows=rows))
            stream.advance()
            yield dict(layers[-1])
    known = mark is not None and calibration.sha256 is not None
    if known and not (second and SPILL_VARIABLE in os.environ) and _bytes(layers) <= MOST_BYTES:
        _kept[:] = [_Kept(key, second, rows, layers)]


def forget_moments() -> None:
    """Drop the moments that are kept for the next recipe."""
    _kept.clear()


def _bytes(layers: list[dict[str, Moments]]) -> int:
    owned = {id(moments): moments for layer in layers for moments in layer.values()}
    return sum(part.nbytes for moments in owned.values() for part in vars(moments).values() if isinstance(part, Tensor))
