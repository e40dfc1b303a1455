"""What the benchmarks here share: alternatives that take turns in one process, and the ratios of their times.

With one thread the clock counts the process's CPU time, which other programs on the machine hardly change; with more it
counts wall time. A ratio is taken within a round, and the median over the rounds is what counts.
"""

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping

# read once, when torch is loaded: an idle OpenMP thread that spins takes the core from the others
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from quant_bench import models
from quant_bench.lowbit.memory import tune_allocator
from quant_bench.model import LanguageModel
from quant_bench.tiny import tiny_tokenizer

LEAST_ROUNDS = 5
MOST_REPEATS = 200


def parser(description: str | None, rounds: int = LEAST_ROUNDS) -> argparse.ArgumentParser:
    """A command line with the options that every benchmark has."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--rounds", type=_rounds, default=rounds, help=f"at least {LEAST_ROUNDS}")
    result.add_argument("--threads", type=int, default=1)
    return result


def _rounds(text: str) -> int:
    if int(text) < LEAST_ROUNDS:
        raise argparse.ArgumentTypeError(f"a median needs at least {LEAST_ROUNDS} rounds")
    return int(text)


def start(options: argparse.Namespace) -> None:
    """Set threads and allocator as `quant-bench run` does, and print what every time depends on."""
    torch.set_num_threads(options.threads)
    tuned = "tuned" if tune_allocator() else "as it is"
    print(
        f"torch {torch.__version__}, {options.threads} thread(s), {'CPU' if options.threads == 1 else 'wall'} time, "
        f"{options.rounds} rounds, load {os.getloadavg()[0]:.1f}, allocator {tuned}"
    )


def clock() -> float:
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def in_turn(calls: Mapping[str, Callable[[int], object]], rounds: int, least: float = 0.0) -> dict[str, list[float]]:
    """Seconds of each call in each round; who goes first changes from round to round.

    Args:
        calls: name -> what is timed, given its round. Round 0 warms up and does not count.
        rounds: how many count.
        least: a call that takes fewer seconds is repeated for about that long, and the time of one call counts.
    """
    names = list(calls)
    repeats = dict.fromkeys(names, 1)
    for name, call in calls.items():
        call(0)
        if least:
            took = _seconds(call, 0, 1)
            repeats[name] = MOST_REPEATS if took <= 0 else min(MOST_REPEATS, math.ceil(least / took))
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(1, rounds + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(_seconds(calls[name], turn, repeats[name]))
    return times


def _seconds(call: Callable[[int], object], turn: int, repeats: int) -> float:
    start = clock()
    for _ in range(repeats):
        call(turn)
    return (clock() - start) / repeats


def ratio(times: list[float], base: list[float]) -> float:
    """Median over the rounds of time over base."""
    return statistics.median(a / b for a, b in zip(times, base, strict=True))


def random_llama(arm: str, **shape: int | bool) -> LanguageModel:
    """A Llama with random weights and the arm: what a forward pass costs does not depend on what was learned.

    Args:
        arm: spec of the arm.
        shape: settings of `LlamaConfig`.
    """
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(LlamaConfig(**shape))
    return models.attach(models.from_module(module, tiny_tokenizer(), name="random"), arm)
