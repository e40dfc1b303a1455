"""Freed memory goes back to the system when asked."""

import subprocess
import sys

import pytest

PROGRAM = """
import torch
from quant_bench.lowbit.memory import release_memory, tune_allocator

def resident():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

tune_allocator()
tensors = [torch.ones(1 << 20) for _ in range(128)]
kept = tensors[-1]
del tensors
held = resident()
release_memory()
print(held - resident())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator is Linux's")
def test_released_memory_leaves_the_process_under_the_tuned_allocator() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    # 127 tensors of 4 MiB lie free below the one that is kept
    assert int(done.stdout) > 400_000
