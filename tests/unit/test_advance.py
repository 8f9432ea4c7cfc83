"""Decode steps that go on from the buffers of the last one: the kernel and its twin, the registry's second form of
writing, and when a runner may use it.
"""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.engine.batch import ForwardBatch, capture_batch, capture_shapes, decode_batch
from ostinato.engine.coordinator import Coordinator
from ostinato.engine.registries import build_decode_registry
from ostinato.graphs import Backend, EagerBackend, GraphRunner, Stream, TapeBackend
from ostinato.graphs.audit import POISONS, poison_registry
from ostinato.moe.pairs import StepWidths
from ostinato.ops.cpu.opset import NumbaOps, open_numba_ops
from ostinato.ops.opset import OpSet
from ostinato.ops.reference import ReferenceOps
from ostinato.padding import Buckets, ShapeRules, StepMode, StepShape, decide_shape
from ostinato.parallel.collectives import SingleGroup
from ostinato.parallel.rendezvous import World
from ostinato.parallel.topology import Topology

BS, PAGE, PAGES = 8, 4, 6
RULES = ShapeRules(Buckets((2, 4, 8)), Buckets(()))


@functools.cache
def numba_ops() -> NumbaOps:
    return open_numba_ops(isa="portable", num_threads=1)


class Rig:
    """A runner whose step chooses tokens as a model would, from ids, positions and slots alone."""

    def __init__(self, ops: OpSet, backend: Backend) -> None:
        self.choice = torch.zeros(BS, dtype=torch.int64)
        self.planned = torch.zeros(BS, dtype=torch.int64)
        self.table = torch.randperm((BS + 1) * PAGES, generator=torch.Generator().manual_seed(1))
        self.table = self.table.view(BS + 1, PAGES).int()
        self.ops = ops
        self.registry = build_decode_registry(BS, BS, advance=self._advance)
        self.runner = GraphRunner(
            self._step, self.registry, backend=backend, prepare=self._plan, capture_on_first_use=True
        )

    def _step(self, view: ForwardBatch, stream: Stream) -> torch.Tensor:
        assert view.input_ids is not None
        stream.launch(self._choose, view.input_ids, view.positions, view.out_cache_loc, view.seq_lens)
        return self.choice[: view.input_ids.shape[0]]

    def _choose(self, *inputs: torch.Tensor) -> None:
        """A token that tells every input apart; the planned lengths take part."""
        rows = inputs[0].shape[0]
        mixed = sum(x * factor for x, factor in zip(inputs, (7, 31, 101, 1009), strict=True))
        self.choice[:rows] = (mixed + self.planned[:rows] * 10007) % 9973

    def _plan(self, view: ForwardBatch, shape: StepShape) -> None:
        self.planned[: shape.bs] = view.seq_lens_cpu[: shape.bs]

    def _advance(self, view: ForwardBatch, stream: Stream) -> None:
        assert view.input_ids is not None
        rows = view.input_ids.shape[0]
        stream.launch(
            self.ops.advance,
            self.choice[:rows],
            view.input_ids,
            view.positions,
            view.out_cache_loc,
            view.req_pool_indices,
            self.table,
            PAGE,
            (view.seq_lens, view.seq_lens_cpu, self.planned[:rows]),
            view.num_token_non_padded,
        )

    def batch(self, ids: list[int], lens: list[int], requests: list[int]) -> ForwardBatch:
        where = torch.tensor(lens) - 1
        slots = self.table[torch.tensor(requests), where // PAGE].long() * PAGE + where % PAGE
        return decode_batch(ids, lens, requests, slots)

    def run(self, ids: list[int], lens: list[int], requests: list[int]) -> list[int]:
        made = self.batch(ids, lens, requests)
        shape = decide_shape(made.mode, [len(ids)], len(ids), RULES)
        return self.runner.run(shape, made)[: len(ids)].tolist()

    def inputs(self) -> dict[str, list[int]]:
        held = {name: self.registry.buffer(name).tolist() for name in self.registry.slot_names}
        return held | {"planned": self.planned.tolist()}


@pytest.mark.parametrize("ops", [ReferenceOps(), numba_ops()], ids=lambda ops: str(ops.name))
@settings(deadline=None, max_examples=40)
@given(st.data())
def test_advancing_leaves_the_inputs_that_a_fill_would(ops: OpSet, data: st.DataObject) -> None:
    """Every slot, tails included, over page boundaries and in any bucket; and the tokens chosen are the same."""
    lens = data.draw(st.lists(st.integers(1, PAGES * PAGE - 8), min_size=1, max_size=BS))
    requests = data.draw(st.permutations(range(1, BS + 1)))[: len(lens)]
    steps = data.draw(st.integers(1, 8))
    going, filling = Rig(ops, TapeBackend()), Rig(ops, TapeBackend())
    ids = list(range(50, 50 + len(lens)))
    expected = [filling.run(ids, lens, requests)]
    for step in range(1, steps + 1):
        expected.append(filling.run(expected[-1], [n + step for n in lens], requests))
    found = [going.run(ids, lens, requests)]
    for _ in range(steps):
        out = going.runner.advance()
        assert out is not None
        found.append(out[: len(lens)].tolist())
    assert found == expected
    assert going.inputs() == filling.inputs()
    assert going.runner.stats.advanced == steps
    assert filling.runner.stats.advanced == 0


def test_a_token_chosen_elsewhere_is_relayed_through_the_choice() -> None:
    rig, plain = (Rig(numba_ops(), TapeBackend()) for _ in range(2))
    rig.run([1, 2], [3, 4], [1, 2])
    rig.choice[1] = 77
    ids = rig.choice[:2].tolist()
    out = rig.runner.advance()
    assert out is not None
    assert out.tolist() == plain.run(ids, [4, 5], [1, 2])


def test_what_the_buffers_do_not_hold_is_never_advanced() -> None:
    """Before any step, after another writer (a poison, an ahead-of-time capture), and on the eager backend."""
    rig = Rig(ReferenceOps(), TapeBackend())
    assert rig.runner.advance() is None
    rig.run([1], [3], [1])
    assert rig.runner.advance() is not None
    poison_registry(rig.registry, POISONS[0])
    assert rig.runner.advance() is None
    rig.run([1], [3], [1])
    rig.runner.capture(capture_shapes(StepMode.DECODE, RULES, context_len=8), capture_batch)
    assert rig.runner.advance() is None
    rig.run([1, 2, 3], [3, 4, 5], [1, 2, 3])
    assert rig.runner.advance() is not None
    assert rig.runner.stats.captures == 4, "one on first use, then all ahead of time"
    eager = Rig(ReferenceOps(), EagerBackend())
    eager.run([1], [3], [1])
    assert eager.runner.advance() is None


def test_a_rejected_step_is_not_gone_on_from() -> None:
    """It filled the buffers, but at its own width; the graph of an earlier step must not run over them."""
    rig = Rig(ReferenceOps(), TapeBackend())
    rig.run([1, 2, 3], [3, 4, 5], [1, 2, 3])
    made = rig.batch([1], [3], [1])
    rig.runner.run(decide_shape(made.mode, [1], 1, RULES), made, reject="shadow run")
    assert rig.runner.advance() is None


def test_refusals_name_the_tensor() -> None:
    ids, table = torch.zeros(3, dtype=torch.int64), torch.zeros(4, 2, dtype=torch.int32)
    advance = numba_ops().advance
    with pytest.raises(ValueError, match=r"int64 \(3,\), got \(3,\) torch.int32"):
        advance(ids.int(), ids, ids, ids, ids, table, 4, (ids,))
    with pytest.raises(ValueError, match="page table must be int32"):
        advance(ids, ids, ids, ids, ids, table.long(), 4, (ids,))
    with pytest.raises(ValueError, match="at most 4"):
        advance(ids, ids, ids, ids, ids, table, 4, (ids,) * 5)


def test_a_step_is_repeated_unasked_only_where_no_other_group_has_a_say() -> None:
    """With more than one data-parallel rank every step is agreed upon; what comes before a step comes either way."""
    calls: list[int] = []

    def coordinator(dp: int) -> Coordinator:
        alone = SingleGroup()
        world = World(Topology(tp=dp, dp=dp, ep=dp), alone, alone, alone)
        return Coordinator.of(world, RULES, StepWidths(), depends=True, before_step=lambda: calls.append(dp))

    assert coordinator(1).repeats()
    assert calls == [1]
    assert not coordinator(2).repeats()
    assert calls == [1]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.sampled_from(["run 1", "run 3", "advance", "drop", "look", "uncounted", "eager"]), max_size=25
    )
)
def test_every_step_is_counted_once_whatever_follows_it(acts: list[str]) -> None:
    """Steps that went on are counted late: before another serves, before their graph goes, before anybody looks."""
    rig = Rig(ReferenceOps(), TapeBackend())
    rows, replays, advanced, eager, held = 0, 0, 0, 0, 0
    for act in acts:
        if act.startswith("run") or act == "eager":
            n = 3 if act == "run 3" else 1
            known = rig.runner.captured
            made = rig.batch([5] * n, [2] * n, list(range(1, n + 1)))
            shape = decide_shape(made.mode, [n], n, RULES)
            rig.runner.run(shape, made, reject="asked for" if act == "eager" else "")
            rows, eager = rows + n, eager + (act == "eager")
            replays += act != "eager" and shape.key in known
            held = 0 if act == "eager" else n
        elif act == "advance":
            if rig.runner.advance() is not None:
                rows, replays, advanced = rows + held, replays + 1, advanced + 1
        elif act == "drop":
            for key in rig.runner.captured:
                rig.runner.drop(key)
        elif act == "look":
            assert rig.runner.stats.replays == replays
        else:
            with rig.runner.uncounted():
                rig.runner.advance()
    stats = rig.runner.stats
    assert (stats.real_rows, stats.replays, stats.advanced, stats.eager_steps) == (
        rows,
        replays,
        advanced,
        eager,
    )
