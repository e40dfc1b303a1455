"""A model's figures and tables: quality by bits, statistics by layer, and which matrices were quantized."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from quant_bench.record import Record
from quant_bench.report.rows import parted
from quant_bench.report.text import number
from quant_bench.schemes import DEFAULTS, is_scheme
from quant_bench.site.board import Board, Row, ranks
from quant_bench.site.figures import Choice, Figure, Heat, Points, is_map, number_in, positive
from quant_bench.spec import Spec

# column of a record's table of tensors -> what it is; docs of the task outliers define them
SIZES: Final = {
    "inf_norm": "infinity norm (mean of max |x| of a sequence)",
    "kurtosis": "kurtosis (3 for a Gaussian)",
    "massive_ratio": "max |x| over median |x|",
    "massive_activations": "massive activations a sequence",
    "outlier_6sigma_share": "share of entries beyond 6σ",
}
SITES: Final = (
    *("attention_norm", "attention_output_input", "attention_output"),
    *("mlp_norm", "mlp_output_input", "mlp_output", "layer_output"),
)
# the recipe that shorthands do not name
_ROUNDED: Final = "rtn"
PLACES: Final = {
    "channel_absmax_ratio": "by channel: largest channel maximum over the median one",
    "channel_rms_kurtosis": "by channel: concentration of power (1: even; width: one channel)",
    "token_kurtosis": "in a token: kurtosis over its channels",
    "max_median_ratio": "in a token: max |x| over median |x|",
    "incoherence": "in a token: √d max |x| over norm (1: flat; √d: one channel)",
}


@dataclass(frozen=True)
class Covered:
    """What a record says of quantized matrices.

    Attributes:
        row: whose.
        path: of the record.
        mac_share: share of multiply-accumulates on quantized operands.
        ways: how matrices were quantized, and how many that way.
        skipped: why matrices stayed in float, and how many.
        stored, floats: bytes of the quantized matrices, and of the same in float32.
        notes: further statements.
    """

    row: Row
    path: str
    mac_share: float | None
    ways: dict[str, int]
    skipped: dict[str, int]
    stored: float | None
    floats: float | None
    notes: tuple[str, ...]


def sweep(board: Board, rows: Sequence[Row]) -> Figure:
    """Quality of each scheme in the order of its bits, a series for each recipe; an arm, model and metric at a time."""
    choices = []
    for index, column in enumerate(board.columns):
        if not ranks(column):
            continue
        for (model, arm), members in parted(rows, lambda row: (row.model, row.arm)).items():
            shown = [row for row in members if index in row.numbers and row.numbers[index].value is not None]
            if not shown:
                continue
            reference = next((row.numbers[index].value for row in shown if row.execution == "float"), None)
            ordered = [(row, *recipe_and_scheme(row.label)) for row in sorted(shown, key=_by_bits)]
            series = {
                recipe: Points(recipe) for recipe in sorted({recipe for _, recipe, _ in ordered}, key=_plain_first)
            }
            for row, recipe, scheme in ordered:
                found = row.numbers[index]
                assert found.value is not None
                text = row.bits if row.execution == "float" else f"{row.bits} {row.execution}"
                series[recipe].add(scheme, found.value.value, found.value, text=text, path=found.paths[0])
            order = list(dict.fromkeys(scheme for _, _, scheme in ordered))
            log = "y" if column.reduction == "exp" and positive(v for one in series.values() for v in one.y) else ""
            keys = (f"{column.heading} — {column.question}", arm, board.models[model].title)
            choices.append(
                Choice(
                    keys,
                    list(series.values()),
                    "scheme, by its bits",
                    column.heading,
                    log,
                    order=order,
                    line=reference,
                    line_name="float model",
                )
            )
    return Figure(
        "sweep",
        "Quality by bit width",
        ("metric", "arm", "weights"),
        choices,
        "Bars are 95 % intervals; the line is the float model, the band around it its interval. Shapes are recipes.",
    )


def recipe_and_scheme(label: str) -> tuple[str, str]:
    """`quarot:w4a4(weights=gptq)` is the recipe `quarot(weights=gptq)` at `w4a4`; a recipe alone stands by itself."""
    spec = Spec.parse(label)
    recipe, colon, scheme = spec.name.rpartition(":")
    if not colon:
        return _ROUNDED if is_scheme(scheme) else label, label
    of_scheme = {key: value for key, value in spec.settings.items() if key in DEFAULTS}
    rest = {key: value for key, value in spec.settings.items() if key not in DEFAULTS}
    return str(Spec(recipe, rest)), str(Spec(scheme, of_scheme))


def _plain_first(recipe: str) -> tuple[bool, str]:
    return recipe != _ROUNDED, recipe


def _by_bits(row: Row) -> tuple[Any, ...]:
    if row.execution == "float":
        return (0,)
    digits = [int(part[1:]) for part in row.bits.split() if part[0] in "WA" and part[1:].isdigit()]
    return (1, -sum(digits), -digits[1], row.label) if len(digits) == 2 else (2, row.label)


def named(board: Board, row: Row, record: Record, several: Sequence[str]) -> str:
    """A record's row among others of its model: only what tells them apart."""
    parts = [board.models[row.model].title] if "model" in several else []
    parts += [row.arm] if "arm" in several else []
    parts += [row.label if row.execution == "float" else f"{row.label} {row.execution}"]
    parts += [f"seed {record.cell.seed}"] if "seed" in several else []
    return " · ".join(parts)


def told_apart_by(rows: Sequence[Row]) -> list[str]:
    """What must be named so that rows are told apart."""
    counts = {"model": len({row.model for row in rows}), "arm": len({row.arm for row in rows})}
    counts["seed"] = len({seed for row in rows for seed in row.seeds})
    return [name for name, count in counts.items() if count > 1]


def records_of(board: Board, rows: Sequence[Row], task: str) -> Iterator[tuple[Row, str, Record]]:
    """Measured records of one task, whatever its settings."""
    wanted = [index for index, column in enumerate(board.columns) if column.task == task]
    for row in sorted(rows, key=lambda row: (row.arm, *map(str, _by_bits(row)))):
        paths = dict.fromkeys(path for index in wanted if index in row.numbers for path in row.numbers[index].paths)
        for path in paths:
            record = board.records[path]
            if record.state == "measured":
                yield row, path, record


def layer_maps(board: Board, rows: Sequence[Row]) -> list[Figure]:
    """Two heat maps of layers and sites: how large outliers are, and where they sit."""
    found: dict[str, list[Choice]] = {"size": [], "place": []}
    several = told_apart_by(rows)
    for row, path, record in records_of(board, rows, "outliers"):
        tensors = _tensors(record)
        keys = (named(board, row, record, several), f"{record.cell.task} · {record.convention}")
        for name, statistics in (("size", SIZES), ("place", PLACES)):
            for statistic, meaning in statistics.items():
                made = _heat(tensors, statistic, path)
                if made is not None:
                    found[name].append(Choice((meaning, *keys), made, "layer", "site"))
    lists = ("statistic", "quantizer", "question")
    size = "Of the activations that each site passes on; the same statistic has one scale of its own in each map."
    place = "Ratios say whether a few channels or a few entries of each token carry the size."
    return [
        Figure("size", "Outliers by layer: infinity norm and kurtosis", lists, found["size"], size),
        Figure("place", "Are outliers in few channels, in few tokens?", lists, found["place"], place),
    ]


def _tensors(record: Record) -> list[tuple[str, int, dict[str, float]]]:
    """Site, layer and statistics of each tensor that a record's table describes; what is no such row is left out."""
    table = record.details.get("tensors")
    rows = []
    for name, row in table.items() if isinstance(table, dict) else ():
        if not isinstance(row, dict):
            continue
        kind, layer = row.get("kind"), row.get("layer")
        if isinstance(kind, str) and isinstance(layer, int) and 0 <= layer < 10_000:
            numbers = {key: value for key in (*SIZES, *PLACES) if (value := number_in(row.get(key))) is not None}
            rows.append((kind, str(name), layer, numbers))
    counts = Counter((kind, layer) for kind, _, layer, _ in rows)
    several = {kind for (kind, _), count in counts.items() if count > 1}
    # where a layer has several tensors of a kind, the end of the module's path says which
    return [
        (f"{kind} {name.rpartition('.')[2]}" if kind in several else kind, layer, numbers)
        for kind, name, layer, numbers in rows
    ]


def _heat(tensors: list[tuple[str, int, dict[str, float]]], statistic: str, path: str) -> Heat | None:
    known = {(site, layer): numbers[statistic] for site, layer, numbers in tensors if statistic in numbers}
    sites = sorted({site for site, _ in known}, key=_in_a_layer)
    layers = sorted({layer for _, layer in known})
    if not is_map(len(sites), len(layers)):
        return None
    z = [[known.get((site, layer)) for layer in layers] for site in sites]
    return Heat(layers, [site.replace("_", " ") for site in sites], z, positive(known.values()), path)


def _in_a_layer(site: str) -> tuple[int, str]:
    """Sites in the order in which a layer computes them; others behind."""
    kind = site.partition(" ")[0]
    return SITES.index(kind) if kind in SITES else len(SITES), site


def coverage(board: Board, rows: Sequence[Row]) -> list[Covered]:
    """Coverage of each row; of the first measured record, and of others only where they say another thing."""
    found = []
    for row in sorted(rows, key=lambda row: (row.model, row.arm, *map(str, _by_bits(row)))):
        if row.execution == "float":
            continue
        seen = set()
        paths = dict.fromkeys(path for item in row.numbers.values() for path in item.paths)
        for path in paths:
            record = board.records[path]
            if record.state != "measured" or record.coverage is None:
                continue
            made = _covered(row, path, record.coverage)
            said = (made.mac_share, tuple(made.ways.items()), tuple(made.skipped.items()), made.stored)
            if said not in seen:
                seen.add(said)
                found.append(made)
    return found


def _covered(row: Row, path: str, said: Any) -> Covered:
    ways, skipped = (_counted(said.get(name)) for name in ("quantized", "skipped"))
    share, stored, floats = (number_in(said.get(name)) for name in ("mac_share", "weight_bytes", "float_bytes"))
    notes = said.get("notes")
    told = tuple(str(note) for note in notes) if isinstance(notes, list) else ()
    return Covered(row, path, share, ways, skipped, stored, floats, told)


def _counted(table: object) -> dict[str, int]:
    return dict(Counter(map(str, table.values())).most_common()) if isinstance(table, dict) else {}


def megabytes(size: float | None) -> str:
    """Bytes for people."""
    return "–" if size is None else f"{number(size / 1e6)} MB"
