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
    return Calibration.of(tiny_ids(wanted, seed=2), "random tokens", wanted) if wanted else Calibration()
