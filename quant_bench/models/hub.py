"""Hub: a snapshot of a model repository without its pickles; knows no torch."""

from pathlib import Path

from quant_bench.errors import Blocked, ModelError, UnsafeModel
from quant_bench.models.folders import PICKLES, TOKENIZER_FILES
from quant_bench.models.manifest import MANIFEST, WEIGHTS, is_saved

_WANTED = [
    *("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json", "*.py"),
    *(MANIFEST, WEIGHTS, "additional_chat_templates/*"),
]


def snapshot(repository: str, revision: str | None) -> tuple[Path, str]:
    """Folder of a repository's configuration, tokenizer and safetensors, and the commit it is of.

    `HF_HUB_OFFLINE`, `HF_HOME` and `HF_TOKEN` mean what they mean to `huggingface_hub`; what was downloaded before is
    found without a network.

    Raises:
        ModelError: no such repository or revision, or it may not be read.
        UnsafeModel: the repository has pickled weights only; they are not downloaded.
        Blocked: it is not in the local cache and the hub cannot be asked.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f" at revision {revision!r}" if revision else ""
    try:
        folder = snapshot_download(repository, revision=revision, allow_patterns=[*_WANTED, *TOKENIZER_FILES])
    except GatedRepoError as error:
        raise ModelError(f"the hub model {repository!r} is gated: accept its terms and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"there is no hub model {repository!r} (or it is private: set HF_TOKEN)") from error
    except RevisionNotFoundError as error:
        raise ModelError(f"the hub model {repository!r} has no revision {revision!r}") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise Blocked(
            f"the hub model {repository!r}{at} is not in the local cache and the hub cannot be asked ({error}); "
            "go online once, or download it elsewhere and give the folder's path"
        ) from error
    path = Path(folder)
    if not list(path.glob("model*.safetensors")) and not is_saved(path):
        _explain(repository, path.name)
    return path, path.name


def _explain(repository: str, commit: str) -> None:
    """Say why a repository without safetensors cannot be used."""
    from huggingface_hub import list_repo_files

    try:
        names = list_repo_files(repository, revision=commit)
    except Exception as error:
        raise Blocked(f"the hub model {repository!r} has no safetensors in the local cache ({error})") from error
    if any(name.endswith(PICKLES) for name in names):
        raise UnsafeModel(f"the hub model {repository!r} has only pickled weights, and unpickling runs code")
    ggufs = [name for name in names if name.endswith(".gguf")]
    hint = f"; download one of its GGUF files ({ggufs[0]}) and give its path" if ggufs else ""
    raise ModelError(f"the hub model {repository!r} has no safetensors{hint}")
