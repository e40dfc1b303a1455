"""Packed forward: a batch is a forest of token segments in one flat row, so nothing is padded or computed twice.

Every segment continues a path: an earlier segment of the row, or tokens whose keys and values are at hand (`Memory`).
Linears, norms and embeddings see one row [1, total]; attention runs per segment over its path's keys and its own, so
what else lies in the row never touches a segment's attention, and no total × total mask exists.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from quant_bench.attention import ATTENTION, Key, Query, attend, causal_mask, set_router
from quant_bench.errors import ModelError
from quant_bench.model import LanguageModel

Path = Float[Tensor, "batch kv_head path dim"]


class Memory:
    """Keys and values of a path of tokens, as every attention module left them, with room to grow.

    One contiguous buffer a module, so that decoding appends in place; starting from another memory copies it once.

    Args:
        capacity: tokens that it can hold.
        start: a memory whose tokens come first, or None.
    """

    def __init__(self, capacity: int, start: "Memory | None" = None) -> None:
        self.capacity = capacity
        self.length: int = 0 if start is None else start.length
        self._start = start
        self._buffers: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def view(self, module: nn.Module, length: int) -> tuple[Path, Path]:
        """Keys and values of the first `length` tokens, not copied."""
        if module not in self._buffers and self._start is not None:
            return self._start.view(module, length)
        keys, values = self._buffers[module]
        return keys[:, :, :length], values[:, :, :length]

    def append(self, module: nn.Module, key: Key, value: Key) -> tuple[Path, Path]:
        """Write behind the present tokens and return the whole path.

        `length` moves on only when the forward pass ends: all modules write at the same place.
        """
        if module not in self._buffers:
            shapes = [(1, new.shape[1], self.capacity, new.shape[3]) for new in (key, value)]
            room = key.new_empty(shapes[0]), value.new_empty(shapes[1])
            if self._start is not None:
                for buffer, old in zip(room, self._start.view(module, self._start.length), strict=True):
                    buffer[:, :, : self._start.length] = old
            self._buffers[module] = room
        end = self.length + key.shape[2]
        for buffer, new in zip(self._buffers[module], (key, value), strict=True):
            buffer[:, :, self.length : end] = new
        return self.view(module, end)


@dataclass(frozen=True, eq=False)
class Segment:
    """A run of tokens that continues a path.

    Attributes:
        tokens: at least one token id.
        parent: what comes before: None (nothing), the index of an earlier segment of the row, or a memory.
        keep: append the keys and values to the parent, which must then be a memory of this segment alone.
    """

    tokens: Sequence[int]
    parent: "int | Memory | None" = None
    keep: bool = False


class _Row:
    """The router of one packed forward."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        self.stops = list(accumulate(len(segment.tokens) for segment in segments))
        self.parents = {segment.parent for segment in segments if isinstance(segment.parent, int)}
        self.used = False
        self.depths: list[int] = []
        for segment in segments:
            above = segment.parent
            if isinstance(above, Memory):
                self.depths.append(above.length)
            else:
                self.depths.append(0 if above is None else self.depths[above] + len(segments[above].tokens))
        self._masks: dict[tuple[int, int, int | None], Bool[Tensor, "query key"] | None] = {}

    def ids(self) -> list[int]:
        return [token for segment in self.segments for token in segment.tokens]

    def positions(self) -> list[int]:
        pairs = zip(self.depths, self.segments, strict=True)
        return [depth + step for depth, segment in pairs for step in range(len(segment.tokens))]

    def __call__(
        self, module: nn.Module, query: Query, key: Key, value: Key, scaling: float, window: int | None
    ) -> Query:
        self.used = True
        # token before head in memory, so that transformers' transpose back costs nothing
        mixed = query.new_empty((1, query.shape[2], query.shape[1], value.shape[3])).transpose(1, 2)
        paths: dict[int, tuple[Tensor, Tensor]] = {}
        start = 0
        for index, (segment, stop) in enumerate(zip(self.segments, self.stops, strict=True)):
            keys, values = self._path(module, segment, paths, key[:, :, start:stop], value[:, :, start:stop])
            if index in self.parents:
                paths[index] = keys, values
            seen = keys.shape[2] if window is None else min(keys.shape[2], stop - start + window - 1)
            mask = self._mask(stop - start, seen, window, query.device)
            mixed[:, :, start:stop] = attend(
                module, query[:, :, start:stop], keys[:, :, -seen:], values[:, :, -seen:], mask=mask, scaling=scaling
            )
            start = stop
        return mixed

    def _path(
        self, module: nn.Module, segment: Segment, paths: dict[int, tuple[Tensor, Tensor]], key: Key, value: Key
    ) -> tuple[Tensor, Tensor]:
        above = segment.parent
        if isinstance(above, Memory):
            if segment.keep:
                return above.append(module, key, value)
            if above.length == 0:
                return key, value
            before = above.view(module, above.length)
        elif above is None:
            return key, value
        else:
            before = paths[above]
        return torch.cat((before[0], key), 2), torch.cat((before[1], value), 2)

    def _mask(self, query: int, key: int, window: int | None, device: torch.device) -> Tensor | None:
        """None where the core's own causal rule says it; else made once for all layers."""
        windowed = window if window is not None and key > window else None
        if query == 1 or (query == key and windowed is None):
            return None
        want = (query, key, windowed)
        if want not in self._masks:
            self._masks[want] = causal_mask(query, key, windowed, device)
        return self._masks[want]


@torch.inference_mode()
def packed_hidden(model: LanguageModel, segments: Sequence[Segment]) -> Float[Tensor, "token width"]:
    """Final hidden states (after the final norm) of all tokens of a row of segments, in order.

    Equal to separate forward passes of every path from its root, but for the rounding of differently shaped matrix
    products; only for models that are `token_independent` may a row hold more than one path.

    Args:
        model: float or quantized.
        segments: parents stand before their children.

    Raises:
        ModelError: the model computes attention elsewhere than at `quant_bench.attention`.
    """
    row = _Row(segments)
    ids = torch.tensor([row.ids()], device=model.device)
    positions = torch.tensor([row.positions()], device=model.device)
    set_router(row)
    try:
        hidden = model.body(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
    finally:
        set_router(None)
    if not row.used:
        raise ModelError(f"{type(model.module).__name__} is not loaded with attn_implementation={ATTENTION!r}")
    for segment in segments:
        if segment.keep and isinstance(segment.parent, Memory):
            segment.parent.length += len(segment.tokens)
    return hidden[0]
