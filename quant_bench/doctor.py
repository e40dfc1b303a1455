"""Doctor: what this machine can do, and what is missing, as facts for people."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from quant_bench import registry
from quant_bench.data import DATA_VARIABLE, DataSource
from quant_bench.environment import processor, versions
from quant_bench.errors import QuantBenchError
from quant_bench.lowbit.kernels import kernel_report


@dataclass(frozen=True)
class Finding:
    """A section of the examination.

    Attributes:
        title: its heading.
        facts: names with values.
        sound: False when something must be mended before a number can be trusted.
    """

    title: str
    facts: tuple[tuple[str, str], ...]
    sound: bool = True


def examine(data: Path | None, device: str) -> Iterator[Finding]:
    """Sections one by one, since the self-test takes a moment.

    Args:
        data: mirror folder, or None for the one that `QUANT_BENCH_DATA` names.
        device: torch device whose integer kernel is tested.
    """
    yield Finding("versions", tuple((name, version or "not installed") for name, version in versions().items()))
    yield _machine()
    yield _kernel(device)
    yield _plugins()
    yield _data(data)


def _machine() -> Finding:
    found = torch.cuda.device_count()
    cuda = ", ".join(torch.cuda.get_device_name(index) for index in range(found)) or "none"
    threads = f"{torch.get_num_threads()} (of {os.cpu_count()} processors)"
    return Finding("machine", (("processor", processor()), ("threads", threads), ("CUDA devices", cuda)))


def _kernel(device: str) -> Finding:
    title = f"integer self-test on {device}"
    try:
        report = kernel_report(device)
    except (QuantBenchError, RuntimeError, AssertionError) as error:
        # torch asserts that it was built for CUDA
        return Finding(title, (("failed", str(error)),), sound=False)
    facts = []
    for name, value in report.items():
        shown = ", ".join(f"{key}: {verdict}" for key, verdict in value.items()) if isinstance(value, dict) else value
        facts.append((name, str(shown)))
    return Finding(title, tuple(facts))


def _plugins() -> Finding:
    try:
        return Finding("plugins", tuple((kind, ", ".join(registry.names(kind))) for kind in registry.KINDS))
    except QuantBenchError as error:
        return Finding("plugins", (("broken", str(error)),), sound=False)


def _data(data: Path | None) -> Finding:
    try:
        source = DataSource(data)
        states = source.verify()
    except QuantBenchError as error:
        return Finding("data", (("broken", str(error)),), sound=False)
    where = "no mirror is named" if source.root is None else str(source.root)
    facts = [("mirror", where), ("python_docs", "ok: every Python has it"), *states]
    if any(state == "missing" for _, state in states):
        hint = f"put missing files in a folder and name it by --data DIR or {DATA_VARIABLE}, or go online: "
        facts.append(("how to supply data", hint + "the hub is asked for what a mirror lacks"))
    return Finding("data", tuple(facts), sound=not any(state.startswith("wrong") for _, state in states))
