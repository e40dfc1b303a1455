"""Shorthands: `w4a4g128-kv8-integer` and `mxfp4` between people and the full settings of a recipe; knows no torch."""

import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Final

from quant_bench.errors import SpecError
from quant_bench.spec import Spec, Value

# what a setting means where it is not named; a test holds them equal to SchemeQuantizer's own defaults, and the
# registry refuses a recipe that changes them: otherwise `w8a8` would mean another thing under another recipe
DEFAULTS: Final[Mapping[str, Value]] = {
    "weight_bits": 8,
    "weight_granularity": "channel",
    "weight_symmetric": True,
    "weight_range": "minmax",
    "activation_bits": 8,
    "activation_granularity": "token",
    "activation_symmetric": True,
    "activation_static": False,
    "activation_range": "minmax",
    "percentile": 100.0,
    "momentum": 0.9,
    "calibration_batches": 4,
    "group_size": 128,
    "scope": "linear",
    "kv_bits": 16,
    "execution": "simulated",
}

# the protocol of the clipped-softmax, gated-attention and OutEffHop tables
_STATIC: Final[Mapping[str, Value]] = {
    "weight_granularity": "tensor",
    "weight_range": "mse",
    "activation_granularity": "tensor",
    "activation_symmetric": False,
    "activation_static": True,
    "activation_range": "running_minmax",
    "percentile": 99.999,
    "scope": "full",
}

SCHEMES: Final[Mapping[str, str]] = {
    "w8a8": "weights per channel, activations per token, both symmetric, dynamic ranges",
    "w8a8-static": "per tensor, static asymmetric activations, every activation tensor: the outlier papers' protocol",
    "w4a8": "weights in groups of 128, activations per token",
    "w4a4": "weights per channel, activations per token: shows the damage of outliers",
    "w4a4g128": "weights and activations in groups of 128: today's W4A4 practice",
    "w6a6": "weights in groups of 128, activations per token",
    "w8a16": "weights per channel, float activations",
    "w4a16": "weights in groups of 128, float activations",
    "w3a16": "weights in groups of 128, float activations",
    "w2a16": "weights in groups of 128, float activations",
}

FORMATS: Final[Mapping[str, str]] = {
    "fp8": "e4m3: weights a scale per channel, activations a scale per token, dynamic",
    "mxfp4": "weights and activations e2m1 in blocks of 32 with power-of-two scales",
    "nvfp4": "weights and activations e2m1 in blocks of 16 with e4m3 scales",
    "fp8a16": "weights fp8, float activations",
    "mxfp4a16": "weights mxfp4, float activations",
    "nvfp4a16": "weights nvfp4, float activations",
}
# the recipe that formats are settings of, and what it means where a setting is not named
_FORMAT_RECIPE: Final = "fp"
_FORMAT_DEFAULTS: Final[Mapping[str, Value]] = {
    "weights": "fp8",
    "activations": "fp8",
    "kv_bits": 16,
    "execution": "simulated",
}

_FORMAT = re.compile(
    r"(?P<format>fp8|mxfp4|nvfp4)(?P<float>a16)?(?:-kv(?P<kv>[2-8]))?(?:-(?P<execution>simulated|integer))?"
)
_SCHEME = re.compile(
    r"(?:(?P<recipe>[A-Za-z_][A-Za-z0-9_]*):)?"
    r"w(?P<weight>[2-8]|16)a(?P<activation>[2-8]|16)(?:g(?P<group>[1-9][0-9]{0,5}))?(?P<static>-static)?"
    r"(?:-kv(?P<kv>[2-8]))?(?:-(?P<execution>simulated|integer|classic))?"
)


def is_scheme(name: str) -> bool:
    """Whether a name is a shorthand, with or without a recipe before it."""
    return _SCHEME.fullmatch(name) is not None or is_format(name)


def is_format(name: str) -> bool:
    """Whether a name is the shorthand of a floating-point format: `mxfp4`, `nvfp4a16-kv8`."""
    return _FORMAT.fullmatch(name) is not None


def looks_like_one(name: str) -> bool:
    """Whether somebody meant a shorthand, whatever its bits and suffixes."""
    return re.match(r"(\w+:)?(w\d+a\d+|fp8|mxfp4|nvfp4)", name) is not None


def expand(text: str) -> Spec:
    """Recipe and settings that a shorthand stands for; `rtn` where no recipe is named.

    `wXaY`: weights per channel (in groups of 128 below 8 bits, but for w4a4), activations per token, both symmetric
    with dynamic ranges. `gN`: weights and activations in groups of N. `-static`: the outlier papers' protocol.
    `-kv8`: 8-bit key/value cache. `-integer`, `-classic`: the execution. 16 bits mean float. `fp8`, `mxfp4`, `nvfp4`
    are weights and activations in that format, with `a16` weights alone. Settings may follow in parentheses.

    Raises:
        SpecError: no such shorthand, or a setting in parentheses contradicts it.
    """
    given = Spec.parse(text)
    recipe, settings = _format(given.name) if is_format(given.name) else _scheme(given.name)
    for key, value in given.settings.items():
        if settings.get(key, value) != value:
            raise SpecError(f"{given.name} already says {key}={settings[key]}; drop {key}={value}")
    return Spec(recipe, settings | dict(given.settings))


def _format(name: str) -> tuple[str, dict[str, Value]]:
    match = _FORMAT.fullmatch(name)
    assert match is not None
    settings: dict[str, Value] = {"weights": match["format"], "activations": match["format"]}
    settings |= {"activations": "float"} if match["float"] else {}
    settings |= {"kv_bits": int(match["kv"])} if match["kv"] else {}
    settings |= {"execution": match["execution"]} if match["execution"] else {}
    return _FORMAT_RECIPE, settings


def _scheme(name: str) -> tuple[str, dict[str, Value]]:
    match = _SCHEME.fullmatch(name)
    if match is None:
        raise SpecError(f"{name!r} is no scheme; schemes look like w8a8, w4a4g128, w8a8-static, gptq:w4a16-kv8, mxfp4")
    weight, activation = int(match["weight"]), int(match["activation"])
    settings: dict[str, Value] = {"weight_bits": weight, "activation_bits": activation}
    if match["static"]:
        if match["group"] or weight == 16 or activation == 16:
            raise SpecError(f"{name!r}: -static is per tensor with quantized weights and activations")
        settings |= dict(_STATIC)
    elif match["group"] or (weight < 8 and (weight, activation) != (4, 4)):
        settings |= {"weight_granularity": "group"} if weight < 16 else {}
        settings |= {"activation_granularity": "group"} if match["group"] and activation < 16 else {}
        settings["group_size"] = int(match["group"] or 128)
    settings |= {"kv_bits": int(match["kv"])} if match["kv"] else {}
    settings |= {"execution": match["execution"]} if match["execution"] else {}
    return match["recipe"] or "rtn", settings


@lru_cache(4096)
def label(canonical: str, settings: Collection[str] = ()) -> str:
    """Short name for people: the shorthand that stands for a canonical quantizer, with what it cannot say behind it.

    `rtn(activation_bits=4,weight_bits=4)` gives `w4a4`; other recipes keep their name (`gptq:w4a16`). What no shorthand
    says follows in parentheses, and `expand` of the label means the same settings again.

    Args:
        canonical: as records name it.
        settings: names of all its settings where they are known: `smoothquant` alone can be a recipe at w8a8, or a
            quantizer that knows no bits.
    """
    spec = Spec.parse(canonical)
    if spec.name == _FORMAT_RECIPE:
        return _format_label(spec)
    # another kind of quantizer has settings of its own; a recipe is known by what it says of weights or activations
    is_recipe = spec.name == "rtn" or DEFAULTS.keys() <= set(settings)
    if not is_recipe and not any(key.startswith(("weight_", "activation_")) for key in spec.settings):
        return canonical
    full = dict(DEFAULTS) | dict(spec.settings)
    prefix = "" if spec.name == "rtn" else f"{spec.name}:"
    fits = [(name, rest) for name in _candidates(prefix, full) if (rest := _unsaid(name, full)) is not None]
    if not fits:
        return canonical
    return str(Spec(*min(fits, key=lambda fit: len(fit[1]))))


def _format_label(spec: Spec) -> str:
    full = dict(_FORMAT_DEFAULTS) | dict(spec.settings)
    if full["activations"] not in (full["weights"], "float"):
        return str(spec)
    name = f"{full['weights']}{'a16' if full['activations'] == 'float' else ''}{_suffix(full)}"
    if not is_format(name):
        return str(spec)
    return str(Spec(name, {key: value for key, value in full.items() if key not in _FORMAT_DEFAULTS}))


@lru_cache(4096)
def execution_of(canonical: str) -> tuple[str, str | None]:
    """Canonical quantizer without its execution, and the execution where it is named."""
    spec = Spec.parse(canonical)
    rest = {key: value for key, value in spec.settings.items() if key != "execution"}
    named = spec.settings.get("execution")
    return str(Spec(spec.name, rest)), None if named is None else str(named)


def _candidates(prefix: str, full: Mapping[str, Value]) -> list[str]:
    base = f"{prefix}w{full['weight_bits']}a{full['activation_bits']}"
    return [name + _suffix(full) for name in (base, f"{base}g{full['group_size']}", f"{base}-static")]


def _suffix(full: Mapping[str, Value]) -> str:
    cache = "" if full["kv_bits"] == 16 else f"-kv{full['kv_bits']}"
    return cache + ("" if full["execution"] == "simulated" else f"-{full['execution']}")


def _unsaid(name: str, full: Mapping[str, Value]) -> dict[str, Value] | None:
    """Settings that a shorthand does not say, or None where it is no shorthand or contradicts them."""
    try:
        stated = dict(expand(name).settings)
    except SpecError:
        return None
    if any(full[key] != value for key, value in stated.items()):
        return None
    return {key: value for key, value in full.items() if (dict(DEFAULTS) | stated).get(key, ...) != value}
