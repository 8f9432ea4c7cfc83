"""The fused MoE kernel against a plain loop over rows in float64, with nobody, pads and tails."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
from torch.nn.functional import silu

from ostinato.errors import ConfigError
from ostinato.ops.cpu.experts import ExpertWeights, MoeExperts
from ostinato.ops.cpu.isa import AVX2, AVX512_BF16, MOST_TILE_ROWS, PORTABLE
from ostinato.ops.cpu.launch import Runtime, open_runtime
from ostinato.ops.cpu.moe import TURNS
from ostinato.ops.cpu.moe_rows import BY_PANEL
from ostinato.ops.cpu.packing import Packer
from ostinato.ops.cpu.scratch import Scratch
from ostinato.ops.cpu.tiles import PANEL

ISAS = [AVX512_BF16, AVX2, PORTABLE]
THREADS = 2
# Hidden rows are rounded to the model's dtype between the products; sums are in fp32.
TOLERANCES = {torch.bfloat16: 6e-3, torch.float32: 2e-6}


@functools.cache
def runtime(isa: str) -> Runtime:
    try:
        return open_runtime(isa=isa, num_threads=THREADS)
    except ConfigError as error:
        pytest.skip(str(error))


@dataclass(frozen=True)
class Case:
    """One layer and its rows."""

    gate_up: torch.Tensor
    down: torch.Tensor
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    def packed(self, isa: str) -> ExpertWeights:
        packer = Packer(runtime(isa))
        return ExpertWeights(packer.pack(self.gate_up, gated=True), packer.pack(self.down))


def make(
    experts: int, hidden: int, inner: int, rows: int, slots: int, dtype: torch.dtype, skipped: float = 0.2
) -> Case:
    """Random values; a share of the slots is nobody, with NaN as weight, and their rows NaN if all of them are."""
    draw = torch.Generator().manual_seed(experts + 10 * hidden + 100 * rows)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    ids = torch.rand(rows, experts, generator=draw).topk(slots).indices.int()
    ids[torch.rand(rows, slots, generator=draw) < skipped] = -1
    if rows > 4:
        ids[rows // 2] = -1
    weights, x = torch.rand(rows, slots, generator=draw), normal(rows, hidden)
    weights[ids < 0] = torch.nan
    x[(ids < 0).all(1)] = torch.nan
    gate_up, down = (
        normal(experts, 2 * inner, hidden) * hidden**-0.5,
        normal(experts, hidden, inner) * inner**-0.5,
    )
    return Case(gate_up.to(dtype), down.to(dtype), x.to(dtype), ids, weights)


def exact(case: Case, on_input: bool) -> torch.Tensor:
    """float64, slot by slot."""
    out = torch.zeros(len(case.x), case.x.shape[1], dtype=torch.float64)
    for t, row in enumerate(case.ids.tolist()):
        for k, expert in enumerate(row):
            if expert < 0:
                continue
            weight = case.weights[t, k]
            source = case.x[t] * weight.to(case.x.dtype) if on_input else case.x[t]
            gate, up = (case.gate_up[expert].double() @ source.double()).chunk(2)
            result = case.down[expert].double() @ (silu(gate) * up)
            out[t] += result if on_input else weight.double() * result
    return out


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize(
    ("experts", "hidden", "inner", "rows", "slots"),
    [
        (1, 1, 1, 1, 1),
        (4, 64, 32, 1, 2),
        (8, 129, 33, 17, 3),
        (3, 48, 80, 60, 2),
        (2, 2048, 17, 9, 1),
        (33, 40, 24, 5, 8),
        (3, 40, 24, 2 * MOST_TILE_ROWS, 2),  # one tile of some experts, two of others
        (2, 2 * THREADS * TURNS * PANEL + 1, 24, 72, 2),  # rows enough to go panel by panel
    ],
)
def test_experts(
    isa: str,
    dtype: torch.dtype,
    on_input: bool,
    experts: int,
    hidden: int,
    inner: int,
    rows: int,
    slots: int,
) -> None:
    case = make(experts, hidden, inner, rows, slots, dtype)
    out = torch.full((rows, hidden), 7.0)
    kernel = MoeExperts(runtime(isa), Scratch())
    kernel(case.x, case.weights, case.ids, case.packed(isa), on_input, out)
    truth = exact(case, on_input)
    # against the largest output, or 1 where every output is small
    assert float((out - truth).abs().max()) < TOLERANCES[dtype] * max(1.0, float(truth.abs().max()))
    idle = (case.ids < 0).all(1)
    assert bool((out[idle] == 0).all())
    rounded = torch.empty(rows, hidden, dtype=torch.bfloat16)
    kernel(case.x, case.weights, case.ids, case.packed(isa), on_input, rounded)
    assert torch.equal(rounded, out.bfloat16())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "by_panel"), [(16, 0), (72, 1), (8192, 0)])
def test_bits_do_not_depend_on_the_rows_beside(
    isa: str, dtype: torch.dtype, rows: int, by_panel: int
) -> None:
    """Experts with one tile of rows, with several (which go panel by panel), and with more than stay near a core."""
    hidden = THREADS * TURNS * PANEL
    case = make(3, hidden, 24, rows, 2, dtype)
    packed, kernel = case.packed(isa), MoeExperts(runtime(isa), Scratch())
    whole, alone = torch.full((rows, hidden), 7.0), torch.empty(4, hidden)
    launch = kernel.bind(case.x, case.weights, case.ids, packed, False, whole)
    launch()
    assert int(launch.block[BY_PANEL]) == by_panel
    for first in (0, rows // 2 - 1, rows - 4):
        some = slice(first, first + 4)
        kernel(case.x[some], case.weights[some], case.ids[some], packed, False, alone)
        assert torch.equal(alone, whole[some])


@pytest.mark.parametrize("live", [0, 1, 6, 20])
def test_live_count(live: int) -> None:
    """Rows past the count go nowhere, whatever their ids: zeros come out, nothing of them is read."""
    case = make(6, 40, 24, 20, 2, torch.float32, skipped=0.0)
    packed, kernel = case.packed(PORTABLE), MoeExperts(runtime(PORTABLE), Scratch())
    whole, out = torch.empty(20, 40), torch.full((20, 40), 7.0)
    kernel(case.x, case.weights, case.ids, packed, False, whole)
    case.x[live:] = torch.nan
    kernel(case.x, case.weights, case.ids, packed, False, out, torch.tensor([live], dtype=torch.int32))
    assert torch.equal(out[:live], whole[:live])
    assert bool((out[live:] == 0).all())


def test_replay_follows_the_routing() -> None:
    """A bound launch reads ids, weights and rows anew; experts that lost their rows leave nothing behind."""
    case, other = make(6, 40, 24, 12, 2, torch.float32), make(6, 40, 24, 12, 2, torch.float32, skipped=0.6)
    packed, kernel = case.packed(PORTABLE), MoeExperts(runtime(PORTABLE), Scratch())
    out, fresh = torch.empty(12, 40), torch.empty(12, 40)
    launch = kernel.bind(case.x, case.weights, case.ids, packed, False, out)
    for ids in (case.ids.clone(), other.ids, torch.full_like(case.ids, -1), case.ids.clone()):
        case.ids.copy_(ids)
        case.weights.fill_(0.5)
        case.x.nan_to_num_()
        launch()
        MoeExperts(runtime(PORTABLE), Scratch())(case.x, case.weights, case.ids, packed, False, fresh)
        assert torch.equal(out, fresh)


def test_ids_that_are_no_expert_go_nowhere() -> None:
    case = make(4, 16, 8, 3, 2, torch.float32, skipped=0.0)
    packed, kernel = case.packed(PORTABLE), MoeExperts(runtime(PORTABLE), Scratch())
    wrong, marked = case.ids.clone(), case.ids.clone()
    wrong[1], marked[1] = torch.tensor([4, -7]), torch.tensor([-1, -1])
    out, expected = torch.empty(3, 16), torch.empty(3, 16)
    kernel(case.x, case.weights, wrong, packed, False, out)
    kernel(case.x, case.weights, marked, packed, False, expected)
    assert torch.equal(out, expected)


def test_what_does_not_fit_is_refused() -> None:
    case = make(4, 16, 8, 3, 2, torch.float32)
    packed, kernel = case.packed(PORTABLE), MoeExperts(runtime(PORTABLE), Scratch())
    out = torch.empty(3, 16)
    with pytest.raises(ValueError, match="topk_ids"):
        kernel(case.x, case.weights, case.ids.long(), packed, False, out)
    with pytest.raises(ValueError, match="as many rows"):
        kernel(case.x, case.weights[:2], case.ids, packed, False, out)
    with pytest.raises(ValueError, match="out must be"):
        kernel(case.x, case.weights, case.ids, packed, False, out.half())
    packer = Packer(runtime(PORTABLE))
    with pytest.raises(ValueError, match="do not fit together"):
        ExpertWeights(packer.pack(torch.ones(2, 8, 6), gated=True), packer.pack(torch.ones(2, 6, 8)))
