"""A quantized model comes back from a folder as it was: same logits, bit for bit, and the same account of itself."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quant_bench import models, registry
from quant_bench.errors import Blocked, ModelError, NotApplicable
from quant_bench.model import LanguageModel
from quant_bench.models.manifest import MANIFEST, WEIGHTS
from quant_bench.testing.tokens import tiny_calibration, tiny_ids
from quant_bench.tiny import CONFIGS, tiny_model

STATIC_FULL = "rtn(activation_granularity=tensor,activation_static=True,activation_symmetric=False,scope=full"
SCHEMES = {
    "dynamic": "w8a8",
    "integer": "w4a8-integer",
    "classic": "rtn(weight_bits=4,activation_bits=4,execution=classic)",
    "groups": "w4a4g16",
    "zero points": "rtn(weight_bits=4,weight_symmetric=False,activation_symmetric=False,kv_bits=4)",
    "float activations": "rtn(weight_bits=4,activation_bits=16,kv_bits=8)",
    "float weights": "rtn(weight_bits=16,activation_bits=8)",
    "full": f"{STATIC_FULL},kv_bits=8,execution=integer)",
    "full with float weights": f"{STATIC_FULL},weight_bits=16)",
    "rotated": "quarot(weight_bits=4,activation_bits=4)",
    "rotated, nothing rounded": "quarot(weight_bits=16,activation_bits=16)",
    "rotated, full": f"{STATIC_FULL},weight_bits=4)".replace("rtn", "quarot"),
    "formats with blocks": "nvfp4",
    "formats without": "fp8a16",
    "outlier columns": "llm_int8(threshold=1.0)",
    "real zero points": "hqq:w4a8g16-integer",
    "floating point": "nvfp4",
    "floating-point weights": "mxfp4a16-kv8",
    "mixed bits": "mixed:w4a8",
}


def quantized(text: str, model: LanguageModel) -> LanguageModel:
    quantizer = registry.build("quantizers", text)
    return models.quantize_with(quantizer, model, tiny_calibration(quantizer))


def logits(model: LanguageModel) -> torch.Tensor:
    module: Any = model.module
    with torch.no_grad():
        return module(input_ids=tiny_ids(), use_cache=False).logits


def assert_comes_back(model: LanguageModel, folder: Path) -> LanguageModel:
    models.save(model, folder)
    loaded = models.load_model(str(folder))
    assert torch.equal(logits(loaded), logits(model))
    for name in ("layout", "coverage", "token_independent", "execution", "recipe"):
        assert getattr(loaded, name) == getattr(model, name), name
    assert loaded.identity.weights_sha256 == model.identity.weights_sha256
    assert not any(parameter.requires_grad for parameter in loaded.module.parameters())
    return loaded


EVERYWHERE = ("groups", "zero points", "full", "rotated", "rotated, full")
CASES = [(scheme, family) for scheme in SCHEMES for family in (CONFIGS if scheme in EVERYWHERE else ("llama", "gpt2"))]


@pytest.mark.parametrize(("scheme", "family"), CASES)
def test_schemes_come_back_on_every_layout(scheme: str, family: str, tmp_path: Path) -> None:
    model = quantized(SCHEMES[scheme], tiny_model(family))
    loaded = assert_comes_back(model, tmp_path / "saved")
    state, again = model.module.state_dict(), loaded.module.state_dict()
    assert sorted(state) == sorted(again)
    for name, tensor in state.items():
        assert torch.equal(tensor, again[name]), name
        assert tensor.dtype == again[name].dtype, name


@pytest.mark.parametrize("name", [name for name in registry.names("quantizers") if name != "none"])
def test_every_recipe_comes_back(name: str, tmp_path: Path) -> None:
    try:
        model = quantized(name, tiny_model("llama"))
    except Blocked as error:
        pytest.skip(str(error))
    if model.execution == "foreign":
        with pytest.raises(NotApplicable, match="foreign"):
            models.save(model, tmp_path / "saved")
    else:
        assert_comes_back(model, tmp_path / "saved")


ARMS = [name for name in registry.names("arms") if name != "softmax"]


@pytest.mark.parametrize("arm", [*ARMS, "softmax1+attnres_oasis(coupled=True)", "sink_logit+projection_gate"])
@pytest.mark.parametrize("scheme", ["full", "rotated"])
def test_every_arm_comes_back(arm: str, scheme: str, tmp_path: Path) -> None:
    model = models.attach(tiny_model("llama"), arm)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    try:
        model = quantized(SCHEMES[scheme], model)
    except NotApplicable as error:
        pytest.skip(str(error))
    loaded = assert_comes_back(model, tmp_path / "saved")
    assert models.arm_of(loaded) == models.arm_of(model)


def test_other_dtypes_come_back_and_are_not_taken_for_float32(tmp_path: Path) -> None:
    models.save(tiny_model("llama"), tmp_path / "float")
    model = models.load_model(str(tmp_path / "float"), models.LoadOptions(dtype="bfloat16"))
    loaded = assert_comes_back(quantized("w8a8", model), tmp_path / "saved")
    assert loaded.head.weight.dtype == torch.bfloat16
    with pytest.raises(ModelError, match="ask for that dtype"):
        models.load_model(str(tmp_path / "saved"), models.LoadOptions(dtype="float32"))


def test_a_tied_head_stays_tied_and_is_stored_once(tmp_path: Path) -> None:
    from safetensors import safe_open

    loaded = assert_comes_back(quantized("w8a8", tiny_model("llama")), tmp_path / "tied")
    assert loaded.head.weight is loaded.module.get_input_embeddings().weight
    with safe_open(tmp_path / "tied" / WEIGHTS, framework="pt") as stored:
        assert ("lm_head.weight" in stored.keys()) != ("model.embed_tokens.weight" in stored.keys())  # noqa: SIM118
    untied = assert_comes_back(quantized("quarot", tiny_model("llama")), tmp_path / "untied")
    assert untied.head.weight is not untied.module.get_input_embeddings().weight


def test_four_bit_codes_take_half_a_byte_in_the_file(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    models.save(quantized("w4a16", tiny_model("llama")), tmp_path / "saved")
    codes = load_file(tmp_path / "saved" / WEIGHTS)["model.layers.0.mlp.down_proj.weight.codes"]
    assert codes.dtype == torch.uint8
    assert codes.shape == (48, 40)


def test_a_model_is_saved_again_after_loading(tmp_path: Path) -> None:
    first = assert_comes_back(quantized(SCHEMES["rotated, full"], tiny_model("opt")), tmp_path / "one")
    assert_comes_back(first, tmp_path / "two")
    assert (tmp_path / "one" / WEIGHTS).read_bytes() == (tmp_path / "two" / WEIGHTS).read_bytes()


def test_generation_settings_come_back(tmp_path: Path) -> None:
    model = quantized("w8a8", tiny_model("llama"))
    model.module.generation_config.eos_token_id = [2, 7]
    assert assert_comes_back(model, tmp_path / "saved").module.generation_config.eos_token_id == [2, 7]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    models.save(quantized("w4a8", tiny_model("llama")), tmp_path / "saved")
    return tmp_path / "saved"


def changed(folder: Path, change: Any) -> None:
    content = json.loads((folder / MANIFEST).read_text())
    change(content)
    (folder / MANIFEST).write_text(json.dumps(content))


@pytest.mark.parametrize("name", [WEIGHTS, "config.json", "tokenizer.json"])
def test_a_changed_or_missing_file_is_refused(saved: Path, name: str) -> None:
    content = bytearray((saved / name).read_bytes())
    content[-2] ^= 1
    (saved / name).write_bytes(content)
    with pytest.raises(ModelError, match="was changed after it was saved"):
        models.load_model(str(saved))
    (saved / name).unlink()
    with pytest.raises(ModelError, match="which its manifest names"):
        models.load_model(str(saved))


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("format 99", lambda m: m.update(format=99)),
        ("damaged", lambda m: m.pop("recipe")),
        ("damaged", lambda m: m["identity"].pop("name")),
        ("float parts in int3", lambda m: m["identity"].update(dtype="int3")),
        ("the manifest says arm softmax1", lambda m: m.update(arm="softmax1")),
        ("lacks '../x'", lambda m: m["files"].update({"../x": "0"})),
        ("no module class 'Popen'", lambda m: m["modules"]["model.layers.0.mlp.up_proj"].update({"class": "Popen"})),
        ("cannot be made again", lambda m: m["modules"].pop("model.layers.0.mlp.up_proj.weight")),
        ("lm_head.weight is missing", lambda m: m["aliases"].clear()),
        ("cannot be made again", lambda m: m["modules"]["model.layers.0.mlp.up_proj.weight"]["settings"].clear()),
        ("must fit in 2 bits", lambda m: m["modules"]["model.layers.0.mlp.up_proj.weight"]["settings"].update(bits=2)),
        ("cannot be made again", lambda m: m["model"]["layout"].update(head="no_head")),
        ("should be one tensor", lambda m: m["aliases"].update(untie(m["aliases"]))),
    ],
)
def test_a_changed_manifest_is_refused(saved: Path, message: str, change: Any) -> None:
    changed(saved, change)
    with pytest.raises(ModelError, match=message):
        models.load_model(str(saved))


def untie(aliases: dict[str, str]) -> dict[str, str]:
    assert list(aliases) == ["lm_head.weight"]
    return {"model.layers.1.input_layernorm.weight": "model.layers.0.input_layernorm.weight"}


def test_a_manifest_that_is_no_json_is_refused(saved: Path) -> None:
    (saved / MANIFEST).write_text("{")
    with pytest.raises(ModelError, match="damaged"):
        models.load_model(str(saved))


def test_an_interrupted_save_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quant_bench.models import saving

    def full_disk(*arguments: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(saving, "save_file", full_disk)
    with pytest.raises(OSError, match="no space"):
        models.save(quantized("w8a8", tiny_model("llama")), tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_in_it_is_kept(saved: Path) -> None:
    before = (saved / WEIGHTS).read_bytes()
    with pytest.raises(ModelError, match="there already"):
        models.save(quantized("w8a8", tiny_model("llama")), saved)
    assert (saved / WEIGHTS).read_bytes() == before


def test_a_model_whose_recipe_is_unknown_is_not_saved(tmp_path: Path) -> None:
    quantizer = registry.build("quantizers", "w8a8")
    with pytest.raises(ModelError, match="not known"):
        models.save(quantizer.quantize(tiny_model("llama"), tiny_calibration(quantizer)), tmp_path / "saved")
    rotated = registry.build("quantizers", SCHEMES["rotated, nothing rounded"])
    with pytest.raises(ModelError, match="not known"):
        models.save(rotated.quantize(tiny_model("llama"), tiny_calibration(rotated)), tmp_path / "saved")


class Undeclared(torch.nn.Linear):
    """A product that says nothing of itself."""


def test_a_module_or_hook_that_cannot_be_made_again_is_named(tmp_path: Path) -> None:
    model = quantized("w8a8", tiny_model("llama"))
    model.module.model.layers[1].mlp.add_module("extra", Undeclared(2, 2))
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.extra is a Undeclared"):
        models.save(model, tmp_path / "saved")
    model = quantized("w8a8", tiny_model("llama"))
    model.module.model.layers[0].register_forward_hook(lambda module, arguments, output: None)
    with pytest.raises(ModelError, match=r"layers\.0 has a hook .*lambda"):
        models.save(model, tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_was_converted_after_loading_is_not_saved(tmp_path: Path) -> None:
    model = quantized("w8a8", tiny_model("llama"))
    model.module.to(torch.bfloat16)
    with pytest.raises(ModelError, match="converted"):
        models.save(model, tmp_path / "saved")


def test_what_a_foreign_engine_executes_is_not_saved(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.execution = "foreign"
    with pytest.raises(NotApplicable, match="foreign"):
        models.save(model, tmp_path / "saved")


def test_an_arm_is_attached_before_quantization_only(saved: Path) -> None:
    with pytest.raises(ModelError, match="is quantized"):
        models.attach(models.load_model(str(saved)), "softmax1")


def test_looking_up_a_saved_model_gives_the_identity_of_loading_it(saved: Path) -> None:
    import hashlib

    identity = models.identify(str(saved))
    assert identity == models.load_model(str(saved)).identity
    assert identity.quantized_sha256 == hashlib.sha256((saved / MANIFEST).read_bytes()).hexdigest()
    assert identity.name == "tiny-llama"
