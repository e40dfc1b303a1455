"""Which two records may be compared: what must agree beside the one thing in which they differ."""

from typing import Final, Literal, get_args

from quant_bench.cell import Cell
from quant_bench.record import Record
from quant_bench.report.frame import GROUP, asked
from quant_bench.schemes import label

By = Literal["arm", "quantizer", "model"]
BY: Final[tuple[By, ...]] = get_args(By)
# in these two models differ: all else must agree
OF_A_MODEL: Final = ("model", "matched_sha256", "dtype")


def counterpart(cell: Cell, by: By, name: str) -> Cell:
    """The cell that differs in one thing."""
    return Cell(**(vars(cell) | {by: name}))


def named(cell: Cell) -> str:
    """A cell for a message, without its arm."""
    seed = f", seed {cell.seed}" if cell.seed else ""
    return f"{cell.model}, {label(cell.quantizer)}, {cell.task}{seed}"


def apart(ours: Record, theirs: Record, by: By) -> str | None:
    """In what two records differ that must agree, or None."""
    pairs = list(zip(GROUP, asked(ours), asked(theirs), strict=True))
    if by == "model":
        pairs = [pair for pair in pairs if pair[0] not in OF_A_MODEL]
        # documents and their answers are the same for every tokenizer, windows of tokens are not
        if "lm-eval" not in str(ours.convention):
            pairs.append(("tokenizer_sha256", *(record.identity["tokenizer_sha256"] for record in (ours, theirs))))
    for kind in ("arm", "quantizer"):
        if kind != by:
            pairs.append((f"{kind}_version", ours.versions[kind], theirs.versions[kind]))
    return next((f"{name} is {own!r} and {other!r}" for name, own, other in pairs if own != other), None)
