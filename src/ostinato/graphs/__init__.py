"""Capture and replay of any callable over named static buffers; a library of its own, which knows no models.

Describe the inputs (`GraphSlot`), let a `GraphBufferRegistry` own them, and hand a callable to a `GraphRunner`
with a backend: eager, tape (CPU) or CUDA graphs. `ostinato.padding` decides the shapes.
"""

from ostinato.graphs.backends import Backend, CapturedGraph, EagerBackend, Recording, SegmentBackend
from ostinato.graphs.breakable import BreakableBackend, BreakableGraph, LiveStep
from ostinato.graphs.buckets import (
    bucket_alignment,
    decode_buckets,
    default_decode_sizes,
    default_prefill_sizes,
    prefill_buckets,
)
from ostinato.graphs.cuda import CudaGraphBackend
from ostinato.graphs.registry import BufferPool, GraphBufferRegistry
from ostinato.graphs.runner import GraphRunner
from ostinato.graphs.slots import FillContext, GraphSlot, PaddingPolicy
from ostinato.graphs.stats import GraphStats, KeyStats
from ostinato.graphs.stream import EagerStream, Kernel, Stream
from ostinato.graphs.tape import Tape, TapeBackend
from ostinato.graphs.workspace import Workspace

__all__ = [
    "Backend",
    "BreakableBackend",
    "BreakableGraph",
    "BufferPool",
    "CapturedGraph",
    "CudaGraphBackend",
    "EagerBackend",
    "EagerStream",
    "FillContext",
    "GraphBufferRegistry",
    "GraphRunner",
    "GraphSlot",
    "GraphStats",
    "Kernel",
    "KeyStats",
    "LiveStep",
    "PaddingPolicy",
    "Recording",
    "SegmentBackend",
    "Stream",
    "Tape",
    "TapeBackend",
    "Workspace",
    "bucket_alignment",
    "decode_buckets",
    "default_decode_sizes",
    "default_prefill_sizes",
    "prefill_buckets",
]
