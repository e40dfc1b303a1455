"""Random tokens for tiny models."""

import torch
from torch import Tensor

from quant_bench.quantizer import Calibration, Quantizer
from quant_bench.tiny import VOCABULARY


def tiny_ids(batch: int = 4, seq: int = 24, seed: int = 1) -> Tensor:
    """Random token ids for tiny models."""
    return torch.randint(3, VOCABULARY, (batch, seq), generator=torch.Generator().manual_seed(seed))


def tiny_calibration(quantizer: Quantizer) -> Calibration:
    """As many random sequences as a quantizer wants, in batches of 8."""
    wanted = quantizer.calibration_sequences
    batches = torch.split(tiny_ids(wanted, seed=2), 8) if wanted else ()
    return Calibration(batches, sha256="0" * 64, description="random tokens", usable=wanted, wanted=wanted)
