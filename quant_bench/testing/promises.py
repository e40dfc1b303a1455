"""A contract as a list of promises: `check_…` raises at the first broken one, `quant-bench check` prints them all."""

import dataclasses
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from quant_bench import registry
from quant_bench.errors import Blocked, NotApplicable, QuantBenchError

State = Literal["kept", "broken", "not_applicable", "not_looked_at"]


class Moot(Exception):
    """There is nothing to look at for this plugin; the message says why."""


@dataclass(frozen=True)
class Promise:
    """One promise of a contract.

    Attributes:
        name: the promise, a sentence.
        expected: what is found where it is kept.
        hint: where to look when it is broken.
        look: takes a case (a plugin, a plugin on a layout); raises AssertionError with what was seen instead, or Moot.
        opening: the other promises about a case make sense only after this one; the plugin may refuse the case here.
    """

    name: str
    expected: str
    hint: str
    look: Callable[[Any], None]
    opening: bool = False


@dataclass(frozen=True)
class Finding:
    """What a look at one promise found: nothing wrong, or an error; `case` is what was looked at."""

    promise: Promise
    case: Any
    error: Exception | None

    @property
    def refused(self) -> bool:
        """Whether the plugin refuses the case."""
        return self.promise.opening and isinstance(self.error, NotApplicable)

    @property
    def broken(self) -> bool:
        """Whether the promise is broken."""
        return not (self.error is None or self.refused or isinstance(self.error, Moot))


@dataclass(frozen=True)
class Verdict:
    """A promise over all cases.

    Attributes:
        promise: which one.
        state: broken where one case is; not applicable where all are.
        seen: what was found of the first broken case, why there was nothing to look at, or which cases are refused.
    """

    promise: Promise
    state: State
    seen: str


def findings(promises: Iterable[Promise], cases: Iterable[Any]) -> Iterator[Finding]:
    """Look at every promise of every case; after an opening one that is not kept, go on with the next case.

    Raises:
        Blocked: something that the plugin needs is missing.
    """
    promises = tuple(promises)
    for case in cases:
        for promise in promises:
            error: Exception | None = None
            try:
                promise.look(case)
            except Blocked:
                raise
            except Exception as found:
                error = found
            yield Finding(promise, case, error)
            if promise.opening and error is not None:
                break


def require(found: Iterable[Finding]) -> dict[str, str]:
    """Raise the first broken promise's error.

    Returns:
        Cases that the plugin refuses, each with its reason.

    Raises:
        NotApplicable: it refuses all of them.
    """
    refused: dict[str, Exception] = {}
    cases: set[str] = set()
    for finding in found:
        cases.add(str(finding.case))
        if finding.error is None:
            continue
        if finding.broken:
            raise finding.error
        if finding.refused:
            refused[str(finding.case)] = finding.error
    if cases and len(refused) == len(cases):
        raise next(iter(refused.values()))
    return {case: str(error) for case, error in refused.items()}


def verdicts(promises: Iterable[Promise], found: Iterable[Finding]) -> list[Verdict]:
    """One verdict a promise, in order."""
    by_promise: dict[str, list[Finding]] = {}
    for finding in found:
        by_promise.setdefault(finding.promise.name, []).append(finding)
    return [_verdict(promise, by_promise.get(promise.name, [])) for promise in promises]


def _verdict(promise: Promise, found: list[Finding]) -> Verdict:
    broken = [finding for finding in found if finding.broken]
    if broken:
        others = ", ".join(dict.fromkeys(str(finding.case) for finding in broken[1:]))
        return Verdict(promise, "broken", _seen(broken[0]) + (f" (also on {others})" if others else ""))
    if not found:
        return Verdict(promise, "not_looked_at", "")
    if all(finding.error is not None for finding in found):
        return Verdict(promise, "not_applicable", str(found[0].error))
    refused = [f"refuses {finding.case}: {finding.error}" for finding in found if finding.refused]
    return Verdict(promise, "kept", "; ".join(refused))


def _seen(finding: Finding) -> str:
    error = finding.error
    if isinstance(error, AssertionError) and str(error):
        return str(error)
    if isinstance(error, QuantBenchError):
        return f"{finding.case}: {error}"
    # somebody else's error: where it comes from matters
    frames = traceback.extract_tb(None if error is None else error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{finding.case}: {type(error).__name__}: {error}{where}"


def _loads(plugin: Any) -> None:
    assert dataclasses.is_dataclass(plugin), f"{plugin!r} is no plugin"


LOADS = Promise(
    "the file holds one plugin, named after it",
    "exactly one concrete frozen dataclass that subclasses the contract; its name is the file's in CamelCase",
    "decorate the class with @dataclass(frozen=True) and implement every abstract method",
    _loads,
    opening=True,
)


@dataclass(frozen=True)
class Named:
    """A plugin by itself, on no layout."""

    kind: registry.Kind
    plugin: Any

    def __str__(self) -> str:
        return type(self.plugin).__name__


def _source(named: Named) -> None:
    for part in getattr(named.plugin, "parts", (named.plugin,)):
        assert "Source:" in (type(part).__doc__ or ""), f"{type(part).__name__}: the docstring has no `Source:`"


def _text(named: Named) -> None:
    text = registry.canonical(named.kind, named.plugin)
    again = registry.build(named.kind, text)
    assert again == named.plugin, f"{text!r} does not give the same settings back"


IDENTITY = (
    Promise(
        "the docstring names a source",
        "a line `Source: …` in the docstring of the class",
        "name the paper or page, with its section or equation; `Source: none; …` for something of your own",
        _source,
    ),
    Promise(
        "settings survive being written as text",
        "`name(key=value,…)` builds an equal instance again",
        "settings are dataclass fields of simple types: numbers, True and False, words (Literal), None",
        _text,
    ),
)
