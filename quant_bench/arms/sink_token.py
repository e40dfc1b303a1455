"""Sink token: a learned token before the text, which heads may attend to instead."""

from dataclasses import dataclass

from quant_bench.arm import Arm
from quant_bench.mechanisms import add_sink_token
from quant_bench.model import LanguageModel


@dataclass(frozen=True)
class SinkToken(Arm):
    """One learned vector, prepended behind the embeddings and dropped before the head; softmax attention otherwise.

    The layers' attention is plain softmax over one more position, so `reference` is that of softmax.

    Source: GPT-2 with a register, Sun et al. 2024, section 4, https://arxiv.org/abs/2402.17762.
    """

    def attach(self, model: LanguageModel) -> LanguageModel:
        return add_sink_token(model)
