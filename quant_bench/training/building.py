"""Building: the model of a tier before its first step, with the same numbers in every arm."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from quant_bench.arm import Arm
from quant_bench.model import LanguageModel
from quant_bench.models import LoadOptions, attach, from_module, load_model
from quant_bench.training.tiers import Tier


def config_of(tier: Tier, tokenizer: Any) -> Any:
    """Configuration of a tier's model; no dropout, head and embedding tied."""
    common = {
        "vocab_size": tier.vocabulary,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": True,
    }
    if tier.layout == "gpt2":
        return GPT2Config(
            n_positions=tier.context,
            n_embd=tier.width,
            n_layer=tier.layers,
            n_head=tier.heads,
            n_inner=tier.inner,
            # the same function as GPT-2's "gelu_new", in one kernel instead of eight: 13 % of a toy's step
            activation_function="gelu_pytorch_tanh",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **common,
        )
    return LlamaConfig(
        hidden_size=tier.width,
        intermediate_size=tier.inner,
        num_hidden_layers=tier.layers,
        num_attention_heads=tier.heads,
        num_key_value_heads=tier.heads,
        max_position_embeddings=tier.context,
        pad_token_id=None,
        **common,
    )


def build(tier: Tier, arm: Arm, seed: int, tokenizer: Any, cache: Path | None = None) -> LanguageModel:
    """A model with fresh weights, or those of the tier's base, and its arm, ready to be trained.

    The shared parameters are there before the arm is attached, so they are equal bit for bit in every arm.

    Args:
        tier: shape of the model.
        arm: attached to it.
        seed: of the weights.
        tokenizer: of its vocabulary.
        cache: where a base is kept.

    Raises:
        NotApplicable: the arm makes no sense for this layout.
        ModelError, Blocked: the base cannot be had.
    """
    model = _drawn(tier, seed, tokenizer) if tier.layout != "base" else load_model(tier.base, LoadOptions(cache=cache))
    # parameters that an arm adds want gradients where the others do
    model.module.requires_grad_(True)
    # the stream of the shared parameters from its start, where transformers draws what it then draws again: no number
    # of an arm is one that a shared parameter keeps
    model = attach(model, arm, seed)
    model.module.train()
    return model


def _drawn(tier: Tier, seed: int, tokenizer: Any) -> LanguageModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = AutoModelForCausalLM.from_config(config_of(tier, tokenizer), dtype=torch.float32)
    # GPT-2's class is not named after its loss, and transformers would say so
    module.loss_type = "ForCausalLM"
    return from_module(module, tokenizer, name=tier.label)


def parameter_counts(model: LanguageModel) -> dict[str, int]:
    """Parameters of a model, with and without its embeddings (a tied head is one of them), as counted."""
    inside = {id(p) for path in model.layout.embeddings for p in model.module.get_submodule(path).parameters()}
    sizes = {id(p): p.numel() for p in model.module.parameters()}
    return {
        "parameters": sum(sizes.values()),
        "parameters_without_embeddings": sum(size for key, size in sizes.items() if key not in inside),
    }
