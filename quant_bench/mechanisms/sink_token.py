"""A learned token before every sequence: prepended behind the embeddings, dropped before the head."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from quant_bench.attention import is_packed
from quant_bench.errors import NotApplicable
from quant_bench.mechanisms.install import attentions, shape_of
from quant_bench.model import LanguageModel

# of GPT-2's embeddings, and of the published construction
DEVIATION = 0.02


class SinkToken(nn.Module):
    """The token's vector, as wide as the model."""

    undecayed = ("vector",)

    def __init__(self, width: int, like: Tensor) -> None:
        super().__init__()
        vector = like.new_empty(width).normal_(0.0, DEVIATION)
        self.vector = nn.Parameter(vector, requires_grad=like.requires_grad)


def add_sink_token(model: LanguageModel) -> LanguageModel:
    """Let every sequence start with a learned token.

    It takes no position of the text: where positions are learned it has none (its position embedding is taken off
    again), under rotary embeddings it stands at -1, which is the same as standing at 0 before a text shifted by one.

    Raises:
        NotApplicable: layers see a window only (the token would leave it), or embeddings are projected (OPT-350m).
    """
    config = model.config.get_text_config()
    if getattr(config, "sliding_window", None) is not None:
        raise NotApplicable("a sink token needs layers that see the whole context; this model has a sliding window")
    body: Any = model.body
    if getattr(body, "project_in", None) is not None:
        raise NotApplicable("a sink token needs embeddings as wide as the model; this model projects them")
    if hasattr(body, "sink_token"):
        raise NotApplicable("this arm cannot be attached: the model has a sink token already")
    shape = shape_of(model)
    body.sink_token = SinkToken(shape.width, shape.like)
    for module in attentions(model):
        module.has_sink_token = True
    body.register_forward_pre_hook(_prepend, with_kwargs=True)
    body.register_forward_hook(_drop)
    return model


def _position_embedding(body: Any) -> Tensor | None:
    """Learned embedding of the first position, or None."""
    if hasattr(body, "wpe"):
        return body.wpe.weight[0]
    table = getattr(body, "embed_positions", None)
    return None if table is None else table.weight[table.offset]


def _prepend(body: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs with the token in front, when a sequence starts."""
    options = dict(options)
    if arguments:
        options["input_ids"] = arguments[0]
    ids = options.pop("input_ids", None)
    embeds = options.get("inputs_embeds")
    embeds = body.get_input_embeddings()(ids) if embeds is None else embeds
    # the cache's name before and after transformers 5.2x
    cache = options.get("cache", options.get("past_key_values"))
    cached = 0 if cache is None else int(cache.get_seq_length())
    batch, length, _ = embeds.shape
    body.sink_token.starts = cached == 0
    positions = options.get("position_ids")
    mask = options.get("attention_mask")
    if mask is None and positions is not None and not is_packed() and bool((positions.diff(dim=-1) != 1).any()):
        raise NotApplicable("a sink token stands before one sequence; these position ids are those of several in a row")
    if positions is None and mask is not None and hasattr(body, "embed_positions"):
        # OPT counts positions from the mask
        positions = (mask.cumsum(-1) * mask - 1)[:, -length:]
    elif positions is None:
        positions = torch.arange(length, device=embeds.device)[None] + max(0, cached - 1)
    if mask is not None and mask.dim() != 2:
        raise NotApplicable("a sink token needs attention masks of shape (batch, position)")
    first = _position_embedding(body)
    if cached == 0:
        vector = body.sink_token.vector
        vector = vector if first is None else vector - first
        embeds = torch.cat((vector.to(embeds.dtype).expand(batch, 1, -1), embeds), 1)
        # before the text: rotary positions are relative; a learned one is taken off above
        positions = functional.pad(positions, (1, 0), value=-1 if first is None else 0)
    # stated even where nothing is masked: without it, positions that do not rise by one each are taken for several
    # sequences in one row
    total = embeds.shape[1] + cached
    mask = embeds.new_ones(batch, total, dtype=torch.long) if mask is None else functional.pad(mask, (1, 0), value=1)
    options |= {"inputs_embeds": embeds, "position_ids": positions, "attention_mask": mask}
    return (), options


def _drop(body: Any, arguments: tuple[Any, ...], output: Any) -> Any:
    """Outputs without the token."""
    if not body.sink_token.starts:
        return output
    output.last_hidden_state = output.last_hidden_state[:, 1:]
    if output.get("hidden_states") is not None:
        output.hidden_states = tuple(state[:, 1:] for state in output.hidden_states)
    return output
