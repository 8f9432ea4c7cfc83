"""One safetensors file, mapped into memory: its tensors as views, whose pages are given back when they were read.

The format: a little-endian uint64 n, n bytes of JSON (name -> dtype, shape, data_offsets), then the data
(https://github.com/huggingface/safetensors). Knows nothing of models. Invariant: a header that does not describe
exactly the bytes behind it is refused before anything is read, and a view never writes to the file.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)
"""The dtypes that views can have; tensors of others are listed but cannot be viewed."""

_MOST_HEADER_BYTES = 100_000_000


class DamagedFileError(ValueError):
    """The file is not what its header says."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in the file: name of its dtype, shape, first byte and size in bytes, counted from the file's start."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFile:
    """`entries` by name, and views of them. Raises DamagedFileError or OSError when it cannot be read."""

    __slots__ = ("_map", "entries")

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            self.entries: Mapping[str, Entry] = _read_header(file, size)
            # Private and never written to: torch wants writable memory.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def view(self, name: str) -> torch.Tensor:
        """The tensor [shape] as it lies in the file. Its pages are read when they are touched."""
        entry = self.entries[name]
        dtype = DTYPES[entry.dtype]
        if entry.nbytes == 0:
            return torch.empty(entry.shape, dtype=dtype)
        flat = torch.frombuffer(self._map, dtype=dtype, count=math.prod(entry.shape), offset=entry.offset)
        return flat.view(entry.shape)

    def expect(self, name: str) -> None:
        """Say that a tensor will be read soon: the system may fetch it from disk meanwhile."""
        self._advise(name, "MADV_WILLNEED")

    def drop(self, name: str) -> None:
        """Give back the memory of a tensor's pages; who reads the view again reads the file again."""
        self._advise(name, "MADV_DONTNEED")

    def _advise(self, name: str, advice: str) -> None:
        entry = self.entries[name]
        if entry.nbytes and hasattr(mmap, advice):
            start = entry.offset // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(getattr(mmap, advice), start, entry.offset + entry.nbytes - start)


def _read_header(file: Any, size: int) -> Mapping[str, Entry]:
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, _MOST_HEADER_BYTES):
        raise DamagedFileError(f"{size} bytes cannot hold a header of {length}")
    try:
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        entries = {name: _entry(value, 8 + length) for name, value in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFileError(f"its header cannot be read: {error}") from error
    end = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != end:
            raise DamagedFileError(f"tensor {name} begins at byte {entry.offset}, expected {end}")
        end += entry.nbytes
    if end != size:
        raise DamagedFileError(f"its tensors end at byte {end}, the file at {size}")
    return entries


def _entry(value: Any, data: int) -> Entry:
    shape, (first, last) = tuple(value["shape"]), value["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, first, last)) or last < first:
        raise ValueError(f"{value} is no tensor")
    dtype = DTYPES.get(value["dtype"])
    if dtype is not None and math.prod(shape) * dtype.itemsize != last - first:
        raise ValueError(f"{value} does not fill its bytes")
    return Entry(value["dtype"], shape, data + first, last - first)
