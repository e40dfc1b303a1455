"""Writing the site: pages from templates, data beside them, a copy of every record, nothing from elsewhere."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from quant_bench import __version__
from quant_bench.errors import RecordError, SpecError
from quant_bench.record import Store
from quant_bench.report import long_frame
from quant_bench.report.text import between, number, signed, visible
from quant_bench.samples import SampleStore
from quant_bench.site.board import Board
from quant_bench.site.filled import made_board
from quant_bench.site.pages import Page, leaderboard_data, pages
from quant_bench.site.pairs import paired_rows, pairs_data

_MARK: Final = "site.json"
# what a site consists of: an earlier one of the same folder is replaced, and nothing else is touched
_FOLDERS: Final = ("assets", "records", "models", "arms")


@dataclass(frozen=True)
class Written:
    """The page to open, and how many pages, records and paired intervals over items from a cache there are.

    `problems` are files under the results that are no records.
    """

    index: Path
    pages: int
    records: int
    over_items: int
    problems: tuple[RecordError, ...]


def write_site(results: Path, out: Path, answers: SampleStore | None = None) -> Written:
    """Write the site of a folder of records.

    Args:
        results: folder of the records.
        out: folder of the site: new, empty, or an earlier site, whose files are replaced. Hidden files stay.
        answers: of the cells, from a cache, for paired intervals of any two rows of one seed.

    Raises:
        SpecError: `out` is no such folder, or one of the two lies in the other.
    """
    _check(results, out)
    store = Store.read(results)
    board = made_board(long_frame(store.records), store.records)
    environment = _environment()
    made = [(page, _page(environment, page)) for page in pages(board)]
    pairs = paired_rows(board, answers)
    over_items = sum(pair.seeds == 1 for found in pairs for pair in found.values())
    # nothing of an earlier site is lost before all pages are made
    for folder in _FOLDERS:
        if (out / folder).exists():
            shutil.rmtree(out / folder)
    out.mkdir(parents=True, exist_ok=True)
    mark = {"generator": f"quant-bench {__version__}", "records": len(store.records)}
    _write(out / _MARK, json.dumps(mark, indent=1) + "\n")
    # some hosts leave out names that start with an underscore unless they are told not to
    _write(out / ".nojekyll", "")
    _assets(out, board, pairs_data(pairs))
    for page, text in made:
        _write(out / page.path, text)
    for path in board.records:
        place = out / "records" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(results / path, place)
    return Written(out / "index.html", len(made), len(board.records), over_items, store.problems)


def _check(results: Path, out: Path) -> None:
    ours, theirs = out.resolve(), results.resolve()
    if ours == theirs or ours in theirs.parents or theirs in ours.parents:
        raise SpecError(f"the site's folder {out} and the records' folder {results} must not lie in each other")
    if out.exists() and not out.is_dir():
        raise SpecError(f"{out} is no folder")
    if out.is_dir() and not (out / _MARK).is_file():
        others = sorted(path.name for path in out.iterdir() if not path.name.startswith("."))
        if others:
            raise SpecError(
                f"{out} has files that are no site of quant-bench, such as {others[0]}: name another folder"
            )


def _assets(out: Path, board: Board, pairs: list[dict[str, Any]]) -> None:
    for name, text in _static():
        _write(out / "assets" / name, text)
    plotly = metadata.distribution("plotly").locate_file("plotly/package_data/plotly.min.js")
    shutil.copyfile(str(plotly), out / "assets" / "plotly.min.js")
    # a script and no JSON file: a page that was opened from a disk may not fetch
    data = script_text(leaderboard_data(board))
    _write(out / "assets" / "board.js", f"window.quantBench.board = JSON.parse({json.dumps(data)});\n")
    _write(out / "assets" / "pairs.js", f"window.quantBench.pairs = JSON.parse({json.dumps(script_text(pairs))});\n")


def _static() -> Iterator[tuple[str, str]]:
    for file in resources.files("quant_bench.site").joinpath("static").iterdir():
        yield file.name, file.read_text(encoding="utf-8")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("utf-8"))


def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("quant_bench.site"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    made.filters |= {"number": number, "signed": signed, "between": between, "record": record_link, "json": script_json}
    made.filters["text"] = script_text
    made.globals |= {"version": __version__, "signed": signed, "commands": _commands}
    return made


def _shown(value: Any) -> Any:
    """Texts from elsewhere without characters that hide or reverse others."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _page(environment: Environment, page: Page) -> str:
    root = "../" * page.path.count("/")
    return environment.get_template(page.template).render(page=page, root=root, **page.values)


def _commands(paths: Iterable[str], command: Callable[[str], str]) -> list[tuple[str, str]]:
    """Addresses of records, with the commands that measure them again."""
    return [(record_link(path), command(path)) for path in paths]


def record_link(path: str) -> str:
    """Address of a record's copy, from the site's root."""
    return "records/" + quote(path, errors="surrogatepass")


def script_text(value: Any) -> str:
    """Strict JSON in ASCII, whose texts have no characters that hide or reverse others."""
    return json.dumps(_harmless(value), allow_nan=False, separators=(",", ":"))


def script_json(value: Any) -> Markup:
    """JSON that can stand in a script element: no text of it can end the element or start another."""
    text = script_text(value)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)


def _harmless(value: Any) -> Any:
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {visible(key): _harmless(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_harmless(inner) for inner in value]
    return value
