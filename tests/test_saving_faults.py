"""What can go wrong around a saved model: full disks, foreign files, damaged manifests, other machines."""

import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from quant_bench import models, registry
from quant_bench.cache import file_sha256
from quant_bench.errors import ModelError
from quant_bench.export import save_compressed
from quant_bench.lowbit import linear
from quant_bench.lowbit.kernels import Kernel, choose_kernel
from quant_bench.model import LanguageModel
from quant_bench.models.manifest import MANIFEST, WEIGHTS
from quant_bench.models.saving import require_free
from quant_bench.quantizer import Calibration
from quant_bench.rebuild import rebuildable, settings_of
from quant_bench.testing.tokens import tiny_calibration
from quant_bench.tiny import tiny_model


def quantized(text: str) -> LanguageModel:
    quantizer = registry.build("quantizers", text)
    return models.quantize_with(quantizer, tiny_model("llama"), tiny_calibration(quantizer))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    models.save(quantized("w4a8"), tmp_path / "saved")
    return tmp_path / "saved"


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writing behind so many bytes fails, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("save", [models.save, save_compressed])
def test_a_disk_that_fills_up_is_an_error_of_the_file_system_and_leaves_nothing(
    save: Callable[[LanguageModel, Path], None], tmp_path: Path
) -> None:
    model = quantized("w8a8")
    with largest_file(20_000), pytest.raises(OSError, match="large"):
        save(model, tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


def test_so_it_is_for_a_float_model(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with largest_file(20_000), pytest.raises(OSError, match="large"):
        models.save(model, tmp_path / "saved")


@pytest.mark.parametrize("save", [models.save, save_compressed])
def test_weights_are_as_readable_as_their_folder(save: Callable[[LanguageModel, Path], None], tmp_path: Path) -> None:
    save(quantized("w8a8"), tmp_path / "saved")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "file").touch()
    modes = {file.stat().st_mode for file in (tmp_path / "saved").iterdir()}
    assert modes == {(tmp_path / "plain" / "file").stat().st_mode}


@pytest.mark.parametrize(("folder", "reason"), [("/", "mount point"), ("/dev/null/x/y", "nothing can be saved in")])
def test_a_place_that_takes_no_folder_is_refused_before_any_work(folder: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        require_free(Path(folder))


@pytest.mark.parametrize("name", ["added_tokens.json", "chat_template.jinja", "model.safetensors", "sub/any.txt"])
def test_a_file_that_was_not_saved_there_is_refused(saved: Path, name: str) -> None:
    (saved / name).parent.mkdir(exist_ok=True)
    (saved / name).write_text("{}")
    with pytest.raises(ModelError, match="not of the model that was saved there"):
        models.identify(str(saved))


def test_notes_and_hidden_files_do_no_harm(saved: Path) -> None:
    for name in ("README.md", "LICENSE", ".gitattributes", ".cache/huggingface/x.json"):
        (saved / name).parent.mkdir(parents=True, exist_ok=True)
        (saved / name).write_text("x")
    assert models.load_model(str(saved)).recipe is not None


def test_several_chat_templates_come_back(tmp_path: Path) -> None:
    model = quantized("w4a8")
    templates = {"default": "a", "tool_use": "b"}
    model.tokenizer.chat_template = templates
    models.save(model, tmp_path / "saved")
    assert models.load_model(str(tmp_path / "saved")).tokenizer.chat_template == templates
    (tmp_path / "saved" / "additional_chat_templates" / "tool_use.jinja").write_text("c")
    with pytest.raises(ModelError, match="was changed"):
        models.identify(str(tmp_path / "saved"))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("identity", "dtype"), []),
        (("identity", "trust_remote_code"), 1),
        (("identity", "weights_sha256"), None),
        (("arm_version",), "1"),
        (("recipe", "quantizer"), 3),
        (("recipe", "settings"), []),
        (("recipe", "seed"), 0.5),
        (("files", "config.json"), {}),
        (("modules",), []),
        (("model", "execution"), "quick"),
        (("model", "token_independent"), "yes"),
        (("model", "coverage", "mac_share"), "all"),
        (("model", "coverage", "notes"), "none"),
        (("model", "layout", "linears", 0, "role"), "gatekeeper"),
        (("model", "layout", "layers"), {}),
        (("modules", "model.layers.0.mlp.up_proj", "settings", "execution"), "quick"),
        (("modules", "model.layers.0.mlp.up_proj", "settings", "execution"), []),
        (("modules", "model.layers.0.mlp.up_proj", "settings", "activation", "granularity"), "word"),
    ],
)
def test_a_manifest_with_a_value_of_another_type_is_refused(saved: Path, place: Any, value: Any) -> None:
    content = json.loads((saved / MANIFEST).read_text())
    part = content
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    (saved / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"is no|has no|cannot be made again"):
        models.load_model(str(saved))


def test_a_manifest_nested_beyond_reading_is_refused(saved: Path) -> None:
    (saved / MANIFEST).write_text("[" * 100_000)
    with pytest.raises(ModelError, match="damaged"):
        models.load_model(str(saved))


@pytest.mark.parametrize("damage", [lambda data: data[:5000], lambda data: b"\xff" * 100])
def test_damaged_weights_of_an_arm_are_a_model_error(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    models.save(models.attach(tiny_model("llama"), "softmax1"), tmp_path / "float")
    weights = tmp_path / "float" / "model.safetensors"
    weights.write_bytes(damage(weights.read_bytes()))
    with pytest.raises(ModelError, match="cannot be loaded"):
        models.load_model(str(tmp_path / "float"))


def test_coverage_names_the_kernel_of_the_machine_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantized("mixed:w4a8-integer")
    models.save(model, tmp_path / "saved")
    assert models.load_model(str(tmp_path / "saved")).coverage == model.coverage
    here = choose_kernel(torch.device("cpu"))
    monkeypatch.setattr(linear, "choose_kernel", lambda device: Kernel("abacus", here.product, "it is at hand"))
    there = models.load_model(str(tmp_path / "saved")).coverage
    for path, text in model.coverage.quantized.items():
        assert here.name in text
        assert "sensitivity" in text
        assert there.quantized[path] == text.replace(here.name, "abacus")


def test_the_manifest_names_every_other_file(saved: Path) -> None:
    names = {path.name for path in saved.iterdir()} - {MANIFEST}
    assert WEIGHTS in names
    assert set(json.loads((saved / MANIFEST).read_text())["files"]) == names


def test_a_quantized_model_is_not_quantized_once_more() -> None:
    # the smoothed weights would stand under the name of w8a8
    model = quantized("smoothquant(activation_bits=16,weight_bits=16)")
    with pytest.raises(ModelError, match="quantized already"):
        models.quantize_with(registry.build("quantizers", "w8a8"), model, Calibration())


def test_a_dtype_that_no_folder_can_have_is_refused(tmp_path: Path) -> None:
    plain = tiny_model("llama")
    model = models.from_module(plain.module.double(), plain.tokenizer)
    with pytest.raises(ModelError, match="computes in float64"):
        models.save(models.quantize_with(registry.build("quantizers", "w8a8"), model, Calibration()), tmp_path / "x")


def test_a_folder_saved_without_trust_runs_no_code(saved: Path) -> None:
    marker = saved.parent / "ran"
    config = json.loads((saved / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.Own"}
    (saved / "config.json").write_text(json.dumps(config))
    (saved / "own.py").write_text(
        f"from pathlib import Path\nfrom transformers import LlamaConfig\nPath({str(marker)!r}).touch()\n"
        "class Own(LlamaConfig):\n    pass\n"
    )
    content = json.loads((saved / MANIFEST).read_text())
    content["files"] |= {name: file_sha256(saved / name) for name in ("config.json", "own.py")}
    (saved / MANIFEST).write_text(json.dumps(content))
    assert not models.load_model(str(saved), models.LoadOptions(trust_remote_code=True)).identity.trust_remote_code
    assert not marker.exists()


@rebuildable("value")
class HoldsAnything(torch.nn.Module):
    """A module with one setting."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


@pytest.mark.parametrize("value", [(1, 2), torch.float16, float("inf"), {1: 2}])
def test_settings_that_json_does_not_give_back_are_refused(value: Any) -> None:
    assert settings_of(HoldsAnything([1, 2.5, None, {"a": "b"}])) == {"value": [1, 2.5, None, {"a": "b"}]}
    with pytest.raises(ModelError, match="settings of a HoldsAnything"):
        settings_of(HoldsAnything(value))
