"""Plugin roots: which folders hold quantizers, tasks and arms; knows no torch.

The names `quantizers` and `tasks` are taken on the package index, so the checkout's top-level folders must never be
installed under those names. They become the packages `quant_bench.quantizers` and `quant_bench.tasks` by extending
`__path__`; the wheel carries copies (see `force-include` in pyproject.toml).
"""

import errno
import os
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
PATH_VARIABLE = "QUANT_BENCH_PATH"


def use_plugins(folders: Iterable[Path]) -> None:
    """Name more plugin folders, for this process and those that it starts.

    Raises:
        OSError: a path holds the sign that parts paths.
    """
    known = os.environ.get(PATH_VARIABLE)
    named = [str(folder.resolve()) for folder in folders]
    for folder in named:
        if os.pathsep in folder:
            raise OSError(errno.EINVAL, f"a plugin folder's path cannot hold {os.pathsep!r}", folder)
    if named:
        os.environ[PATH_VARIABLE] = os.pathsep.join(named + ([known] if known else []))


def plugin_folders(kind: str) -> list[str]:
    """Folders that hold plugins of a kind (`arms`, `quantizers`, `tasks`), in the order in which they are searched.

    The checkout's own folder counts only where a `pyproject.toml` lies beside it: site-packages has none, so a foreign
    distribution called `quantizers` is never taken for ours.
    """
    folders = [PACKAGE / kind]
    checkout = PACKAGE.parent
    if (checkout / "pyproject.toml").is_file() and (checkout / kind).is_dir():
        folders.append(checkout / kind)
    extra = [entry for entry in os.environ.get(PATH_VARIABLE, "").split(os.pathsep) if entry]
    folders += [Path(entry).expanduser().resolve() / kind for entry in extra]
    # a folder named twice, or the checkout's own, holds no second plugin of a name
    return list(dict.fromkeys(str(folder) for folder in folders if folder.is_dir()))
