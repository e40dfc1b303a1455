"""Checkpoints: one folder for a tier, arm and seed, found in the cache or trained."""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from quant_bench import models, registry
from quant_bench.arm import Arm
from quant_bench.cache import folder_made_whole, write_atomically
from quant_bench.cell import require_seed
from quant_bench.data import DataSource
from quant_bench.errors import Blocked
from quant_bench.models.quiet import quiet
from quant_bench.progress import ProgressReport
from quant_bench.samples import digest_of
from quant_bench.training.building import build, parameter_counts
from quant_bench.training.loop import BETAS, CLIP, FINAL_RATE, fit
from quant_bench.training.material import Material, is_at_hand, material_of
from quant_bench.training.tiers import TRAINING_KEY, Tier

# goes up when the same settings would train to other weights
VERSION = 1
NOTE = "training.json"
_PACKAGES = ("torch", "transformers", "accelerate", "tokenizers", "numpy")


@dataclass(frozen=True)
class Order:
    """One training to be done.

    Attributes:
        tier: what all arms share.
        arm: what they differ in.
        seed: of the initial weights and of the order of the data.
        data: where the text comes from.
        cache: cache folder.
        device: torch device of one process.

    Raises:
        SpecError: the seed is none.
    """

    tier: Tier
    arm: Arm
    seed: int
    data: DataSource
    cache: Path
    device: str = "cpu"

    def __post_init__(self) -> None:
        require_seed(self.seed)

    @property
    def arm_text(self) -> str:
        """Canonical text of the arm."""
        return registry.canonical("arms", self.arm)


@dataclass(frozen=True)
class Checkpoint:
    """A trained model: `models.load_model(folder)` gives it with its arm; `note` is its `training.json`."""

    folder: Path
    note: dict[str, Any]


def find(order: Order) -> Checkpoint | None:
    """The checkpoint of a training if it is in the cache; packs and trains nothing.

    Raises:
        Blocked: the toy's text must be fetched and cannot be.
    """
    if not is_at_hand(order.tier, order.data, order.cache):
        return None
    return _read(_folder(order, material_of(order.tier, order.data, order.cache)))


def find_or_train(order: Order, progress: ProgressReport = lambda description, done, total: None) -> Checkpoint:
    """The checkpoint of a training, trained on first use.

    A killed training goes on from its last checkpoint; two processes that want the same one train it once.

    Args:
        order: what to train.
        progress: called as progress(description, done, total).

    Raises:
        Blocked: the text must be fetched and cannot be, or there is no such device.
        NotApplicable: the arm makes no sense for this layout.
        ModelError: the training diverged.
        DataError: the text is too short.
    """
    material = material_of(order.tier, order.data, order.cache, progress)
    folder = _folder(order, material)
    with _alone(folder):
        found = _read(folder)
        if found is not None:
            return found
        _train(order, material, folder, progress)
    found = _read(folder)
    assert found is not None
    return found


def key_of(order: Order, material_sha256: str) -> str:
    """Digest of everything that decides the weights, but for the machine.

    Raises:
        ModelError, Blocked: the tier's base cannot be had.
    """
    base = order.tier.base
    # which text it is, is in the digest of the material
    settings = {key: value for key, value in order.tier.settings.items() if key not in ("name", "text")}
    return digest_of(
        {
            "version": VERSION,
            "tier": settings,
            "arm": order.arm_text,
            "arm_version": order.arm.version,
            "seed": order.seed,
            "data": material_sha256,
            "base": models.identify(base, models.LoadOptions(cache=order.cache)).weights_sha256 if base else None,
        }
    )


def _folder(order: Order, material: Material) -> Path:
    return order.cache / "training" / "models" / key_of(order, material.sha256)


def _read(folder: Path) -> Checkpoint | None:
    path = folder / NOTE
    return Checkpoint(folder, json.loads(path.read_text(encoding="utf8"))) if path.is_file() else None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time; the system frees the lock of a killed one. Processes of one torchrun work together."""
    if torch.distributed.is_available() and torch.distributed.is_torchelastic_launched():
        yield
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        yield


def _train(order: Order, material: Material, folder: Path, progress: ProgressReport) -> None:
    tier, started = order.tier, time.perf_counter()
    device = torch.device(order.device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise Blocked(f"device {order.device!r}: this torch ({torch.__version__}) finds no such CUDA device")
    work = folder.with_name(f"{folder.name}.work")
    work.mkdir(parents=True, exist_ok=True)
    model = build(tier, order.arm, order.seed, material.tokenizer(), order.cache)
    counts = parameter_counts(model)
    marks = {"tier": tier.label, "seed": order.seed, "data_sha256": material.sha256}
    setattr(model.config, TRAINING_KEY, marks)
    model.module.to(device)
    losses = fit(model, material, tier, order.seed, work, progress)
    if torch.distributed.is_initialized() and torch.distributed.get_rank() > 0:
        torch.distributed.barrier()
        return
    note = {
        **marks,
        "version": VERSION,
        "arm": order.arm_text,
        "arm_version": order.arm.version,
        "settings": tier.settings,
        "optimizer": {"name": "AdamW", "betas": BETAS, "clip": CLIP, "final_rate": FINAL_RATE},
        "steps": tier.steps,
        "tokens": tier.tokens,
        **counts,
        "data": material.note,
        "losses": losses,
        "packages": {package: metadata.version(package) for package in _PACKAGES},
        "device": order.device,
        "threads": torch.get_num_threads(),
        # of the last process only, where the training was interrupted
        "took_seconds": time.perf_counter() - started,
    }
    with folder_made_whole(folder) as whole:
        with quiet():
            models.save(model, whole)
        content = json.dumps(note, sort_keys=True, indent=1, allow_nan=False) + "\n"
        write_atomically(whole / NOTE, content.encode())
    shutil.rmtree(work, ignore_errors=True)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
