"""Arms on models: attaching one by name, and loading the weights of a model that has one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from quant_bench import registry
from quant_bench.arm import Arm
from quant_bench.errors import ModelError
from quant_bench.model import LanguageModel
from quant_bench.models.folders import ARM_KEY

_MOVE_TOKENS = 64


def arm_of(model: LanguageModel) -> str:
    """Canonical text of the arm that a model has; `softmax` for the model as it is."""
    return getattr(model.config, ARM_KEY, "softmax")


def attach(model: LanguageModel, arm: str | Arm, seed: int = 0) -> LanguageModel:
    """Give a float model an attention mechanism.

    Args:
        model: given away; use the one returned.
        arm: spec such as `clipped_softmax(gamma=-0.03)` or `sink_logit+norm_gate`, or an instance.
        seed: of initial values that are drawn (output gates, sink token); all others are constants.

    Raises:
        ModelError: the model has another arm already: its weights belong to that one.
        NotApplicable: the mechanism makes no sense for this model.
        SpecError, UnknownPlugin: the text names no arm.
    """
    built = registry.build("arms", arm) if isinstance(arm, str) else arm
    text, present = registry.canonical("arms", built), arm_of(model)
    if model.recipe is not None and text != present:
        raise ModelError(f"{model.identity.name!r} is quantized ({model.recipe.quantizer}): attach {text} before that")
    if present != "softmax":
        if present == text:
            return model
        raise ModelError(f"{model.identity.name!r} was made with arm {present}: ask for that one, not for {text}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = built.attach(model)
    if text != "softmax":
        setattr(model.config, ARM_KEY, text)
    return model


def attach_to_trained(model: LanguageModel, arm: str | Arm, seed: int = 0) -> LanguageModel:
    """Attach an arm to weights that were trained without it, and note in the identity how far that moves the model.

    Compared are the next-token distributions on 64 random tokens: what a reader should know before taking the arm's
    score for the mechanism's merit. Errors and arguments as for `attach`.
    """
    if arm_of(model) != "softmax":
        return attach(model, arm, seed)
    length = min(_MOVE_TOKENS, model.max_length)
    rows = int(model.config.get_text_config().vocab_size)
    ids = torch.randint(rows, (1, length), generator=torch.Generator().manual_seed(0)).to(model.device)
    before = _log_probabilities(model, ids)
    model = attach(model, arm, seed)
    if arm_of(model) == "softmax":
        return model
    after = _log_probabilities(model, ids)
    divergence = float((before.exp() * (before - after)).sum(-1).mean())
    largest = float((after - before).abs().max())
    moved = (
        f"arm {arm_of(model)} attached to weights trained without it: on {length} random tokens the mean KL divergence "
        f"is {divergence:.3g} nats, the largest change of a log-probability {largest:.3g}"
    )
    notes = "; ".join(note for note in (model.identity.note, moved) if note)
    model.identity = replace(model.identity, note=notes)
    return model


@torch.inference_mode()
def _log_probabilities(model: LanguageModel, ids: Tensor) -> Tensor:
    module: Any = model.module
    logits: Tensor = module(input_ids=ids, use_cache=False).logits
    return torch.log_softmax(logits.double(), -1)


def load_weights(module: nn.Module, files: list[Path], name: str) -> None:
    """Fill a model that has its arm from safetensors files; nothing may be missing, left over or of another shape.

    Raises:
        ModelError: a file is damaged, or weights and model do not fit.
    """
    try:
        state = {key: value for file in files for key, value in load_file(file).items()}
    except SafetensorError as error:
        raise ModelError(f"{name!r} cannot be loaded: {error}") from error
    own = module.state_dict()
    # a tied head is stored once
    stored = {own[key].data_ptr() for key in state if key in own}
    missing = sorted(key for key in own if key not in state and own[key].data_ptr() not in stored)
    unknown = sorted(key for key in state if key not in own)
    wrong = sorted(key for key in state if key in own and own[key].shape != state[key].shape)
    for what, keys in (("missing", missing), ("unknown", unknown), ("of another shape", wrong)):
        if keys:
            raise ModelError(f"{name!r}: weights do not fit the configuration and its arm ({what}: {keys[0]})")
    module.load_state_dict(state, strict=False)
