import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quant_bench.errors import Blocked, ModelError, UnsafeModel
from quant_bench.models import LoadOptions, identify


def test_offline_hub_model_is_blocked_and_a_cached_one_is_found(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots").mkdir()
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir()
    # looking up an identity opens none of them but the JSON files
    for name, content in (("config.json", "{}"), ("tokenizer.json", "{}"), ("model.safetensors", "weights")):
        (snapshot / name).write_text(content)
    code = (
        "from quant_bench.models import identify; from quant_bench.errors import Blocked\n"
        "identity = identify('someone/tiny')\n"
        "print(identity.source, identity.revision)\n"
        "try:\n    identify('someone/else')\nexcept Blocked as error:\n    print(error)\n"
    )
    environment = {
        **os.environ,
        "QUANT_BENCH_CACHE": str(tmp_path / "cache"),
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
    }
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    first, second = result.stdout.splitlines()
    assert first == f"hub {commit}"
    assert "'someone/else'" in second
    assert "give the folder's path" in second


def test_hub_without_safetensors_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    empty = tmp_path / "commit"
    empty.mkdir()
    names: list[str] = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_arguments, **_options: str(empty))
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda *_arguments, **_options: names)
    names[:] = ["config.json", "pytorch_model.bin"]
    with pytest.raises(UnsafeModel, match="only pickled weights"):
        identify("someone/pickled", LoadOptions(cache=tmp_path))
    names[:] = ["model.Q4_0.gguf"]
    with pytest.raises(ModelError, match=r"model\.Q4_0\.gguf"):
        identify("someone/gguf", LoadOptions(cache=tmp_path))


def test_an_unreachable_hub_is_blocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(*_arguments: Any, **_options: Any) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(Blocked, match="no route"):
        identify("someone/model", LoadOptions(cache=tmp_path))
