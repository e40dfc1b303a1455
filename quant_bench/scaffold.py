"""Files that `quant-bench new` writes: a plugin of each kind that keeps its contract, and its test. Knows no torch."""

import keyword
import re
from dataclasses import dataclass
from pathlib import Path

from quant_bench import registry, schemes
from quant_bench.errors import SpecError

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


@dataclass(frozen=True)
class Scaffold:
    """What is written for one plugin: paths and texts."""

    files: dict[Path, str]

    def write(self) -> None:
        """Write every file.

        Raises:
            SpecError: one of them is there already; then none is written.
        """
        there = [str(path) for path in self.files if path.exists()]
        if there:
            raise SpecError(f"{' and '.join(there)} exists already; choose another name, or move it away")
        for path, text in self.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            # exclusive: what appeared in the meantime is not overwritten either
            with path.open("x", encoding="utf-8") as file:
                file.write(text)


def scaffold(kind: registry.Kind, name: str, folder: Path) -> Scaffold:
    """A plugin and its test in a plugin folder, or in this project's checkout.

    Args:
        kind: of the plugin.
        name: of the file: lower case, words joined by underscores.
        folder: what `--plugins` names; `folder/quantizers/name.py` and `folder/tests/test_name.py` are its files. In a
            checkout arms lie in `quant_bench/arms`.

    Raises:
        SpecError: the name is none, or taken.
    """
    word = kind.removesuffix("s")
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise SpecError(f"a {word}'s name is a lower-case word, or words joined by underscores; got {name!r}")
    if kind == "quantizers" and schemes.looks_like_one(name):
        raise SpecError(f"{name!r} reads like a scheme; choose a name that does not begin with bits")
    if name in registry.names(kind):
        raise SpecError(f"there is a {word} named {name!r} already; choose another name")
    plugin, test = _TEMPLATES[kind]
    named = registry.class_name(name)
    if re.search(rf"\b{named}\b", plugin):
        raise SpecError(f"the class {named} would hide what the file imports; choose another name")
    checkout = (folder / "quant_bench" / "_roots.py").is_file()
    inside = folder / "quant_bench" / "arms" if checkout and kind == "arms" else folder / kind
    setup = "" if checkout else _SETUP
    texts = (plugin, test.replace("SETUP", setup).replace("IMPORTS", "" if checkout else _IMPORTS))
    plugin, test = (text.replace("CLASS", named).replace("NAME", name) for text in texts)
    return Scaffold({inside / f"{name}.py": plugin, folder / "tests" / f"test_{name}.py": test})


_IMPORTS = """from pathlib import Path

import pytest

"""
_SETUP = """

@pytest.fixture(autouse=True)
def this_folder_is_a_plugin_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANT_BENCH_PATH", str(Path(__file__).resolve().parent.parent))
"""

_QUANTIZER = '''"""NAME: one line on what the recipe does, for `quant-bench list`."""

from dataclasses import dataclass

from torch import nn

from quant_bench.errors import SpecError
from quant_bench.lowbit.codes import WeightCodes
from quant_bench.model import LanguageModel, LinearSite
from quant_bench.quantization import apply_scheme, nearest, weight_of
from quant_bench.quantizer import Calibration, SchemeQuantizer


@dataclass(frozen=True)
class CLASS(SchemeQuantizer):
    """Clips each weight to a share of the largest magnitude in its channel, then rounds to nearest.

    Attributes:
        clip: that share, above 0 and at most 1.

    Source: none; a start. Name the paper, with the section or equation, of what you write here.
    """

    clip: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.clip <= 1.0:
            raise SpecError(f"clip must be above 0 and at most 1; got {self.clip!r}")

    def quantize(self, model: LanguageModel, calibration: Calibration) -> LanguageModel:
        def weights(site: LinearSite, linear: nn.Module) -> WeightCodes:
            # (output, input), whichever way round the module keeps it
            weight = weight_of(linear).float()
            largest = self.clip * weight.abs().amax(1, keepdim=True)
            return nearest(weight.clamp(-largest, largest), self)

        return apply_scheme(model, self, calibration, weights)
'''

_QUANTIZER_TEST = '''"""NAME keeps the contract of quantizers."""

IMPORTSfrom quant_bench import registry
from quant_bench.testing import check_quantizer
SETUP

def test_NAME_keeps_the_contract() -> None:
    assert check_quantizer(registry.build("quantizers", "NAME")) == {}
'''

_ARM = '''"""NAME: one line on what the mechanism does, for `quant-bench list`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quant_bench.arm import Arm, Attended
from quant_bench.errors import SpecError
from quant_bench.mechanisms import set_normalizer
from quant_bench.mechanisms.normalizers import safe_softmax
from quant_bench.model import LanguageModel


@dataclass(frozen=True)
class CLASS(Arm):
    """softmax(s / temperature): flatter than softmax above 1, sharper below.

    Attributes:
        temperature: above 0.

    Source: none; a start. Name the paper, with the section or equation, of what you write here.
    """

    temperature: float = 2.0

    def __post_init__(self) -> None:
        if not self.temperature > 0.0:
            raise SpecError(f"temperature must be above 0; got {self.temperature!r}")

    def attach(self, model: LanguageModel) -> LanguageModel:
        return set_normalizer(model, lambda scores, null: safe_softmax(scores / self.temperature))

    def normalize(self, a: Attended, scores: Tensor) -> Tensor:
        # the plain definition that what `attach` installs is held to; a row that sees nothing reads nothing
        return torch.softmax(scores / self.temperature, -1).nan_to_num(0.0)
'''

_ARM_TEST = '''"""NAME keeps the contract of arms."""

IMPORTSfrom quant_bench import registry
from quant_bench.testing import check_arm
SETUP

def test_NAME_keeps_the_contract() -> None:
    assert check_arm(registry.build("arms", "NAME"), ("llama", "gpt2")) == {}
'''

_TASK = '''"""NAME: one line on what the task asks, for `quant-bench list`."""

import hashlib
from dataclasses import dataclass

import pandas as pd
import torch

from quant_bench.errors import SpecError
from quant_bench.model import LanguageModel
from quant_bench.score import Metric
from quant_bench.scoring import final_hidden, target_log_probs
from quant_bench.task import Context, Evaluation, Measure, Task

ITEMS = ("tree", "river", "seven", "blue", "engine", "winter", "paper", "north")


@dataclass(frozen=True)
class CLASS(Task):
    """Nats of a word's last token after the model has read the word several times.

    Attributes:
        repeats: how often the word stands there, at least 2.

    Source: none; a start. Name where the questions come from.
    """

    repeats: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.repeats < 2:
            raise SpecError(f"repeats must be at least 2; got {self.repeats!r}")

    def evaluate(self, model: LanguageModel, context: Context) -> Evaluation:
        rows = []
        asked = ITEMS[: self.limit]
        for item, word in enumerate(asked):
            ids = torch.tensor([model.tokenizer.encode(f" {word}" * self.repeats)])
            hidden = final_hidden(model, ids)[0, -2:-1]
            found = target_log_probs(model, hidden, ids[0, -1:].to(hidden.device))
            # one row an item; `item` means the same question whatever the quantizer
            rows.append({"item": item, "nll": -float(found.log_probs)})
        return Evaluation(
            measures=[Measure(Metric("nll", "nats/token", "lower", "mean"), "nll")],
            samples=pd.DataFrame(rows),
            data_sha256=hashlib.sha256(" ".join(asked).encode()).hexdigest(),
            convention=f"repeats={self.repeats}",
        )
'''

_TASK_TEST = '''"""NAME keeps the contract of tasks."""

IMPORTSfrom quant_bench import registry
from quant_bench.testing import check_task
SETUP

def test_NAME_keeps_the_contract() -> None:
    found = check_task(registry.build("tasks", "NAME(limit=2)"))
    assert len(found.samples) == 2
'''

_TEMPLATES: dict[registry.Kind, tuple[str, str]] = {
    "quantizers": (_QUANTIZER, _QUANTIZER_TEST),
    "arms": (_ARM, _ARM_TEST),
    "tasks": (_TASK, _TASK_TEST),
}
