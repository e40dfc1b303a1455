"""Packed forward against plain forward passes of transformers, one path at a time, in every layout."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from quant_bench.attention import ATTENTION
from quant_bench.errors import ModelError
from quant_bench.model import LanguageModel
from quant_bench.packing import Memory, Segment, packed_hidden
from quant_bench.tiny import CONFIGS, VOCABULARY, tiny_model

# a window shorter than the paths, on one of two layers; gemma3's own has one too
SLIDING = {"use_sliding_window": True, "sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"]}


def tiny(layout: str) -> LanguageModel:
    return tiny_model(layout, seed=7, max_position_embeddings=128, **(SLIDING if layout == "qwen3" else {}))


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(1, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def plain(model: LanguageModel, ids: list[int]) -> Tensor:
    """The reference: transformers' own sdpa attention on one path, no packing."""
    model.module.set_attn_implementation("sdpa")
    try:
        return model.body(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
    finally:
        model.module.set_attn_implementation(ATTENTION)


@pytest.fixture(params=sorted(CONFIGS))
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
        packed_hidden(model, [Segment([VOCABULARY + 3])])
    with torch.inference_mode():
        ordinary = model.body(input_ids=torch.tensor([ids, ids]), use_cache=False).last_hidden_state
    close(ordinary[1], plain(model, ids))


def test_a_model_with_another_attention_is_refused() -> None:
    model = tiny("llama")
    model.module.set_attn_implementation("sdpa")
    with pytest.raises(ModelError, match="attn_implementation"):
        packed_hidden(model, [Segment(tokens(4, 1)), Segment(tokens(4, 2))])
