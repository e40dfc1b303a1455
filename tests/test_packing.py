"""Packed forward against plain forward passes of transformers, one path at a time, in every layout."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from quant_bench.attention import ATTENTION
from quant_bench.errors import ModelError
from quant_bench.model import LanguageModel, ModelIdentity
from quant_bench.models.layouts import layout_of
from quant_bench.packing import Memory, Segment, packed_hidden

VOCAB = 96
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
HIDDEN: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **SIZES}
GATED: dict[str, Any] = {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 128, **HIDDEN}
LAYOUTS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**GATED),
    "qwen3": lambda: Qwen3Config(
        **GATED,
        head_dim=16,
        use_sliding_window=True,
        sliding_window=7,
        layer_types=["full_attention", "sliding_attention"],
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **GATED, head_dim=16, sliding_window=5, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt2": lambda: GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, **SIZES),
    "gpt_neox": lambda: GPTNeoXConfig(intermediate_size=48, rotary_pct=0.5, max_position_embeddings=128, **HIDDEN),
    "opt": lambda: OPTConfig(ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=128, **HIDDEN),
}


def tiny(layout: str) -> LanguageModel:
    torch.manual_seed(7)
    module = AutoModelForCausalLM.from_config(LAYOUTS[layout](), attn_implementation=ATTENTION).eval()
    for parameter in module.parameters():
        # larger than the default spread, so that attention is far from uniform and a wrong key shows
        parameter.data.mul_(6.0 if parameter.ndim > 1 else 1.0)
    identity = ModelIdentity("tiny", "memory", None, "0" * 64, "0" * 64, "float32")
    return LanguageModel(module, None, identity, layout_of(module))


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(1, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def plain(model: LanguageModel, ids: list[int]) -> Tensor:
    """The reference: transformers' own sdpa attention on one path, no packing."""
    model.module.set_attn_implementation("sdpa")
    try:
        return model.body(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
    finally:
        model.module.set_attn_implementation(ATTENTION)


@pytest.fixture(params=sorted(LAYOUTS))
def model(request: pytest.FixtureRequest) -> LanguageModel:
    return tiny(request.param)


def close(found: Tensor, wanted: Tensor) -> None:
    # float32 through two layers with values of order 10: differently shaped products round at about 1e-6
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_every_path_of_a_forest_equals_its_own_forward_pass(model: LanguageModel) -> None:
    trunk, ending, other, twig, alone = tokens(17, 1), tokens(6, 2), tokens(1, 3), tokens(9, 4), tokens(11, 5)
    row = [Segment(trunk), Segment(ending, 0), Segment(alone), Segment(other, 0), Segment(twig, 1)]
    hidden = packed_hidden(model, row).split([len(segment.tokens) for segment in row])
    close(hidden[0], plain(model, trunk))
    close(hidden[1], plain(model, trunk + ending)[-6:])
    close(hidden[2], plain(model, alone))
    close(hidden[3], plain(model, trunk + other)[-1:])
    close(hidden[4], plain(model, trunk + ending + twig)[-9:])


def test_a_kept_prefix_serves_many_continuations(model: LanguageModel) -> None:
    prefix, left, right = tokens(21, 1), tokens(5, 2), tokens(8, 3)
    memory = Memory(len(prefix))
    close(packed_hidden(model, [Segment(prefix, memory, keep=True)]), plain(model, prefix))
    for _ in range(2):
        hidden = packed_hidden(model, [Segment(left, memory), Segment(right, memory)])
        close(hidden[:5], plain(model, prefix + left)[-5:])
        close(hidden[5:], plain(model, prefix + right)[-8:])
    assert memory.length == len(prefix)


def test_ragged_decoding_from_a_shared_prefix_equals_full_forward_passes(model: LanguageModel) -> None:
    prefix, prompts = tokens(13, 1), [tokens(4, 2), tokens(1, 3), tokens(10, 4)]
    shared = Memory(len(prefix))
    packed_hidden(model, [Segment(prefix, shared, keep=True)])
    memories = [Memory(len(prefix) + 20, shared) for _ in prompts]
    packed_hidden(model, [Segment(p, m, keep=True) for p, m in zip(prompts, memories, strict=True)])
    paths = [prefix + prompt for prompt in prompts]
    for step in range(6):
        new = [tokens(1, 10 * step + index) for index in range(3)]
        hidden = packed_hidden(model, [Segment(n, m, keep=True) for n, m in zip(new, memories, strict=True)])
        paths = [path + n for path, n in zip(paths, new, strict=True)]
        close(hidden, torch.stack([plain(model, path)[-1] for path in paths]))
    assert [memory.length for memory in memories] == [len(path) for path in paths]


def test_a_memory_without_own_tokens_reads_through_to_its_start() -> None:
    model, prefix, more = tiny("llama"), tokens(6, 1), tokens(3, 2)
    shared = Memory(6)
    packed_hidden(model, [Segment(prefix, shared, keep=True)])
    close(packed_hidden(model, [Segment(more, Memory(9, shared))]), plain(model, prefix + more)[-3:])
    close(packed_hidden(model, [Segment(more, Memory(9))]), plain(model, more))


def test_integer_linears_give_the_same_bits_whatever_shares_the_row() -> None:
    # products of integers held in float32 are exact in any order, so a token-wise integer model has no batch noise at
    # all: what is left must be bit-identical, or attention or the norms looked at a neighbour
    model, ids = tiny("llama"), tokens(12, 1)
    for site in model.layout.linears:
        owner, name = site.path.rsplit(".", 1)
        setattr(model.module.get_submodule(owner), name, Rounded(model.module.get_submodule(site.path)))
    alone = packed_hidden(model, [Segment(ids), Segment(tokens(3, 8), 0)])
    crowd = [Segment(tokens(30, 9)), Segment(ids), Segment(tokens(5, 7), 0), Segment(tokens(3, 8), 1)]
    crowded = packed_hidden(model, crowd)
    assert torch.equal(alone[:12], crowded[30:42])
    assert torch.equal(alone[12:], crowded[47:])


class Rounded(nn.Module):
    """An 8-bit product with one scale a token and one for the weights, as integers in float32."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.scale = linear.weight.abs().max() / 127
        self.codes = (linear.weight / self.scale).round()

    def forward(self, x: Tensor) -> Tensor:
        step = x.abs().amax(-1, keepdim=True) / 127
        return nn.functional.linear((x / step).round(), self.codes) * self.scale * step


def test_the_key_value_transform_reaches_kept_keys() -> None:
    model, prefix, more = tiny("llama"), tokens(5, 1), tokens(2, 2)
    for path in model.layout.attentions:
        model.module.get_submodule(path).key_value_transform = lambda key, value: (key.round(), value.round())
    memory = Memory(5)
    packed_hidden(model, [Segment(prefix, memory, keep=True)])
    keys, _ = memory.view(model.module.get_submodule(model.layout.attentions[0]), 5)
    assert torch.equal(keys, keys.round())
    assert not torch.equal(keys, torch.zeros_like(keys))
    together = packed_hidden(replace(model), [Segment(prefix + more)])
    close(packed_hidden(model, [Segment(more, memory)]), together[-2:])


def test_the_router_is_removed_when_a_forward_fails() -> None:
    model, ids = tiny("llama"), tokens(6, 1)
    with pytest.raises(IndexError):
        packed_hidden(model, [Segment([VOCAB + 3])])
    with torch.inference_mode():
        ordinary = model.body(input_ids=torch.tensor([ids, ids]), use_cache=False).last_hidden_state
    close(ordinary[1], plain(model, ids))


def test_a_model_with_another_attention_is_refused() -> None:
    model = tiny("llama")
    model.module.set_attn_implementation("sdpa")
    with pytest.raises(ModelError, match="attn_implementation"):
        packed_hidden(model, [Segment(tokens(4, 1)), Segment(tokens(4, 2))])
