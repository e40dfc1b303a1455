"""Integer products: exact at full range, and a self-test that finds the ones that are not."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from quant_bench.errors import KernelError
from quant_bench.lowbit import kernels, vnni
from quant_bench.lowbit.activation import ActivationRule
from quant_bench.lowbit.codes import quantize_weight
from quant_bench.lowbit.linear import QuantLinear


def saturating(a, w):
    """What processors without VNNI do: pairs of products are added in 16 bits, with saturation."""
    tokens, columns = a.shape
    pad = columns % 2
    left = torch.nn.functional.pad(a.int() + 128, (0, pad)).reshape(tokens, 1, -1, 2)
    right = torch.nn.functional.pad(w.int(), (0, pad)).reshape(1, w.shape[0], -1, 2)
    pairs = (left * right).sum(-1).clamp(-32768, 32767).sum(-1)
    return (pairs - 128 * w.int().sum(1)).int()


def test_self_test_finds_a_product_that_saturates():
    assert kernels.self_test(saturating, torch.device("cpu")).startswith("wrong by up to")
    # small operands would not have found it
    a, w = (torch.randint(-60, 61, (5, 64), dtype=torch.int8) for _ in range(2))
    assert torch.equal(saturating(a, w).long(), kernels.int64_product(a, w))


def test_self_test_reports_a_product_that_raises():
    def refuse(a, w):
        raise RuntimeError("not on this device\nmore")

    assert kernels.self_test(refuse, torch.device("cpu")) == "failed: RuntimeError: not on this device"


@pytest.mark.parametrize("name", ["float32_split", "float64_product", "int_mm_padded"])
@pytest.mark.parametrize(("tokens", "columns", "rows"), [(1, 1, 1), (17, 577, 35), (3, 2048, 8)])
def test_fallbacks_equal_int64_at_full_range(name, tokens, columns, rows):
    if name == "int_mm_padded" and kernels.self_test(kernels.int_mm, torch.device("cpu")) != "exact":
        pytest.skip("torch._int_mm is not exact here")
    product = getattr(kernels, name)
    a = torch.randint(-128, 128, (tokens, columns), dtype=torch.int8)
    w = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
    for left, right in ((a, w), (torch.full_like(a, -128), torch.full_like(w, -128))):
        assert torch.equal(product(left, right).long(), kernels.int64_product(left, right))


def test_self_test_finds_a_product_that_is_wrong_for_one_column_only():
    def careless(a, w):
        return kernels.float64_product(a, w) + int(a.shape[1] == 1)

    assert kernels.self_test(careless, torch.device("cpu")) == "wrong by up to 1"


@pytest.mark.parametrize("columns", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 2, 65])
def test_torch_s_own_product_is_right_for_a_column_or_two(rows, columns):
    # few columns stay exact without VNNI too while the weights are small
    a = torch.randint(-128, 128, (7, columns), dtype=torch.int8)
    w = torch.randint(-60, 61, (rows, columns), dtype=torch.int8)
    assert torch.equal(kernels.int_mm(a, w).long(), kernels.int64_product(a, w))


def test_padding_meets_the_limits_of_cuda(monkeypatch):
    seen = []

    def spy(a, w):
        seen.append((a.shape[0] > 16, a.shape[1] % 8, w.shape[1] % 8))
        return (a.float() @ w.float()).int()

    monkeypatch.setattr(torch, "_int_mm", spy)
    for tokens in (*range(1, 18), 40):
        for columns, rows in ((3, 5), (8, 8), (577, 35)):
            got = kernels.int_mm_padded(
                torch.ones(tokens, columns, dtype=torch.int8), torch.ones(rows, columns, dtype=torch.int8)
            )
            assert got.shape == (tokens, rows)
            assert (got == columns).all()
    assert set(seen) == {(True, 0, 0)}


def test_no_exact_product_is_an_error(monkeypatch):
    monkeypatch.setattr(kernels, "_candidates", lambda device: [("saturating", saturating)])
    kernels._choose.cache_clear()
    try:
        with pytest.raises(KernelError, match="saturating"):
            kernels.choose_kernel("cpu")
    finally:
        kernels._choose.cache_clear()


@pytest.mark.parametrize("group", [None, 16])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_layer_gives_the_same_bits_whatever_exact_kernel_it_runs(monkeypatch, group, symmetric):
    granularity = ("group", "group") if group else ("channel", "token")
    weight = quantize_weight(
        torch.randn(35, 77), bits=8, granularity=granularity[0], symmetric=symmetric, group_size=16
    )
    rule = ActivationRule(8, granularity[1], symmetric, 16)
    x = torch.randn(9, 77)
    want = QuantLinear(weight, None, rule, "simulated")(x)
    for name, product in kernels._candidates(torch.device("cpu")):
        if kernels.self_test(product, torch.device("cpu")) != "exact":
            continue
        monkeypatch.setattr(kernels, "_candidates", lambda device, one=(name, product): [one])
        kernels._choose.cache_clear()
        try:
            layer = QuantLinear(weight, None, rule, "integer")
            assert torch.equal(layer(x), want)
            assert layer.kernel == name
            assert torch.equal(layer.accumulators(x).long(), layer.reference_accumulators(x))
        finally:
            kernels._choose.cache_clear()
            monkeypatch.undo()


def test_report_says_what_was_tested_and_why():
    report = kernels.kernel_report()
    assert set(report) == {"isa", "vnni", "machine", "kernel", "why", "tested"}
    assert report["tested"][report["kernel"]] == "exact"
    json.dumps(report, allow_nan=False)


def run_child(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


LAYER = """
    import json, torch
    from quant_bench.lowbit.activation import ActivationRule
    from quant_bench.lowbit.codes import WeightCodes
    from quant_bench.lowbit.kernels import kernel_report
    from quant_bench.lowbit.linear import QuantLinear

    codes = torch.full((33, 2048), 127, dtype=torch.int8)
    codes[::2] = -127
    weight = WeightCodes(codes, torch.ones(33, 1), None, bits=8)
    x = torch.full((7, 2048), 127.0)
    integer = QuantLinear(weight, None, ActivationRule(8), "integer")
    simulated = QuantLinear(weight, None, ActivationRule(8), "simulated")
    wrong = int((integer.accumulators(x).long() != integer.reference_accumulators(x)).sum())
    want = (x.long() @ codes.long().t()).int().float()
    same = torch.equal(integer(x), want) and torch.equal(simulated(x), want)
    print(json.dumps({"wrong": wrong, "same": same, **kernel_report()}))
"""


@pytest.mark.parametrize("isa", ["AVX2", "AVX512_CORE"])
def test_every_accumulator_is_exact_without_vnni(isa):
    report = run_child(LAYER, ONEDNN_MAX_CPU_ISA=isa)
    assert report["wrong"] == 0
    assert report["same"]
    assert report["tested"][report["kernel"]] == "exact"
    assert report["kernel"] != kernels.VNNI


def test_a_restricted_compiler_target_does_not_get_vnni_code():
    if not vnni.supported():
        pytest.skip("no AVX-512 VNNI here")
    report = run_child(LAYER, NUMBA_CPU_NAME="generic")
    assert (report["wrong"], report["same"]) == (0, True)
    assert kernels.VNNI not in report["tested"]


def test_loops_compile_where_no_folder_can_be_written():
    code = """
        import json
        from numba.core import caching
        from quant_bench.lowbit import threads

        def nowhere(self, py_func):
            raise RuntimeError("cannot cache function: no locator available")

        caching.CacheImpl.__init__ = nowhere

        @threads.compiled
        def total(start, stop, out):
            for index in range(start, stop):
                out[0] += index

        import numpy as np
        out = np.zeros(1)
        total(0, 5, out)
        print(json.dumps(out[0]))
    """
    assert run_child(code) == 10
