"""What quantization loses in one place: the value vectors of a text's first token, which attention sinks read.

    python examples/intact_first_token.py smollm2-135m-instruct w4a16 gptq:w4a16 --data DIR

Of each quantizer the loss in nats a token against float, and what it changes when the float model's values are put back
at the first position of every layer; all other numbers stay as quantized. That keys and values of such a token should
be kept intact is the finding of IntactKV (Liu et al. 2024, https://arxiv.org/abs/2403.01241).
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import quant_bench as qb
from quant_bench.data import DataSource
from quant_bench.model import LanguageModel
from quant_bench.scoring import final_hidden, target_log_probs
from quant_bench.statistics import spread_of
from quant_bench.windows import WindowSettings, cut

# path of a value projection -> what it put out for the first token of a window
First = dict[str, Tensor]


@contextmanager
def hooked(model: LanguageModel, hook: Callable[[str], Callable[..., Any]]) -> Iterator[None]:
    """A forward hook on every value projection."""
    paths = [site.path for site in model.layout.linears if site.role == "value"]
    if not paths:
        raise SystemExit("this layout has no value projection of its own (query, key and value are one matrix)")
    handles = [model.module.get_submodule(path).register_forward_hook(hook(path)) for path in paths]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def keeping(found: First) -> Callable[[str], Callable[..., None]]:
    def hook(path: str) -> Callable[..., None]:
        def keep(module: nn.Module, arguments: Any, output: Tensor) -> None:
            found[path] = output[:, :1].clone()

        return keep

    return hook


def putting(first: First) -> Callable[[str], Callable[..., Tensor]]:
    def hook(path: str) -> Callable[..., Tensor]:
        return lambda module, arguments, output: torch.cat([first[path], output[:, 1:]], 1)

    return hook


@torch.inference_mode()
def loss(model: LanguageModel, ids: Tensor) -> float:
    """Mean negative log-likelihood of one window, in nats a token."""
    hidden = final_hidden(model, ids)[0, :-1]
    return -float(target_log_probs(model, hidden, ids[0, 1:]).log_probs.double().mean())


def told(name: str, differences: list[float]) -> str:
    """A mean difference with its 95 % Student interval over windows."""
    spread = spread_of(differences)
    interval = "" if spread.ci95 is None else f" [{spread.ci95[0]:.6f}, {spread.ci95[1]:.6f}]"
    return f"{name} {spread.mean:.6f}{interval}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("quantizers", nargs="+")
    parser.add_argument("--data", type=Path, help="mirror of the data sets")
    parser.add_argument("--text", default="wikitext2")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--seq-length", type=int, default=512)
    options = parser.parse_args()

    model = qb.load_model(options.model)
    cutting = WindowSettings(seq_length=options.seq_length)
    windows = cut(
        DataSource(options.data).text(options.text).rows, model, cutting, wikitext=options.text == "wikitext2"
    )
    texts = [windows.ids(index) for index in range(options.windows)]
    plain, first = [], []
    for ids in texts:
        first.append(First())
        with hooked(model, keeping(first[-1])):
            plain.append(loss(model, ids))
    print(f"float {np.mean(plain):.3f} nats a token, {len(texts)} windows of {options.seq_length} tokens")
    for name in options.quantizers:
        quantized = qb.quantize(qb.load_model(options.model), name, data=options.data)
        lost = [loss(quantized, ids) for ids in texts]
        kept = []
        for ids, values in zip(texts, first, strict=True):
            with hooked(quantized, putting(values)):
                kept.append(loss(quantized, ids))
        of_all = [a - b for a, b in zip(lost, plain, strict=True)]
        of_first = [a - b for a, b in zip(kept, lost, strict=True)]
        print(f"{name}: {told('against float', of_all)}; {told('with the first values of float', of_first)}")


if __name__ == "__main__":
    main()
