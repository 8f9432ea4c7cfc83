"""Audits: poison reaches what it should, and finds stale reads; shadow runs find graphs that drift."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.graphs import (
    FillContext,
    GraphBufferRegistry,
    GraphRunner,
    GraphSlot,
    PaddingPolicy,
    Stream,
    TapeBackend,
    Workspace,
)
from ostinato.graphs.audit import (
    POISONS,
    Poison,
    first_difference,
    poison_registry,
    poison_workspace,
    replay_trace,
    shadow_run,
)
from ostinato.padding import Buckets, ShapeRules, StepMode, decide_shape

SIZES = (2, 4, 8)
RULES = ShapeRules(Buckets(SIZES), Buckets(()))
TABLE = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True, slots=True)
class Batch:
    batch_size: int
    rows: torch.Tensor
    index: torch.Tensor
    once: torch.Tensor | None = None
    mask: torch.Tensor | None = None


def lookup(rows: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(TABLE[index] * rows)


def make(policy: PaddingPolicy = PaddingPolicy.ZERO) -> tuple[GraphRunner[Batch, torch.Tensor], Workspace]:
    registry: GraphBufferRegistry[Batch] = GraphBufferRegistry(8, 8)
    registry.register_slot(
        GraphSlot("rows", lambda bs, t: (bs, 8), torch.float32, "bs", padding_policy=PaddingPolicy.ZERO)
    )
    registry.register_slot(GraphSlot("index", lambda bs, t: (bs,), torch.int64, "bs", padding_policy=policy))
    registry.register_slot(
        GraphSlot(
            "once",
            lambda bs, t: (bs,),
            torch.int64,
            "bs",
            padding_policy=PaddingPolicy.FILL_ONCE,
            pad_value=3,
        )
    )
    registry.register_slot(GraphSlot("mask", lambda bs, t: (bs,), torch.bool, "bs"))
    workspace = Workspace()
    workspace.reserve("out", (8, 8), torch.float32)

    def fn(view: Batch, stream: Stream) -> torch.Tensor:
        out = workspace.take("out", view.index.shape[0], 8)
        stream.launch(lookup, view.rows, view.index, out)
        return out

    return GraphRunner(fn, registry, backend=TapeBackend(), capture_on_first_use=True), workspace


def batch(n: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(n, torch.randn(n, 8, generator=generator), torch.randint(6, (n,), generator=generator))


def run(runner: GraphRunner[Batch, torch.Tensor], made: Batch) -> torch.Tensor:
    shape = decide_shape(StepMode.DECODE, [made.batch_size], made.batch_size, RULES)
    return runner.run(shape, made)[: made.batch_size].clone()


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 8), larger=st.integers(1, 8), poison=st.sampled_from(POISONS), seed=st.integers(0, 3))
def test_p1_poison_never_reaches_a_real_row(n: int, larger: int, poison: Poison, seed: int) -> None:
    """P1: after a step of any other size, under any poison, real rows are bit for bit what eager gives alone."""
    runner, workspace = make()
    made = batch(n, seed)
    alone = decide_shape(StepMode.DECODE, [n], n, ShapeRules(Buckets(()), Buckets(())))
    want = runner.run(alone, made).clone()
    for _ in range(2):
        run(runner, batch(larger, seed + 10))
        poison_registry(runner.registry, poison)
        poison_workspace(workspace, poison)
        assert torch.equal(run(runner, made), want)


def test_poison_finds_a_tail_that_nobody_resets() -> None:
    """The same run with a kept tail of indices reads the poison: an illegal access."""
    runner, _ = make(PaddingPolicy.KEEP_PAD)
    run(runner, batch(3))
    run(runner, batch(3))
    poison_registry(runner.registry, POISONS[0])
    with pytest.raises(IndexError):
        run(runner, batch(3))


def test_poison_values() -> None:
    runner, workspace = make()
    registry = runner.registry
    for poison in POISONS:
        poison_registry(registry, poison, keep=["mask"])
        rows, index = registry.buffer("rows"), registry.buffer("index")
        assert torch.equal(rows, torch.full_like(rows, poison.number)) or rows.isnan().all()
        assert index.eq(poison.index).all()
        assert registry.buffer("once").eq(3).all(), "filled once, so nothing would restore it"
        assert not registry.buffer("mask").any()
    poison_registry(registry, POISONS[0])
    assert registry.buffer("mask").all()
    poison_workspace(workspace, POISONS[0])
    assert workspace.take("out", 8, 8).isnan().all()
    small = torch.zeros(2, dtype=torch.float16)
    POISONS[2].into(small)
    assert small.tolist() == [65504.0] * 2
    bytes_ = torch.zeros(2, dtype=torch.uint8)
    POISONS[1].into(bytes_)
    assert bytes_.tolist() == [255] * 2
    POISONS[3].into(bytes_)
    assert bytes_.tolist() == [0] * 2


def test_shadow_runs_agree_and_traces_name_kernels() -> None:
    runner, _ = make()
    made = batch(3)
    shape = decide_shape(StepMode.DECODE, [3], 3, RULES)
    run(runner, made)
    assert shadow_run(runner, shape, batch(3, seed=1), rows=3) is None
    assert replay_trace(runner, shape) == ("lookup",)
    assert runner.stats.eager_reasons == {"shadow run": 1}
    with pytest.raises(KeyError):
        replay_trace(runner, decide_shape(StepMode.DECODE, [8], 8, RULES))


def test_shadow_runs_find_a_frozen_host_value() -> None:
    scale = [1.0]
    registry: GraphBufferRegistry[Batch] = GraphBufferRegistry(4, 4)
    registry.register_slot(GraphSlot("rows", lambda bs, t: (bs, 8), torch.float32, "bs"))
    runner = GraphRunner(
        lambda view, stream: view.rows * scale[0], registry, backend=TapeBackend(), capture_on_first_use=True
    )
    shape = decide_shape(StepMode.DECODE, [2], 2, RULES)
    made = Batch(2, torch.tensor([[0.0] * 8, [1.0] * 8]), torch.zeros(2, dtype=torch.int64))
    runner.run(shape, made)
    scale[0] = 3.0
    found = shadow_run(runner, shape, made, rows=2)
    assert found is not None
    assert (found.tensor, found.row, found.max_abs) == (0, 1, 2.0)


def test_differences_are_bitwise() -> None:
    a, nan = torch.tensor([[1.0], [0.0]]), torch.tensor([math.nan])
    assert first_difference([a, {"k": nan}], [a.clone(), {"k": nan.clone()}]) is None
    minus = first_difference(a, torch.tensor([[1.0], [-0.0]]))
    assert minus is not None
    assert (minus.row, minus.max_abs) == (1, 0.0)
    assert first_difference(a, torch.tensor([[1.0], [5.0]]), rows=1) is None
    gap = first_difference((a, torch.tensor(3)), (a, torch.tensor(5)))
    assert gap is not None
    assert (gap.tensor, gap.row, gap.max_abs) == (1, 0, 2.0)
    with pytest.raises(ValueError, match="structure"):
        first_difference(a, a.double())


def test_views_are_all_that_leaves() -> None:
    """F12 at the runner: the output of a narrow step has its own width, whatever ran before."""
    runner, _ = make()
    run(runner, batch(8))
    shape = decide_shape(StepMode.DECODE, [2], 2, RULES)
    out = runner.run(shape, batch(2))
    assert out.shape == (2, 8)
    ctx = FillContext.of(shape)
    assert runner.registry.extract_buffer(batch(2), ctx).index.shape == (2,)
