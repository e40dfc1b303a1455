"""Threads of compiled loops: same bits on any number of them, and from several callers at once."""

import threading
import time

import numpy as np
import pytest
import torch

from quant_bench.lowbit import threads
from quant_bench.lowbit.activation import ActivationRule
from quant_bench.lowbit.codes import quantize_weight
from quant_bench.lowbit.linear import QuantLinear


@pytest.fixture
def torch_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("execution", ["integer", "simulated"])
@pytest.mark.parametrize("granularity", ["token", "group"])
def test_results_do_not_depend_on_the_number_of_threads(torch_threads, monkeypatch, execution, granularity):
    monkeypatch.setattr(threads, "GRAIN", 1)
    weight = quantize_weight(torch.randn(193, 96), bits=4, granularity="group", group_size=32)
    layer = QuantLinear(weight, torch.randn(193), ActivationRule(4, granularity, False, 32), execution)
    for tokens in (1, 50):
        x = torch.randn(tokens, 96)
        torch_threads(1)
        want = layer(x)
        for count in (2, 3, 5):
            torch_threads(count)
            assert torch.equal(layer(x), want)


def test_every_part_of_a_range_is_done_once(torch_threads, monkeypatch):
    monkeypatch.setattr(threads, "GRAIN", 1)
    torch_threads(3)
    for count in (1, 2, 3, 10):
        seen = np.zeros(count, np.int64)

        def mark(start, stop, out):
            out[start:stop] += 1

        threads.shared(mark, count, 1000, seen)
        assert (seen == 1).all()


def test_small_work_stays_in_the_calling_thread(torch_threads):
    torch_threads(4)
    names = []
    threads.shared(lambda start, stop: names.append(threading.current_thread().name), 100, threads.GRAIN)
    assert names == [threading.current_thread().name]


def test_an_error_in_another_thread_is_raised(torch_threads):
    torch_threads(2)

    def fail(start, stop):
        if start:
            raise ValueError("second part")

    with pytest.raises(ValueError, match="second part"):
        threads.shared(fail, 2, 10 * threads.GRAIN)


def test_two_callers_at_once_get_their_own_results(torch_threads, monkeypatch):
    monkeypatch.setattr(threads, "GRAIN", 1)
    torch_threads(2)
    layer = QuantLinear(quantize_weight(torch.randn(64, 64), bits=8), None, ActivationRule(8), "integer")
    inputs = [torch.randn(40, 64) for _ in range(4)]
    wanted = [layer(x) for x in inputs]
    wrong = []

    def work(x, want):
        wrong.extend(1 for _ in range(30) if not torch.equal(layer(x), want))

    callers = [threading.Thread(target=work, args=pair) for pair in zip(inputs, wanted, strict=True)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


def test_compiled_loops_release_the_interpreter():
    @threads.compiled
    def spin(start, stop, flag):
        # ends only when another Python thread runs meanwhile
        for _ in range(start, stop):
            if flag[0] != 0:
                return

    flag = np.ones(1, np.int64)
    spin(0, 1, flag)
    flag[0] = 0

    def release():
        time.sleep(0.05)
        flag[0] = 1

    other = threading.Thread(target=release)
    other.start()
    spin(0, 1 << 62, flag)
    other.join()
    assert flag[0] == 1
