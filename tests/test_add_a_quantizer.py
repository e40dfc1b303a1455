"""docs/add-a-quantizer.md is true: every block of it is run in an empty folder, and says what the page says."""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "add-a-quantizer.md"
FENCE = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# `…` stands for anything, as in doctest
SAME = doctest.OutputChecker()


class Block(NamedTuple):
    language: str
    file: str
    text: str


def blocks() -> list[Block]:
    text = PAGE.read_text(encoding="utf-8")
    found = [Block(*match) for match in FENCE.findall(text)]
    assert len(found) * 2 == len(re.findall(r"^```", text, re.MULTILINE)), "every fence is a block with a language"
    return found


def run(block: Block, folder: Path, environment: dict[str, str]) -> str:
    program = [sys.executable, "-"] if block.language == "python" else ["bash", "-euo", "pipefail", "-s"]
    done = subprocess.run(
        program, input=block.text, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def agrees(wanted: str, got: str) -> bool:
    lines = [re.sub(r"\s+", " ", text).strip().replace("…", "...") for text in (wanted, got)]
    return SAME.check_output(lines[0], lines[1], doctest.ELLIPSIS)


def test_every_block_of_the_page_does_what_the_page_says(tmp_path: Path) -> None:
    # the command as a reader has it, but of this checkout
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, arguments in (("quant-bench", "-m quant_bench"), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n', encoding="utf-8")
        (programs / name).chmod(0o755)
    path = os.pathsep.join((str(programs), os.environ["PATH"]))
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "QUANT_BENCH_CACHE": str(tmp_path / "cache")}
    environment.pop("QUANT_BENCH_PATH", None)
    folder = tmp_path / "empty"
    folder.mkdir()
    output, checked = "", 0
    for block in blocks():
        if block.language == "text":
            assert agrees(block.text, output), f"the page says\n{block.text}\nbut it is\n{output}"
            checked += 1
        elif block.file:
            assert (folder / block.file).is_file(), "the page writes its own version of a file that is there"
            (folder / block.file).write_text(block.text, encoding="utf-8")
        else:
            assert block.language in ("sh", "python")
            output = run(block, folder, environment)
    assert checked == sum(block.language == "text" for block in blocks()) > 0
    assert "shrink" in (folder / "results" / "LEADERBOARD.md").read_text(encoding="utf-8")


def test_what_the_page_says_is_compared_and_not_only_read() -> None:
    assert agrees("a  b\n…\nlast", "a b\nx\ny\nlast\n")
    assert not agrees("a b", "a c")
    assert not agrees("a …", "b c")
