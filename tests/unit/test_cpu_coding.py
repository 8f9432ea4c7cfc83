"""Coded weights: every bit comes back, and every product has the bits of the plain one."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ostinato.errors import ConfigError
from ostinato.models.loader import BLOCK_BYTES, WeightSource
from ostinato.models.weights import Cut, Part, StoredWeight
from ostinato.ops.cpu.coding import VB, codes_by_16, codes_by_64
from ostinato.ops.cpu.compile import Compiler
from ostinato.ops.cpu.isa import AVX2, AVX512_BF16, MOST_TILE_ROWS, PORTABLE, select_isa
from ostinato.ops.cpu.lane_kinds import Float32, Kind
from ostinato.ops.cpu.linear import LinearWeights
from ostinato.ops.cpu.native import NativeFunction, NativeLibrary
from ostinato.ops.cpu.opset import NumbaOps, open_numba_ops
from ostinato.ops.cpu.packing import Panels
from ostinato.ops.cpu.panel_words import DECODED_ROWS, decoding_block
from ostinato.ops.cpu.scratch import Scratch
from ostinato.ops.cpu.tiles import PANEL
from ostinato.ops.cpu.vector_ir import Lanes, Value, host_has

PATTERNS = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
SHAPES = [(1, 1), (2, 3), (31, 4), (33, 7), (70, 129), (64, 258), (150, 533)]


OpSets = Callable[[str], NumbaOps]  # by weight coding


@functools.cache
def ops_of(isa: str, coding: str) -> NumbaOps:
    try:
        ops = open_numba_ops(isa=isa, weight_coding=coding)
    except ConfigError as error:
        pytest.skip(str(error))
    if coding == "auto" and not ops.codes_weights:
        pytest.skip("this CPU cannot decode weights as it multiplies")
    return ops


@pytest.fixture(params=[AVX512_BF16, AVX2])
def opset(request: pytest.FixtureRequest) -> OpSets:
    return functools.partial(ops_of, request.param)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return (0.02 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def any_bits(*shape: int, seed: int = 0) -> torch.Tensor:
    """Every exponent alike: NaN, infinities, subnormals and both zeros among the values."""
    generator = torch.Generator().manual_seed(seed)
    return PATTERNS[torch.randint(1 << 16, shape, generator=generator)].view(torch.bfloat16)


def rare(*shape: int, seed: int = 0) -> torch.Tensor:
    """Gaussian values of which one in 300 has bits of any kind: segments of all lengths, none among them."""
    generator = torch.Generator().manual_seed(seed)
    hit = torch.rand(shape, generator=generator) < 1 / 300
    return torch.where(hit, any_bits(*shape, seed=seed), draw(*shape, seed=seed))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def rows_of(ops: NumbaOps, packed: LinearWeights) -> torch.Tensor:
    """The weight [N, K], read back row by row."""
    panels = packed.panels
    out = torch.empty(panels.rows, panels.columns, dtype=torch.bfloat16)
    ops.embedding(torch.arange(panels.rows), packed, out)
    return out


@pytest.mark.parametrize("make", [draw, rare, any_bits])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_bit_comes_back(
    opset: OpSets, make: functools.partial[torch.Tensor], shape: tuple[int, int]
) -> None:
    weight = make(*shape, seed=shape[1])
    packed = opset("auto").pack_linear(weight)
    assert packed.panels.coded
    assert torch.equal(bits(rows_of(opset("auto"), packed)), bits(weight))


def test_all_patterns_come_back(opset: OpSets) -> None:
    """In an order in which tables cover nothing, and sorted, where they cover everything."""
    shuffled = PATTERNS[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(1))]
    ops = opset("auto")
    for values in (shuffled, PATTERNS):
        weight = values.view(torch.bfloat16).view(256, 256)
        assert torch.equal(bits(rows_of(ops, ops.pack_linear(weight))), bits(weight))


@pytest.mark.parametrize("make", [draw, rare])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", [(2, 3), (34, 7), (70, 129), (150, 534)])
def test_products_have_the_bits_of_plain_weights(
    opset: OpSets, make: functools.partial[torch.Tensor], gated: bool, shape: tuple[int, int]
) -> None:
    """For every number of rows in a tile, and for more than one tile."""
    weight = make(*shape, seed=3)
    weight[:, 0] = 0  # no infinity meets it below
    outs = []
    for coding in ("plain", "auto"):
        ops = opset(coding)
        packed = ops.pack_gated(weight) if gated else ops.pack_linear(weight, out_dtype=torch.float32)
        assert packed.panels.coded == (coding == "auto")
        found = []
        for rows in (*range(1, 14), 50, MOST_TILE_ROWS, MOST_TILE_ROWS + 1):
            x = draw(rows, shape[1], seed=rows) * 50
            x[0, 0] = torch.inf
            out = torch.empty(rows, packed.out_features, dtype=torch.bfloat16 if gated else torch.float32)
            ops.linear(x, packed, out)
            found.append(bits(out).flatten())
        outs.append(torch.cat(found))
    assert torch.equal(*outs)


WIDE = 8 * PANEL * 8 + 2  # outputs of more panels than a thread has at once, and enough to go panel by panel


@pytest.mark.parametrize("rows", [DECODED_ROWS, DECODED_ROWS + 1, 3 * DECODED_ROWS + 5])
@pytest.mark.parametrize("columns", [66, 1027, 8300])
def test_panels_decoded_once_for_many_rows_have_the_bits_of_plain_ones(
    opset: OpSets, columns: int, rows: int
) -> None:
    """One panel at a time, some, all; and panels too large to stay near a core, which tiles decode themselves."""
    weight = rare(WIDE if columns < 8300 else 70, columns, seed=4).nan_to_num(1, 1, 1)
    x, outs = draw(rows, columns, seed=5), []
    for coding in ("plain", "auto"):
        packed = opset(coding).pack_linear(weight)
        outs.append(torch.empty(rows, len(weight), dtype=torch.bfloat16))
        opset(coding).linear(x, packed, outs[-1])
    assert torch.equal(*map(bits, outs))


def test_who_decodes_a_panel() -> None:
    """A thread, once, for launches of many rows; tiles for others, for panels that are too large, and where panels are
    plain."""
    runtime = ops_of(AVX512_BF16, "auto").runtime
    coded, plain, large = (
        ops_of(AVX512_BF16, coding).pack_linear(draw(40, columns)).panels
        for coding, columns in (("auto", 64), ("plain", 64), ("auto", 8300))
    )
    scratch = Scratch()
    assert decoding_block(runtime, scratch, DECODED_ROWS + 1, coded, coded)[0] != 0
    for rows, matrices in ((DECODED_ROWS, [coded]), (999, [plain]), (999, [large]), (999, [coded, plain])):
        assert decoding_block(runtime, scratch, rows, *matrices) == (0, ())


@pytest.mark.parametrize("rows", [9, 3 * DECODED_ROWS, 9 * DECODED_ROWS])
def test_experts_of_many_rows_have_the_bits_of_plain_weights(opset: OpSets, rows: int) -> None:
    """Some experts with few rows among those with many; by expert, and down panel by panel."""
    gate_up, down = rare(4, 98, WIDE // 8, seed=1), rare(4, WIDE // 8, 49, seed=2)
    gate_up, down = gate_up.nan_to_num(1, 1, 1), down.nan_to_num(1, 1, 1)
    ids = torch.arange(rows).remainder(3)[:, None].int()
    ids[: rows // 8] = 3
    ids[:3] = -1
    x, weights = draw(rows, WIDE // 8, seed=rows), torch.rand(rows, 1)
    outs = []
    for coding in ("plain", "auto"):
        outs.append(torch.empty(rows, WIDE // 8, dtype=torch.bfloat16))
        experts = opset(coding).pack_experts(gate_up, down)
        opset(coding).moe_experts(x, weights, ids, experts, False, outs[-1])
    assert torch.equal(*map(bits, outs))


@pytest.mark.parametrize("on_input", [False, True])
def test_experts_have_the_bits_of_plain_weights(opset: OpSets, on_input: bool) -> None:
    gate_up, down = rare(5, 98, 66, seed=1), rare(5, 66, 49, seed=2)
    gate_up[1] = any_bits(98, 66).nan_to_num(1, 1, 1)  # panels that gain nothing among those that do
    plain, coded = (opset(coding).pack_experts(gate_up, down) for coding in ("plain", "auto"))
    assert coded.gate_up.coded
    for rows in (1, 2, 9, 70):
        ids = torch.rand(rows, 5, generator=torch.Generator().manual_seed(rows)).topk(3).indices.int()
        x, weights = draw(rows, 66, seed=rows) * 50, torch.rand(rows, 3)
        outs = [torch.empty(rows, 66, dtype=torch.bfloat16) for _ in range(2)]
        for coding, experts, out in zip(("plain", "auto"), (plain, coded), outs, strict=True):
            opset(coding).moe_experts(x, weights, ids, experts, on_input, out)
        assert torch.equal(*map(bits, outs))


def test_codes_are_looked_up_alike_whatever_the_cpu_looks_up_at_once(tmp_path: Path) -> None:
    """All 256 high bytes, in a table of any codes."""
    ways = [*[codes_by_16] * host_has("avx2"), *[codes_by_64] * host_has("avx512vbmi")]
    if not ways:
        pytest.skip("this CPU looks up no bytes")
    plan, high = (torch.randperm(256, generator=torch.Generator().manual_seed(i)).byte() for i in (1, 2))
    for way in ways:

        def emit(lanes: Lanes, kind: Kind, args: list[Value], way: Any = way) -> None:
            table, source, target = args
            lanes.store(way(lanes, table, lanes.load(source, VB, 1)), target, 1)

        library = NativeLibrary(
            way.__name__, {"codes": NativeFunction(3, emit)}, Float32(), Compiler(tmp_path)
        )
        look_up = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(library.addresses["codes"])
        out = torch.empty(256, dtype=torch.uint8)
        for i in range(0, 256, 64):
            look_up(plan.data_ptr(), high[i:].data_ptr(), out[i:].data_ptr())
        assert torch.equal(out, plan[high.long()])


def test_what_it_gains(opset: OpSets) -> None:
    """Gaussian weights take little more than 12 bits; weights of any bits take their own size and a line a panel."""
    size = 2 * 96 * 2048
    assert 0.75 * size < opset("auto").pack_linear(draw(96, 2048)).panels.nbytes < 0.77 * size
    assert opset("auto").pack_linear(any_bits(96, 2048)).panels.nbytes == size + 3 * 64
    ops = open_numba_ops(weight_coding="auto")
    ops.pack_linear(draw(96, 2048))
    assert ops.packed_size.uncoded == size
    assert ops.packed_size.stored < 0.77 * size


def same(one: Panels, other: Panels) -> None:
    assert one.starts is not None
    assert other.starts is not None
    assert torch.equal(one.starts, other.starts)
    assert torch.equal(one.words, other.words)


def test_coded_by_blocks_is_coded_whole(opset: OpSets, tmp_path: Path) -> None:
    """In blocks of the file, parts in any order; and experts, one of them twice."""
    wide = BLOCK_BYTES // 2 // 64
    weight, experts = draw(100, wide), rare(3, 40, 34)
    save_file({"w": weight, "low": weight[:50].clone(), "e": experts}, tmp_path / "model.safetensors")
    source, ops = WeightSource(tmp_path), opset("auto")
    parts = (Part("w", (100, wide)),)
    stored = StoredWeight(source, (100, wide), torch.bfloat16, parts)
    same(ops.pack_linear(stored).panels, ops.pack_linear(weight).panels)
    same(ops.pack_gated(stored).panels, ops.pack_gated(weight).panels)
    high = Cut(((50, 100),))
    parts = (Part("low", (50, wide), first=50), Part("low", (50, wide)))
    turned = StoredWeight(source, (100, wide), torch.bfloat16, parts)
    same(ops.pack_linear(turned).panels, ops.pack_linear(torch.cat([weight[:50]] * 2)).panels)
    same(ops.pack_linear(stored.cut(high)).panels, ops.pack_linear(weight[50:].clone()).panels)
    chosen = Cut(((0, 40),), matrices=(2, 0, 2))
    kept = StoredWeight(source, (3, 40, 34), torch.bfloat16, (Part("e", (3, 40, 34)),)).cut(chosen)
    ids, x, weights = torch.tensor([[0, 1, 2]], dtype=torch.int32), draw(1, 34), torch.rand(1, 3)
    outs = []
    for gate_up in (kept, experts[[2, 0, 2]]):
        packed = ops.pack_experts(gate_up, draw(3, 34, 20))
        outs.append(torch.empty(1, 34))
        ops.moe_experts(x, weights, ids, packed, False, outs[-1])
    assert torch.equal(*outs)


def test_what_stays_plain(opset: OpSets) -> None:
    """fp32, the portable path, machines without byte tables, experts that move, and int8; the head of int8 does not."""
    ops, weight = opset("auto"), draw(40, 24)
    assert not ops.pack_linear(weight.float()).panels.coded
    portable = open_numba_ops(isa=PORTABLE, weight_coding="auto")
    assert not portable.pack_linear(weight).panels.coded
    lacking = dict.fromkeys(("avx512f", "avx512bw", "avx512vl", "avx512bf16", "avx512vnni"), True)
    assert not select_isa(features=lacking).byte_tables
    assert select_isa(features={**lacking, "avx512vbmi": True}).byte_tables
    moving = open_numba_ops(weight_coding="auto", experts_move=True)
    experts = moving.pack_experts(draw(2, 40, 24), draw(2, 24, 20))
    assert [len(part) for part in experts.by_expert] == [2, 2]
    assert moving.pack_linear(weight).panels.coded
    quantised = open_numba_ops(quantization="int8", weight_coding="auto")
    assert not quantised.pack_linear(weight).panels.coded
    assert quantised.pack_linear(weight, out_dtype=torch.float32).panels.coded
