"""The public surface from Python, on a tiny model in memory."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import quant_bench
from quant_bench.demo import demo_options
from quant_bench.errors import DataError, ModelError, RecordError, SpecError
from quant_bench.plan import RunOptions
from quant_bench.samples import Samples, SampleStore
from quant_bench.tiny import tiny_model


def test_the_public_surface_is_this_list() -> None:
    public = ["LanguageModel", "attach", "evaluate", "leaderboard", "load_model", "quantize", "run", "save", "train"]
    assert quant_bench.__all__ == public
    package = Path(quant_bench.__file__).parent
    for name in quant_bench.__all__:
        assert callable(getattr(quant_bench, name))
        # importing a module of that name would put it in the function's place
        assert not (package / f"{name}.py").exists()
        assert not (package / name).exists()
    with pytest.raises(AttributeError, match="nonsense"):
        _ = quant_bench.nonsense  # type: ignore[attr-defined]


def test_importing_the_package_imports_no_torch() -> None:
    program = "import sys, quant_bench; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_model_is_quantized_and_evaluated_step_by_step(tmp_path: Path) -> None:
    task = "python_docs(limit=2,seq_length=16)"
    float_scores = quant_bench.evaluate(tiny_model("llama"), task, cache=tmp_path)
    model = quant_bench.quantize(tiny_model("llama"), "w4a4-integer")
    assert model.execution == "integer"
    scores = quant_bench.evaluate(model, task, cache=tmp_path)
    assert [s.metric.name for s in scores] == [s.metric.name for s in float_scores]
    assert scores[0].metric.name == "token_perplexity"
    assert scores[0].value != float_scores[0].value


def test_a_static_scheme_finds_its_calibration_text_and_says_when_it_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("QUANT_BENCH_DATA", raising=False)
    # the tiny tokenizer makes one token of a word, so the text has fewer sequences than for a real one
    with pytest.warns(UserWarning, match="of 32 sequences"):
        model = quant_bench.quantize(tiny_model("llama", max_position_embeddings=512), "w8a8-static")
    assert model.coverage.quantized


def test_samples_come_back_as_they_were_written_and_never_by_halves(tmp_path: Path) -> None:
    import pandas as pd

    store = SampleStore(tmp_path)
    frame = pd.DataFrame({"item": [0, 1], "nll": [0.1, 2.5], "text": ["a", "b"]})
    assert store.read("key") is None
    store.write("key", Samples(frame, "digest"))
    found = store.read("key")
    assert found is not None
    assert found.data_sha256 == "digest"
    assert found.frame.equals(frame)
    with pytest.raises(Exception, match=r"parquet|Arrow|convert|object"):
        store.write("key", Samples(pd.DataFrame({"item": [object()]}), "other"))
    again = store.read("key")
    assert again is not None
    assert again.frame.equals(frame)
    assert [path.name for path in store.folder.iterdir()] == ["key.parquet"]


def test_the_demo_names_the_text_that_it_reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("QUANT_BENCH_DATA", raising=False)
    options, sentence = demo_options(None, tmp_path)
    assert isinstance(options, RunOptions)
    assert options.tasks[0] == "python_docs"
    assert "Python's own documentation" in sentence
    assert {"w8a8", "w8a8-integer", "w8a8-static", "w4a4", "w4a4g128-integer"} < set(options.quantizers)


@pytest.mark.parametrize("name", ["arms", "quantizers", "tasks", "seeds"])
def test_a_text_or_a_number_in_place_of_a_list_is_a_usage_error(name: str, tmp_path: Path) -> None:
    given: Any = 0 if name == "seeds" else "none"
    with pytest.raises(SpecError, match=f"{name} are a list"):
        quant_bench.run("m", **{name: given, "results": tmp_path})


@pytest.mark.parametrize(
    "option",
    [{"limit": 0}, {"batch_size": 0}, {"seq_length": 1}, {"device": "tpu"}, {"device": "cuda:256"}, {"seeds": [-1]}],
)
def test_a_value_that_no_run_can_have_is_a_usage_error(option: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=next(iter(option)).removesuffix("s")):
        quant_bench.run("m", results=tmp_path / "results", **option)
    assert not (tmp_path / "results").exists()


def test_folders_may_be_texts(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model"):
        quant_bench.run("./m", results=str(tmp_path), cache=str(tmp_path), data=None)
    with pytest.raises(DataError, match="there-is-no-such-folder"):
        quant_bench.run("./m", results=str(tmp_path), data=str(tmp_path / "there-is-no-such-folder"))


def test_a_seed_that_is_none_and_a_folder_that_is_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="seed"):
        quant_bench.evaluate(tiny_model("llama"), "python_docs(limit=1,seq_length=16)", seed=-1)
    with pytest.raises(RecordError, match="no folder"):
        quant_bench.leaderboard(tmp_path / "resluts")
