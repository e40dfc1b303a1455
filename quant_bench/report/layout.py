"""What a report consists of: sections of tables of entries, not yet escaped for any format."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Entry:
    """One cell of a table.

    Attributes:
        lines: what a format puts under each other.
        best: whether its first line is the best of its column beyond doubt.
    """

    lines: tuple[str, ...] = ("",)
    best: bool = False


@dataclass(frozen=True)
class Table:
    """Headings, rows and footnotes, not yet escaped for any format; the first `words` columns are no numbers."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[Entry, ...], ...]
    footnotes: tuple[str, ...] = ()
    words: int = 3


@dataclass(frozen=True)
class Section:
    """One model: weights and precision in the title, and what a reader must know about them."""

    title: str
    note: str
    tables: tuple[Table, ...]


@dataclass(frozen=True)
class Document:
    """A whole report.

    Attributes:
        title: of it.
        legend: what its signs mean, a line each.
        sections: one a model.
        empty: what is said where there is no section.
        header: first line of a file, or "".
    """

    title: str
    legend: tuple[str, ...]
    sections: tuple[Section, ...]
    empty: str
    header: str = ""


@dataclass
class Footnotes:
    """Numbered notes of one table; the same text has the same number."""

    numbers: dict[str, int] = field(default_factory=dict)

    def mark(self, text: str) -> str:
        """The number that stands for a note."""
        return f"[{self.numbers.setdefault(text, len(self.numbers) + 1)}]"

    @property
    def texts(self) -> tuple[str, ...]:
        """The notes, the first one first."""
        return tuple(self.numbers)
