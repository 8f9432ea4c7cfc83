"""Full prefill graphs of attention whose topology depends on the cached prefix: one graph for each number of chunks.

The attention is the reference's, with the limits that such a backend declares; what it was planned for is checked
against the prefixes of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ostinato.attention import CaptureLimits, ReferenceAttention
from ostinato.config import EngineConfig
from ostinato.engine.engine import Engine
from ostinato.engine.request import SamplingParams

LIMITS = CaptureLimits(request_slots=True, prefix_chunks=(1, 2, 4), max_context=200)
OPTIONS: dict[str, Any] = {
    "kernels": "reference",
    "context_length": 256,
    "max_running_requests": 4,
    "max_prefill_tokens": 32,
    "chunked_prefill_size": 32,
    "prefill_request_slots": 2,
    "prefill_buckets": (16, 32),
    "capture": "startup",
}
GREEDY = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, logprobs=5)


def answers(engine: Engine, prompts: list[list[int]]) -> Any:
    names = [engine.submit(prompt, GREEDY) for prompt in prompts]
    done: dict[str, Any] = {}
    while len(done) < len(names):
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output.outputs[0]
    return [(done[name].token_ids, done[name].logprobs) for name in names]


def test_a_graph_for_each_number_of_prefix_chunks(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of 16 keys: prompts of 32-token chunks need 0, 2, 4 and then too many; long contexts are refused first."""
    model = str(checkpoint("llama"))
    prompts = [[(5 * j + i) % 150 + 1 for j in range(n)] for i, n in enumerate((100, 210, 9))]
    config = EngineConfig(model=model, progress=False, threads=1, **OPTIONS)
    expected = answers(Engine(config, lambda *args: None), prompts)

    planned: list[tuple[str, int, bool]] = []
    plan = ReferenceAttention.plan

    def noted(self: Any, view: Any, shape: Any) -> None:
        if view.mode.is_extend:
            longest = int(view.extend_prefix_lens.max()) if len(view.extend_prefix_lens) else 0
            planned.append((shape.variant, longest, bool(shape.eager_reason)))
        plan(self, view, shape)

    monkeypatch.setattr(ReferenceAttention, "capture_limits", LIMITS)
    monkeypatch.setattr(ReferenceAttention, "plan", noted)
    engine = Engine(config, lambda *args: None)
    assert engine.worker.coordinator.prefill.chunk_tokens == 16
    assert engine.worker.rules.max_extend_bs == 2
    assert len(engine.worker.prefill.captured) == 2 * 4
    assert {variant for variant, _, _ in planned} == {"", "prefix1", "prefix2", "prefix4"}
    assert all(longest == 0 for _, longest, _ in planned), "captured without any KV behind the rows"
    planned.clear()
    assert answers(engine, prompts) == expected

    holds = {"": 0, "prefix1": 16, "prefix2": 32, "prefix4": 64}
    for variant, longest, eager in planned:
        assert eager or longest <= holds[variant]
    stats = engine.worker.prefill.stats.as_dict()
    assert {"extend/32", "extend/32/prefix2", "extend/32/prefix4"} <= {
        name for name, key in stats["keys"].items() if key["replays"]
    }
    assert {"too many prefix chunks", "context above the limit of captured attention"} <= set(
        stats["eager_reasons"]
    )
