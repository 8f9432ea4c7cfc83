"""Replay traces: one step as a file, with all that is needed to run it again elsewhere.

    tensors   batch.*: the host's rows   read.*, filled.*: the static buffers   seen.*, expected.*: outputs of both
              runs, and the pages of KV that they wrote into
              page_table, k.N, v.N: the KV pages that the step reads, and only those, numbered anew from 1
    metadata  one JSON object: shape, key, model and its identity, engine options, kernels, versions, what differed

A safetensors file, so reading one never runs code. Knows nothing of how steps are run. Invariant: a directory never
gets more than `MAX_TRACES` files of at most `MAX_TRACE_BYTES` each, and a file that is there is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import struct
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from ostinato import __version__
from ostinato.config import EngineConfig
from ostinato.engine.batch import ForwardBatch
from ostinato.engine.shadow import CheckedStep, Named, differing_inputs, where
from ostinato.errors import ConfigError, TraceError
from ostinato.graphs.stats import spell_key
from ostinato.kv.pool import KVPool
from ostinato.padding import StepMode, StepShape, align_up
from ostinato.parallel.topology import Topology

FORMAT = 3
MAX_TRACES = 16
MAX_TRACE_BYTES = 512 << 20
_KEY = "ostinato"
_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of each weight file, for the checkpoint's identity
_HEADER = ("shape", "outputs", "model", "config", "parallel", "kernels", "versions", "left_out", "where")
EXTEND_FIELDS = ("extend_seq_lens", "extend_prefix_lens", "logit_rows", "num_logit_rows")
_BATCH_FIELDS = (
    "input_ids",
    "positions",
    "out_cache_loc",
    "req_pool_indices",
    "seq_lens",
    *EXTEND_FIELDS,
)


@dataclass(frozen=True, slots=True)
class TraceWriter:
    """Writes steps of one engine's rank into `directory`. kernels: names of the op set, attention and graph backend."""

    directory: Path
    checkpoint: Path
    config: EngineConfig
    topology: Topology
    pool: KVPool
    kernels: dict[str, str]

    def check(self, *, wanted: bool) -> None:
        """Raises ConfigError where no trace could be written; with traces `wanted`, also where there is no room."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            probe = self.directory / f"{os.getpid()}-rank{self.topology.rank}.part"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"replay traces cannot be written to {self.directory} ({error.strerror}); choose another trace_dir"
            ) from error
        if wanted and self._full():
            raise ConfigError(
                f"trace_dir {self.directory} holds {MAX_TRACES} traces, as many as it may; remove some, or choose "
                "another"
            )

    def _full(self) -> bool:
        return sum(1 for _ in self.directory.glob("*.trace")) >= MAX_TRACES

    def __call__(self, step: CheckedStep) -> Path | None:
        """The new file; None when the directory is full. Raises OSError when it cannot be written."""
        from safetensors import SafetensorError  # imported where it is used: a start need not wait for it
        from safetensors.torch import save_file

        self.directory.mkdir(parents=True, exist_ok=True)
        if self._full():
            return None
        header, tensors = self._header(step), _step_tensors(step)
        pages = _pages(step.batch, self.pool)
        size = sum(t.nbytes for t in tensors.values())
        kv_bytes = len(pages) * self.pool.layout.bytes_per_page
        if size + kv_bytes > MAX_TRACE_BYTES:
            header["left_out"] = f"{kv_bytes >> 20} MiB of KV pages, with which it would be too large"
        else:
            tensors |= _kv_tensors(step.batch, self.pool, pages)
        kind = "prefill" if step.shape.mode.is_extend else "decode"
        name = f"{kind}-{int(time.time())}-{os.getpid()}-{step.number}-rank{self.topology.rank}"
        unfinished, path = self.directory / f"{name}.part", self.directory / f"{name}.trace"
        try:
            save_file(tensors, unfinished, {_KEY: json.dumps(header)})
            unfinished.replace(path)
        except SafetensorError as error:
            unfinished.unlink(missing_ok=True)
            raise OSError(None, str(error)) from error
        return path

    def _header(self, step: CheckedStep) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "step": step.number,
            "time": time.time(),
            "shape": {f.name: getattr(step.shape, f.name) for f in fields(StepShape) if f.init}
            | {"mode": step.shape.mode.value},
            "key": spell_key(step.shape.key),
            "outputs": list(step.seen),
            "difference": None if step.difference is None else asdict(step.difference),
            "where": where(step),
            "differing_inputs": differing_inputs(step),
            "model": {"name": self.config.model, "identity": checkpoint_identity(self.checkpoint)},
            "config": asdict(self.config),
            "parallel": self.topology.as_dict() | {"rank": self.topology.rank},
            "page_size": self.pool.page_size,
            "kernels": self.kernels | {"threads": str(torch.get_num_threads())},
            "versions": {
                "ostinato": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "machine": platform.platform(),
            },
            "left_out": "",
        }


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace that was read. `tensors` as in the module's picture, on the host."""

    header: dict[str, Any]
    tensors: Named

    @property
    def shape(self) -> StepShape:
        values = dict(self.header["shape"])
        values["mode"] = StepMode(values["mode"])
        values["num_tokens"] = tuple(values["num_tokens"])
        return StepShape(**values)

    @property
    def config(self) -> EngineConfig:
        """The engine's options, those that this version still knows. Raises ConfigError for values it cannot take."""
        known = {spec.name for spec in fields(EngineConfig)}
        return EngineConfig(**{k: v for k, v in self.header["config"].items() if k in known})

    def group(self, prefix: str) -> Named:
        """Tensors `prefix.NAME` by NAME."""
        start = f"{prefix}."
        return {name.removeprefix(start): t for name, t in self.tensors.items() if name.startswith(start)}


def read_trace(path: Path) -> Trace:
    """The trace in a file. Raises TraceError for what is none, is damaged, or has another version's format."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {}).get(_KEY)
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
        header = json.loads(text or "{}")
    except (SafetensorError, OSError, ValueError) as error:
        raise TraceError(f"{path} cannot be read as a replay trace: {error}") from error
    if header.get("format") != FORMAT:
        raise TraceError(
            f"{path} is no replay trace of format {FORMAT} (it says {header.get('format')!r}); give a .trace file that "
            "this version wrote"
        )
    missing = [name for name in _HEADER if name not in header]
    missing += [name for name in ("batch.input_ids", "batch.seq_lens") if name not in tensors]
    if missing:
        raise TraceError(f"{path} lacks {', '.join(missing)}; it is damaged")
    return Trace(header, tensors)


def checkpoint_identity(directory: Path) -> str:
    """A hash of the model's config, of names, sizes and headers of its weight files, and of samples of the weights: a
    model trained on, saved in the same place, is another one.
    """
    found = hashlib.sha256((directory / "config.json").read_bytes())
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            length, size = struct.unpack("<Q", file.read(8))[0], path.stat().st_size
            found.update(f"{path.name} {size} ".encode() + file.read(min(length, 1 << 24)))
            for sample in range(_SAMPLES):
                file.seek(8 + length + (size - 8 - length) * sample // _SAMPLES)
                found.update(file.read(_SAMPLE_BYTES))
    return found.hexdigest()


def _step_tensors(step: CheckedStep) -> Named:
    groups = {"seen": step.seen, "expected": step.expected, "read": step.read, "filled": step.filled}
    tensors = {f"{prefix}.{name}": t for prefix, group in groups.items() for name, t in group.items()}
    for name in _BATCH_FIELDS:
        rows = getattr(step.batch, name)
        if rows is not None:
            tensors[f"batch.{name}"] = rows.clone()
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def _pages(batch: ForwardBatch, pool: KVPool) -> list[int]:
    """Pages of the batch's requests, each once."""
    pages: dict[int, None] = {}
    for row, length in zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True):
        count = align_up(length, pool.page_size) // pool.page_size
        pages |= dict.fromkeys(pool.page_table[row, :count].tolist())
    return list(pages)


def _kv_tensors(batch: ForwardBatch, pool: KVPool, pages: list[int]) -> Named:
    """The pages one behind the other, and the requests' page tables and slots in numbers that count from 1."""
    size, rows = pool.page_size, batch.req_pool_indices
    width = align_up(max([1, *batch.seq_lens.tolist()]), size) // size
    number = torch.zeros(pool.num_pages, dtype=torch.int64)
    number[pages] = torch.arange(1, len(pages) + 1)
    slots = batch.out_cache_loc
    tensors = {
        "page_table": number[pool.page_table[rows, :width].long().cpu()].to(torch.int32),
        "batch.out_cache_loc": number[slots // size] * size + slots % size,
        "batch.req_pool_indices": torch.arange(1, len(rows) + 1),
    }
    picked = torch.tensor(pages, dtype=torch.int64)
    for layer, (k, v) in enumerate(zip(pool.k, pool.v, strict=True)):
        for name, memory in (("k", k), ("v", v)):
            tensors[f"{name}.{layer}"] = memory.view(pool.num_pages, size, *memory.shape[1:])[picked]
    return tensors
