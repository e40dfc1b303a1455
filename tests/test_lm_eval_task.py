"""lm-eval tasks on our side against `lm_eval.evaluate` with the plain `hf` model on the same documents."""

import logging
import math
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import pytest
import torch
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from quant_bench import lm_eval_task, registry
from quant_bench.attention import ATTENTION
from quant_bench.data import DataSource
from quant_bench.errors import Blocked, SpecError
from quant_bench.lm_eval_task import prepare, run_lm_eval_task
from quant_bench.model import LanguageModel, ModelIdentity
from quant_bench.models.layouts import layout_of
from quant_bench.probe import Probe
from quant_bench.task import Context

PASSAGES = [
    "the old man wrote a letter to the city and the city wrote a letter to the man",
    "there was a river under the city . seven boats went over the river",
    "Q: how many boats ? A: seven boats . The answer is 7 .",
    "a dog sat under the river because the boats were new",
]
SETS: dict[tuple[str, str | None], dict[str, list[dict[str, Any]]]] = {
    ("EleutherAI/lambada_openai", "default"): {"test": [{"text": text} for text in PASSAGES]},
    ("cimec/lambada", None): {"test": [{"text": text} for text in PASSAGES[:2]], "validation": []},
    ("Rowan/hellaswag", None): {
        "train": [],
        "validation": [
            {"activity_label": "boats", "ctx_a": text, "ctx_b": "he", "label": str(n % 4), "endings": PASSAGES}
            for n, text in enumerate(PASSAGES)
        ],
    },
    ("openai/gsm8k", "main"): {
        "train": [{"question": f"how many ? {n}", "answer": f"so {n}\n#### {n}"} for n in range(9)],
        "test": [{"question": text, "answer": f"so\n#### {n}"} for n, text in enumerate(PASSAGES[:2])],
    },
    ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1"): {
        "train": [],
        "validation": [{"page": "the"}],
        "test": [{"page": " = boats = \n" + text * 3} for text in PASSAGES[:3]],
    },
}


class Shelf(DataSource):
    """A mirror that holds `SETS`."""

    def __init__(self) -> None:
        super().__init__(allow_hub=False)

    def dataset(self, path: str, name: str | None) -> Any:
        found = SETS.get((path, name))
        if found is None:
            return None
        columns = list(next(rows for rows in found.values() if rows)[0])
        return datasets.DatasetDict(
            {
                split: datasets.Dataset.from_list(rows)
                if rows
                else datasets.Dataset.from_dict({c: [] for c in columns})
                for split, rows in found.items()
            }
        )

    def note(self, path: str, name: str | None) -> str:
        return ""


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<s>", "</s>"]
    raw.train_from_iterator(
        PASSAGES,
        trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    module = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()
    for parameter in module.parameters():
        parameter.data.mul_(6.0 if parameter.ndim > 1 else 1.0)
    identity = ModelIdentity("tiny", "memory", None, "0" * 64, "0" * 64, "float32")
    return LanguageModel(module, tokenizer, identity, layout_of(module))


def context(data: DataSource | None = None, probe: Probe | None = None) -> Context:
    return Context(data=data or Shelf(), cache=Path("unused"), probe=probe or Probe.off())


def plain(model: LanguageModel, name: str, overrides: dict[str, Any]) -> Any:
    """Per-document results of lm-eval's own evaluator, task class and `hf` model."""
    config = LlamaConfig(**model.config.to_dict())
    module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    module.load_state_dict(model.module.state_dict())
    task = prepare(name, overrides, Shelf(), None).task
    task.set_fewshot_seed(1234)
    return lm_eval.evaluate(
        HFLM(pretrained=module.eval(), tokenizer=model.tokenizer, batch_size=2), {name: task}, bootstrap_iters=0
    )


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lambada(variant=openai)": ("lambada_openai", {}),
    "lambada(variant=standard)": ("lambada_standard", {}),
    "hellaswag": ("hellaswag", {"num_fewshot": 0}),
    "gsm8k(num_fewshot=2)": ("gsm8k", {"num_fewshot": 2}),
    "gsm8k(variant=cot)": ("gsm8k_cot", {}),
    "lm_eval(task=wikitext)": ("wikitext", {}),
}


@pytest.mark.parametrize("spec", sorted(CASES))
def test_every_document_scores_as_in_plain_lm_eval(model: LanguageModel, spec: str) -> None:
    name, overrides = CASES[spec]
    found = registry.build("tasks", spec).evaluate(model, context())
    wanted = plain(model, name, overrides)
    samples = sorted(wanted["samples"][name], key=lambda row: row["doc_id"])
    assert name in found.convention
    for measure in found.measures:
        values = found.samples[measure.column].tolist()
        weights = [1.0] * len(values) if measure.weight is None else found.samples[measure.weight].tolist()
        score = sum(values) / sum(weights)
        score = math.exp(score) if measure.metric.reduction == "exp" else score
        metric, tail = measure.metric.name, "none"
        for suffix in ("strict-match", "flexible-extract"):
            if metric.endswith("_" + suffix.replace("-", "_")):
                metric, tail = metric[: -len(suffix) - 1], suffix
        rows = [row for row in samples if row["filter"] == tail]
        if metric == "extraction_failures":
            assert values == [float(row["filtered_resps"][0] == "[invalid]") for row in rows]
            continue
        assert score == pytest.approx(wanted["results"][name][f"{metric},{tail}"], rel=1e-5)
        if metric.startswith(("acc", "exact_match")):
            assert values == [row[metric] for row in rows]
    if "response" in found.samples:
        assert found.samples["response"].tolist() == [row["resps"][0][0] for row in samples if row["filter"] == tail]
        assert sum(found.details["finish_reasons"].values()) == len(found.samples)


def test_multiple_choice_states_what_a_guess_scores(model: LanguageModel) -> None:
    found = run_lm_eval_task("hellaswag", {}, model, context(), None)
    assert [(m.metric.name, m.metric.chance) for m in found.measures] == [("acc", 0.25), ("acc_norm", 0.25)]


def test_a_limit_takes_the_first_documents_and_changes_the_digest(model: LanguageModel) -> None:
    shared = context()
    full = run_lm_eval_task("lambada_openai", {}, model, shared, None)
    part = run_lm_eval_task("lambada_openai", {}, model, shared, 2)
    assert part.samples["item"].tolist() == [0, 1]
    assert part.samples["nll"].tolist() == pytest.approx(full.samples["nll"].tolist()[:2], abs=1e-4)
    assert part.data_sha256 != full.data_sha256
    assert part.convention == full.convention


def test_requests_are_built_once_and_answered_anew(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, built = context(), []
    plain_prepare = lm_eval_task.prepare
    monkeypatch.setattr(lm_eval_task, "prepare", lambda *a: built.append(a[0]) or plain_prepare(*a))
    first = run_lm_eval_task("hellaswag", {}, model, shared, None)
    again = run_lm_eval_task("hellaswag", {}, model, shared, None)
    assert built == ["hellaswag"]
    assert first.samples.equals(again.samples)


def test_the_probe_is_offered_each_document(model: LanguageModel, tmp_path: Path) -> None:
    collect = Probe.collect(tmp_path / "probe.safetensors")
    run_lm_eval_task("hellaswag", {}, model, context(probe=collect), None)
    collect.save()
    compare = Probe.compare(tmp_path / "probe.safetensors")
    run_lm_eval_task("hellaswag", {}, model, context(probe=compare), None)
    assert compare.frame()["item"].tolist() == [0, 1, 2, 3]
    assert compare.frame()["kl"].max() < 1e-6


def test_missing_data_block_the_task_and_are_named(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUANT_BENCH_DATA", raising=False)
    nothing = DataSource(allow_hub=False)
    for name, wanted in (("lambada_openai", "lambada_test.jsonl"), ("arc_easy", "allenai/ai2_arc")):
        with pytest.raises(Blocked, match=wanted):
            run_lm_eval_task(name, {}, model, context(nothing), None)


def test_missing_examples_block_the_task(model: LanguageModel) -> None:
    with pytest.raises(Blocked, match="num_fewshot=3"):
        run_lm_eval_task("hellaswag", {"num_fewshot": 3}, model, context(), None)


def test_a_group_is_refused(model: LanguageModel) -> None:
    with pytest.raises(SpecError, match="group"):
        run_lm_eval_task("lambada", {}, model, context(), None)


@pytest.mark.slow
def test_an_unknown_name_is_refused(model: LanguageModel) -> None:
    # only the index of all of lm-eval's tasks can say that there is none
    with pytest.raises(SpecError, match="no task"):
        run_lm_eval_task("lambada_opena", {}, model, context(), None)
