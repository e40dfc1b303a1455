from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from quant_bench.attention import ATTENTION
from quant_bench.errors import ModelError
from quant_bench.models import from_module, layout_of

SIZE: dict[str, Any] = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
HEADS: dict[str, Any] = dict(num_attention_heads=4)
ENDS: dict[str, Any] = dict(bos_token_id=0, eos_token_id=1)

CONFIGS: dict[str, Any] = {
    "llama_gqa": lambda: transformers.LlamaConfig(**SIZE, **HEADS, num_key_value_heads=2),
    "llama_mqa_tied_bias": lambda: transformers.LlamaConfig(
        **SIZE, **HEADS, num_key_value_heads=1, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "mistral": lambda: transformers.MistralConfig(**SIZE, **HEADS, num_key_value_heads=2, sliding_window=8),
    "qwen2": lambda: transformers.Qwen2Config(**SIZE, **HEADS, num_key_value_heads=2),
    "qwen3": lambda: transformers.Qwen3Config(**SIZE, **HEADS, num_key_value_heads=2, head_dim=16),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SIZE, **HEADS, num_key_value_heads=1, head_dim=16, sliding_window=8
    ),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, **ENDS),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SIZE, **HEADS),
    "gpt_neox_sequential": lambda: transformers.GPTNeoXConfig(**SIZE, **HEADS, use_parallel_residual=False),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=48, num_hidden_layers=2, **HEADS, word_embed_proj_dim=32
    ),
    "opt_350m": lambda: transformers.OPTConfig(
        vocab_size=64,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        **HEADS,
        word_embed_proj_dim=16,
        do_layer_norm_before=False,
    ),
}
FAMILIES = {name: name.split("_")[0] for name in CONFIGS} | {
    "mistral": "llama",
    "qwen2": "llama",
    "gpt_neox": "gpt_neox",
    "gpt_neox_sequential": "gpt_neox",
}


def build(name: str) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()


@pytest.mark.parametrize("name", CONFIGS)
def test_every_matrix_product_of_the_layers_is_named_once(name: str) -> None:
    module = build(name)
    layout = layout_of(module)
    found = {
        path
        for path, part in module.named_modules()
        if isinstance(part, nn.Linear | Conv1D) and any(path.startswith(f"{layer}.") for layer in layout.layers)
    }
    paths = [site.path for site in layout.linears]
    assert set(paths) == found
    assert len(paths) == len(set(paths))
    assert layout.family == FAMILIES[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_linears_are_listed_in_the_order_in_which_they_run(name: str) -> None:
    module = build(name)
    layout = layout_of(module)
    order: list[str] = []
    for site in layout.linears:
        module.get_submodule(site.path).register_forward_hook(lambda *_, path=site.path: order.append(path))
    with torch.no_grad():
        module(torch.arange(8)[None])
    assert order == [site.path for site in layout.linears]


@pytest.mark.parametrize("name", CONFIGS)
def test_body_and_head_give_the_model_s_logits(name: str) -> None:
    module = build(name)
    ids = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = module(ids).logits
        model = from_module(module, None)
        hidden = model.body(ids).last_hidden_state
        assert torch.allclose(model.head(hidden), expected, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_our_attention_equals_eager_attention_beyond_the_window(name: str) -> None:
    module = build(name)
    ids = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        module.set_attn_implementation("eager")
        eager = module(ids).logits
        model = from_module(module, None)
        assert model.config._attn_implementation == ATTENTION
        assert torch.allclose(model.module(ids).logits, eager, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_sites_are_the_protocol_s_tensors_in_every_layer(name: str) -> None:
    module = build(name)
    layout = layout_of(module)
    per_layer = ["attention_norm", "attention_output", "mlp_norm", "mlp_output", "layer_output"]
    last = [] if name == "opt_350m" else ["final_norm"]
    assert [site.kind for site in layout.sites] == per_layer * 2 + last
    seen: dict[str, Any] = {}
    for site in layout.sites:
        module.get_submodule(site.path).register_forward_hook(
            lambda _module, _inputs, output, path=site.path: seen.setdefault(path, output)
        )
    with torch.no_grad():
        module(torch.arange(8)[None])
    for site in layout.sites:
        output = seen[site.path][0] if isinstance(seen[site.path], tuple) else seen[site.path]
        assert output.shape[-1] == 32
    assert (layout.final_norm is None) == (name == "opt_350m")


def test_gemma_mlp_norm_is_the_one_before_the_mlp() -> None:
    sites = {(site.layer, site.kind): site.path for site in layout_of(build("gemma3")).sites}
    assert sites[1, "mlp_norm"] == "model.layers.1.pre_feedforward_layernorm"
    assert sites[1, "mlp_output"] == "model.layers.1.mlp.down_proj"


def test_embeddings_hold_learned_positions_where_there_are_some() -> None:
    assert layout_of(build("gpt2")).embeddings == ("transformer.wte", "transformer.wpe")
    assert layout_of(build("opt")).embeddings == ("model.decoder.embed_tokens", "model.decoder.embed_positions")
    assert layout_of(build("llama_gqa")).embeddings == ("model.embed_tokens",)


def test_unknown_model_type_is_refused_with_the_list_of_known_ones() -> None:
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4)
    module = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError, match=r"'bloom'.*gpt2.*llama"):
        layout_of(module)


def test_a_body_without_head_is_refused() -> None:
    with pytest.raises(ModelError, match="lm_head"):
        layout_of(build("llama_gqa").model)


def test_a_matrix_product_that_the_layout_does_not_know_is_refused() -> None:
    module = build("llama_gqa")
    module.model.layers[1].mlp.extra = nn.Linear(4, 4)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.extra"):
        layout_of(module)


def test_a_missing_part_is_named() -> None:
    module = build("llama_gqa")
    del module.model.layers[1].mlp.up_proj
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj"):
        layout_of(module)


def test_from_module_freezes_and_sets_eval_mode() -> None:
    model = from_module(build("llama_gqa").train(), None, name="mine")
    assert not model.module.training
    assert not any(parameter.requires_grad for parameter in model.module.parameters())
    assert (model.identity.name, model.identity.source, model.identity.dtype) == ("mine", "memory", "float32")


def test_memory_identity_follows_one_weight_and_the_configuration() -> None:
    digest = from_module(build("llama_gqa"), None).identity.weights_sha256
    assert from_module(build("llama_gqa"), None).identity.weights_sha256 == digest
    changed = build("llama_gqa")
    with torch.no_grad():
        changed.model.layers[0].mlp.up_proj.weight[0, 0] += 1e-3
    assert from_module(changed, None).identity.weights_sha256 != digest
    other = build("llama_gqa")
    other.config.rms_norm_eps = 1e-3
    assert from_module(other, None).identity.weights_sha256 != digest


def test_a_configuration_without_maximum_length_is_refused() -> None:
    module = build("llama_gqa")
    module.config.max_position_embeddings = 0
    with pytest.raises(ModelError, match="max_position_embeddings"):
        from_module(module, None)
