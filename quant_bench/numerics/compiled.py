"""Compiled loops: numba with the settings that all loops over activations share."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numba

# reordering sums lets them use vector registers; infinities and NaN keep their meaning (so no full fastmath)
_REORDER = {"reassoc", "contract", "nsz"}


def cached_loop(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile a loop at its first call; the machine code is kept on disk where some folder is writable.

    Args:
        function: the loop; shape checks, in which a test run wraps every function of the package, are taken off.
        options: of `numba.njit`.
    """
    plain = inspect.unwrap(function)
    try:
        loop: Callable[..., Any] = numba.njit(cache=True, **options)(plain)
    except RuntimeError:
        # neither the package's folder nor the user's cache folder can be written: compile in every process
        loop = numba.njit(**options)(plain)
    return loop


def compiled(*, reorder: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a loop over activations; see `cached_loop`.

    Args:
        reorder: whether sums may be added in another order, for speed.
    """
    return partial(cached_loop, fastmath=_REORDER if reorder else False, nogil=True)
