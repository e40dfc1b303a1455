"""Scores of tokens: final hidden states, logits, and log-probabilities with the head taken in chunks of tokens."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int, Int64
from torch import Tensor

from quant_bench.attention import ATTENTION
from quant_bench.errors import ModelError, QuantizationError
from quant_bench.model import LanguageModel

CHUNK_TOKENS = 256


class Scored(NamedTuple):
    """What the model says about given next tokens.

    Attributes:
        log_probs: natural log of the probability of each target, float64 so that sums over a text lose nothing.
        greedy: whether the target is the most probable token.
        argmax: the most probable token (the lowest id among equals).
    """

    log_probs: Float64[Tensor, " token"]
    greedy: Bool[Tensor, " token"]
    argmax: Int64[Tensor, " token"]


@torch.inference_mode()
def final_hidden(model: LanguageModel, ids: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq width"]:
    """Hidden states after the final norm, one full forward pass of the body without a cache.

    Every position counts as a token: there is no padding here, so no row can influence another one unless the model
    is not `token_independent`.

    Raises:
        ModelError: attention is computed elsewhere than at `quant_bench.attention`: without what an arm or a quantizer
            changed in it.
    """
    chosen = model.config.get_text_config()._attn_implementation
    if chosen != ATTENTION:
        raise ModelError(f"{type(model.module).__name__} has attn_implementation={chosen!r}, not {ATTENTION!r}")
    return model.body(input_ids=ids.to(model.device), use_cache=False).last_hidden_state


@torch.inference_mode()
def logits(model: LanguageModel, hidden: Float[Tensor, "*rows width"]) -> Float32[Tensor, "*rows vocab"]:
    """Next-token logits in float32: the head, then the configuration's soft cap where it has one (Gemma).

    Source of the cap c·tanh(x/c): Gemma Team 2024, section 2, https://arxiv.org/abs/2408.00118.
    """
    out = model.head(hidden).float()
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return out if cap is None else torch.tanh(out / cap) * cap


@torch.inference_mode()
def target_log_probs(
    model: LanguageModel,
    hidden: Float[Tensor, "token width"],
    targets: Int[Tensor, " token"],
    *,
    chunk: int = CHUNK_TOKENS,
) -> Scored:
    """Log-probability of one target at each hidden state.

    The head runs on `chunk` tokens at a time, so only chunk × vocab logits exist at once. Each log-probability is
    target logit - logsumexp, both of float32 logits, subtracted in float64.

    Args:
        model: float or quantized.
        hidden: final hidden states of the positions before the targets.
        targets: next-token ids.
        chunk: tokens a chunk.

    Raises:
        QuantizationError: a log-probability is not a number.
    """
    targets = targets.to(hidden.device)
    log_probs = torch.empty(len(targets), dtype=torch.float64, device=hidden.device)
    best = torch.empty(len(targets), dtype=torch.int64, device=hidden.device)
    for start in range(0, len(targets), chunk):
        piece = slice(start, start + chunk)
        scores = logits(model, hidden[piece])
        picked = scores.gather(1, targets[piece, None].long())[:, 0]
        best[piece] = scores.argmax(-1)
        log_probs[piece] = picked.double() - torch.logsumexp(scores, -1).double()
    if not bool(torch.isfinite(log_probs).all()):
        first = int((~torch.isfinite(log_probs)).nonzero()[0, 0])
        raise QuantizationError(f"the logits are not finite at position {first} of {len(targets)}: no score exists")
    return Scored(log_probs, best == targets, best)
