"""Compiled loops: numba with the settings that all loops over activations share."""

import inspect
from collections.abc import Callable
from typing import Any

import numba

# reordering sums lets them use vector registers; infinities and NaN keep their meaning (so no full fastmath)
_REORDER = {"reassoc", "contract", "nsz"}


def compiled(*, reorder: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a loop at its first call and keep the machine code on disk.

    Shape checks of the test run wrap every function of the package; the compiler needs what they wrap.

    Args:
        reorder: whether sums may be added in another order, for speed.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        plain = inspect.unwrap(function)
        options: dict[str, Any] = {"fastmath": _REORDER if reorder else False, "nogil": True}
        try:
            loop: Callable[..., Any] = numba.njit(cache=True, **options)(plain)
        except RuntimeError:
            # neither the installation nor the user's cache folder can be written: compile in every process
            loop = numba.njit(**options)(plain)
        return loop

    return decorate
