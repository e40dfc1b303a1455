"""Examples run as they stand, on a tiny model."""

import runpy
from pathlib import Path

import pytest

import quant_bench
from quant_bench.tiny import tiny_model

FOLDER = Path(__file__).parent.parent / "examples"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="a source distribution has no examples")


def test_the_first_values_of_float_change_nothing_in_float_and_something_in_a_quantized_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quant_bench, "load_model", lambda name: tiny_model("llama"))
    arguments = ["tiny", "none", "w4a16", "--text", "python_docs", "--windows", "2", "--seq-length", "16"]
    monkeypatch.setattr("sys.argv", ["intact_first_token.py", *arguments])
    runpy.run_path(str(FOLDER / "intact_first_token.py"), run_name="__main__")
    head, unchanged, quantized = capsys.readouterr().out.splitlines()
    assert head.endswith("nats a token, 2 windows of 16 tokens")
    assert unchanged.startswith("none: against float 0.000000 [")
    assert "with the first values of float 0.000000 [" in unchanged
    assert quantized.startswith("w4a16: against float ")
    assert "with the first values of float 0.000000 [" not in quantized
