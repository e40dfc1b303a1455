"""Token scores against transformers' own logits and loss."""

import pytest
import torch
from torch import nn

from quant_bench.errors import QuantizationError
from quant_bench.scoring import final_hidden, logits, target_log_probs
from quant_bench.tiny import CONFIGS, tiny_model


def some_ids(count: int, batch: int = 1) -> torch.Tensor:
    return torch.randint(3, 97, (batch, count), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_log_probs_equal_those_of_the_whole_model(family: str) -> None:
    model, ids = tiny_model(family), some_ids(41)
    with torch.no_grad():
        wanted = torch.log_softmax(model.module(input_ids=ids).logits[0].double(), -1)
    scored = target_log_probs(model, final_hidden(model, ids)[0, :-1], ids[0, 1:], chunk=7)
    picked = wanted[:-1].gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(scored.log_probs, picked, rtol=0, atol=2e-5)
    assert torch.equal(scored.argmax, wanted[:-1].argmax(-1))
    assert torch.equal(scored.greedy, scored.argmax == ids[0, 1:])


def test_chunks_do_not_change_scores() -> None:
    model, ids = tiny_model("llama"), some_ids(50)
    hidden = final_hidden(model, ids)[0, :-1]
    whole = target_log_probs(model, hidden, ids[0, 1:], chunk=1000)
    for chunk in (1, 16, 49):
        pieces = target_log_probs(model, hidden, ids[0, 1:], chunk=chunk)
        torch.testing.assert_close(pieces.log_probs, whole.log_probs, rtol=0, atol=1e-5)


def test_soft_cap_of_the_configuration_bounds_logits() -> None:
    model, ids = tiny_model("gemma3"), some_ids(9)
    hidden = final_hidden(model, ids)
    free = logits(model, hidden * 100)
    model.config.final_logit_softcapping = 2.0
    capped = logits(model, hidden * 100)
    torch.testing.assert_close(capped, 2.0 * torch.tanh(free / 2.0))
    with torch.no_grad():
        own = model.module(input_ids=ids).logits
    torch.testing.assert_close(logits(model, hidden), own)


def test_half_precision_gives_float32_logits_and_float64_scores() -> None:
    model, ids = tiny_model("llama"), some_ids(12)
    model.module.to(torch.bfloat16)
    hidden = final_hidden(model, ids)[0, :-1]
    assert hidden.dtype == torch.bfloat16
    assert logits(model, hidden).dtype == torch.float32
    assert target_log_probs(model, hidden, ids[0, 1:]).log_probs.dtype == torch.float64


def test_logits_that_are_not_finite_are_an_error_that_names_the_position() -> None:
    model, ids = tiny_model("llama"), some_ids(12)
    hidden = final_hidden(model, ids)[0, :-1].clone()
    hidden[4] = torch.nan
    with pytest.raises(QuantizationError, match="position 4 of 11"):
        target_log_probs(model, hidden, ids[0, 1:])


def test_never_more_than_a_chunk_of_logits_exists() -> None:
    model, ids = tiny_model("llama"), some_ids(60)
    sizes: list[int] = []

    def note(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        sizes.append(arguments[0].shape[0])

    model.head.register_forward_pre_hook(note)
    target_log_probs(model, final_hidden(model, ids)[0, :-1], ids[0, 1:], chunk=16)
    assert sizes == [16, 16, 16, 11]
