"""The layout table: which layouts there are, in what ways each can run, what is played, and how answers compare.

    layout = tp, dp, ep        way = dispatch, redundant experts, graph, padding between data-parallel ranks

Engines are watched where a worker hands its logits over, on every rank. Knows nothing of pytest. Invariant: `layouts`
and `ways` name every combination that is legal, each once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ostinato.config import EngineConfig
from ostinato.engine.engine import Engine
from ostinato.engine.request import RequestOutput, SamplingParams
from ostinato.padding import Buckets, DpPaddingMode
from ostinato.parallel.topology import Topology

from .ensemble import ensemble, generate

SPARSE = ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "phimoe", "llama4")
DENSE = ("llama", "llama_tied", "mistral", "qwen2", "qwen3")
SIZES = (1, 2, 4)
REDUNDANT = 4
TOLERANCE = 1e-4
"""Of logits, where experts are sliced over ranks."""
LENGTHS = (9, 1, 21, 4, 2)
PROMPTS = [[(7 * i + 3 * j + j * j) % 160 for j in range(n)] for i, n in enumerate(LENGTHS)]
# Ends at different times: ranks run dry beside busy ones.
PARAMS = [
    SamplingParams(
        max_tokens=n, temperature=0, logprobs=20, ignore_eos=True, prompt_logprobs=5 if n == 3 else None
    )
    for n in (6, 3, 5, 2, 7)
]
SMALL: dict[str, Any] = {
    "context_length": 64,
    "max_running_requests": 8,
    "chunked_prefill_size": 16,
    "num_pages": 64,
    "graph": "tape",
}
EQUAL_SLOTS, EXACT_OFFSETS = DpPaddingMode.MAX_LEN, DpPaddingMode.SUM_LEN


def layouts(*, sparse: bool) -> list[Topology]:
    """Every legal layout; in a dense model nothing is split by ep."""
    sizes = [(tp, dp, ep) for tp, dp, ep in product(SIZES, SIZES, SIZES if sparse else (1,))]
    return [Topology(*one) for one in sizes if one[0] % one[1] == 0 and one[0] % one[2] == 0]


@dataclass(frozen=True, slots=True)
class Way:
    """How a layout runs. padding: None for buckets; else no bucket serves a step, and rows lie as it says."""

    dispatch: str = "gathered"
    redundant: int = 0
    graph: str = "tape"
    padding: DpPaddingMode | None = None

    def __str__(self) -> str:
        padding = "buckets" if self.padding is None else self.padding.value
        return f"{self.dispatch}, {self.redundant} redundant experts, {self.graph}, {padding}"

    def prepare(self, engine: Engine) -> None:
        """What no option asks for."""
        if self.padding is None:
            return
        none, coordinator = Buckets(()), engine.worker.coordinator
        rules = replace(coordinator.rules, decode=none, extend=none, dp_padding=self.padding)
        engine.worker.coordinator = replace(coordinator, rules=rules)


def ways(layout: Topology, *, sparse: bool) -> list[Way]:
    """Every way that makes a difference in a layout."""
    dispatches = ["gathered"]
    if sparse and layout.tp > 1:
        # Without attention TP no rows are shared, so none can be shared out.
        dispatches += ["sharded"] * (layout.attn_tp > 1) + ["all_to_all", "all_to_all_fixed"]
    graphs: list[tuple[str, DpPaddingMode | None]] = [
        ("eager", None),
        ("tape", None),
        ("eager", EXACT_OFFSETS),
    ]
    if sparse and layout.dp > 1:
        graphs.append(("eager", EQUAL_SLOTS))
    redundant = (0, REDUNDANT) if sparse else (0,)
    return [Way(d, r, g, p) for d, r, (g, p) in product(dispatches, redundant, graphs)]


@dataclass(slots=True)
class Logits:
    """Logits of every request by position, as the ranks that compute it saw them: all the same, or it raises."""

    rows: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)

    def watch(self, engine: Engine) -> None:
        """Note what this rank's worker hands over from now on."""
        worker: Any = engine.worker
        execute = worker.execute

        def watched(plan: Any, prompt_logits: Callable[..., None]) -> Any:
            def watched_prompt(sequence: Any, first: int, logits: torch.Tensor) -> None:
                self._see(sequence, first + 1, logits)
                prompt_logits(sequence, first, logits)

            result = execute(plan, watched_prompt)
            for row, logits in zip(result.sampling, result.logits[: len(result.sampling)], strict=True):
                self._see(row.sequence, row.start + row.num_tokens, logits.unsqueeze(0))
            return result

        worker.execute = watched

    def _see(self, sequence: Any, first: int, logits: torch.Tensor) -> None:
        seen = self.rows.setdefault(sequence.request.request_id, {})
        for position, row in enumerate(logits.clone(), start=first):
            before = seen.setdefault(position, row)
            assert torch.equal(before, row), f"ranks differ at position {position}"


@dataclass(frozen=True, slots=True)
class Answers:
    """Outputs in the order of the prompts, and logits of each."""

    outputs: list[RequestOutput]
    logits: list[dict[int, torch.Tensor]]

    @classmethod
    def of(cls, outputs: list[RequestOutput], logits: Logits) -> Answers:
        return cls(outputs, [logits.rows[output.request_id] for output in outputs])


def play(model: Path, layout: Topology, way: Way, **options: Any) -> Answers:
    """What the requests are answered by a layout."""
    logits = Logits()
    settings = {**SMALL, **options, "graph": way.graph, "redundant_experts": way.redundant}
    if layout.tp == 1:
        config = EngineConfig(model=str(model), progress=False, threads=1, **settings)
        engine = Engine(config, lambda *args: None)
        way.prepare(engine)
        logits.watch(engine)
        return Answers.of(generate(engine, PROMPTS, PARAMS), logits)

    def prepare(engine: Engine) -> None:
        way.prepare(engine)
        logits.watch(engine)

    with ensemble(layout, model=str(model), dispatch=way.dispatch, prepare=prepare, **settings) as ranks:
        answers = Answers.of(ranks.generate(PROMPTS, PARAMS), logits)
        for engine in ranks.engines:
            engine.scheduler.check_leaks()
        return answers


def values(output: RequestOutput) -> Any:
    """Everything that must not change, names aside."""
    each = [(o.token_ids, o.logprobs, o.text, o.finish_reason) for o in output.outputs]
    return each, output.prompt_logprobs


def same(found: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    """Assert that outputs are equal in every bit."""
    for one, other in zip(found, expected, strict=True):
        assert values(one) == values(other)


def difference(found: Answers, expected: Answers) -> float:
    """The greatest difference of any logit; 0 only if all have the same bits. Asserts that tokens are the same."""
    greatest = 0.0
    for i, (one, other) in enumerate(zip(found.outputs, expected.outputs, strict=True)):
        assert [o.token_ids for o in one.outputs] == [o.token_ids for o in other.outputs], f"request {i}"
        assert found.logits[i].keys() == expected.logits[i].keys(), f"request {i}"
        for position, row in found.logits[i].items():
            there = expected.logits[i][position]
            if not torch.equal(row.view(torch.int32), there.view(torch.int32)):
                assert bool(row.isfinite().all()), f"request {i}, position {position}"
                greatest = max(greatest, float((row - there).abs().max()), 1e-30)
    return greatest


def is_exact(layout: Topology) -> bool:
    """Whether experts are whole on their ranks, so that answers have the bits of one rank."""
    return layout.moe_tp == 1
