"""Tiny random models of every supported layout, with a tokenizer: for conformance checks and tests, no download."""

from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from quant_bench.model import LanguageModel
from quant_bench.models import from_module

VOCABULARY = 97
_CONTEXT = 64

_COMMON = {"vocab_size": VOCABULARY, "max_position_embeddings": _CONTEXT, "bos_token_id": 1, "eos_token_id": 2}
_GATED = {**_COMMON, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "pad_token_id": 0}


def _gemma3() -> Any:
    # one local and one global layer; one key/value head for two query heads (MQA)
    return Gemma3TextConfig(
        **_GATED,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=20,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=20,
    )


CONFIGS: dict[str, Callable[[], Any]] = {
    # two query heads a key/value head, tied head
    "llama": lambda: LlamaConfig(**_GATED, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True),
    # head_dim differs from hidden size over heads
    "qwen3": lambda: Qwen3Config(
        **_GATED, num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=False
    ),
    "gemma3": _gemma3,
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY, n_positions=_CONTEXT, n_embd=48, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    ),
    "gpt_neox": lambda: GPTNeoXConfig(
        **_COMMON, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, rotary_pct=0.25
    ),
    "opt": lambda: OPTConfig(
        **_COMMON,
        hidden_size=48,
        ffn_dim=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=48,
        pad_token_id=0,
    ),
}
"""Layout family -> a configuration of that family."""


def tiny_tokenizer() -> Any:
    """A tokenizer of `<unk>`, `<s>`, `</s>` and the words `w3` to `w96`, separated by white space."""
    special = ["<unk>", "<s>", "</s>"]
    words = {word: index for index, word in enumerate([*special, *(f"w{index}" for index in range(3, VOCABULARY))])}
    tokenizer = Tokenizer(WordLevel(words, unk_token=special[0]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    unknown, begin, end = special
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unknown, bos_token=begin, eos_token=end)


def tiny_model(family: str, seed: int = 0, **overrides: Any) -> LanguageModel:
    """A random model of a layout family.

    Weights, biases and norms are all random and of a size at which every part of a layer matters.

    Args:
        family: a key of `CONFIGS`.
        seed: of the weights.
        overrides: configuration values to change.
    """
    config = CONFIGS[family]()
    for key, value in overrides.items():
        setattr(config, key, value)
    module = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2:
                fan = 1 if "emb" in name or "wte" in name or "wpe" in name else parameter.shape[1]
                parameter.copy_(noise * (0.5 if fan == 1 else fan**-0.5))
            else:
                base = 1.0 if "norm" in name.lower() or "ln_" in name else 0.0
                parameter.copy_(noise * 0.1 + (base if name.endswith("weight") else 0.0))
    return from_module(module, tiny_tokenizer(), name=f"tiny-{family}")
