"""Weights: which model the cells of an arm and seed are asked of: one for all, or a tier's checkpoint for each."""

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quant_bench import calibrate, models, registry
from quant_bench.cache import cache_folder
from quant_bench.cell import BASELINE_ARM
from quant_bench.data import DataSource
from quant_bench.errors import ModelError, QuantBenchError, SpecError
from quant_bench.identity import ModelIdentity
from quant_bench.model import LanguageModel
from quant_bench.models.manifest import Manifest
from quant_bench.plan import PlannedCell, RunOptions, planned_cells
from quant_bench.progress import ProgressReport
from quant_bench.quantizer import Calibration
from quant_bench.samples import digest_of
from quant_bench.training import own_data
from quant_bench.training.tiers import Tier, is_tier, tier_of

if TYPE_CHECKING:
    from quant_bench.training.checkpoints import Order
_Key = tuple[str, int]


class Weights:
    """The models of one run.

    Args:
        options: of the run; its model may be a tier, or a folder with a quantized model.
        cache: cache folder.
        data: where a tier's text comes from.

    Attributes:
        saved: what the folder says of its quantized model, or None.

    Raises:
        SpecError: there is no such tier.
        ModelError, Blocked: the model cannot be had.
    """

    def __init__(self, options: RunOptions, cache: Path, data: DataSource) -> None:
        self._options, self._cache, self._data = options, cache, data
        self._load = models.LoadOptions(
            dtype=options.dtype,
            device=options.device,
            revision=options.revision,
            trust_remote_code=options.trust_remote_code,
            cache=cache,
        )
        self._tier: Tier | None = None
        self.saved: Manifest | None = None
        self._folders: dict[_Key, tuple[Path, ModelIdentity] | None] = {}
        self._failures: dict[_Key, Exception] = {}
        if is_tier(options.model):
            self._tier = tier_of(options.model)
            if options.revision is not None:
                raise ModelError(f"{options.model!r} has no revision: only a model on the hub has revisions")
        else:
            found = models.find(options.model, self._load)
            self._one, self.saved = found.identity, found.manifest
            if self.saved is not None:
                self._load = replace(self._load, dtype=self._one.dtype)  # type: ignore[arg-type]

    def identity(self, planned: PlannedCell) -> ModelIdentity | None:
        """Which weights a cell is asked of, or None while they are not trained; trains nothing."""
        if self.saved is not None and not _is_of(planned, self.saved):
            # what a loaded cell is compared with was made of the float weights
            return replace(self._one, quantized_sha256=None)
        if self._tier is None:
            return self._one
        found = self._found(planned)
        return None if found is None else found[1]

    def named(self, planned: PlannedCell) -> ModelIdentity:
        """The same for a record that has no scores: weights that are not trained have the digest of nothing."""
        nothing = hashlib.sha256(b"").hexdigest()
        untrained = ModelIdentity(
            self._options.model, "tier", None, nothing, nothing, self._options.dtype, note="its training did not end"
        )
        return self.identity(planned) or untrained

    def train(self, cells: Iterable[PlannedCell], progress: ProgressReport) -> None:
        """Train the checkpoints of a tier that are not in the cache; does nothing for other models.

        An arm whose training fails costs its own cells only: loading it says what went wrong.
        """
        if self._tier is None:
            return
        from quant_bench.training.checkpoints import find_or_train

        for planned in {_key(planned): planned for planned in cells}.values():
            try:
                find_or_train(self._order(planned), progress)
            except Exception as error:
                self._failures[_key(planned)] = error
            self._folders.pop(_key(planned), None)

    def load(self, planned: PlannedCell) -> LanguageModel:
        """The float model of a cell, with its arm; from a folder with a quantized model that one.

        Raises:
            ModelError, Blocked, NotApplicable: it cannot be loaded, was not trained, or cannot have this arm.
        """
        if self._tier is None:
            model = models.load_model(self._options.model, self._load)
            if self.saved is not None:
                return model
            return models.attach_to_trained(model, planned.arm, planned.cell.seed)
        if _key(planned) in self._failures:
            raise self._failures[_key(planned)]
        found = self._found(planned)
        if found is None:
            raise ModelError(f"{self._tier.label} with arm {planned.cell.arm} and seed {planned.cell.seed} is gone")
        model = models.load_model(str(found[0]), self._load)
        model.identity = found[1]
        return models.attach(model, planned.arm, planned.cell.seed)

    def _order(self, planned: PlannedCell) -> "Order":
        from quant_bench.training.checkpoints import Order

        assert self._tier is not None
        return Order(self._tier, planned.arm, planned.cell.seed, self._data, self._cache, self._options.device)

    def _found(self, planned: PlannedCell) -> tuple[Path, ModelIdentity] | None:
        from quant_bench.training.checkpoints import find

        key = _key(planned)
        if key not in self._folders:
            try:
                checkpoint = find(self._order(planned))
            except QuantBenchError:
                # its text is missing, so nothing can have been trained on it; training says so
                checkpoint = None
            self._folders[key] = None
            if checkpoint is not None:
                identity = models.identify(str(checkpoint.folder), self._load)
                made = checkpoint.note
                # what decides the last bits of a step, and in the end more, but is not in the digest below
                where = f"{made['device']}, threads {made['threads']}, torch {made['packages']['torch']}"
                note = f"trained here with arm {made['arm']} and seed {made['seed']} ({where})"
                shared = {part: made[part] for part in ("version", "settings", "optimizer", "data_sha256")}
                named = replace(
                    identity, name=self._options.model, source="tier", note=note, training_sha256=digest_of(shared)
                )
                self._folders[key] = (checkpoint.folder, named)
        return self._folders[key]


def _is_of(planned: PlannedCell, saved: Manifest) -> bool:
    cell, recipe = planned.cell, saved.recipe
    return (cell.arm, cell.quantizer, cell.seed) == (saved.arm, recipe.quantizer, recipe.seed)


def of_saved(options: RunOptions, saved: Manifest) -> RunOptions:
    """The run that a folder with a quantized model stands for: its cells are those of the float model and the recipe.

    What options leave at their default is the folder's; naming what the folder has says nothing new.

    Raises:
        SpecError: another arm, quantizer, seed or dtype is asked for.
        ModelError: the recipe or the arm has changed since: the numbers would stand under the wrong name.
    """
    recipe = saved.recipe
    quantizer, arm = registry.build("quantizers", recipe.quantizer), registry.build("arms", saved.arm)
    made = (recipe.version, recipe.settings, saved.arm_version)
    if made != (quantizer.version, registry.settings(quantizer), arm.version):
        raise ModelError(
            f"{options.model!r} was made by version {recipe.version} of {recipe.quantizer} (arm version "
            f"{saved.arm_version}), which is not what is here now: quantize the model again"
        )
    arms = {registry.canonical("arms", registry.build("arms", text)) for text in options.arms}
    quantizers = {registry.canonical("quantizers", registry.build("quantizers", text)) for text in options.quantizers}
    asked: tuple[tuple[str, Iterable[Any], Any, Any], ...] = (
        ("arm", arms, BASELINE_ARM, saved.arm),
        ("quantizer", quantizers, "none", recipe.quantizer),
        ("seed", options.seeds, 0, recipe.seed),
        ("dtype", [options.dtype], "float32", saved.identity.dtype),
    )
    for what, values, default, held in asked:
        other = sorted(str(value) for value in values if value not in (held, default))
        if other:
            raise SpecError(
                f"{options.model!r} is quantized already: its {what} is {held}, not {other[0]}; "
                f"name its float model ({saved.identity.name}) to quantize that in another way"
            )
    return replace(
        options,
        model=saved.identity.name,
        arms=(saved.arm,),
        quantizers=(recipe.quantizer,),
        seeds=(recipe.seed,),
        dtype=saved.identity.dtype,  # type: ignore[arg-type]
        revision=None,
    )


def quantized(options: RunOptions, progress: ProgressReport) -> LanguageModel:
    """The model that the cells of a run with one arm, quantizer and seed are asked of.

    Raises:
        SpecError: the quantizer is `none`, or the model is quantized already.
        QuantBenchError: what loading, calibration and the quantizer raise.
    """
    planned = planned_cells(options)[0]
    if planned.cell.quantizer == "none":
        raise SpecError("the quantizer none leaves the model in float: name another one")
    cache, data = cache_folder(options.cache), DataSource(options.data)
    weights = Weights(options, cache, data)
    if weights.saved is not None:
        raise SpecError(f"{options.model!r} is quantized already, by {weights.saved.recipe.quantizer}")
    weights.train([planned], progress)
    model = weights.load(planned)
    wanted = planned.quantizer.calibration_sequences
    calibration = calibration_of(model, data, cache, wanted, planned.cell.seed)
    model = models.quantize_with(planned.quantizer, model, calibration, planned.cell.seed)
    if options.revision is not None:
        # the model's part of the cell's name, which the saved model keeps
        model.identity = replace(model.identity, name=f"{options.model}@{options.revision}")
    return model


def canonical(model: str) -> str:
    """The one name for a model: two ways to write a tier's settings are one tier."""
    return tier_of(model).label if is_tier(model) else model


def _key(planned: PlannedCell) -> _Key:
    return (planned.cell.arm, planned.cell.seed)


def calibration_of(model: LanguageModel, data: DataSource, cache: Path, sequences: int, seed: int) -> Calibration:
    """Sequences for a quantizer: of its own training for a model that was trained here, else of the suite's text.

    Raises:
        Blocked: the text is missing.
    """
    if sequences == 0:
        return Calibration()
    if own_data.was_trained_here(model):
        return own_data.calibration(model, data, cache, sequences, seed)
    return calibrate.batches_for(model, data.calibration_text(), sequences=sequences, seed=seed)
