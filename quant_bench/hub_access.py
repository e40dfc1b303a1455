"""Hub access: data sets by `datasets`, with an answer within seconds where there is no network; knows no torch."""

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from quant_bench.errors import Blocked

_SECONDS = 5.0


@cache
def hub_answers() -> bool:
    """Whether the hub answers within five seconds; asked once a process, never when `HF_HUB_OFFLINE` is set."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    answers: list[bool] = []

    def ask() -> None:
        try:
            request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
            with urllib.request.urlopen(request, timeout=_SECONDS):
                answers.append(True)
        except urllib.error.HTTPError:
            # an error status is an answer too
            answers.append(True)
        except (OSError, ValueError):
            # no route, no name, no proxy: no answer
            pass

    # a name server that does not answer blocks beyond any socket timeout, so the question waits in a thread
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_SECONDS)
    return bool(answers)


@contextmanager
def hub_access() -> Iterator[None]:
    """Let `datasets` and `huggingface_hub` use their local caches only, while the hub does not answer.

    Without this each of them retries for minutes. What was cached before is found either way.
    """
    if hub_answers():
        yield
        return
    import datasets
    from huggingface_hub import constants

    before = (datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE)
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


@contextmanager
def _blocked_without(what: str) -> Iterator[None]:
    """Ask the hub for something, and raise `Blocked` where it cannot be had."""
    with hub_access():
        try:
            yield
        except Exception as error:
            # `datasets` raises a dozen kinds here, from its own and from three network libraries
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            state = "it was asked" if hub_answers() else "it does not answer, or HF_HUB_OFFLINE is set"
            raise Blocked(f"{what} cannot be had: {state}: {said}") from error


def hub_rows(path: str, configuration: str, split: str, column: str) -> list[str]:
    """One text column of a hub data set.

    Raises:
        Blocked: it is neither cached nor can it be downloaded.
    """
    import datasets

    with _blocked_without(f"the hub's {path} ({configuration}, {split})"):
        rows: Any = datasets.load_dataset(path, configuration, split=split)
    return [str(row) for row in rows[column]]


def hub_stream(path: str, configuration: str | None, split: str, column: str) -> Iterator[str]:
    """One text column of a hub data set, row by row as it arrives; nothing but the rows at hand is kept.

    Raises:
        Blocked: it is neither cached nor can it be read.
    """
    import datasets

    with _blocked_without(f"the hub's {path} ({configuration}, {split})"):
        for row in datasets.load_dataset(path, configuration, split=split, streaming=True):
            yield str(row[column])
