"""The wheel works in a folder of its own, plugins and schema included, and installs nothing else at the top level."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the unpacked wheel, as an installer leaves it."""
    pytest.importorskip("hatchling", reason="the build backend is in the dependency group `test`")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def ask(installed: Path, script: str) -> list[str]:
    environment = {key: value for key, value in os.environ.items() if key != "QUANT_BENCH_PATH"}
    environment["PYTHONPATH"] = str(installed)
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=installed.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_only_our_package_is_at_the_top_level(installed: Path) -> None:
    assert {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")} == {"quant_bench"}


def test_the_plugins_of_the_checkout_are_inside(installed: Path) -> None:
    script = (
        "import json, quant_bench; from quant_bench import registry\n"
        "print(quant_bench.__file__)\n"
        "print(json.dumps({kind: registry.names(kind) for kind in registry.KINDS}))"
    )
    place, found = ask(installed, script)
    assert Path(place).is_relative_to(installed)
    for kind in ("quantizers", "tasks"):
        expected = sorted(file.stem for file in (ROOT / kind).glob("*.py"))
        assert set(json.loads(found)[kind]) >= set(expected)


def test_plugins_schema_and_commands_work_there(installed: Path) -> None:
    script = (
        "import quant_bench; from quant_bench import registry, record_json\n"
        "print(registry.canonical('quantizers', registry.build('quantizers', 'w4a4-integer')))\n"
        "print(registry.load('quantizers', 'rtn').__module__, record_json.schema()['type'])\n"
        "from quant_bench.cli import main; main(['--version'], standalone_mode=False)"
    )
    assert ask(installed, script) == [
        "rtn(activation_bits=4,execution=integer,weight_bits=4)",
        "quant_bench.quantizers.rtn object",
        "quant-bench, version 0.1.0",
    ]
