"""Tiers: what a matched training fixes, so that its arms differ in nothing else; knows no torch."""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from quant_bench.errors import SpecError
from quant_bench.spec import Spec

PREFIX = "tier:"
# under this name the configuration of a model trained here says what it was trained on
TRAINING_KEY = "quant_bench_training"


@dataclass(frozen=True)
class Tier:
    """A model's shape, its data and its schedule. `CHANGEABLE` names what may be changed by `tier:NAME(key=value,…)`.

    Attributes:
        name: of the tier.
        layout: `llama` (RMSNorm, rotary positions, SwiGLU, no biases) or `gpt2` (LayerNorm, learned positions, GELU,
            biases), head and embedding tied in both; or `base`: a pretrained model that arms are attached to and
            that is trained on (its shape is stated for readers; the model itself decides).
        layers: decoder layers.
        width: of the residual stream.
        heads: of each attention module.
        inner: width of the MLP.
        context: tokens a sequence, in training and at most.
        vocabulary: rows of the embedding.
        tokenizer: `characters`, a byte-level BPE trained on the text (`bpe`), GPT-2's (`gpt2`), or that of the base.
        task: `text`, or sequences of Bigram-Backcopy drawn from the text's bigrams; see `backcopy.Backcopy`.
        text: where documents come from; see `documents.SOURCES`.
        held_out: sequences of validation that no run sees.
        tokens: a run sees, in whole steps.
        batch: sequences a step, over all devices.
        device_batch: sequences at a time on one device at most; gradients are accumulated up to `batch`.
        learning_rate: its peak, after a linear warm-up; a cosine takes it to a tenth.
        warmup: share of the steps.
        weight_decay: of matrices, the exclusions of the arms left out.
        bf16: whether products run in bfloat16 (autocast; the weights stay float32).
        base: what layout `base` starts from, as `load_model` takes it.
    """

    name: str
    layout: Literal["llama", "gpt2", "base"]
    layers: int
    width: int
    heads: int
    inner: int
    context: int
    vocabulary: int
    tokenizer: Literal["characters", "bpe", "gpt2", "base"]
    task: Literal["text", "backcopy"]
    text: str
    held_out: int
    tokens: int
    batch: int
    device_batch: int
    learning_rate: float
    warmup: float = 0.05
    weight_decay: float = 0.1
    bf16: bool = False
    base: str = ""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise SpecError(f"a step of tier {self.name} takes {self.tokens_a_step} tokens; got tokens={self.tokens}")
        # a run consists of whole steps, so budgets that mean the same run are the same tier
        object.__setattr__(self, "tokens", self.steps * self.tokens_a_step)

    @property
    def tokens_a_step(self) -> int:
        """Tokens that one optimizer step sees."""
        return self.batch * self.context

    @property
    def steps(self) -> int:
        """Optimizer steps of a run."""
        return self.tokens // self.tokens_a_step

    @property
    def warmup_steps(self) -> int:
        """Steps until the learning rate is at its peak."""
        return round(self.warmup * self.steps)

    @property
    def label(self) -> str:
        """The one text for a tier: its name and what differs from the named one."""
        named = TIERS[self.name]
        changed = {key: getattr(self, key) for key in CHANGEABLE if getattr(self, key) != getattr(named, key)}
        return str(Spec(f"{PREFIX}{self.name}", changed))

    @property
    def settings(self) -> dict[str, Any]:
        """Every field, for digests and records."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


CHANGEABLE = ("tokens", "text", "bf16")


def _llama(name: str, shape: tuple[int, int, int, int], tokens: int, batch: int, learning_rate: float) -> Tier:
    """A tier above `micro`: context 1,024, GPT-2's BPE, FineWeb-Edu, bfloat16."""
    layers, width, heads, inner = shape
    return Tier(
        name=name,
        layout="llama",
        layers=layers,
        width=width,
        heads=heads,
        inner=inner,
        context=1024,
        vocabulary=50257,
        tokenizer="gpt2",
        task="text",
        text="fineweb_edu",
        held_out=1024,
        tokens=tokens,
        batch=batch,
        device_batch=16,
        learning_rate=learning_rate,
        bf16=True,
    )


def _toy(name: str, layout: Literal["llama", "gpt2"], layers: int, heads: int) -> Tier:
    """Bigram-Backcopy in a model small enough to watch.

    Source: Guo et al. 2024, https://arxiv.org/abs/2410.13835, with a quarter of its context, half its width, an eighth
    of its batch and thrice its learning rate, so that a run takes minutes on one core.
    """
    inner = 512 if layout == "gpt2" else 352
    return Tier(
        name=name,
        layout=layout,
        layers=layers,
        width=128,
        heads=heads,
        inner=inner,
        context=64,
        vocabulary=64,
        tokenizer="characters",
        task="backcopy",
        text="wikitext2_validation",
        held_out=1024,
        tokens=2000 * 64 * 64,
        batch=64,
        device_batch=64,
        learning_rate=1e-3,
        weight_decay=1e-4,
    )


_MICRO = Tier(
    name="micro",
    layout="llama",
    layers=5,
    width=128,
    heads=4,
    inner=352,
    context=256,
    vocabulary=4096,
    tokenizer="bpe",
    task="text",
    text="wikipedia_en_2014",
    held_out=512,
    tokens=3_000_000,
    batch=8,
    device_batch=8,
    learning_rate=2e-3,
)

_SMOLLM2 = Tier(
    name="smollm2",
    layout="base",
    base="smollm2-135m-instruct",
    layers=30,
    width=576,
    heads=9,
    inner=1536,
    context=256,
    vocabulary=49152,
    tokenizer="base",
    task="text",
    text="wikipedia_en_2014",
    held_out=128,
    tokens=200 * 4 * 256,
    batch=4,
    device_batch=4,
    # rate and share of warm-up of the published conversion: arXiv 2605.17887, appendices E and F
    learning_rate=5e-5,
    warmup=0.2,
)

# shapes and budgets of the larger ones: 20, 19, 13 and 17 tokens a parameter in the paper's own naming
TIERS = {
    tier.name: tier
    for tier in (
        _toy("toy", "gpt2", layers=1, heads=1),
        _toy("toy-3", "gpt2", layers=3, heads=1),
        _toy("toy-rope", "llama", layers=3, heads=2),
        _MICRO,
        _SMOLLM2,
        _llama("10m", (6, 384, 6, 1024), 200_000_000, 64, 1e-3),
        _llama("50m", (10, 640, 10, 1728), 950_000_000, 128, 8e-4),
        _llama("124m", (12, 768, 12, 2048), 1_600_000_000, 256, 6e-4),
        _llama("350m", (24, 1024, 16, 2752), 5_800_000_000, 512, 3e-4),
    )
}


def is_tier(model: str) -> bool:
    """Whether a model's name stands for checkpoints that are trained here."""
    return model.startswith(PREFIX)


def tier_of(model: str) -> Tier:
    """The tier that `tier:NAME` or `tier:NAME(key=value,…)` stands for.

    Settings are `tokens`, or `steps` instead of it, `text` and `bf16`.

    Raises:
        SpecError: there is no such tier or setting, or a value is out of range.
    """
    spec = Spec.parse(model)
    name = spec.name.removeprefix(PREFIX)
    if not is_tier(spec.name) or name not in TIERS:
        raise SpecError(f"no tier {name!r}; there are {', '.join(TIERS)}")
    return changed(TIERS[name], **spec.settings)


def changed(tier: Tier, **settings: Any) -> Tier:
    """A tier with other settings; None leaves one as it is.

    Raises:
        SpecError: no such setting, or a value is out of range.
    """
    values = {key: value for key, value in settings.items() if value is not None}
    unknown = sorted(set(values) - {*CHANGEABLE, "steps"})
    if unknown:
        raise SpecError(f"a tier has no setting {unknown[0]!r} to change (it has {', '.join(CHANGEABLE)}, steps)")
    if "steps" in values:
        if "tokens" in values:
            raise SpecError("steps and tokens of a tier say the same thing: give one of them")
        values["tokens"] = _whole("steps", values.pop("steps")) * tier.tokens_a_step
    if "tokens" in values:
        values["tokens"] = _whole("tokens", values["tokens"])
    if not isinstance(values.get("text", ""), str) or not isinstance(values.get("bf16", False), bool):
        raise SpecError(f"text of a tier is a word and bf16 is True or False; got {settings!r}")
    return replace(tier, **values)


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(f"{name} of a tier is a whole number from 1; got {value!r}")
    return value
