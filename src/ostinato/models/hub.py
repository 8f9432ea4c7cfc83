"""From what a user calls a model to a local checkpoint directory: a path as it is, a hub id downloaded.

The one place that knows the Hugging Face hub, whose library is imported only when something is downloaded.
Knows nothing of what is in a checkpoint, except that only data files are fetched, never code or pickles.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from ostinato.config import DEMO_NAME
from ostinato.errors import ModelError
from ostinato.models.fetch import FETCHABLE

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_WANTED = ("*.safetensors", "*.json", "*.jinja")
# Second copies of the weights in other layouts.
_UNWANTED = ("original/*", "consolidated*", "*/*.safetensors")


def resolve_model(model: str | Path, *, revision: str | None = None) -> Path:
    """The local directory of `model`: itself when it is a directory, else a download of the hub id.

    Raises ModelError when it is neither, or when the download fails.
    """
    try:
        path = Path(model).expanduser()
    except RuntimeError:
        raise ModelError(f"{model} is in the home of a user who is not there; correct the path") from None
    if model != "" and path.is_dir():
        return path
    if path.is_file():
        what = "a GGUF file, and models are read from safetensors" if path.suffix == ".gguf" else "a file"
        raise ModelError(f"{path} is {what}; give the checkpoint's directory")
    if isinstance(model, Path) or not _HUB_ID.fullmatch(model):
        raise ModelError(
            f"{model or repr(model)} is neither a directory nor a hub id (owner/name); correct the path"
        )
    from huggingface_hub import snapshot_download

    try:
        local = snapshot_download(
            model, revision=revision, allow_patterns=list(_WANTED), ignore_patterns=list(_UNWANTED)
        )
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].removeprefix("Got: ")
        close = difflib.get_close_matches(model, (*FETCHABLE, DEMO_NAME), n=1)
        meant = f"did you mean {close[0]!r}? Else check" if close else "check"
        raise ModelError(
            f"{model} is no local directory and could not be downloaded from the hub ({reason}); {meant} the "
            "name and the network, or give a local path"
        ) from error
    return Path(local)
