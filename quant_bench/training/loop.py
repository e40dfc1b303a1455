"""The loop: transformers' Trainer with a tier's schedule; a killed run goes on where its last checkpoint was."""

import json
import math
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging

from quant_bench.errors import ModelError
from quant_bench.mechanisms import learning_rates, undecayed
from quant_bench.model import LanguageModel
from quant_bench.progress import ProgressReport
from quant_bench.training.material import Material
from quant_bench.training.tiers import Tier

BETAS = (0.9, 0.95)
CLIP = 1.0
FINAL_RATE = 0.1
_LOGGED, _SAVED = 50, 20


class Rows(Dataset[dict[str, Tensor]]):
    """The sequences of a whole run in their order, as the Trainer asks for them."""

    def __init__(self, material: Material, seed: int, count: int) -> None:
        self.material, self.seed, self.count = material, seed, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.from_numpy(self.material.row(self.seed, index))}


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Int64[Tensor, "batch seq"]]:
    """A batch; the model itself shifts the labels by one."""
    ids = torch.stack([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids}


class MatchedTrainer(Trainer):  # type: ignore[misc]
    """Weight decay on matrices only, never on what an arm keeps free of it; learning rates that arms ask for."""

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the matrices that decay; see `mechanisms.undecayed`.

        Source: the rule by shape is nanoGPT's, https://github.com/karpathy/nanoGPT, model.py.
        """
        kept = undecayed(model)
        return [name for name, p in model.named_parameters() if p.dim() >= 2 and name not in kept]

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The Trainer's optimizer, with a group for parameters that an arm gives another rate.

        The schedule multiplies the first rate of each group, so that the ratio stays the same all along.
        """
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        named = dict((self.model if model is None else model).named_parameters())
        for name, factor in learning_rates(self.model if model is None else model).items():
            _apart_at(optimizer, named[name], factor * self.args.learning_rate)
        return optimizer


def _apart_at(optimizer: torch.optim.Optimizer, parameter: Tensor, rate: float) -> None:
    """Move a parameter into a group of its own, with its group's other settings."""
    for group in list(optimizer.param_groups):
        rest = [p for p in group["params"] if p is not parameter]
        if len(rest) < len(group["params"]):
            group["params"] = rest
            optimizer.add_param_group({**group, "params": [parameter], "lr": rate})


class _Reporter(TrainerCallback):  # type: ignore[misc]
    def __init__(self, name: str, progress: ProgressReport) -> None:
        self.name, self.progress = name, progress

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.progress(self.name, state.global_step, state.max_steps)


def arguments(tier: Tier, seed: int, work: Path, device: str) -> TrainingArguments:
    """The Trainer's settings for a tier, as many sequences at a time as divide a step and fit the device."""
    place = torch.device(device)
    common = TrainingArguments(
        output_dir=str(work),
        max_steps=tier.steps,
        per_device_train_batch_size=1,
        learning_rate=tier.learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": FINAL_RATE},
        warmup_steps=tier.warmup_steps,
        weight_decay=tier.weight_decay,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        max_grad_norm=CLIP,
        bf16=tier.bf16,
        logging_steps=max(1, tier.steps // _LOGGED),
        logging_first_step=True,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=max(1, tier.steps // _SAVED),
        save_total_limit=2,
        seed=seed,
        use_cpu=place.type == "cpu",
        dataloader_pin_memory=place.type == "cuda",
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        disable_tqdm=True,
        report_to="none",
    )
    # several GPUs work as several processes (torchrun); in one process the others are left alone
    common._n_gpu = min(common.n_gpu, 1)
    share = tier.batch // common.world_size
    if share * common.world_size != tier.batch:
        raise ModelError(f"{tier.batch} sequences a step cannot be parted among {common.world_size} processes")
    at_once = max(size for size in range(1, min(share, tier.device_batch) + 1) if share % size == 0)
    common.per_device_train_batch_size = at_once
    common.gradient_accumulation_steps = share // at_once
    return common


def last_checkpoint(work: Path) -> Path | None:
    """The newest complete checkpoint of a run; those that a killed process left half written are deleted."""
    found: list[tuple[int, Path]] = []
    for folder in work.glob("checkpoint-*"):
        try:
            # written last
            step = int(json.loads((folder / "trainer_state.json").read_text(encoding="utf8"))["global_step"])
            found.append((step, folder))
        except (OSError, ValueError, KeyError):
            shutil.rmtree(folder, ignore_errors=True)
    return max(found)[1] if found else None


@contextmanager
def _apart() -> Iterator[None]:
    """Keep the Trainer's seeds to itself, and its bars and hints off the screen (our own progress is shown)."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    states = (random.getstate(), np.random.get_state())
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def fit(
    model: LanguageModel, material: Material, tier: Tier, seed: int, work: Path, progress: ProgressReport
) -> list[dict[str, float]]:
    """Train a model in place, from the last checkpoint in `work` if there is one.

    Args:
        model: from `building.build`, on the device to train on.
        material: what it reads.
        tier: schedule.
        seed: of the order.
        work: folder of the checkpoints; stays when the run is killed.
        progress: called as progress(description, done, total).

    Returns:
        Training loss in nats (mean since the entry before), learning rate and norm of the gradient at logged steps.

    Raises:
        ModelError: a loss or weight is not finite.
    """
    with _apart():
        trainer = MatchedTrainer(
            model=model.module,
            args=arguments(tier, seed, work, str(model.device)),
            train_dataset=Rows(material, seed, tier.steps * tier.batch),
            data_collator=collate,
            callbacks=[_Reporter(f"training {tier.name}", progress)],
        )
        trainer.remove_callback(PrinterCallback)
        before = last_checkpoint(work)
        trainer.train(resume_from_checkpoint=None if before is None else str(before))
    model.config.use_cache = True
    model.module.eval().requires_grad_(False)
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    losses = [{key: float(entry[key]) for key in ("step", "loss", "learning_rate", "grad_norm")} for entry in history]
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in model.module.parameters())
    if not finite or not all(math.isfinite(entry["loss"]) for entry in losses):
        raise ModelError(f"the training of {tier.label} with seed {seed} diverged: a loss or weight is not finite")
    return losses
