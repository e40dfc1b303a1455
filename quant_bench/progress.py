"""Progress bars on standard error, on a terminal only."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

# what long work is told to call: what it does, how much of it is done, of how much
ProgressReport = Callable[[str, int, int], None]


class Progressor:
    """One bar for the cells and one for the work inside the cell at hand; silent where nobody looks."""

    def __init__(self, cells: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._cells: TaskID = self._progress.add_task("cells", total=cells)
        self._inner: TaskID = self._progress.add_task("", total=None, visible=False)

    def __enter__(self) -> "Progressor":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def work(self, description: str, done: int, total: int) -> None:
        """Show how far the cell at hand is."""
        self._progress.update(self._inner, description=description, completed=done, total=total, visible=done < total)

    def cell(self, description: str) -> None:
        """A cell begins."""
        self._progress.update(self._cells, description=description)

    def advance(self) -> None:
        """A cell is done."""
        self._progress.advance(self._cells)
        self._progress.update(self._inner, visible=False)


@contextmanager
def bytes_bar(description: str, done: int, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar for a download; yields what to call with the number of bytes that came."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    hidden = not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden) as progress:
        task = progress.add_task(description, completed=done, total=total)
        yield lambda count: progress.advance(task, count)
