"""Specs: `name(key=value,…)` between people and plugins; knows no plugin and no torch."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from quant_bench.errors import SpecError

Value = bool | int | float | str | None

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.:-]*")
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.+/:-]*")
_INTEGER = re.compile(r"[+-]?[0-9]{1,300}")
_FLOAT = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
# blanks have one place each, or a hostile text would take the square of its length
_CALL = re.compile(rf"\s*({_NAME.pattern})\s*(?:\((.*)\)\s*)?", re.DOTALL)
_BLANK = re.compile(r"\s*")
_ARGUMENT = re.compile(
    rf"""\s*({_KEY.pattern})\s*=\s*("(?:[^"\\]|\\.)*"|'[^'\\]*'|[^\s,'"()]+)\s*(,|$)""",
    re.DOTALL,
)
_CONSTANTS: dict[str, Value] = {"True": True, "False": False, "None": None}


@dataclass(frozen=True, eq=False)
class Spec:
    """A plugin's name with settings, as people write it: `rtn(weight_bits=4,scope=full)`.

    `str` gives the canonical form: keys sorted, strings as bare words wherever that is unambiguous, no spaces. Two
    specs are equal when their canonical forms are. The registry, which knows the class, drops values at their default.

    Args:
        name: letters, digits and `_ . : -`, not starting with a digit.
        settings: booleans, integers, finite floats, strings and None.

    Raises:
        SpecError: a name, key or value that no text could give back.
    """

    name: str
    settings: Mapping[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise SpecError(f"a name has letters, digits and _ . : - and starts with a letter; got {self.name!r}")
        for key, value in self.settings.items():
            if not _KEY.fullmatch(key):
                raise SpecError(f"a setting's name is a Python identifier; got {key!r}")
            if not isinstance(value, Value):
                raise SpecError(f"{key} must be a number, a string, True, False or None; got {value!r}")
            if isinstance(value, float) and not math.isfinite(value):
                raise SpecError(f"{key} must be finite; got {value!r}")
        object.__setattr__(self, "settings", dict(sorted(self.settings.items())))

    def __str__(self) -> str:
        if not self.settings:
            return self.name
        return f"{self.name}({','.join(f'{key}={written(value)}' for key, value in self.settings.items())})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spec) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    @classmethod
    def parse(cls, text: str) -> "Spec":
        """Read `name` or `name(key=value, …)`; no code is evaluated.

        Raises:
            SpecError: the text cannot be read; the message says where.
        """
        match = _CALL.fullmatch(text)
        if match is None:
            raise SpecError(f"cannot read {text!r}: expected name or name(key=value,…)")
        settings: dict[str, Value] = {}
        for key, value in _arguments(match[2] or "", text):
            if key in settings:
                raise SpecError(f"cannot read {text!r}: {key} is given twice")
            settings[key] = value
        return cls(match[1], settings)


def joined(text: str) -> Iterator[str]:
    """Parts of a text that `+` joins, outside of parentheses and quotes.

    Raises:
        SpecError: a part is empty.
    """
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter == "(") - (letter == ")")
        if letter == "+" and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    if len(parts) > 1 and not all(part.strip() for part in parts):
        raise SpecError(f"cannot read {text!r}: a name is missing beside '+'")
    # no list: the types of its items are checked at random in tests, and a random draw is what hypothesis must control
    return iter(parts)


def written(value: Value) -> str:
    """Canonical text of one value; a string that could be taken for something else is quoted as in JSON."""
    if isinstance(value, str):
        return value if _WORD.fullmatch(value) and value not in _CONSTANTS else json.dumps(value)
    return repr(value)


def _arguments(inside: str, text: str) -> Iterator[tuple[str, Value]]:
    """Keys and values between the parentheses."""
    position = 0
    while not _BLANK.fullmatch(inside, position):
        match = _ARGUMENT.match(inside, position)
        if match is None:
            raise SpecError(f"cannot read {text!r} at {inside[position:].strip()!r}: expected key=value")
        yield match[1], _value(match[2], text)
        position = match.end()


def _value(written_value: str, text: str) -> Value:
    if written_value in _CONSTANTS:
        return _CONSTANTS[written_value]
    if written_value[0] == "'":
        return written_value[1:-1]
    if written_value[0] == '"':
        try:
            # strict=False lets a line break stand in a quoted string; canonical text escapes it
            return str(json.loads(written_value, strict=False))
        except json.JSONDecodeError as error:
            raise SpecError(f"cannot read {text!r}: {written_value} is not a JSON string ({error.msg})") from error
    if _WORD.fullmatch(written_value):
        return written_value
    if _INTEGER.fullmatch(written_value):
        return int(written_value)
    if _FLOAT.fullmatch(written_value):
        return float(written_value)
    raise SpecError(f"cannot read {text!r}: {written_value!r} is no number and no word; write a text in quotes")
