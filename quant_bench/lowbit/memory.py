"""Allocator settings: keep freed memory in the process, because giving it back costs a page fault a page."""

import ctypes
import logging
import os
from functools import cache
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_PAD_BYTES = 64 << 20
_GROWTH_BYTES = 512 << 20
_STATM = Path("/proc/self/statm")


@cache
def tune_allocator() -> bool:
    """Tell glibc to serve large tensors from its heap and to keep what is freed.

    By default every tensor above 32 MiB is mapped anew and unmapped when freed, so its first touch faults page by page;
    with large outputs that costs more than the product. The price: the heap fragments, and its holes are never given
    back, so long work asks `HeapWatch` after each of its steps.

    Source: mallopt(3), https://man7.org/linux/man-pages/man3/mallopt.3.html.

    Returns:
        Whether the settings took effect; False where the C library is not glibc.
    """
    library = _glibc()
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, _PAD_BYTES))
    return library is not None and all([library.mallopt(*setting) for setting in settings])


def release_memory() -> bool:
    """Give the heap's free pages back to the system; some hundredths of a second a gigabyte.

    Source: malloc_trim(3), https://man7.org/linux/man-pages/man3/malloc_trim.3.html.

    Returns:
        Whether anything was given back; False where the C library is not glibc.
    """
    library = _glibc()
    return library is not None and bool(library.malloc_trim(0))


class HeapWatch:
    """Gives free memory back whenever the process has grown by half a gigabyte over the least since it last did.

    Steps of different lengths leave holes of different sizes. Giving back after every step instead would fault the
    pages of the next one again.
    """

    def __init__(self) -> None:
        self._held = _resident()

    def check(self) -> None:
        """Call it after each step of long work; a few microseconds."""
        now = _resident()
        # what was given back elsewhere, or belonged to a larger model, is no room to grow into
        self._held = min(self._held, now)
        if now - self._held > _GROWTH_BYTES:
            release_memory()
            self._held = _resident()


def _resident() -> int:
    """Bytes of this process in memory; 0 where the system does not say, and then nothing is ever given back."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


@cache
def _glibc() -> Any:
    """The C library where it is glibc, else None."""
    try:
        library: Any = ctypes.CDLL("libc.so.6")
    except OSError:
        library = None
    if not hasattr(library, "malloc_trim"):
        logger.info("no glibc here: allocator left as it is")
        return None
    return library
