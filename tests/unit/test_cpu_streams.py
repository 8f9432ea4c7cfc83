"""Weights that a step reads once drive nothing out of the last level of cache; what is read again stays in it."""

from __future__ import annotations

import re

import pytest
from llvmlite import ir

from ostinato.ops.cpu.coded_tiles import CodedTileEmitter
from ostinato.ops.cpu.tiles import TILE_ARGUMENTS, TileEmitter, bf16_dot
from ostinato.ops.cpu.vector_ir import I64, Keep, Lanes

_CALL = re.compile(r"call void @\"?llvm\.prefetch\.p0\"?\(.*, i32 0, i32 (\d), i32 1\)")


def blocks_of(emitter: type[TileEmitter], rows: int) -> list[list[int]]:
    """The localities of the prefetches in each block of a tile of `rows` rows that has any."""
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * (TILE_ARGUMENTS - 1)), "tile")
    lanes = Lanes(ir.IRBuilder(function.append_basic_block("entry")))
    emitter(lanes, rows, bf16_dot).tile(rows, *function.args)
    lanes.b.ret_void()
    found = [[int(place) for place in _CALL.findall(str(block))] for block in function.blocks]
    return [places for places in found if places]


@pytest.mark.parametrize("emitter", [TileEmitter, CodedTileEmitter])
def test_a_panel_that_one_row_reads_is_asked_for_once(emitter: type[TileEmitter]) -> None:
    blocks = blocks_of(emitter, 1)
    assert blocks
    assert {place for places in blocks for place in places} == {Keep.ONCE.value}


@pytest.mark.parametrize("emitter", [TileEmitter, CodedTileEmitter])
def test_a_panel_that_more_tiles_read_stays_in_the_caches(emitter: type[TileEmitter]) -> None:
    """Of several rows either way is there, in pairs of as many lines: the pace of asking tells them apart."""
    blocks = blocks_of(emitter, 3)
    kinds = [set(places) for places in blocks]
    assert kinds == [{Keep.ONCE.value}, {Keep.NEAREST.value}] * (len(kinds) // 2)
    assert [len(places) for places in blocks[::2]] == [len(places) for places in blocks[1::2]]
