"""The contract can fail: for each axis an engine that breaks it, and nothing else, by the least that bits can differ.

Faults are put into a finished engine, between its parts. `nudge` moves each value of a row by one unit in the last
place: a kernel that picked another order of summation would do no less.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato import LLM
from ostinato.ops.cpu.isa import select_isa

from . import axes
from .paths import NumericPath, subject
from .report import NotExactError
from .score import Part, ensemble, long_answers
from .stage import Setting, Stage

EAGER = Setting(chunk_pages=7)
TAPE = Setting(graph="tape", chunk_pages=7)
PADDED = Setting(graph="tape", chunk_pages=7, decode_buckets=(32,))
CHUNKED = Setting(chunk_pages=1)
SMALL = Setting(graph="tape", kv_tokens=144, hopeful=True)


def nudge(values: torch.Tensor) -> None:
    """One unit in the last place."""
    values.view({4: torch.int32, 2: torch.int16}[values.element_size()]).add_(1)


def through_linear(is_wrong: Callable[[int, int], bool]) -> Callable[[LLM], None]:
    """Products whose first row is off when `is_wrong(live rows, rows of the buffer)`."""

    def tamper(llm: LLM) -> None:
        ops: Any = llm.engine.worker.model.ops
        right = ops.linear

        def linear(x: torch.Tensor, weight: Any, out: torch.Tensor, live: torch.Tensor | None = None) -> None:
            right(x, weight, out, live)
            if is_wrong(len(out) if live is None else int(live), len(out)):
                nudge(out[0])

        ops.linear = linear

    return tamper


def through_attention(is_wrong: Callable[[Any], Any]) -> Callable[[LLM], None]:
    """Attention that is off for the requests of a step where `is_wrong(view)` holds, a bool or one for each."""

    def tamper(llm: LLM) -> None:
        attention: Any = llm.engine.worker.model.attention
        right = attention.forward

        def forward(stream: Any, layer: Any, q: Any, k: Any, v: Any, view: Any, out: torch.Tensor) -> None:
            right(stream, layer, q, k, v, view, out)
            stream.launch(lambda: spoil(view, out))

        def spoil(view: Any, out: torch.Tensor) -> None:
            wrong = torch.as_tensor(is_wrong(view)).expand(len(view.seq_lens))
            if view.mode.is_extend:
                wrong = wrong.repeat_interleave(view.extend_seq_lens)
            for row in wrong.nonzero().flatten().tolist():
                nudge(out[row])

        attention.forward = forward

    return tamper


def in_decode(view: Any) -> bool:
    return not view.mode.is_extend


def behind_a_prefix(view: Any) -> Any:
    return view.mode.is_extend and view.extend_prefix_lens > 0


def in_high_rows(view: Any) -> torch.Tensor:
    """Whoever holds a high row of the page table: a matter of who came when."""
    return view.req_pool_indices > 2


def in_replays(llm: LLM) -> None:
    """A graph that does not repeat what it recorded."""
    runner: Any = llm.engine.worker.decode
    right = runner.backend.capture

    def capture(*args: Any) -> Any:
        graph = right(*args)
        replay = graph.replay

        class Wrong:
            outputs = graph.outputs

            def replay(self) -> Any:
                logits = replay()
                if logits is not None:
                    nudge(logits[:1])
                return logits

        return Wrong()

    runner.backend.capture = capture


def in_cached_pages(llm: LLM) -> None:
    """A page that changes while nobody uses it."""
    kv: Any = llm.engine.scheduler.kv
    right = kv.start

    def start(sequence: Any, match: Any) -> None:
        right(sequence, match)
        if match.pages:
            nudge(kv.pool.k[0][match.pages[0] * kv.page_size :][: kv.page_size])

    kv.start = start


def in_resumed_requests(llm: LLM) -> None:
    """A request that was sent back has another seed."""
    scheduler: Any = llm.engine.scheduler
    right = scheduler.submit

    def submit(sequence: Any) -> None:
        sequence.seed += sequence.retractions
        right(sequence)

    scheduler.submit = submit


def in_what_is_generated(llm: LLM) -> None:
    """KV of a generated token, prefilled again after a retraction, is off."""
    scheduler: Any = llm.engine.scheduler
    right, was_sent_back = scheduler.submit, [False]

    def submit(sequence: Any) -> None:
        was_sent_back[0] |= sequence.retractions > 0
        right(sequence)

    scheduler.submit = submit
    through_attention(lambda view: was_sent_back[0] and view.mode.is_extend)(llm)


def in_steps_that_go_on(llm: LLM) -> None:
    """Inputs that stay on the device for the next step are one position too far."""
    ops: Any = llm.engine.worker.model.ops
    right = ops.advance

    def advance(choice: Any, ids: Any, positions: torch.Tensor, *rest: Any) -> None:
        right(choice, ids, positions, *rest)
        positions.add_(1)

    ops.advance = advance


@dataclass(frozen=True, slots=True)
class Fault:
    """What is broken, and the check that must notice."""

    tamper: Callable[[LLM], None]
    setting: Setting
    check: Callable[[Stage, Setting, list[Part]], None]
    report: str


def one_hit(stage: Stage, setting: Setting, parts: list[Part]) -> None:
    axes.hits(stage, setting, max(parts, key=lambda part: len(part.prompt)), (0, 1))


def two_mates(stage: Stage, setting: Setting, parts: list[Part]) -> None:
    axes.mates(stage, setting, parts, (2,))


ROWS = through_linear(lambda live, rows: live == 5)
PADS = through_linear(lambda live, rows: rows > live)
FAULTS = {
    "mates": Fault(through_linear(lambda live, rows: live == 3), EAGER, two_mates, "beside 2 mates"),
    "number of rows": Fault(ROWS, EAGER, axes.together, "all together"),
    "pads": Fault(PADS, PADDED, axes.together, "all together"),
    "replay": Fault(in_replays, TAPE, axes.together, "all together"),
    "going on": Fault(in_steps_that_go_on, TAPE, axes.together, "all together"),
    "chunks": Fault(through_attention(behind_a_prefix), CHUNKED, axes.together, "all together"),
    "hits": Fault(through_attention(behind_a_prefix), EAGER, one_hit, "on a hit of 1 pages"),
    "cached pages": Fault(in_cached_pages, EAGER, one_hit, "on a hit of 1 pages"),
    "decoded": Fault(through_attention(in_decode), EAGER, axes.prefilled_again, "decoded tokens prefilled"),
    "turns": Fault(through_attention(in_decode), EAGER, axes.continued, "continued from a longer prompt"),
    "order": Fault(through_attention(in_high_rows), EAGER, axes.any_order, "arriving"),
    "resumed": Fault(in_what_is_generated, SMALL, axes.retracted, "sent back"),
    "resumed seed": Fault(in_resumed_requests, SMALL, axes.retracted, "another token was sampled"),
}


@pytest.fixture
def staged(checkpoint: Callable[[str], Path]) -> Iterator[Callable[..., Stage]]:
    """staged(tamper) -> engines of a small mixture on the fastest kernels there are, tampered with."""
    made: list[Stage] = []

    def make(tamper: Callable[[LLM], None] | None = None) -> Stage:
        path = NumericPath("numba", select_isa().name, "bfloat16")
        made.append(Stage(subject("qwen2_moe", path, checkpoint), tamper=tamper))
        return made[-1]

    yield make
    for stage in made:
        stage.close()


def parts_for(stage: Stage, check: object) -> list[Part]:
    return long_answers(stage.vocab) if check is axes.retracted else ensemble(stage.vocab, 6, stay=3)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_noticed(name: str, staged: Callable[..., Stage]) -> None:
    fault = FAULTS[name]
    stage = staged(fault.tamper)
    with pytest.raises(NotExactError, match=fault.report):
        fault.check(stage, fault.setting, parts_for(stage, fault.check))


def test_without_a_fault_nothing_is_noticed(staged: Callable[..., Stage]) -> None:
    stage = staged()
    for fault in FAULTS.values():
        fault.check(stage, fault.setting, parts_for(stage, fault.check))


def test_noise_that_depends_on_the_order_of_draws_is_noticed(
    staged: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(0)
    for module in ("chooser", "sampler"):  # where a row's seed goes to the kernel
        monkeypatch.setattr(f"ostinato.engine.{module}.signed64", lambda seed: draw.getrandbits(62))
    stage = staged()
    with pytest.raises(
        NotExactError, match=r"logits are equal but another token was sampled at position \d+"
    ):
        axes.together(stage, EAGER, parts_for(stage, axes.together))


def test_what_a_report_says(staged: Callable[..., Stage]) -> None:
    """Model, path, axis, setting, request, first position and value that differ, and how much."""
    stage = staged()
    parts = ensemble(stage.vocab, 2)
    answers = stage.player(EAGER).play(parts)
    name, at = parts[0].name, len(parts[0].prompt)
    value = float(answers[name].logits[at][7])
    nudge(answers[name].logits[at][7:8])
    with pytest.raises(NotExactError) as caught:
        stage.check("an axis", EAGER, parts, answers)
    message = str(caught.value)
    for part in (
        "qwen2_moe on ",
        "an axis [chunk_pages=7]",
        f"'{name}'",
        f"first at position {at}, token id 7",
    ):
        assert part in message
    assert f"{value!r} alone" in message
    assert "1 of 160 values differ, by " in message
