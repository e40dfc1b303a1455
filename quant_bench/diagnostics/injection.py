"""Task `injection`: junk added to quiet reads at evaluation time, and the loss that it costs."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from quant_bench.diagnostics.attention import Pooling, quiet_reads
from quant_bench.diagnostics.junk import Directions, Junk, donor_directions, fixed_directions, gaussian_directions
from quant_bench.diagnostics.reads import Reads, ReadSite, read_sites, sizes
from quant_bench.diagnostics.sequences import Sequences
from quant_bench.errors import NotApplicable, SpecError
from quant_bench.model import LanguageModel
from quant_bench.score import Metric
from quant_bench.scoring import final_hidden, target_log_probs
from quant_bench.task import Context, Evaluation, Measure

DOSES = (0.2, 0.4, 0.8, 1.6)
CLEAN_LOSS = Metric("clean_loss", "nats/token", "lower", "mean")
_PERCENTILES = {"p50": 50.0, "p25": 25.0}


def damage_metric(dose: float) -> Metric:
    """Loss with junk of a dose minus the clean loss."""
    return Metric(f"injection_damage_{dose:g}", "nats/token", "lower", "mean")


@dataclass(frozen=True)
class InjectionSettings:
    """Which reads get which junk; what no source fixes is a choice here, stored with the result.

    Attributes:
        cutoff: reads of a head below this percentile of its read norms are quiet.
        junk: its direction. `structured`: of the read at a random position of another sequence, same layer and head.
            `gaussian`: drawn for each read. `random_direction`: drawn once a head. `gate_direction`: w of the head's
            projection gate, which opens it.
        position0: whether the first token's read may get junk.
        pooling: reads over which percentile and median are taken: of all sequences, or of each by itself.
        layer: the one layer that is hit; None for all at once.
        group: sequences side by side among which donors are drawn; their reads are held in memory together.
    """

    cutoff: Literal["p50", "p25"] = "p25"
    junk: Junk = "structured"
    position0: Literal["in", "out"] = "in"
    pooling: Pooling = "all"
    layer: int | None = None
    group: int = 8

    def __post_init__(self) -> None:
        if self.group < 2:
            raise SpecError(f"group must be at least 2: a donor belongs to another sequence; got {self.group!r}")


@dataclass
class _Clean:
    """The clean pass: summed loss of each sequence, and the norms of each layer's reads."""

    nll: list[float]
    norms: list[Float[Tensor, "item kv_head key"]]


@dataclass
class _Rule:
    """What the clean pass fixes for one layer: how much junk of norm 1 each read gets per unit of dose; 0 if loud."""

    amount: Float[Tensor, "item kv_head key"]
    typical: float
    quiet: float


def injection(
    model: LanguageModel,
    context: Context,
    sequences: Sequences,
    settings: InjectionSettings,
    doses: Sequence[float] = DOSES,
) -> Evaluation:
    """Damage in nats: v' = v + dose · m · u for quiet reads, u of norm 1, m the head's median read norm.

    Junk is added to what the value projection puts out, so gates see it, as do rounded caches and later layers; queries
    and keys of the layer do not. Quiet set and m are frozen from the clean pass. Draws depend on the cell's seed,
    layer, sequence, head and position alone, so all arms of one shape get the same donors.

    A cell holds all doses of one kind of junk: a pass a dose, one more for the donors' reads of structured junk, and a
    clean pass that all cells over the same sequences share.

    Source: arXiv 2609.22005, injection experiment.

    Raises:
        NotApplicable: there is no gate direction, no second sequence, or no value projection a layer.
        SpecError: there is no such layer.
    """
    sites = read_sites(model)
    if settings.layer is not None and not 0 <= settings.layer < len(sites):
        raise SpecError(f"layer={settings.layer}: this model has layers 0 to {len(sites) - 1}")
    hit = [site for site in sites if settings.layer in (None, site.layer)]
    fixed = fixed_directions(sites, settings.junk, context.seed)
    count, tokens = sequences.ids.shape
    if settings.junk == "structured" and count < 2:
        raise NotApplicable("junk=structured needs at least 2 sequences: a donor belongs to another one")
    clean = _clean(model, context, sequences, sites)
    rules = [_rule(norms, settings) for norms in clean.norms]
    rows: list[dict[str, float]] = []
    for members in _groups(count, settings.group):
        donors = _reads(model, sequences, hit, members) if settings.junk == "structured" else {}
        for item in members:
            junk: list[tuple[ReadSite, Reads]] = []
            for site in hit:
                directions: Directions
                if fixed is not None:
                    directions = fixed[site.layer]
                elif donors:
                    directions = donor_directions(context.seed, site.layer, item, members, donors[site.layer])
                else:
                    shape = (site.shape[0], tokens, site.shape[1])
                    directions = gaussian_directions(context.seed, site.layer, item, shape)
                junk.append((site, directions * rules[site.layer].amount[item, :, :, None]))
            row = {"item": item, "tokens": tokens - 1, "nll": clean.nll[item]}
            for dose in doses:
                row[damage_metric(dose).name] = loss(model, sequences.ids[item], junk, dose) - clean.nll[item]
            rows.append(row)
            context.progress(f"{settings.junk} {settings.cutoff}", len(rows), count)
    return _evaluation(pd.DataFrame(rows), sequences, [rules[site.layer] for site in hit], hit, doses)


@torch.inference_mode()
def loss(
    model: LanguageModel, ids: Int64[Tensor, " seq"], junk: Sequence[tuple[ReadSite, Reads]] = (), dose: float = 1.0
) -> float:
    """Negative log-likelihood of a sequence's tokens but the first, in nats, with `dose · junk` added to its reads.

    Args:
        model: float or quantized.
        ids: the sequence.
        junk: sites and what is added to the reads of the text's tokens there.
        dose: factor on it.

    Raises:
        QuantizationError: a log-probability is not a number.
    """

    def adding(site: ReadSite, vectors: Reads) -> Callable[[Tensor], Tensor]:
        def act(output: Tensor) -> Tensor:
            changed = output.clone()
            reads = site.of_text(changed)
            # in float32, then as the projection puts reads out
            reads.copy_(reads.float() + dose * vectors.to(reads.device))
            return changed

        return act

    with ExitStack() as stack:
        for site, vectors in junk:
            stack.callback(site.hook(adding(site, vectors)).remove)
        hidden = final_hidden(model, ids[None])[0, :-1]
    return -float(target_log_probs(model, hidden, ids[1:]).log_probs.sum())


@torch.inference_mode()
def _reads(
    model: LanguageModel, sequences: Sequences, sites: Sequence[ReadSite], members: Sequence[int]
) -> dict[int, Float[Tensor, "member kv_head key dim"]]:
    """Clean reads of some sequences, by layer."""
    found: dict[int, list[Tensor]] = {site.layer: [] for site in sites}
    for item in members:
        with ExitStack() as stack:
            for site in sites:
                stack.callback(_keeping(site, found[site.layer], lambda reads: reads.cpu()))
            final_hidden(model, sequences.ids[item][None])
    return {layer: torch.stack(parts) for layer, parts in found.items()}


def _keeping(site: ReadSite, kept: list[Tensor], what: Callable[[Reads], Tensor]) -> Callable[[], None]:
    """Append something of each output's reads; returns how to stop."""

    def act(output: Tensor) -> None:
        kept.append(what(site.of_text(output)).clone())

    return site.hook(act).remove


def _clean(model: LanguageModel, context: Context, sequences: Sequences, sites: Sequence[ReadSite]) -> _Clean:
    """The clean pass, once for all cells of a quantized model over these sequences."""
    key = ("injection", *sequences.key)
    if key not in context.pass_memo:
        norms: list[list[Tensor]] = [[] for _ in sites]
        nll: list[float] = []
        with ExitStack() as stack:
            for site, kept in zip(sites, norms, strict=True):
                stack.callback(_keeping(site, kept, lambda reads: sizes(reads).cpu()))
            for ids in sequences.ids:
                nll.append(loss(model, ids))
                context.progress("clean", len(nll), len(sequences.ids))
        context.pass_memo[key] = _Clean(nll, [torch.stack(parts) for parts in norms])
    found: _Clean = context.pass_memo[key]
    return found


def _rule(norms: Float[Tensor, "item kv_head key"], settings: InjectionSettings) -> _Rule:
    """Amounts of junk of one layer."""
    quiet = quiet_reads(norms, _PERCENTILES[settings.cutoff], settings.pooling)
    if settings.position0 == "out":
        quiet[:, :, 0] = False
    axes = (0, 2) if settings.pooling == "all" else (2,)
    typical = torch.from_numpy(np.median(norms.double().numpy(), axis=axes, keepdims=True))
    return _Rule((quiet * typical).float(), float(typical.mean()), float(quiet.double().mean()))


def _groups(count: int, size: int) -> list[list[int]]:
    """Sequences side by side; one left over at the end joins the group before it."""
    groups = [list(range(start, min(start + size, count))) for start in range(0, count, size)]
    if len(groups) > 1 and len(groups[-1]) == 1:
        last = groups.pop()
        groups[-1] += last
    return groups


def _evaluation(
    frame: pd.DataFrame, sequences: Sequences, rules: Sequence[_Rule], hit: Sequence[ReadSite], doses: Sequence[float]
) -> Evaluation:
    metrics = [damage_metric(dose) for dose in doses]
    layers = [
        {"layer": site.layer, "median_read_norm": rule.typical, "quiet_share": rule.quiet}
        for site, rule in zip(hit, rules, strict=True)
    ]
    return Evaluation(
        measures=[
            *(Measure(metric, metric.name, "tokens") for metric in metrics),
            Measure(CLEAN_LOSS, "nll", "tokens"),
        ],
        samples=frame,
        data_sha256=sequences.sha256,
        convention=sequences.label,
        details={"layers": layers, "sequences": len(frame)},
        settings={**sequences.settings, "doses": list(doses)},
    )
