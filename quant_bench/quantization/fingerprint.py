"""Telling whether two float models compute the same, so that what was found for one serves the other."""

import hashlib

import torch

from quant_bench.model import LanguageModel


def fingerprint(model: LanguageModel) -> str | None:
    """Digest of what a float model computes: weights, configuration, modules. None where an arm hooked something in."""
    marks = ("attention_core", "query_key_transform", "key_value_transform")
    for module in model.module.modules():
        if module._forward_hooks or module._forward_pre_hooks or any(hasattr(module, mark) for mark in marks):
            return None
    digest = hashlib.sha256(f"{model.config}{model.module}{model.device}".encode())
    for name, tensor in model.module.state_dict().items():
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
