"""Publishing: a folder as a whole or not at all, and one commit to a hub that a small server stands for."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import CliRunner, Result
from huggingface_hub import DatasetCard, constants

from quant_bench import report
from quant_bench.cli import main
from quant_bench.hub_access import hub_answers
from quant_bench.record import Cell, Record, Store
from quant_bench.score import Metric, Score

DIGEST = "a" * 64
TOKEN = "hf_a_secret_of_somebody"
HEAD = "c" * 40


def record(model: str = "m") -> Record:
    digests = {key: DIGEST for key in ("weights_sha256", "tokenizer_sha256", "data_sha256", "calibration_sha256")}
    return Record(
        state="measured",
        reason=None,
        cell=Cell(model, "softmax", "none", "hellaswag", 0),
        settings={"model": {"dtype": "float32"}, "arm": {}, "quantizer": {}, "task": {}},
        versions={"arm": 1, "quantizer": 1, "task": 1},
        identity=digests,
        convention="lm-eval v1",
        coverage={"quantized": {}, "skipped": {}, "tied": {}, "mac_share": 0.5, "notes": []},
        scores=(Score(Metric("acc", "share", "higher", "mean"), 0.5, 0.01, (0.4, 0.6), 100),),
    )


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["publish", *(str(argument) for argument in arguments)])


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    record().write(folder)
    record("../x").write(folder)
    return folder


def test_a_folder_has_the_records_byte_for_byte_and_what_is_made_of_them(results: Path, tmp_path: Path) -> None:
    out = tmp_path / "pages"
    found = call("--to", out, "--results", results)
    assert found.exit_code == 0, found.output
    assert "2 records" in found.stdout
    for path in results.rglob("*.json"):
        assert (out / "results" / path.relative_to(results)).read_bytes() == path.read_bytes()
    assert not report.stale(out / "results", report.leaderboard(results))
    assert "<html" in (out / "index.html").read_text(encoding="utf-8")
    scores = pd.read_parquet(out / "scores.parquet")
    assert scores["value"].tolist() == [0.5, 0.5]
    assert len(json.loads((out / "scores.json").read_text(encoding="utf-8"))) == 2
    assert (
        DatasetCard((out / "README.md").read_text(encoding="utf-8")).data.configs[0]["data_files"] == "scores.parquet"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pages", "results"]


def test_a_checkout_of_pages_keeps_what_is_not_ours(results: Path, tmp_path: Path) -> None:
    out = tmp_path / "pages"
    (out / ".git").mkdir(parents=True)
    (out / ".git" / "HEAD").write_text("ref", encoding="utf-8")
    (out / "CNAME").write_text("example.org", encoding="utf-8")
    for _ in range(2):
        assert call("--to", out, "--results", results).exit_code == 0
        assert (out / ".git" / "HEAD").read_text(encoding="utf-8") == "ref"
        assert (out / "CNAME").read_text(encoding="utf-8") == "example.org"
    record("new").write(results)
    assert call("--to", out, "--results", results).exit_code == 0
    assert len(Store.read(out / "results").valid()) == 3


def test_a_folder_of_other_things_is_left_alone(results: Path, tmp_path: Path) -> None:
    out = tmp_path / "project"
    out.mkdir()
    (out / "README.md").write_text("mine", encoding="utf-8")
    found = call("--to", out, "--results", results)
    assert found.exit_code == 1
    assert "was not published by quant-bench" in found.stderr
    assert [path.name for path in out.iterdir()] == ["README.md"]


def test_a_record_that_only_the_target_has_is_never_lost(results: Path, tmp_path: Path) -> None:
    out = tmp_path / "pages"
    assert call("--to", out, "--results", results).exit_code == 0
    (results / "m" / "softmax" / "none" / "hellaswag.json").unlink()
    found = call("--to", out, "--results", results)
    assert found.exit_code == 1
    assert "m/softmax/none/hellaswag.json" in found.stderr
    assert len(Store.read(out / "results").valid()) == 2


def test_a_failure_leaves_the_old_folder(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "pages"
    assert call("--to", out, "--results", results).exit_code == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    record("new").write(results)

    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(pd.DataFrame, "to_parquet", full)
    found = call("--to", out, "--results", results)
    assert found.exit_code == 1
    assert "no space left" in found.stderr
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pages", "results"]


def test_an_interrupt_between_the_two_renames_leaves_the_old_folder(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "pages"
    assert call("--to", out, "--results", results).exit_code == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    rename = Path.rename

    def interrupted(path: Path, target: Path) -> Path:
        renamed = rename(path, target)
        if target.name == "old":
            raise KeyboardInterrupt
        return renamed

    monkeypatch.setattr(Path, "rename", interrupted)
    assert call("--to", out, "--results", results).exit_code == 1
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_what_is_no_record_is_not_published(results: Path, tmp_path: Path) -> None:
    (results / "m" / "notes.txt").write_text("foreign", encoding="utf-8")
    found = call("--to", tmp_path / "pages", "--results", results)
    assert found.exit_code == 1
    assert "notes.txt" in found.stderr
    assert not (tmp_path / "pages").exists()
    (tmp_path / "empty").mkdir()
    assert call("--to", tmp_path / "pages", "--results", tmp_path / "empty").exit_code == 1


class Hub(ThreadingHTTPServer):
    """What a commit needs of the hub: one data set, and the files of the last commit."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.present: list[str] = [".gitattributes"]
        self.files: dict[str, bytes] = {}
        self.commits: list[dict[str, Any]] = []
        self.tokens: set[str | None] = set()
        self.refuse = False


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, content: Any, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.answer({})

    def do_GET(self) -> None:
        self.server.tokens.add(self.headers.get("Authorization"))
        if self.path.startswith("/api/whoami"):
            self.answer({"name": "org", "type": "user"})
        elif self.path.startswith("/api/datasets/org/scores"):
            siblings = [{"rfilename": name} for name in self.server.present]
            self.answer({"id": "org/scores", "sha": HEAD, "siblings": siblings, "private": False, "tags": []})
        else:
            self.answer({"error": f"not asked for: {self.path}"}, 404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            self.answer({"url": f"http://{self.headers['Host']}/datasets/org/scores"})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif self.path.startswith("/api/datasets/org/scores/preupload/main"):
            asked = json.loads(body)["files"]
            self.answer(
                {"files": [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in asked]}
            )
        elif self.path.startswith("/api/datasets/org/scores/commit/main") and not self.server.refuse:
            self.commit([json.loads(line) for line in body.splitlines()])
        else:
            self.answer({"error": "not allowed"}, 403)

    def commit(self, lines: list[dict[str, Any]]) -> None:
        self.server.commits.append(lines[0]["value"])
        for line in lines[1:]:
            assert line["key"] == "file", "nothing is deleted"
            self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        address = f"http://{self.headers['Host']}/datasets/org/scores/commit/{'d' * 40}"
        self.answer({"success": True, "commitOid": "d" * 40, "commitUrl": address, "hookOutput": ""})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    hub_answers.cache_clear()
    yield server
    hub_answers.cache_clear()
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_hub_gets_everything_in_one_commit_with_the_library_s_own_token(hub: Hub, results: Path) -> None:
    found = call("--to", "hub:org/scores", "--results", results)
    assert found.exit_code == 0, found.output
    assert "/datasets/org/scores/commit/" in found.stdout
    (commit,) = hub.commits
    assert "2 records" in commit["summary"]
    assert commit["parentCommit"] == HEAD
    for path in results.rglob("*.json"):
        assert hub.files[f"results/{path.relative_to(results).as_posix()}"] == path.read_bytes()
    assert {"README.md", "scores.parquet", "scores.csv", "results/LEADERBOARD.md"} <= hub.files.keys()
    assert f"Bearer {TOKEN}" in hub.tokens
    assert TOKEN not in found.output
    assert not any(TOKEN.encode() in content for content in hub.files.values())


def test_a_record_that_only_the_hub_has_is_never_lost(hub: Hub, results: Path) -> None:
    hub.present.append("results/other/softmax/none/hellaswag.json")
    found = call("--to", "hub:org/scores", "--results", results)
    assert found.exit_code == 1
    assert "other/softmax/none/hellaswag.json" in found.stderr
    assert hub.commits == []


def test_a_refusal_of_the_hub_is_one_line_without_the_token(hub: Hub, results: Path) -> None:
    hub.refuse = True
    found = call("--to", "hub:org/scores", "--results", results)
    assert found.exit_code == 1
    assert "the hub refuses" in found.stderr
    assert "403" in found.stderr
    assert TOKEN not in found.output
    assert "Traceback" not in found.output


def test_without_a_login_the_command_says_how_to_get_one(
    hub: Hub, results: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    found = call("--to", "hub:org/scores", "--results", results)
    assert found.exit_code == 1
    assert "hf auth login" in found.stderr
    assert hub.commits == []


def test_without_a_connection_publishing_is_blocked_with_the_reason(
    hub: Hub, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found = call("--to", "hub:org/scores", "--results", results)
    assert found.exit_code == 1
    assert "the hub does not answer, or HF_HUB_OFFLINE is set" in found.stderr


@pytest.mark.parametrize("name", ["", "scores", "org/", "a/b/c", "../x", "org/a b"])
def test_a_name_that_is_none_on_the_hub_is_exit_code_two(name: str, results: Path) -> None:
    assert call("--to", f"hub:{name}", "--results", results).exit_code == 2
