"""Numbers for people, and text from elsewhere made harmless for each output format."""

import math
import re
from collections.abc import Callable, Iterable
from typing import Final

# controls, unpaired surrogates, ends of lines, and what Unicode calls default-ignorable: characters that show nothing
_CONTROL: Final = re.compile(
    r"[\x00-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    r"\u2060-\u206f\u3164\ud800-\udfff\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb"
    r"\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
# signs that start markup or an element wherever they stand
_SIGNS: Final = str.maketrans(
    {sign: f"\\{sign}" for sign in "\\`*{}[]|~$@!"} | {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
)
# an underscore at a word's edge; what makes a list or a heading of a line's beginning; the full stop and colon by which
# an address is known. Every branch starts with a sign, so that all others are passed over at once
_PLACES: Final = re.compile(
    r"_(?:(?<![A-Za-z0-9]_)|(?![A-Za-z0-9]))|[#+-](?<=^.)|:(?=/)"
    r"|\.(?:(?<=[A-Za-z]\.)(?=[A-Za-z])|(?<=[Ww]{3}\.)|(?<=^[0-9]\.)(?= ))",
    re.MULTILINE,
)
_LATEX: Final = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\symbol{34}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "Δ": r"$\Delta$",
    "·": r"$\cdot$",
    "−": r"$-$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "–": "--",
    "†": r"\dag{}",
    "‡": r"\ddag{}",
    "…": r"\ldots{}",
}


def number(value: float) -> str:
    """Four significant digits or so: 29.94, 0.3256, 4,136, 1.3e-05; whole numbers stay whole."""
    size = abs(value)
    if value == math.trunc(value) and size < 1e9:
        return f"{int(value):,}"
    if size >= 1e7 or size < 1e-3:
        return f"{value:.2e}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2f}" if size >= 10 else f"{value:.3f}" if size >= 1 else f"{value:.4f}"


def signed(value: float) -> str:
    """A difference: always with its sign."""
    return f"+{number(value)}" if value > 0 else number(value)


def between(low: float, high: float, show: Callable[[float], str] = number) -> str:
    """An interval."""
    return f"[{show(low)}, {show(high)}]"


def visible(text: str) -> str:
    """Text on one line without control, direction-changing or unpaired characters; they are shown as U+XXXX."""
    if text.isascii() and text.isprintable():
        return text
    return _CONTROL.sub(lambda match: " " if match[0] in "\n\t" else f"<U+{ord(match[0]):04X}>", text)


def markdown(text: str) -> str:
    """Text that Markdown shows as it is: no markup, no HTML, no end of a table's cell, no link, no mention."""
    return markdown_lines([text])[0]


def markdown_lines(texts: Iterable[str]) -> list[str]:
    """What `markdown` makes of each text, all at once: for thousands of cells in 40 % of the time."""
    # none of them has an end of a line left, so that they come apart again where they were joined
    return _PLACES.sub(r"\\\g<0>", "\n".join(map(visible, texts)).translate(_SIGNS)).split("\n")


def latex(text: str) -> str:
    """Text that LaTeX prints as it is; characters beyond ASCII that the tables do not use become a question mark."""
    return "".join(_LATEX.get(sign, sign if sign.isascii() else "?") for sign in visible(text))


def csv(text: str) -> str:
    """Text that no spreadsheet takes for a formula."""
    shown = visible(text)
    # the wide forms are what East Asian keyboards type, and spreadsheets read them, too
    return f"'{shown}" if shown.lstrip()[:1] in tuple("=+-@\uff1d\uff0b\uff0d\uff20") else shown
