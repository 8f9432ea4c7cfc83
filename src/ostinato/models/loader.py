"""Safetensors files of a checkpoint directory, read one tensor at a time.

Finds the files (single or sharded), hands out tensors by name with their shape checked, and accounts for
every one of them. Knows nothing of what the tensors mean. Invariant: nothing is unpickled, no tensor is
silently missing or silently left over, and a tensor handed out shares no memory with the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ostinato.errors import ModelError

Progress = Callable[[int, int], None]
"""Called with (loaded bytes, total bytes)."""

_SIZES: Mapping[str, int] = MappingProxyType({"F32": 4, "F16": 2, "BF16": 2})
# Buffers, not parameters: old checkpoints carry the rope frequencies, which the config determines.
_BUFFERS = re.compile(r"rotary_emb\.inv_freq$")
_AGAIN = "download the checkpoint again"


class WeightSource:
    """The tensors of one checkpoint directory.

    `renamed` maps name prefixes of the files to the names asked for; names with a prefix of `ignored` are
    left out.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        renamed: Sequence[tuple[str, str]] = (),
        ignored: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> None:
        self.directory = Path(directory)
        self._progress = progress
        self._loaded = 0
        self._total = 0
        self._where: dict[str, tuple[Any, str]] = {}  # name asked for -> (open file, name in it)
        self._taken: set[str] = set()
        for path in weight_files(self.directory):
            handle = _open(path)
            for stored in handle.keys():  # noqa: SIM118 (the handle is no mapping)
                if _BUFFERS.search(stored) or stored.startswith(tuple(ignored)):
                    continue
                self._add(path, handle, stored, renamed)

    def _add(self, path: Path, handle: Any, stored: str, renamed: Sequence[tuple[str, str]]) -> None:
        entry = handle.get_slice(stored)
        if entry.get_dtype() not in _SIZES:
            raise ModelError(
                f"{path}: tensor {stored} has dtype {entry.get_dtype()}; ostinato loads {', '.join(_SIZES)}, "
                "give an unquantised checkpoint"
            )
        name = stored
        for prefix, replacement in renamed:
            if stored.startswith(prefix):
                name = replacement + stored.removeprefix(prefix)
                break
        if name in self._where:
            raise ModelError(f"{path}: tensor {stored} is there twice; {_AGAIN}")
        self._where[name] = (handle, stored)
        size = _SIZES[entry.get_dtype()]
        for extent in entry.get_shape():
            size *= extent
        self._total += size

    def has(self, name: str) -> bool:
        return name in self._where

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A fresh copy of tensor `name` in `dtype`. ModelError when it is missing or has another shape."""
        if name not in self._where:
            raise ModelError(
                f"{self.directory} has no tensor {name}, which config.json asks for; "
                "take weights and config of the same checkpoint"
            )
        handle, stored = self._where[name]
        found = tuple(handle.get_slice(stored).get_shape())
        if found != shape:
            raise ModelError(
                f"{self.directory}: tensor {stored} has shape {list(found)}, config.json asks for "
                f"{list(shape)}; take weights and config of the same checkpoint"
            )
        tensor: torch.Tensor = handle.get_tensor(stored)
        self._taken.add(name)
        self._loaded += tensor.numel() * tensor.element_size()
        if self._progress is not None:
            self._progress(self._loaded, self._total)
        return tensor.to(dtype, copy=True)

    def finish(self) -> None:
        """Raise ModelError when the files hold tensors that nobody took."""
        left = sorted(self._where.keys() - self._taken)
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise ModelError(
                f"{self.directory} has an unexpected tensor {left[0]}{more}, for which config.json has no "
                "place; take weights and config of the same checkpoint"
            )


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: `model.safetensors`, else the shards that its index names.

    Raises ModelError when there are none (pickled weights are never read) or a shard is missing.
    """
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return _shards(index)
    if any(directory.glob("model-*.safetensors")):
        raise ModelError(f"{directory} has shards but no {index.name}; {_AGAIN}")
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt")):
        raise ModelError(
            f"{directory} has pickled weights only, which can run code and are never loaded; convert them to "
            "safetensors"
        )
    raise ModelError(f"{directory} has no model.safetensors; {_AGAIN}")


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} cannot be read as a weight index; {_AGAIN}") from error
    paths = []
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(f"{index} names the file {name!r}, which is not in its directory; {_AGAIN}")
        path = index.parent / name
        if not path.is_file():
            raise ModelError(f"shard {name} named by {index} is missing; {_AGAIN}")
        paths.append(path)
    if not paths:
        raise ModelError(f"{index} names no files; {_AGAIN}")
    return paths


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is truncated or damaged ({error}); {_AGAIN}") from error
