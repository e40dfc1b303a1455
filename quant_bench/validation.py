"""Validation: loss of a model that was trained here on sequences that no arm of its tier has seen."""

import numpy as np

from quant_bench.model import LanguageModel
from quant_bench.perplexity import HELD_OUT, TextWindows, perplexity
from quant_bench.score import Metric
from quant_bench.task import Context, Evaluation, Measure
from quant_bench.training import own_data

LOSS = Metric("loss", "nats/token", "lower", "mean")
COPY_LOSS = Metric("copy_loss", "nats/token", "lower", "mean")
OTHER_LOSS = Metric("other_loss", "nats/token", "lower", "mean")
EXCESS_LOSS = Metric("excess_loss", "nats/token", "lower", "mean")


def validation(model: LanguageModel, context: Context, limit: int | None) -> Evaluation:
    """Next-token cross-entropy over held-out sequences, every token but a sequence's first.

    For Bigram-Backcopy also its parts: `copy_loss` at the tokens that repeat the one before last (at least 0),
    `other_loss` at all others, and `excess_loss`, by how much the latter is above what the source itself gives these
    tokens. Perplexity and what a quantized model is compared by are those of `perplexity.perplexity`.

    Args:
        model: a checkpoint of a tier, float or quantized.
        context: of the task.
        limit: first so many sequences; None for all.

    Raises:
        NotApplicable: the model was not trained here.
        Blocked: the text of its training is missing.
    """
    wanted = TextWindows.p1(HELD_OUT, None, limit)
    found = perplexity(model, context, wanted)
    parts: list[Measure] = []
    held_out = own_data.held_out(model, context.data, context.cache)
    if held_out.copies is not None and held_out.surprise is not None:
        done, _ = wanted.run(model, context, observe=False)
        losses = -np.stack([log_probs.numpy() for log_probs in done.log_probs])
        count, length = losses.shape
        copies = held_out.copies[:count, 1 : length + 1]
        surprise = held_out.surprise[:count, 1 : length + 1]
        frame = found.samples
        frame["copy_nll"], frame["copies"] = (losses * copies).sum(1), copies.sum(1)
        frame["other_nll"], frame["others"] = (losses * ~copies).sum(1), (~copies).sum(1)
        frame["excess_nll"] = ((losses - surprise) * ~copies).sum(1)
        parts = [
            Measure(COPY_LOSS, "copy_nll", "copies"),
            Measure(OTHER_LOSS, "other_nll", "others"),
            Measure(EXCESS_LOSS, "excess_nll", "others"),
        ]
    found.measures = [Measure(LOSS, "nll", "tokens"), *parts, *found.measures]
    found.settings["tier"] = held_out.tier.label
    return found
