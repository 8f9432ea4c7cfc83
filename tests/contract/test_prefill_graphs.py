"""Prefill graph modes: full, breakable and eager give the same bits in every bucket, and pads change nothing in any.

Ragged batches of several requests, cold, behind cached prefixes and as later chunks, mixed steps too; under the
poisons of the padding contract. The last tests break the breakable graph on purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from ostinato.graphs import BreakableGraph
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
def modes(rigs: ModuleType, tiny: Any) -> Rigs:
    """modes(family, dtype, kernels) -> a rig for each mode, captured at start-up."""
    made: dict[tuple[str, ...], dict[str, Any]] = {}

    def get(*model: str) -> dict[str, Any]:
        if model not in made:
            family, dtype, kernels = model
            made[model] = {
                mode: rigs.Rig(tiny(family), dtype, kernels=kernels, prefill_graph=mode) for mode in MODES
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
    few = (1, 3, 4, 7, 13, 23, largest)
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
