"""Weights that a step reads once drive nothing out of the last level of cache; what is read again stays in it."""

from __future__ import annotations

import re

import pytest
from llvmlite import ir

from ostinato.ops.cpu.coded_tiles import CodedTileEmitter
from ostinato.ops.cpu.narrow_coded import CodedNarrowEmitter
from ostinato.ops.cpu.narrow_tiles import NARROW, NarrowTileEmitter, Tile
from ostinato.ops.cpu.products import Bf16Dot, Bf16Narrow
from ostinato.ops.cpu.tiles import TILE_ARGUMENTS, TileEmitter
from ostinato.ops.cpu.vector_ir import I64, Keep, Lanes

_CALL = re.compile(r"call void @\"?llvm\.prefetch\.p0\"?\(.*, i32 0, i32 (\d), i32 1\)")


def function_of(arguments: int, lanes: int) -> tuple[ir.Function, Lanes]:
    """An empty function of so many int64, and what emits into it."""
    kind = ir.FunctionType(ir.VoidType(), [I64] * arguments)
    function = ir.Function(ir.Module(), kind, "tile")
    return function, Lanes(ir.IRBuilder(function.append_basic_block("entry")), lanes)


def places_in(function: ir.Function) -> list[list[int]]:
    """The localities of the prefetches in each block that has any."""
    found = [[int(place) for place in _CALL.findall(str(block))] for block in function.blocks]
    return [places for places in found if places]


def blocks_of(emitter: type[TileEmitter], rows: int) -> list[list[int]]:
    """Those of a tile of `rows` rows."""
    function, lanes = function_of(TILE_ARGUMENTS - 1, 2 * NARROW)
    emitter(lanes, rows, Bf16Dot()).tile(rows, *function.args)
    lanes.b.ret_void()
    return places_in(function)


@pytest.mark.parametrize("emitter", [TileEmitter, CodedTileEmitter])
def test_a_panel_that_one_row_reads_is_asked_for_once(emitter: type[TileEmitter]) -> None:
    blocks = blocks_of(emitter, 1)
    assert blocks
    assert {place for places in blocks for place in places} == {Keep.ONCE.value}


@pytest.mark.parametrize(
    ("rows", "keep", "times"), [(2, Keep.ONCE, 1), (3, Keep.SECOND, 2), (12, Keep.SECOND, 2)]
)
@pytest.mark.parametrize("emitter", [TileEmitter, CodedTileEmitter])
def test_a_panel_that_more_tiles_read_stays_in_the_caches(
    emitter: type[TileEmitter], rows: int, keep: Keep, times: int
) -> None:
    """Of several rows either way is there, in pairs: the pace of asking tells them apart. What takes about as long to
    multiply as to read comes into the second level, and each of its lines is asked for twice.
    """
    blocks = blocks_of(emitter, rows)
    kinds = [set(places) for places in blocks]
    assert kinds == [{keep.value}, {Keep.NEAREST.value}] * (len(kinds) // 2)
    assert [len(places) for places in blocks[::2]] == [times * len(places) for places in blocks[1::2]]


@pytest.mark.parametrize("emitter", [NarrowTileEmitter, CodedNarrowEmitter])
def test_tiles_of_narrow_registers_tell_them_apart_too(emitter: type[NarrowTileEmitter]) -> None:
    function, lanes = function_of(TILE_ARGUMENTS, NARROW)
    emitter(lanes, Bf16Narrow()).emit(Tile(*function.args))
    lanes.b.ret_void()
    blocks = places_in(function)
    assert blocks
    kinds = [set(places) for places in blocks]
    assert kinds == [{Keep.ONCE.value}, {Keep.NEAREST.value}] * (len(kinds) // 2)
    assert [len(places) for places in blocks[::2]] == [len(places) for places in blocks[1::2]]
