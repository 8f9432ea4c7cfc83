"""Which tile multiplies weights of a dtype on an instruction path, and how many rows at most.

Knows nothing of how tiles work. Invariant: one tile for one dtype and path, whatever the shape.
"""

from __future__ import annotations

import torch

from ostinato.ops.cpu.coded_tiles import decode_panel, tile_coded
from ostinato.ops.cpu.int8_tiles import tile_int8_dot, tile_int8_portable
from ostinato.ops.cpu.isa import AVX2, MOST_TILE_ROWS, Isa
from ostinato.ops.cpu.narrow_coded import tile_coded_avx2
from ostinato.ops.cpu.narrow_int8 import tile_int8_avx2
from ostinato.ops.cpu.narrow_tiles import tile_bf16_avx2, tile_fp32_avx2
from ostinato.ops.cpu.prepare import RowFunction
from ostinato.ops.cpu.tiles import TileFunction, tile_bf16_dot, tile_bf16_portable, tile_fp32


def tile_function(dtype: torch.dtype, isa: Isa, *, coded: bool = False) -> TileFunction:
    """The tile for weights of `dtype`, `coded` or plain: rows of the same, or quantised rows for int8."""
    narrow = isa.name == AVX2
    if coded:
        assert dtype == torch.bfloat16, dtype
        return tile_coded_avx2 if narrow else tile_coded
    if dtype == torch.int8:
        return tile_int8_avx2 if narrow else tile_int8_dot if isa.dot_products else tile_int8_portable
    if dtype == torch.float32:
        return tile_fp32_avx2 if narrow else tile_fp32
    assert dtype == torch.bfloat16, dtype
    return tile_bf16_avx2 if narrow else tile_bf16_dot if isa.dot_products else tile_bf16_portable


def tile_rows(isa: Isa, *, coded: bool = False) -> int:
    """Most rows of a tile: where a tile decodes its panel before it multiplies, many rows share what that costs."""
    return MOST_TILE_ROWS if coded and isa.name == AVX2 else isa.tile_rows


def panel_decoder(isa: Isa, *, coded: bool) -> RowFunction | None:
    """What decodes a whole panel for many tiles of plain words; None: tiles take panels as they are, or decode them
    for many rows themselves.
    """
    return decode_panel if coded and isa.dot_products else None
