"""Threads for compiled loops: as many as torch uses, asleep between calls, and none for small work.

Numba's own parallel loops are not used: its portable backend may not be entered from two threads at once, and OpenMP's
workers spin between calls, which costs more than it saves on a shared machine.
"""

import inspect
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar, cast

import numba
import torch

from quant_bench.numerics.compiled import cached_loop

Function = TypeVar("Function", bound=Callable[..., Any])

# elements that one thread handles in the time that waking another one takes (some ten microseconds)
GRAIN = 1 << 16


def compiled(function: Function) -> Function:
    """Compile a loop that releases the interpreter lock.

    Divisions follow IEEE 754 and no operation is fused or reordered, so results equal plain torch bit for bit.
    """
    return cast(Function, cached_loop(function, nogil=True, error_model="numpy"))


def inlined(function: Function) -> Function:
    """A loop that is compiled into its callers: handing over arrays would count references for each tile."""
    return numba.njit(error_model="numpy", inline="always")(inspect.unwrap(function))


@cache
def _pool(size: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(size, thread_name_prefix="quant-bench")


# a forked child has the pool but not its threads
os.register_at_fork(after_in_child=_pool.cache_clear)


def shared(function: Callable[..., None], count: int, work: int, *arguments: Any) -> None:
    """Call `function(start, stop, *arguments)` over the range of `count`, split among torch's threads.

    Args:
        function: compiled loop; its parts must not write to the same place.
        count: length of the range.
        work: elements in all, to see whether threads pay.
        arguments: passed on.
    """
    parts = max(1, min(torch.get_num_threads(), count, work // GRAIN))
    if parts == 1:
        function(0, count, *arguments)
        return
    bounds = [count * index // parts for index in range(parts + 1)]
    others = [_pool(parts - 1).submit(function, start, stop, *arguments) for start, stop in pairwise(bounds[1:])]
    function(bounds[0], bounds[1], *arguments)
    for other in others:
        other.result()
