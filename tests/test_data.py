import bz2
import gzip
import hashlib
import lzma
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quant_bench import hub_access
from quant_bench.corpora import (
    lines_of,
    make_text,
    python_docs,
    raw_wikitext,
    wikitext_pages,
    wikitext_rows,
)
from quant_bench.data import DERIVED_HELLASWAG, DataSource
from quant_bench.errors import Blocked, DataError
from quant_bench.mirror import packaged_digests

P1_SHA256 = "696cca6b65a171b0a358a4be6732cdfdf2dd6164a32e20fd70e3c13fc4dfae83"
PRESSES: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}


@pytest.fixture
def mirror() -> Path:
    named = os.environ.get("QUANT_BENCH_DATA")
    if not named:
        pytest.skip("QUANT_BENCH_DATA names no mirror folder with the real data sets")
    return Path(named)


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """No test asks the real hub, and only those that take `mirror` see the user's folder."""
    if "mirror" not in request.fixturenames:
        monkeypatch.delenv("QUANT_BENCH_DATA", raising=False)
    monkeypatch.setattr(hub_access, "hub_answers", lambda: False)


def test_p1_text_has_the_pinned_digest(mirror: Path) -> None:
    text = DataSource(mirror).text("wikitext2", "test")
    assert hashlib.sha256("\n\n".join(text.rows).encode()).hexdigest() == P1_SHA256
    assert (text.sha256, text.origin, text.name) == (P1_SHA256, "mirror", "wikitext2 test")
    assert (len(text.rows), sum(1 for row in text.rows if row), len(text.joined)) == (4358, 2891, 1_294_336)


def test_gpt2_finds_the_published_number_of_tokens_in_the_p1_text(mirror: Path) -> None:
    from tokenizers import ByteLevelBPETokenizer

    folder = mirror / "tokenizer_gpt2"
    tokenizer = ByteLevelBPETokenizer.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    # Hugging Face's guide to the perplexity of fixed-length models shows this number
    assert len(tokenizer.encode(DataSource(mirror).text("wikitext2").joined).ids) == 287_644


def test_raw_file_comes_back_from_the_rows(mirror: Path) -> None:
    for split, file in (("test", "wiki.test.raw"), ("validation", "wiki.valid.raw")):
        raw = (mirror / "wikitext2" / file).read_bytes().decode("utf8")
        assert raw_wikitext(DataSource(mirror).text("wikitext2", split).rows) == raw


def test_known_files_of_the_mirror_are_what_the_package_pins(mirror: Path) -> None:
    states = dict(DataSource(mirror).verify())
    assert states["wikitext2/wiki.test.raw"] == "ok"
    assert not [name for name, state in states.items() if state.startswith("wrong")]


def test_wikitext_documents_are_those_of_lm_eval(mirror: Path) -> None:
    from lm_eval.tasks.wikitext.preprocess_wikitext import process_results, wikitext_detokenizer

    data = DataSource(mirror).dataset("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1")
    assert data is not None
    pages = [row["page"] for row in data["test"]]
    assert len(pages) == 62
    assert all(re.match(r" = [^=].* = \n", page) for page in pages)
    raw = (mirror / "wikitext2" / "wiki.test.raw").read_bytes().decode("utf8")
    # one blank line before the first title, and the newline before each later one, belong to no document
    assert " \n" + "\n".join(pages) == raw
    assert wikitext_detokenizer(data["test"][0]).startswith(" = Robert Boulter =\n\nRobert Boulter is an English film,")
    words = sum(process_results(row, (0.0,))["word_perplexity"][1] for row in data["test"])
    # `re.split` counts the empty strings at both ends of a page, `split` does not
    assert words == sum(len(page.split()) for page in pages) + 2 * len(pages)


def test_hellaswag_rows_are_what_lm_eval_processes(mirror: Path) -> None:
    from lm_eval.tasks.hellaswag.utils import process_docs

    source = DataSource(mirror)
    official = source.dataset("Rowan/hellaswag", None)
    derived = source.dataset(DERIVED_HELLASWAG, None)
    assert official is not None
    assert derived is not None
    assert (len(official["validation"]), len(derived["validation"])) == (1000, 10_042)
    assert process_docs(official["train"]).num_rows == 0
    documents = process_docs(official["validation"])
    assert documents[0]["query"].startswith("Pole vault: Pole vault is a sport")
    assert documents[0]["choices"][3] == "are in the gym practicing to do this pole vault, trying to do their best."
    assert (documents[0]["gold"], documents[0]["label"]) == (3, "3")
    assert "1,000 official rows" in source.note("Rowan/hellaswag", None)
    assert "derived" in source.note(DERIVED_HELLASWAG, None)


def test_lambada_and_gsm8k_have_the_columns_and_counts_of_their_tasks(mirror: Path) -> None:
    source = DataSource(mirror)
    for path, name, split, rows, columns in (
        ("EleutherAI/lambada_openai", "default", "test", 5153, ["text"]),
        ("cimec/lambada", None, "test", 5153, ["text"]),
        ("cimec/lambada", None, "validation", 0, ["text"]),
        ("openai/gsm8k", "main", "train", 7473, ["question", "answer"]),
        ("openai/gsm8k", "main", "test", 1319, ["question", "answer"]),
    ):
        data = source.dataset(path, name)
        assert data is not None
        assert (data[split].num_rows, data[split].column_names) == (rows, columns)
    openai, standard = source.dataset("EleutherAI/lambada_openai", "default"), source.dataset("cimec/lambada", None)
    assert openai is not None
    assert standard is not None
    assert openai["test"][0]["text"].startswith("In my palm is a clear stone, and inside it")
    assert standard["test"][0]["text"].startswith("in my palm is a clear stone , and inside it")


def test_lm_eval_builds_its_tasks_from_the_mirror(mirror: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    from lm_eval.tasks import TaskManager

    source = DataSource(mirror)
    monkeypatch.setattr(datasets, "load_dataset", lambda path, name=None, **_: source.dataset(path, name))
    names = ["lambada_openai", "lambada_standard", "hellaswag", "gsm8k", "gsm8k_cot", "wikitext"]
    tasks: dict[str, Any] = TaskManager().load(names)["tasks"]
    counts = {name: len(task.eval_docs) for name, task in tasks.items()}
    assert counts == {
        "lambada_openai": 5153,
        "lambada_standard": 5153,
        "hellaswag": 1000,
        "gsm8k": 1319,
        "gsm8k_cot": 1319,
        "wikitext": 62,
    }


def test_calibration_text_of_a_mirror_is_the_train_part(mirror: Path) -> None:
    text = DataSource(mirror).calibration_text()
    assert (text.name, len(text.rows), text.origin) == ("wikitext2 train_part", 2120, "mirror")
    assert not set(text.rows) & {row for row in DataSource(mirror).text("wikitext2").rows if len(row) > 80}


def test_missing_text_is_blocked_with_name_digest_and_way_to_supply_it(tmp_path: Path) -> None:
    pinned = packaged_digests()["wikitext2/wiki.test.raw"]
    for source in (DataSource(), DataSource(tmp_path), DataSource(tmp_path, allow_hub=False)):
        with pytest.raises(Blocked) as caught:
            source.text("wikitext2", "test")
        for part in ("wikitext2/wiki.test.raw", pinned, "--data DIR", "QUANT_BENCH_DATA"):
            assert part in str(caught.value)


def test_missing_data_set_is_none_and_says_what_is_wanted(tmp_path: Path) -> None:
    source = DataSource(tmp_path)
    assert source.dataset("openai/gsm8k", "main") is None
    assert source.dataset("allenai/ai2_arc", "ARC-Easy") is None
    wanted = source.wanted("openai/gsm8k", "main")
    assert "gsm8k/train.jsonl" in wanted
    assert packaged_digests()["gsm8k/test.jsonl"] in wanted
    assert "allenai/ai2_arc (ARC-Easy)" in source.wanted("allenai/ai2_arc", "ARC-Easy")
    assert source.note("openai/gsm8k", "main") == ""


def test_unknown_text_or_split_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(DataError, match=r"wiki40b test.*python_docs"):
        DataSource().text("wikitext103", "test")
    with pytest.raises(DataError, match="calibration"):
        DataSource().text("python_docs", "train")


def test_python_docs_need_nothing_and_name_the_python() -> None:
    text = DataSource().text("python_docs", "test")
    version = ".".join(map(str, sys.version_info[:3]))
    assert text.origin == f"python {version}"
    assert len(text.joined) > 100_000
    assert DataSource().calibration_text().name == "python_docs calibration"


def test_python_docs_parts_share_no_paragraph_and_repeat_none() -> None:
    parts = python_docs(__import__("pydoc_data.topics").topics.topics)
    paragraphs = {
        split: [part.strip() for row in rows for part in re.split(r"\n{2,}", row) if len(part.strip()) > 80]
        for split, rows in parts.items()
    }
    assert not set(paragraphs["test"]) & set(paragraphs["calibration"])
    for split in ("test", "calibration"):
        assert len(paragraphs[split]) == len(set(paragraphs[split])) > 100
    # 32 sequences of 512 tokens, at no more than four characters a token
    assert sum(map(len, parts["calibration"])) > 32 * 512 * 4


def test_rows_of_hub_and_mirror_have_one_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    rows = ["", " = A = \n", "", " text \n"]
    asked: list[Any] = []

    def load(path: str, configuration: str, split: str) -> dict[str, list[str]]:
        asked.append((path, configuration, split))
        return {"text": rows}

    monkeypatch.setattr(hub_access, "hub_answers", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", load)
    text = DataSource().text("wikitext2", "train")
    assert asked == [("Salesforce/wikitext", "wikitext-2-raw-v1", "train")]
    assert (text.origin, text.sha256) == ("hub", make_text(wikitext_rows(raw_wikitext(rows)), "mirror", "").sha256)
    # the test split is pinned, whoever gives it
    with pytest.raises(DataError, match=f"from hub has digest .* but {P1_SHA256} is pinned"):
        DataSource().text("wikitext2", "test")


def test_hub_failure_is_blocked_with_the_hub_s_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load(*_arguments: object, **_options: object) -> None:
        raise ConnectionError("could not reach it\nsecond line")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(Blocked, match=r"google/wiki40b.*could not reach it; wanted: wiki40b/en\.validation\.jsonl"):
        DataSource().text("wiki40b", "validation")


def test_offline_access_is_set_while_needed_only() -> None:
    import datasets
    from huggingface_hub import constants

    before = (datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE)
    with hub_access.hub_access():
        assert (datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE) == (True, True)
    assert before == (datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE)


def test_a_hub_that_refuses_connections_does_not_answer() -> None:
    code = "from quant_bench.hub_access import hub_answers; print(hub_answers())"
    # a port that nobody listens on refuses at once
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_reading_text_needs_no_torch() -> None:
    code = (
        "import sys; from quant_bench.data import DataSource; DataSource().text('python_docs', 'test')\n"
        "print('torch' in sys.modules, 'datasets' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]


def test_lines_are_cut_at_newlines_only() -> None:
    assert lines_of("a\x85b\u2028c\r\nd\n\ne") == ["a\x85b\u2028c\r\n", "d\n", "\n", "e"]
    assert lines_of("") == []


def test_section_titles_do_not_begin_a_document() -> None:
    raw = " \n = One = \n \n text = x = \n = = Part = = \n = Two = \n = = = Deep = = = \n"
    pages = [row["page"] for row in wikitext_pages(raw)]
    assert pages == [" = One = \n \n text = x = \n = = Part = = ", " = Two = \n = = = Deep = = = \n"]
