"""Where a number was made: versions, machine, kernel, commit, memory."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import quant_bench
from quant_bench.lowbit.kernels import kernel_report

_PROCESS = Path("/proc/self")
PACKAGES = ("torch", "transformers", "lm_eval", "optimum-quanto", "torchao", "datasets", "numpy", "numba", "pandas")


def versions() -> dict[str, str | None]:
    """Versions of Python, the suite and what it stands on; None for a package that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "quant_bench": quant_bench.__version__}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def commit() -> tuple[str | None, bool | None]:
    """The checkout's commit and whether its code differs from it; (None, None) outside a checkout.

    `results/` does not count: a run writes there, and a record must not call the next one dirty.
    """
    folder = Path(__file__).resolve().parent.parent
    if not (folder / ".git").exists():
        return None, None
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!results"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None, None
    return head.stdout.strip(), bool(changed.stdout.strip())


def processor() -> str:
    """The processor's own name where the system tells it."""
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text(encoding="utf8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def environment(device: str) -> dict[str, Any]:
    """Everything about the machine that could explain a difference, as strict JSON."""
    head, dirty = commit()
    place = torch.device(device)
    # a cell is blocked where its device is missing, and its record still says which machine that was
    here = place.type != "cuda" or (place.index or 0) < torch.cuda.device_count()
    return {
        "commit": head,
        "dirty": dirty,
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" and here else processor(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "kernel": kernel_report(place) if here else None,
    }


class PeakMemory:
    """Peak resident memory of this process between `reset` and `bytes`.

    Only Linux can forget its high-water mark; the peak since the process began, which is what others know, would be a
    number of whatever ran before.
    """

    def __init__(self) -> None:
        self._known = True

    def reset(self) -> None:
        """Forget the peak so far, where the system allows it."""
        try:
            (_PROCESS / "clear_refs").write_text("5", encoding="ascii")
            self._known = True
        except OSError:
            self._known = False

    def bytes(self) -> int | None:
        """The peak, in bytes; None where it could not be reset or is not told."""
        if not self._known:
            return None
        try:
            lines = (_PROCESS / "status").read_text(encoding="ascii", errors="replace").splitlines()
        except OSError:
            return None
        found = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
        return int(found[0]) * 1024 if found else None
