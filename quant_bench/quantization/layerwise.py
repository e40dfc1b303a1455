"""Running decoder layers one at a time over calibration batches: only one layer's inputs are held, or lie on disk."""

import copy
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor

from quant_bench.cache import tensor_files
from quant_bench.errors import QuantizationError
from quant_bench.model import LanguageModel
from quant_bench.quantizer import Calibration

# a folder: states of the calibration pass are written there instead of being held
SPILL_VARIABLE = "QUANT_BENCH_SPILL"

State = Float[Tensor, "batch seq width"]
_Call = tuple[tuple[Any, ...], dict[str, Any]]


class LayerStream:
    """The inputs of one decoder layer after the other, over all calibration batches.

    The body runs once a batch with its layers skipped: that gives the first layer's input and what the body passes to
    every layer (masks, position embeddings). From there `advance` turns the inputs of a layer into those of the next.
    So each layer runs once to be looked at and once to be left behind, and the head never.

    With the environment variable `QUANT_BENCH_SPILL` naming a folder, states lie there and one batch is in memory; the
    results are the same. A context manager: its exit lets go of all states, on disk too.

    Attributes:
        layer: index of the decoder layer whose inputs are held.
    """

    def __init__(self, model: LanguageModel, calibration: Calibration) -> None:
        """Capture the first layer's inputs.

        Raises:
            QuantizationError: there is no calibration batch.
        """
        if not calibration.batches:
            raise QuantizationError("this recipe needs calibration batches, and there are none")
        self.layer = 0
        self._layers: list[Any] = [model.module.get_submodule(path) for path in model.layout.layers]
        folder = os.environ.get(SPILL_VARIABLE)
        self._folder = None if folder is None else tempfile.TemporaryDirectory(dir=folder, prefix="states-")
        self._states: list[State | Path] = []
        self._calls: list[list[_Call]] = []
        try:
            with torch.no_grad():
                for ids in calibration.batches:
                    state, calls = self._captured(model, ids.to(model.device))
                    self._states.append(self._kept(len(self._states), state))
                    self._calls.append(calls)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def _captured(self, model: LanguageModel, ids: Tensor) -> tuple[State, list[_Call]]:
        """Input of the first layer, and the further arguments of each."""
        first: list[State] = []
        calls: list[_Call] = []

        def skip(hidden_states: State, *arguments: Any, **given: Any) -> State:
            first.append(hidden_states)
            calls.append((arguments, given))
            return hidden_states

        for layer in self._layers:
            layer.forward = skip
        try:
            model.body(input_ids=ids, use_cache=False)
        finally:
            for layer in self._layers:
                del layer.forward
        if any(not torch.equal(state, first[0]) for state in first):
            raise QuantizationError("layers of this model do not read the layer before them; they cannot run alone")
        return first[0], calls

    def __enter__(self) -> "LayerStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._states.clear()
        if self._folder is not None:
            self._folder.cleanup()

    def _kept(self, batch: int, state: State) -> State | Path:
        if self._folder is None:
            return state
        file = Path(self._folder.name) / f"{batch}.safetensors"
        with tensor_files(file.parent):
            save_file({"state": state.contiguous()}, file)
        return file

    @property
    def batches(self) -> int:
        """Number of calibration batches."""
        return len(self._states)

    def state(self, batch: int) -> State:
        """The layer's input (after the last layer: its output)."""
        kept = self._states[batch]
        return load_file(kept)["state"].to(self._device()) if isinstance(kept, Path) else kept

    def _device(self) -> torch.device:
        return next(self._layers[min(self.layer, len(self._layers) - 1)].parameters()).device

    def call(self, batch: int) -> _Call:
        """What the layer is called with beside its input; to call it any number of times."""
        arguments, options = self._calls[batch][self.layer]
        # an arm's own objects may remember what they were called with (routers over depth do)
        return arguments, {name: value if _plain(value) else copy.deepcopy(value) for name, value in options.items()}

    def _outputs(self, final: bool) -> Iterator[tuple[int, State]]:
        for batch in range(self.batches):
            arguments, options = self._calls[batch][self.layer] if final else self.call(batch)
            with torch.no_grad():
                output = self._layers[self.layer](self.state(batch), *arguments, **options)
            yield batch, output[0] if isinstance(output, tuple) else output

    def run(self, each: Callable[[], None] | None = None) -> None:
        """Run the layer over all batches for the sake of hooks; its inputs stay.

        Args:
            each: called after each batch.
        """
        for _ in self._outputs(final=False):
            if each is not None:
                each()

    def advance(self) -> None:
        """Run the layer as it is now, and hold its outputs as the inputs of the next layer."""
        for batch, state in self._outputs(final=True):
            self._states[batch] = self._kept(batch, state)
        self.layer += 1


def _plain(value: Any) -> bool:
    """Whether an argument cannot change when a layer is called with it."""
    if isinstance(value, tuple | list):
        return all(_plain(part) for part in value)
    return value is None or isinstance(value, Tensor | bool | int | float | str | dict)
