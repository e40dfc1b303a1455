"""Records, scores and leaderboard as a folder that others can read, here or as a data set on the Hugging Face hub."""

import json
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from quant_bench import __version__, report
from quant_bench.errors import Blocked, RecordError, SpecError
from quant_bench.hub_access import hub_answers
from quant_bench.samples import SampleStore
from quant_bench.site import write_site
from quant_bench.submission.check import Tree

RECORDS: Final = "results"
# by this a folder is known as one that was published, and may be replaced
MARK: Final = "quant-bench.json"
HUB: Final = "hub:"
_REPOSITORY: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# what a folder for GitHub Pages holds before anything is published there
_KEPT: Final = {".git", ".gitattributes", ".gitignore", ".nojekyll", "CNAME"}
_CARD: Final = """---
pretty_name: quant-bench results
tags:
- quantization
- benchmark
configs:
- config_name: scores
  data_files: scores.parquet
---

# quant-bench results

How robust language models are to quantization: {count} records, made into this by quant-bench {version}.

- `results/`: one JSON file a cell (model, arm, quantizer, task, seed), with settings, versions and digests.
- `results/LEADERBOARD.md`: the leaderboard made of them.
- `scores.parquet`, `scores.csv`, `scores.json`: one row a score, with interval, differences, convention and rank.
"""


def write_tree(results: Path, out: Path) -> Tree:
    """Write everything that is published but the site into a folder, and return the records.

    Raises:
        RecordError: a file is no record, or there is none; the message names every one.
    """
    tree = Tree.read(results)
    if tree.problems:
        raise RecordError("\n".join(f"{results / one.path}: {one.what}" for one in tree.problems))
    if not tree.records:
        raise RecordError(f"there are no records in {results}")
    for name, content in tree.texts.items():
        path = out / RECORDS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    frame = report.long_frame(tree.records.values())
    (out / RECORDS / report.FILE).write_bytes(report.rendered(frame, "markdown").encode())
    for how in ("csv", "json"):
        (out / f"scores.{how}").write_text(report.rendered(frame, how), encoding="utf-8")
    frame.to_parquet(out / "scores.parquet", index=False)
    (out / "README.md").write_text(_CARD.format(count=len(tree.records), version=__version__), encoding="utf-8")
    (out / MARK).write_text(json.dumps({"quant_bench": __version__, "records": len(tree.records)}) + "\n")
    # without it GitHub Pages leaves out what starts with an underscore
    (out / ".nojekyll").touch()
    return tree


def publish_folder(results: Path, target: Path, answers: SampleStore | None = None) -> int:
    """Publish with the site into a folder, as a whole or not at all, and return the number of records.

    A folder that was published before is replaced; what else lies in it (`.git`, `CNAME`) is kept.

    Args:
        results: folder of the records.
        target: the folder.
        answers: as in `write_site`: for paired intervals of any two rows.

    Raises:
        RecordError: the target holds something and was not published before, or it has a record that would be lost, or
            a file in `results` is no record.
    """
    target = target.resolve()
    present = {path.name for path in target.iterdir()} if target.is_dir() else set[str]()
    if target.exists() and not target.is_dir():
        raise RecordError(f"{target} is no folder")
    if not present <= _KEPT and MARK not in present:
        raise RecordError(f"{target} holds files and was not published by quant-bench: name another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    # beside the target, so that a rename can put it there
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as work:
        made, old = Path(work) / "new", Path(work) / "old"
        write_site(results, made, answers)
        tree = write_tree(results, made)
        known = (path.relative_to(target / RECORDS).as_posix() for path in (target / RECORDS).rglob("*.json"))
        _refuse_loss(known, tree, str(target))
        for name in present - {path.name for path in made.iterdir()}:
            _copy(target / name, made / name)
        try:
            if target.exists():
                target.rename(old)
            made.rename(target)
        except BaseException:
            # whenever it comes: what leaves this block in the old place is deleted
            if old.exists() and not target.exists():
                old.rename(target)
            raise
    return len(tree.records)


def publish_hub(results: Path, repository: str) -> str:
    """Publish as a data set on the hub, in one commit, and return its address.

    The token is the one that `hf auth login` stored, or `HF_TOKEN`; it is neither read nor written here.

    Args:
        results: folder of the records.
        repository: `ORG/DATASET`; made where there is none.

    Raises:
        SpecError: `repository` is no such name.
        Blocked: the hub does not answer, nobody is logged in, or the hub refuses.
        RecordError: the data set has a record that would be lost, or a file in `results` is no record.
    """
    if not _REPOSITORY.fullmatch(repository):
        raise SpecError(f"a data set on the hub is named {HUB}ORG/DATASET; got {HUB}{repository!r}")
    with tempfile.TemporaryDirectory() as work:
        tree = write_tree(results, Path(work))
        if not hub_answers():
            raise Blocked(
                f"{HUB}{repository}: the hub does not answer, or HF_HUB_OFFLINE is set; publish to a folder, or again "
                "when there is a connection"
            )
        return _commit(Path(work), repository, tree)


def _commit(folder: Path, repository: str, tree: Tree) -> str:
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import LocalTokenNotFoundError

    api = HfApi(library_name="quant-bench", library_version=__version__)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    additions = [CommitOperationAdd(path.relative_to(folder).as_posix(), str(path)) for path in files]
    message = f"{len(tree.records)} records by quant-bench {__version__}"
    where = f"{HUB}{repository}"
    try:
        api.whoami()
        api.create_repo(repository, repo_type="dataset", exist_ok=True)
        info: Any = api.repo_info(repository, repo_type="dataset")
        present = (file.rfilename for file in info.siblings or ())
        known = (name.removeprefix(f"{RECORDS}/") for name in present if name.startswith(f"{RECORDS}/"))
        _refuse_loss((name for name in known if name.endswith(".json")), tree, where)
        # the hub refuses where somebody else was faster, so that nothing gets lost in between
        made = api.create_commit(
            repository, additions, commit_message=message, repo_type="dataset", parent_commit=info.sha
        )
    except RecordError:
        raise
    except LocalTokenNotFoundError as error:
        raise Blocked(f"{where}: nobody is logged in to the hub: run `hf auth login`") from error
    except Exception as error:
        # a dozen kinds, from the library and from those below it
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise Blocked(f"{where}: the hub refuses, or the connection broke: {said}") from error
    return str(made.commit_url)


def _refuse_loss(known: Iterable[str], tree: Tree, where: str) -> None:
    lost = sorted(set(known) - tree.records.keys())
    if lost:
        listed = "\n".join(f"  {name}" for name in lost)
        raise RecordError(f"{where} has records that would be lost; merge them first (quant-bench merge):\n{listed}")


def _copy(source: Path, target: Path) -> None:
    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copy2(source, target, follow_symlinks=False)
