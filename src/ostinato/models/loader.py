"""Safetensors files of a checkpoint directory, read one tensor at a time.

Finds the files (single or sharded), hands out tensors by name with their shape checked, and accounts for
every one of them. `WeightSource.open` is the one way to a tensor's values. Knows nothing of what the tensors
mean. Invariant: nothing is unpickled, no tensor is silently missing or silently left over, and no more of a
file is in memory than the tensors that are open.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ostinato.errors import ModelError
from ostinato.models.safetensors_file import DTYPES, DamagedFileError, Entry, SafetensorsFile

Progress = Callable[[int, int], None]
"""Called with (loaded bytes, total bytes)."""

BLOCK_BYTES = 8 << 20
"""What of a tensor is read at once."""

# Buffers, not parameters: old checkpoints carry the rope frequencies, which the config determines.
_BUFFERS = re.compile(r"rotary_emb\.inv_freq$")
_AGAIN = "download the checkpoint again"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """An open tensor: `values` is a view of the file, [shape] in the file's dtype; take slices of it at will, what is
    not touched is not read. It is good until the tensor is closed.
    """

    values: torch.Tensor
    _file: SafetensorsFile
    _stored: str

    def drop(self) -> None:
        """Give back the memory of what was read so far; what is read again is fetched again."""
        self._file.drop(self._stored)

    def blocks(self, rows: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, block) of `rows`, a view [n, ...] of `values`; a block is good until the next is asked for."""
        size = max(1, rows[:1].numel()) * rows.element_size()
        step = max(BLOCK_BYTES // size // 32 * 32, 32)
        for first in range(0, rows.shape[0], step):
            yield first, rows[first : first + step]
            self.drop()


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
        self._where: dict[str, tuple[SafetensorsFile, str]] = {}  # name asked for -> (file, name in it)
        self._taken: set[str] = set()
        for path in weight_files(self.directory):
            file = _open(path)
            for stored in file.entries:
                if _BUFFERS.search(stored) or stored.startswith(tuple(ignored)):
                    continue
                self._add(path, file, stored, renamed)

    def _add(
        self, path: Path, file: SafetensorsFile, stored: str, renamed: Sequence[tuple[str, str]]
    ) -> None:
        entry = file.entries[stored]
        if entry.dtype not in DTYPES:
            raise ModelError(
                f"{path}: tensor {stored} has dtype {entry.dtype}; ostinato loads {', '.join(DTYPES)}, "
                "give an unquantised checkpoint"
            )
        name = stored
        for prefix, replacement in renamed:
            if stored.startswith(prefix):
                name = replacement + stored.removeprefix(prefix)
                break
        if name in self._where:
            raise ModelError(f"{path}: tensor {stored} is there twice; {_AGAIN}")
        self._where[name] = (file, stored)
        self._total += entry.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self._total

    def has(self, name: str) -> bool:
        return name in self._where

    @contextmanager
    def open(self, name: str, shape: tuple[int, ...]) -> Iterator[StoredTensor]:
        """Tensor `name` for the length of a block. ModelError when it is missing or has another shape."""
        file, stored, entry = self._find(name, shape)
        file.expect(stored)
        yield StoredTensor(file.view(stored), file, stored)
        file.drop(stored)
        self._loaded += (
            0 if name in self._taken else entry.nbytes
        )  # one tensor may be read for two parts of a rank
        self._taken.add(name)
        if self._progress is not None:
            self._progress(self._loaded, self._total)

    def leave(self, name: str, shape: tuple[int, ...]) -> None:
        """Another rank takes tensor `name`: check that it is there, and read nothing of it."""
        self._find(name, shape)
        self._taken.add(name)

    def _find(self, name: str, shape: tuple[int, ...]) -> tuple[SafetensorsFile, str, Entry]:
        if name not in self._where:
            raise ModelError(
                f"{self.directory} has no tensor {name}, which config.json asks for; "
                "take weights and config of the same checkpoint"
            )
        file, stored = self._where[name]
        entry = file.entries[stored]
        if entry.shape != shape:
            raise ModelError(
                f"{self.directory}: tensor {stored} has shape {list(entry.shape)}, config.json asks for "
                f"{list(shape)}; take weights and config of the same checkpoint"
            )
        return file, stored, entry

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A fresh copy of tensor `name` in `dtype`. ModelError when it is missing or has another shape."""
        with self.open(name, shape) as stored:
            copy = torch.empty(shape, dtype=dtype)
            for first, block in stored.blocks(stored.values):
                copy[first : first + block.shape[0]] = block
        return copy

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
    if any(directory.glob("*.gguf")):
        raise ModelError(
            f"{directory} has GGUF files only; take the safetensors checkpoint they were made from"
        )
    raise ModelError(f"{directory} has no model.safetensors; {_AGAIN}")


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
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


def _open(path: Path) -> SafetensorsFile:
    try:
        return SafetensorsFile(path)
    except (DamagedFileError, OSError) as error:
        raise ModelError(f"{path} is truncated or damaged ({error}); {_AGAIN}") from error
