"""Freed memory goes back to the system when asked."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from quant_bench import registry
from quant_bench.environment import PeakMemory
from quant_bench.lowbit import memory
from quant_bench.lowbit.formats import FormatLinear
from quant_bench.lowbit.linear import QuantLinear
from quant_bench.lowbit.ready import make_ready_
from quant_bench.quantizer import Calibration
from quant_bench.scoring import final_hidden
from quant_bench.tiny import tiny_model

PROGRAM = """
import torch
from quant_bench.lowbit.memory import HeapWatch, release_memory, tune_allocator

def resident():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

tune_allocator()
watch = HeapWatch()
tensors = [torch.ones(1 << 20) for _ in range(MANY)]
kept = tensors[-1]
del tensors
held = resident()
GIVE_BACK
print(held - resident())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator is Linux's")
def test_released_memory_leaves_the_process_under_the_tuned_allocator() -> None:
    # 127 tensors of 4 MiB lie free below the one that is kept
    assert _released("release_memory()", 128) > 400_000


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator is Linux's")
def test_a_heap_that_has_grown_by_half_a_gigabyte_is_given_back_and_a_smaller_one_kept() -> None:
    assert _released("watch.check()", 192) > 600_000
    assert _released("watch.check()", 64) < 50_000


def _released(give_back: str, many: int) -> int:
    """KiB that leave a process which has freed that many tensors of 4 MiB but one."""
    program = PROGRAM.replace("GIVE_BACK", give_back).replace("MANY", str(many))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_memory_that_was_given_back_elsewhere_is_no_room_to_grow_into(monkeypatch: pytest.MonkeyPatch) -> None:
    megabytes = iter([100, 4000, 4000, 300, 700, 900, 900])
    released = []
    monkeypatch.setattr(memory, "_resident", lambda: next(megabytes) << 20)
    monkeypatch.setattr(memory, "release_memory", lambda: released.append(True))
    watch = memory.HeapWatch()
    watch.check()
    assert len(released) == 1
    # a large model has gone, and the next has grown by 600 megabytes
    watch.check()
    watch.check()
    assert len(released) == 1
    watch.check()
    assert len(released) == 2


@pytest.mark.parametrize("told", [None, "", "many pages"])
def test_a_system_that_does_not_tell_its_memory_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: str | None
) -> None:
    monkeypatch.setattr(memory, "_STATM", tmp_path / "statm")
    monkeypatch.setattr(memory, "release_memory", lambda: pytest.fail("given back"))
    if told is not None:
        (tmp_path / "statm").write_text(told)
    memory.HeapWatch().check()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="others tell no peak")
def test_a_peak_is_of_what_came_after_the_reset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    peak = PeakMemory()
    large = torch.ones(64 << 20)
    before = peak.bytes()
    del large
    memory.release_memory()
    peak.reset()
    after = peak.bytes()
    assert before is not None
    assert after is not None
    assert before - after > 200 << 20
    # a system that forgets no peak would tell that of the tensor again
    monkeypatch.setattr("quant_bench.environment._PROCESS", tmp_path / "none")
    peak.reset()
    assert peak.bytes() is None


@pytest.mark.parametrize(
    "quantizer", ["w8a8", "w8a8-integer", "w8a8-classic", "w8a16", "w8a16-integer", "w4a8-integer", "fp8", "mxfp4a16"]
)
def test_the_first_pass_of_a_model_that_is_ready_leaves_nothing_behind(quantizer: str) -> None:
    model = registry.build("quantizers", quantizer).quantize(tiny_model("llama"), Calibration())
    make_ready_(model.module)
    before = _lasting(model.module)
    final_hidden(model, torch.arange(3, 40)[None])
    assert before
    assert _lasting(model.module) == before


def _lasting(module: nn.Module) -> dict[str, list[int]]:
    """What layers keep beside their parameters, by identity."""
    kept: dict[str, list[int]] = {}
    for path, part in module.named_modules():
        if isinstance(part, QuantLinear):
            kept[path] = [id(value) for value in part._derived.values()]
        elif isinstance(part, FormatLinear):
            kept[path] = [id(part._operand)]
    return kept
