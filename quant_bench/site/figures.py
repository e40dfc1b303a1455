"""Figures as plain data: what a page's script hands to the plotting library, and shows as a table beside it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from quant_bench.report.rows import Together

# places of a map: more are no table that a task wrote, and would take all memory
_MOST_PLACES: Final = 1_000_000


@dataclass
class Points:
    """A series of points, joined by a line where `line`; each has an interval, texts and a record where it has one."""

    name: str
    line: bool = False
    x: list[Any] = field(default_factory=list)
    y: list[Any] = field(default_factory=list)
    low: list[float | None] = field(default_factory=list)
    high: list[float | None] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    label: list[str] = field(default_factory=list)
    path: list[str | None] = field(default_factory=list)

    def add(self, x: Any, y: Any, found: Together, *, text: str = "", path: str | None = None, label: str = "") -> None:
        """Add a point with the interval of what it shows; `label` stands beside it, `text` when it is asked."""
        self.x.append(x)
        self.y.append(y)
        self.low.append(found.low)
        self.high.append(found.high)
        self.text.append(text)
        self.label.append(label)
        self.path.append(path)

    def data(self) -> dict[str, Any]:
        """As JSON."""
        return {"name": self.name, "line": self.line} | {
            name: rounded(getattr(self, name)) for name in ("x", "y", "low", "high", "text", "label", "path")
        }


@dataclass(frozen=True)
class Heat:
    """A heat map: a row of `z` for each of `y`, None where there is nothing; colours by the logarithm where `log`."""

    x: Sequence[Any]
    y: Sequence[str]
    z: Sequence[Sequence[float | None]]
    log: bool
    path: str | None = None

    def data(self) -> dict[str, Any]:
        """As JSON."""
        return {"x": list(self.x), "y": list(self.y), "z": rounded(self.z), "log": self.log, "path": self.path}


@dataclass(frozen=True)
class Choice:
    """One thing that a figure can show.

    Attributes:
        keys: what is chosen in each of the figure's lists.
        content: series, or one heat map.
        x, y: titles of the axes.
        log: axes with a logarithmic scale, such as `"y"` or `"xy"`.
        across: whether intervals belong to x.
        order: of the categories on x, or on y where intervals belong to x.
        line: a value that is marked by a line, its interval by a band; None without.
        line_name: what that is.
        missing: what could not be shown, and why.
    """

    keys: tuple[str, ...]
    content: Sequence[Points] | Heat
    x: str
    y: str
    log: str = ""
    across: bool = False
    order: Sequence[str] = ()
    line: Together | None = None
    line_name: str = ""
    missing: Sequence[str] = ()

    def data(self) -> dict[str, Any]:
        """As JSON."""
        found: dict[str, Any] = {
            "keys": list(self.keys),
            "x": self.x,
            "y": self.y,
            "log": self.log,
            "across": self.across,
            "order": list(self.order),
            "missing": list(self.missing),
        }
        if self.line is not None:
            found["line"] = {"name": self.line_name, "at": rounded(list(self.line[:3]))}
        if isinstance(self.content, Heat):
            return found | {"heat": self.content.data()}
        return found | {"series": [points.data() for points in self.content if points.x]}


@dataclass(frozen=True)
class Figure:
    """A plot with lists to choose from.

    Attributes:
        name: short, unique on a page.
        title: of it.
        lists: names of the lists.
        choices: what can be chosen; the first is shown first.
        caption: what it shows, and what it cannot.
    """

    name: str
    title: str
    lists: tuple[str, ...]
    choices: Sequence[Choice]
    caption: str = ""

    def data(self) -> dict[str, Any]:
        """As JSON."""
        return {"title": self.title, "lists": list(self.lists), "choices": [choice.data() for choice in self.choices]}


def rounded(value: Any) -> Any:
    """Numbers with six digits, which is more than a plot can show; records have all."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list | tuple):
        return [rounded(inner) for inner in value]
    return value


def number_in(value: object) -> float | None:
    """A finite number, or None for anything else: tables in records are what their tasks wrote."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # an integer may be too large for a float
    return float(value) if abs(value) < 1e300 and math.isfinite(value) else None


def is_map(rows: int, columns: int) -> bool:
    """Whether a table has anything to show, and not so much that no page could."""
    return 0 < rows * columns <= _MOST_PLACES


def positive(values: Iterable[float | None]) -> bool:
    """Whether a logarithmic scale can show the values."""
    known = [value for value in values if value is not None]
    return bool(known) and all(value > 0 for value in known)
