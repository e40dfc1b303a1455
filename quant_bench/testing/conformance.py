"""Verdicts of a plugin of any kind, promise by promise: what `quant-bench check` prints."""

from collections.abc import Iterator, Sequence
from typing import Any

from quant_bench import registry
from quant_bench.data import DataSource
from quant_bench.errors import SpecError
from quant_bench.testing import arms, promises, quantizers, tasks
from quant_bench.testing.promises import Finding, Named, Promise, Verdict
from quant_bench.tiny import CONFIGS

_PROMISES: dict[registry.Kind, tuple[Promise, ...]] = {
    "arms": arms.PROMISES,
    "quantizers": quantizers.PROMISES,
    "tasks": tasks.PROMISES,
}


def conformance(
    kind: registry.Kind, plugin: Any, layouts: Sequence[str] = (), data: DataSource | None = None
) -> list[Verdict]:
    """Hold a plugin to its contract and say what became of each promise.

    Args:
        kind: of the plugin.
        plugin: an instance with any settings; a task with a small `limit`.
        layouts: of the tiny models; all of them when empty. Tasks ask a tiny Llama.
        data: where a task's data come from.

    Raises:
        SpecError: no such layout.
        Blocked: something that the plugin needs is missing.
    """
    unknown = sorted(set(layouts) - set(CONFIGS))
    if unknown:
        raise SpecError(f"no layout {', '.join(unknown)}; there are {', '.join(CONFIGS)}")
    own = list(promises.findings(promises.IDENTITY, [Named(kind, plugin)]))
    found = list(_findings(kind, plugin, layouts or tuple(CONFIGS), data))
    return promises.verdicts(promises.IDENTITY, own) + promises.verdicts(_PROMISES[kind], found)


def _findings(kind: registry.Kind, plugin: Any, layouts: Sequence[str], data: DataSource | None) -> Iterator[Finding]:
    if kind == "arms":
        return arms.findings(plugin, layouts)
    if kind == "quantizers":
        return quantizers.findings(plugin, layouts)
    return tasks.findings(plugin, data=data)
