"""Names of models and data sets: paths on this machine, and names on the Hugging Face Hub, which are downloaded."""

import os
import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from rl_backend.contracts import ConfigError

FILES = ".jsonl, .json, .csv or .parquet"

_HUB_NAME = re.compile(r"(?P<repository>\w[\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_FILES = (".arrow", ".csv", ".json", ".jsonl", ".parquet", ".safetensors", ".txt", ".yaml", ".yml")
_OF_A_MODEL = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_NOT_OF_A_MODEL = ["*/*", "consolidated*"]


class HubName(NamedTuple):
    """A name on the Hub: ``org/name``, or ``org/name@revision``."""

    repository: str
    revision: str | None


def hub_name(text: str) -> HubName | None:
    """The name on the Hub that ``text`` is; None where it is a path.

    A path begins with ``/``, ``.`` or ``~``, has no or more than one slash, ends as a data file does, or its parent exists.
    """
    found = _HUB_NAME.fullmatch(text)
    if found is None or text.endswith(_FILES) or Path(text).exists() or Path(text).parent.is_dir():
        return None
    return HubName(found["repository"], found["revision"])


def local_model(model: Path | str, *, field: str = "model") -> str:
    """The folder of a model: ``model`` itself, or what is downloaded of a name on the Hub, once for each process."""
    text = str(model)
    name = hub_name(text)
    if name is not None:
        return _downloaded(name, field)
    path = Path(text).expanduser()
    if not path.is_dir():
        problem = "is a file" if path.exists() else f"no such folder ({path.absolute()})"
        raise ConfigError.of(
            field, text, f"{problem}; give a folder with config.json, safetensors and tokenizer, or a name on the Hub"
        )
    return str(path) if text.startswith("~") else text


@lru_cache(maxsize=64)
def _downloaded(name: HubName, field: str) -> str:
    # Imported here: it takes a while, and a folder needs none of it.
    from huggingface_hub import snapshot_download

    try:
        folder: str = snapshot_download(
            name.repository, revision=name.revision, allow_patterns=_OF_A_MODEL, ignore_patterns=_NOT_OF_A_MODEL
        )
    except Exception as error:  # of any type: the Hub, the network and the disk have their own
        raise ConfigError.of(field, "@".join(filter(None, name)), why_not(error, "model")) from error
    return folder


def why_not(error: BaseException, kind: str) -> str:
    from huggingface_hub import errors

    # huggingface_hub wraps what happened in errors of the cache.
    causes = _causes(error)
    if any(isinstance(each, errors.GatedRepoError) for each in causes):
        return f"the Hub asks for an account that may read this {kind}; accept its terms there, then hf auth login"
    if any(isinstance(each, errors.RepositoryNotFoundError) for each in causes):
        return (
            f"is neither a folder here nor a {kind} on the Hub that you may read; check the name, hf auth login for a "
            "private one, or give a path"
        )
    if any(isinstance(each, errors.RevisionNotFoundError) for each in causes):
        return f"the {kind} has no such revision on the Hub; check what follows @"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        why = "HF_HUB_OFFLINE is set"
    elif any(isinstance(each, ConnectionError | TimeoutError | errors.LocalEntryNotFoundError) for each in causes):
        why = "it cannot be reached"
    else:
        return f"cannot be loaded: {type(error).__name__}: {str(error).strip().partition('\n')[0]}"
    return (
        f"is not a folder here, and of the Hub nothing is in this machine's cache while {why}; give a path, or download the "
        f"{kind} where there is a network"
    )


def _causes(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found
