"""Where the words of a panel are found: as they are stored, or decoded once for many rows.

A thread that passes many rows over a group of panels keeps the group in its L2 cache. Coded panels it first decodes
there: tiles decode in registers at no cost where memory is the limit, but where a panel meets hundreds of rows the
shuffles take turns with the multiplications. Knows nothing of codes or rows. Invariant: what is multiplied are the
words of the plain panel, so the sums have the same bits either way.
"""

from __future__ import annotations

import torch

from ostinato.ops.cpu.intrinsics import call_prepare
from ostinato.ops.cpu.jit import njit
from ostinato.ops.cpu.launch import Runtime
from ostinato.ops.cpu.memory import load_i64
from ostinato.ops.cpu.packing import Panels, words_of
from ostinato.ops.cpu.prepare import PREPARE_ARGUMENTS
from ostinato.ops.cpu.scratch import Scratch
from ostinato.ops.cpu.tile_choice import panel_decoder, tile_function
from ostinato.ops.cpu.tiles import STEP_BYTES, TILE_ARGUMENTS

L2_BYTES = 128 * 1024  # of panels, as stored, that many rows pass over
STREAM_BYTES = 64 * 1024  # of panels in a task of few rows
DECODED_ROWS = 48  # more rows than these share what it takes to decode a panel
DECODED_BYTES = 512 * 1024  # of a decoded panel: a larger one would not stay in the L2 cache

# The block of int64 that says how to decode.
DECODE, PLAIN_TILE, WORDS, SHARE, NUM_WORDS = range(5)  # SHARE: bytes of WORDS for each thread


@njit(error_model="numpy")
def panel_group(rows: int, tile_rows: int, panels: int, panel_bytes: int, share: int) -> int:
    """Panels of one task: what stays in L2 for many rows, else enough to be worth a draw; `share` tasks at
    least.
    """
    size = L2_BYTES if rows > tile_rows else STREAM_BYTES
    return max(1, min(size // panel_bytes, panels // share))


@njit(error_model="numpy")
def panel_at(weight: int, starts: int, panel: int, panel_bytes: int) -> int:
    """Address of a panel."""
    return weight + (panel * panel_bytes if starts == 0 else load_i64(starts + 8 * panel))


@njit(error_model="numpy")
def plain_bytes(columns: int) -> int:
    """Bytes of a plain bf16 panel."""
    return (columns + 1) // 2 * STEP_BYTES


@njit(error_model="numpy")
def decode_group(
    decoding: int, member: int, weight: int, starts: int, first: int, count: int, columns: int
) -> int:
    """Decode panels `first`.. of `columns` values; returns where the thread has their words, one panel after the other.

    `decoding`: address of the block of `decoding_block`.
    """
    words = load_i64(decoding + 8 * WORDS) + member * load_i64(decoding + 8 * SHARE)
    for i in range(count):
        at = panel_at(weight, starts, first + i, 0)
        call_prepare(load_i64(decoding + 8 * DECODE), at, words + i * plain_bytes(columns), columns)
    return words


def decoding_block(
    runtime: Runtime, scratch: Scratch, rows: int, *matrices: Panels
) -> tuple[int, tuple[torch.Tensor, ...]]:
    """Address of the block for a launch that takes up to `rows` rows over these matrices, and what has to be kept.

    0 where nothing is to be decoded: plain weights, tiles that decode for many rows themselves, few rows, panels that
    would not stay in the cache.
    """
    decoder = panel_decoder(runtime.isa, coded=all(panels.coded for panels in matrices))
    sizes = [
        (words_of(panels.columns, torch.bfloat16) * STEP_BYTES, panels.panel_bytes) for panels in matrices
    ]
    if decoder is None or rows <= DECODED_ROWS or max(plain for plain, _ in sizes) > DECODED_BYTES:
        return 0, ()
    share = max(max(1, L2_BYTES // stored) * plain for plain, stored in sizes)
    words = scratch.take("panel.words", runtime.pool.num_threads * share)
    block = torch.zeros(NUM_WORDS, dtype=torch.int64)
    block[DECODE] = runtime.compiler.address(decoder, PREPARE_ARGUMENTS)
    block[PLAIN_TILE] = runtime.compiler.address(tile_function(torch.bfloat16, runtime.isa), TILE_ARGUMENTS)
    block[WORDS], block[SHARE] = words.data_ptr(), share
    return block.data_ptr(), (block, words)
