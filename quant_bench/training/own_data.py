"""Own data: what a model that was trained here is asked and calibrated on, the same for all arms of its tier."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quant_bench.data import DataSource
from quant_bench.errors import Blocked, NotApplicable
from quant_bench.model import LanguageModel
from quant_bench.quantizer import SEQUENCES_A_BATCH, Calibration
from quant_bench.training.material import Material, ToyMaterial, material_of
from quant_bench.training.tiers import TRAINING_KEY, Tier, tier_of

# calibration reads what training reads, in an order that no training has
_CALIBRATION_SEED = 1 << 40


@dataclass(frozen=True)
class HeldOut:
    """Sequences that no training of a tier has seen.

    Attributes:
        tier: of the model.
        rows: int64 token ids, one row a sequence.
        sha256: digest of the ids.
        copies: True at the tokens of Bigram-Backcopy that repeat the one before last; None for text.
        surprise: nats of each token under the source that drew it; None for text, whose source nobody knows.
    """

    tier: Tier
    rows: np.ndarray
    sha256: str
    copies: np.ndarray | None = None
    surprise: np.ndarray | None = None


def was_trained_here(model: LanguageModel) -> bool:
    """Whether a model is a checkpoint of a tier."""
    return hasattr(model.config, TRAINING_KEY)


def held_out(model: LanguageModel, data: DataSource, cache: Path) -> HeldOut:
    """The held-out sequences of a model's tier.

    Raises:
        NotApplicable: the model was not trained here.
        Blocked: its text is not at hand, or has become another one.
    """
    tier, material = _material(model, data, cache)
    rows = material.held_out()
    sha256 = hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()
    if isinstance(material, ToyMaterial):
        return HeldOut(tier, rows, sha256, material.source.copies(rows), material.source.surprise(rows))
    return HeldOut(tier, rows, sha256)


def calibration(model: LanguageModel, data: DataSource, cache: Path, sequences: int, seed: int) -> Calibration:
    """Training sequences for static ranges, as the outlier papers take them; the same for all arms of a tier.

    Args:
        model: trained here.
        data: where its text comes from.
        cache: cache folder.
        sequences: how many.
        seed: chooses them.

    Raises:
        Blocked: its text is not at hand, or has become another one.
    """
    tier, material = _material(model, data, cache)
    rows = np.stack([material.row(_CALIBRATION_SEED + seed, index) for index in range(sequences)])
    where = f"{tier.label} training sequences seq={tier.context} batch={SEQUENCES_A_BATCH} seed={seed}"
    return Calibration.of(torch.from_numpy(rows), where, sequences)


def _material(model: LanguageModel, data: DataSource, cache: Path) -> tuple[Tier, Material]:
    marks: dict[str, Any] | None = getattr(model.config, TRAINING_KEY, None)
    if marks is None:
        raise NotApplicable(f"{model.identity.name!r} was not trained here, so nothing is known to be held out from it")
    tier = tier_of(marks["tier"])
    material = material_of(tier, data, cache)
    if material.sha256 != marks["data_sha256"]:
        raise Blocked(
            f"the text of {tier.label} is another one than this model was trained on (digest {material.sha256}, "
            f"wanted {marks['data_sha256']}): use the cache folder and --data of its training"
        )
    return tier, material
