"""A real package with an entry point is installed and used like a built-in."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent / "third_party"
USE = """
from quant_bench import registry
from quant_bench.testing import check_arm, check_quantizer
assert "ternary" in registry.names("quantizers")
quantizer = registry.build("quantizers", "ternary(threshold=0.5)")
assert registry.canonical("quantizers", quantizer) == "ternary(threshold=0.5)"
assert registry.canonical("quantizers", registry.build("quantizers", "ternary(threshold=0.70)")) == "ternary"
check_quantizer(quantizer, families=("llama", "gpt2"))
check_arm(registry.build("arms", "sigmoid_attention"), families=("llama", "gpt2"))
check_arm(registry.build("arms", "sigmoid_attention+projection_gate"), families=("llama",))
print("kept the contract")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("third_party")
    # built from a copy, so that no build folder is left in the repository
    source, target = folder / "source", folder / "target"
    shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(source)], check=True)
    return target


def test_installed_package_is_found_by_name_and_keeps_the_contract(installed: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", USE], env=environment, cwd=installed, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("kept the contract")


def test_the_command_checks_a_package_by_its_name(installed: Path) -> None:
    command = [sys.executable, "-m", "quant_bench", "check", "ternary(threshold=0.5)", "--layout", "llama"]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(command, env=environment, cwd=installed, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "quantizer ternary(threshold=0.5)"
    assert "  pass  coverage accounts for every weight matrix" in lines
    # it has no bits and executions of ours, and the command says so
    assert "  n/a   simulated and integer execution agree" in lines
    assert " 0 broken," in lines[-1]


def test_package_that_is_not_installed_is_unknown() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from quant_bench import registry; registry.load('quantizers', 'ternary')"],
        cwd=PACKAGE.parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "no quantizer named 'ternary'" in done.stderr
