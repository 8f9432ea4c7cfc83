"""Prefill graph modes: full, breakable and eager give the same bits in every bucket, and pads change nothing in any.

Ragged batches of several requests, cold, behind cached prefixes and as later chunks, mixed steps too; under the
poisons of the padding contract. The last tests break the breakable graph on purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from ostinato.graphs import BreakableGraph, LiveStep, breakable
from ostinato.graphs.audit import POISONS
from ostinato.padding import StepMode

MODES = ("full", "breakable", "eager")
MODELS = [
    ("qwen2_moe", "float32", "reference"),
    ("phimoe", "bfloat16", "numba"),
    ("llama4", "float32", "numba"),
    ("llama", "bfloat16", "numba"),
]

Rigs = Callable[..., Any]


@pytest.fixture(scope="module")
def modes(rigs: ModuleType, checkpoint: Any) -> Rigs:
    """modes(family, dtype, kernels) -> a rig for each mode, captured at start-up."""
    made: dict[tuple[str, ...], dict[str, Any]] = {}

    def get(*model: str) -> dict[str, Any]:
        if model not in made:
            family, dtype, kernels = model
            made[model] = {
                mode: rigs.Rig(checkpoint(family), dtype, kernels=kernels, prefill_graph=mode)
                for mode in MODES
            }
        return made[model]

    return get


def spans(it: Any, n: int, seed: int) -> list[tuple[int, int, int]]:
    """`n` rows of several requests: from the start of a prompt, behind a cached prefix, as a later chunk."""
    generator = torch.Generator().manual_seed(seed)
    found: list[tuple[int, int, int]] = []
    for request in torch.randperm(len(it.lengths), generator=generator).tolist():
        left = n - sum(count for _, _, count in found)
        if left == 0:
            break
        start = int(torch.randint(0, it.lengths[request] + 1, (1,), generator=generator))
        found.append((request, start, min(int(torch.randint(1, 9, (1,), generator=generator)), left)))
    assert sum(count for _, _, count in found) == n
    return found


@pytest.mark.parametrize("model", MODELS, ids="-".join)
def test_every_mode_has_the_same_bits_in_every_bucket(
    model: tuple[str, ...], modes: Rigs, rigs: ModuleType, request: pytest.FixtureRequest
) -> None:
    """Outputs, live KV, load, ids of pads: each mode's padded step against the rows alone of the full mode's rig."""
    each = modes(*model)
    largest = max(rigs.PREFILL_BUCKETS)
    few = (1, 4, 6, 13, 23)
    for n in range(1, largest + 1) if request.config.getoption("--exhaustive") else few:
        mode = StepMode.MIXED if n % 3 == 0 else StepMode.EXTEND
        want = each["full"].clean(each["full"].extend(spans(each["full"], n, seed=n), mode))
        for turn, (name, it) in enumerate(each.items()):
            batch = it.extend(spans(it, n, seed=n), mode)
            assert torch.equal(it.clean(batch).outputs, want.outputs), (n, name)
            way = "eager" if name == "eager" else "replay"
            for bucket in {min(b for b in rigs.PREFILL_BUCKETS if b >= n), largest}:
                poison = (*POISONS, None)[(n + turn) % 5]
                before = None if poison else it.extend(spans(it, bucket, seed=n + 100))
                found = it.broken(batch, want, bucket, way=way, poison=poison, before=before)
                assert not found, (n, bucket, name, poison)


def test_a_breakable_graph_has_a_segment_between_any_two_attentions(modes: Rigs, rigs: ModuleType) -> None:
    it = modes(*MODELS[1])["breakable"]
    layers = it.config.num_layers
    for key in it.worker.prefill.captured:
        graph = it.worker.prefill.graph(key)
        assert isinstance(graph, BreakableGraph)
        assert graph.num_segments == layers + 1
        assert sum(name == "eager Attention._attend" for name in graph.trace) == layers
    outputs = {it.worker.prefill.graph(key).outputs.data_ptr() for key in it.worker.prefill.captured}
    assert len(outputs) == 1, "the final output of all buckets is one buffer"


def test_full_graphs_hold_as_many_requests_as_they_have_slots(rigs: ModuleType, checkpoint: Any) -> None:
    """More requests run eagerly, and say so; a breakable graph has no such bound."""
    few = rigs.Rig(checkpoint("llama"), prefill_request_slots=2, prefill_graph="full", prefill_buckets=(8,))
    assert few.worker.rules.max_extend_bs == 2
    batch = few.extend([(0, 0, 3), (1, 0, 2), (3, 0, 1)])
    shape = few.shape(batch, 8)
    assert shape.eager_reason == "too many requests"
    assert few.worker.coordinator.prefill.mode.value == few.worker.stats()["prefill_graph"] == "full"


# --- the tests can fail -------------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch


def lengths_noted(it: Any, patch: Patch) -> list[set[int]]:
    """Numbers of rows of all that attention gets, by call."""
    attention, noted = it.model.attention, []
    right = type(attention).forward

    def forward(
        self: Any, stream: Any, layer: Any, q: Any, k: Any, v: Any, view: Any, out: torch.Tensor
    ) -> None:
        rows = (q, k, v, out, view.input_ids, view.positions, view.out_cache_loc)
        noted.append({len(t) for t in rows})
        right(self, stream, layer, q, k, v, view, out)

    patch.setattr(type(attention), "forward", forward)
    return noted


def broken_prefills(it: Any, n: int = 7, bucket: int = 16) -> set[str]:
    batch, before = it.extend(spans(it, n, seed=n)), it.extend(spans(it, bucket, seed=1))
    clean = it.clean(batch)
    return it.broken(batch, clean, bucket) | it.broken(batch, clean, bucket, poison=None, before=before)


@pytest.fixture
def breakable_rig(rigs: ModuleType, checkpoint: Any) -> Any:
    """One that a test may break; a bucket is captured when its first step comes, on that step's rows."""
    return rigs.Rig(checkpoint("qwen3_moe"), prefill_graph="breakable", capture="lazy")


def test_attention_sees_real_rows_alone(breakable_rig: Any, monkeypatch: Patch) -> None:
    """F11: in every call all row fields have the same length, that of the real rows."""
    noted = lengths_noted(breakable_rig, monkeypatch)
    breakable_rig.padded(breakable_rig.extend(spans(breakable_rig, 16, seed=3)), 16)
    noted.clear()
    for n in (5, 11):
        for way in ("replay", "eager"):
            breakable_rig.padded(breakable_rig.extend(spans(breakable_rig, n, seed=n)), 16, way)
            assert {frozenset(rows) for rows in noted} == {frozenset({n})}
            noted.clear()


def test_a_field_that_is_not_narrowed_is_noticed(breakable_rig: Any, monkeypatch: Patch) -> None:
    noted, right = lengths_noted(breakable_rig, monkeypatch), LiveStep.begin
    buffer = breakable_rig.worker.prefill.registry.buffer("positions")

    def begin(self: LiveStep, view: Any, rows: int, padded: int) -> None:
        right(self, replace(view, positions=buffer[:padded]), rows, padded)

    monkeypatch.setattr(LiveStep, "begin", begin)
    breakable_rig.padded(breakable_rig.extend(spans(breakable_rig, 5, seed=5)), 16)
    assert {frozenset(rows) for rows in noted} == {frozenset({5, 16})}


def test_rows_past_the_real_ones_that_are_not_zeroed_are_caught(
    breakable_rig: Any, monkeypatch: Patch
) -> None:
    breakable_rig.padded(breakable_rig.extend(spans(breakable_rig, 7, seed=7)), 16)
    assert broken_prefills(breakable_rig) == set()
    call = breakable.EagerCall.__call__

    def kept(self: breakable.EagerCall) -> None:
        saved = [t[self.live.rows :].clone() for t in self.outputs]
        call(self)
        for tensor, old in zip(self.outputs, saved, strict=True):
            tensor[self.live.rows :] = old

    monkeypatch.setattr(breakable.EagerCall, "__call__", kept)
    assert "attention of pads is not zero" in broken_prefills(breakable_rig)


def test_a_count_frozen_at_capture_is_caught(breakable_rig: Any, monkeypatch: Patch) -> None:
    """Captured on 7 rows, replayed on 11: tensors of 7 rows meet a plan of 11."""
    right = LiveStep.begin
    frozen: dict[int, int] = {}

    def begin(self: LiveStep, view: Any, rows: int, padded: int) -> None:
        right(self, view, frozen.setdefault(padded, rows), padded)

    breakable_rig.padded(breakable_rig.extend(spans(breakable_rig, 7, seed=7)), 16)
    assert broken_prefills(breakable_rig, 11) == set()
    frozen[16] = 7
    monkeypatch.setattr(LiveStep, "begin", begin)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        broken_prefills(breakable_rig, 11)
