"""The scheduler, driven without a model: a fake one lives in the KV pool, so a wrong page shows as a wrong token.

Each KV slot holds a number that depends on every token before it, read back through the page table. An answer is then
right only if every page of every step was right: over chunks, prefix hits, duplicates, retraction and aborts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.engine.plan import StepPlan
from ostinato.engine.request import Request, SamplingParams
from ostinato.engine.residency import Residency
from ostinato.engine.scheduler import Scheduler, SchedulerOptions
from ostinato.engine.sequence import Sequence, SequenceState
from ostinato.errors import RequestError
from ostinato.kv.pages import TRASH_PAGE, PageAllocator
from ostinato.kv.pool import KVLayout, KVPool
from ostinato.kv.radix import RadixCache
from ostinato.padding import StepMode

VOCAB = 50
EOS = 7
MASK = (1 << 62) - 1


def mix(*values: int) -> int:
    h = 1469598103934665603
    for v in values:
        h = ((h ^ v) * 1099511628211 + 12345) & MASK
        h ^= h >> 29
    return h


def oracle(
    prompt: tuple[int, ...], seed: int, max_new: int, stops: frozenset[int], min_tokens: int
) -> list[int]:
    """What the fake model answers when it has the world for itself."""
    total, out = 0, []
    for position, token in enumerate(prompt):
        total = (total + mix(token, position, total)) & MASK
    while len(out) < max_new:
        token = choose(total, seed, blocked=stops if len(out) < min_tokens else frozenset())
        out.append(token)
        if token in stops:
            break
        total = (total + mix(token, len(prompt) + len(out) - 1, total)) & MASK
    return out


def choose(total: int, seed: int, blocked: frozenset[int]) -> int:
    return next(t for i in count() if (t := mix(total, seed, i) % VOCAB) not in blocked)


@dataclass
class Rig:
    """A scheduler over a small pool, and the fake model."""

    num_pages: int = 33
    page_size: int = 4
    max_running: int = 8
    max_prefill: int = 64
    context: int = 64
    chunk: int | None = None
    mixed: bool = False
    fair: bool = False
    caching: bool = True
    conservativeness: float = 1.0
    negotiate: Callable[[bool], bool] | None = None
    scheduler: Scheduler = field(init=False)
    pool: KVPool = field(init=False)
    radix: RadixCache = field(init=False)
    ended: list[Sequence] = field(default_factory=list)
    spare: list[int] = field(default_factory=list)
    modes: list[StepMode] = field(default_factory=list)
    arrivals: Any = field(default_factory=count)

    def __post_init__(self) -> None:
        layout = KVLayout(1, 1, 1, torch.int64, self.page_size)
        self.pool = KVPool(
            layout,
            num_pages=self.num_pages,
            max_requests=self.max_running,
            max_pages_per_request=-(-self.context // self.page_size) + 1,
        )
        self.slots = self.pool.k[0].view(-1).numpy()
        self.slots[:] = -1  # never written
        self.allocator = PageAllocator(self.num_pages, self.page_size)
        self.radix = RadixCache(self.allocator, enabled=self.caching)
        options = SchedulerOptions(
            max_running_requests=self.max_running,
            max_prefill_tokens=self.max_prefill,
            context_length=self.context,
            chunked_prefill_size=self.chunk,
            mixed_prefill=self.mixed,
            fair=self.fair,
            conservativeness=self.conservativeness,
        )
        self.scheduler = Scheduler(options, Residency(self.allocator, self.radix, self.pool), self.negotiate)

    def make(
        self, prompt: Any, max_new: int | None = 8, *, priority: int = 0, key: str = "", **params: Any
    ) -> list[Sequence]:
        """Sequences of one request, not queued yet."""
        prompt = tuple(prompt)
        p = SamplingParams(max_tokens=max_new, **params)
        limit = self.scheduler.limits.clamp(len(prompt), max_new)
        stops = frozenset(p.stop_token_ids) | (frozenset() if p.ignore_eos else frozenset({EOS}))
        made: list[Sequence] = []
        for index in range(p.n):
            arrival = next(self.arrivals)
            request = Request(f"r{arrival - index}", prompt, p, priority=priority, extra_key=key)
            leader = made[0] if made else None
            made.append(Sequence(request, index, arrival, index, self.page_size, limit, stops, leader=leader))
        return made

    def submit(self, prompt: Any, max_new: int | None = 8, **options: Any) -> Sequence:
        made = self.make(prompt, max_new, **options)
        for sequence in made:
            self.scheduler.submit(sequence)
        return made[0]

    # ---- steps ----

    def schedule(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        self.ended += self.scheduler.take_failed()
        if plan is not None:
            self.modes.append(plan.mode)
            self.check_plan(plan)
        self.check()
        return plan

    def commit(self, plan: StepPlan) -> None:
        self.ended += self.scheduler.commit(plan, self.execute(plan))
        self.check()

    def step(self) -> StepPlan | None:
        plan = self.schedule()
        if plan is not None:
            self.commit(plan)
        return plan

    def until_retraction(self, limit: int = 200) -> None:
        for _ in range(limit):
            self.step()
            if self.scheduler.counts["retractions"]:
                return
        raise AssertionError("nothing was retracted")

    def take_all(self) -> None:
        """Make the pool full, as if others held the rest of it."""
        self.spare = self.allocator.allocate(self.allocator.free_pages)

    def give_back(self) -> None:
        self.allocator.free(self.spare)
        self.spare = []
        self.check()

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            failed = len(self.ended)
            assert self.step() is not None or len(self.ended) > failed or not self.scheduler.has_work, (
                "no progress"
            )
        raise AssertionError("it does not come to an end")

    def execute(self, plan: StepPlan) -> dict[Sequence, int]:
        """The fake model: write every row's KV, then choose from what the page table shows."""
        tokens: dict[Sequence, int] = {}
        table = self.pool.page_table.numpy()
        for row in plan.rows:
            s = row.sequence
            if s.state is SequenceState.FINISHED:
                continue
            stop = row.start + row.num_tokens
            positions = np.arange(stop)
            where = table[s.row, positions // self.page_size].astype(np.int64) * self.page_size
            where += positions % self.page_size
            assert (where >= self.page_size).all(), "a real row in the trash page"
            total = 0
            for at in range(row.start):
                total = (total + int(self.slots[where[at]])) & MASK
            for at, token in zip(range(row.start, stop), s.tokens(row.start, stop), strict=True):
                self.slots[where[at]] = mix(token, at, total)
                total = (total + int(self.slots[where[at]])) & MASK
            if row.samples and s.max_new_tokens > 0:
                blocked = len(s.output_token_ids) < s.request.params.min_tokens
                tokens[s] = choose(total, s.seed, s.stop_token_ids if blocked else frozenset())
        return tokens

    # ---- what always holds ----

    @property
    def live(self) -> list[Sequence]:
        chunked = self.scheduler.chunked
        return [*self.scheduler.running, *([chunked] if chunked else [])]

    def check(self) -> None:
        if not self.spare:
            self.scheduler.check_leaks()
        tree = set(self.radix.owned_pages())
        assert self.pool.free_rows + len(self.live) == self.max_running
        for s in self.live:
            assert set(s.pages[: s.num_tree_pages]) <= tree
            assert not set(s.pages[s.num_tree_pages :]) & tree
            entries = self.pool.page_table[s.row].tolist()
            assert entries == s.pages + [TRASH_PAGE] * (len(entries) - len(s.pages))
        for s in self.scheduler.waiting:
            assert not s.pages
            assert s.row == 0
        assert not self.pool.page_table[0].any()

    def check_plan(self, plan: StepPlan) -> None:
        options = self.scheduler.options
        sequences = [row.sequence for row in plan.rows]
        assert len(set(sequences)) == len(sequences) <= options.max_running_requests
        prefill = [row for row in plan.rows if row.prefill]
        decode = [row for row in plan.rows if not row.prefill]
        mode = StepMode.MIXED if prefill and decode else StepMode.EXTEND if prefill else StepMode.DECODE
        assert plan.mode is mode
        assert options.mixed_prefill or mode is not StepMode.MIXED
        assert list(plan.rows) == prefill + decode
        for row in plan.rows:
            s = row.sequence
            assert row.num_tokens >= 1
            assert row.start == s.num_computed
            assert row.start + row.num_tokens <= len(s.pages) * self.page_size
        for row in decode:
            assert (row.num_tokens, row.start) == (1, row.sequence.num_tokens - 1)
        unfinished = [row for row in prefill if not row.samples]
        assert len(unfinished) <= 1
        if options.chunked_prefill_size is not None:
            assert not prefill or plan.num_tokens <= options.chunked_prefill_size
            assert all(row.num_tokens % self.page_size == 0 for row in unfinished)
        else:
            assert not unfinished

    def check_idle(self) -> None:
        """At the end: nothing runs, nothing is locked, every page is free or may be evicted."""
        assert not self.scheduler.has_work
        assert self.radix.protected_pages == 0
        assert self.pool.free_rows == self.max_running
        assert not self.pool.page_table.any()
        assert self.allocator.free_pages + self.radix.evictable_pages == self.allocator.capacity

    def check_answer(self, s: Sequence) -> None:
        expected = oracle(
            s.request.prompt_token_ids,
            s.seed,
            s.max_new_tokens,
            s.stop_token_ids,
            s.request.params.min_tokens,
        )
        if s.finish_reason in ("stop", "length"):
            assert s.output_token_ids == expected
            assert s.finish_reason == ("stop" if expected and expected[-1] in s.stop_token_ids else "length")
        else:
            assert s.output_token_ids == expected[: len(s.output_token_ids)]


# ---- plain life ----


def test_one_request() -> None:
    rig = Rig()
    s = rig.submit(range(10), 5, ignore_eos=True)
    plan = rig.step()
    assert plan is not None
    assert (plan.mode, plan.num_tokens) == (StepMode.EXTEND, 10)
    rig.run()
    assert rig.modes == [StepMode.EXTEND] + [StepMode.DECODE] * 4
    assert (s.finish_reason, s.stop_reason, len(s.output_token_ids)) == ("length", None, 5)
    rig.check_answer(s)
    rig.check_idle()
    assert rig.schedule() is None


def test_stop_token() -> None:
    rig = Rig(context=200, num_pages=80)
    s = rig.submit([1, 2, 3], 150)
    rig.run()
    assert s.finish_reason == "stop"
    assert s.stop_reason == s.output_token_ids[-1] == EOS
    rig.check_answer(s)


def test_min_tokens_and_own_stop_tokens() -> None:
    rig = Rig(context=200, num_pages=80)
    s = rig.submit([1, 2, 3], 150, stop_token_ids=list(range(0, VOCAB, 2)), min_tokens=6)
    rig.run()
    assert s.finish_reason == "stop"
    assert len(s.output_token_ids) > 6
    rig.check_answer(s)


def test_min_tokens_whatever_is_sampled() -> None:
    rig = Rig()
    s = rig.submit([1, 2, 3], 9, min_tokens=2)
    for said in (1, 2, 3):
        plan = rig.schedule()
        assert plan is not None
        rig.scheduler.commit(plan, {s: EOS})
        assert len(s.output_token_ids) == said
        assert (s.state is SequenceState.FINISHED) == (said == 3)


def test_prefill_first_and_new_requests_join() -> None:
    rig = Rig()
    a = rig.submit(range(6), 9, ignore_eos=True)
    rig.step()
    rig.step()
    b = rig.submit(range(20, 26), 3, ignore_eos=True)
    plan = rig.step()
    assert plan is not None
    assert [row.sequence for row in plan.rows] == [b]
    plan = rig.step()
    assert plan is not None
    assert [row.sequence for row in plan.rows] == [a, b]
    rig.run()
    rig.check_answer(a)
    rig.check_answer(b)


def test_a_stop_found_outside() -> None:
    """Stop strings are the text layer's affair: it ends the sequence between two steps."""
    rig = Rig()
    s = rig.submit(range(6), 9, ignore_eos=True)
    rig.step()
    rig.scheduler.finish(s, "stop", "END")
    rig.scheduler.finish(s, "length")  # too late to change anything
    assert (s.finish_reason, s.stop_reason) == ("stop", "END")
    rig.check_idle()


def test_limits_of_running_requests() -> None:
    rig = Rig(max_running=2)
    made = [rig.submit([i, i + 1], 4, ignore_eos=True) for i in range(5)]
    rig.step()
    assert rig.scheduler.running == made[:2]
    assert rig.scheduler.counts["admission_other"] == 1
    rig.run()
    assert all(s.finish_reason == "length" for s in made)


def test_priority_then_arrival() -> None:
    rig = Rig(max_running=1)
    late = rig.submit([1], 1, priority=5)
    first = rig.submit([2], 1)
    second = rig.submit([3], 1)
    urgent = rig.submit([4], 1, priority=-1)
    rig.run()
    assert rig.ended == [urgent, first, second, late]


def test_prefill_budget_without_chunks() -> None:
    rig = Rig(max_prefill=16)
    made = [rig.submit(range(i, i + 7), 2, ignore_eos=True) for i in (0, 10, 20)]
    rig.step()
    assert rig.scheduler.running == made[:2]
    long = rig.submit(range(30), 2, ignore_eos=True)
    plans = [rig.step(), rig.step()]
    assert [row.sequence for p in plans if p for row in p.rows] == [made[2], long]
    rig.run()
    rig.check_idle()


# ---- chunks ----


def test_chunked_prefill() -> None:
    rig = Rig(chunk=8, caching=False)
    s = rig.submit(range(21), 3, ignore_eos=True)
    spans = []
    for _ in range(3):
        plan = rig.schedule()
        assert plan is not None
        spans += [(row.start, row.num_tokens, row.samples) for row in plan.rows]
        rig.commit(plan)
    assert spans == [(0, 8, False), (8, 8, False), (16, 5, True)]
    rig.run()
    rig.check_answer(s)


def test_only_one_request_is_chunked() -> None:
    rig = Rig(chunk=8)
    a, b = rig.submit(range(11), 2, ignore_eos=True), rig.submit(range(20, 40), 2, ignore_eos=True)
    rig.step()
    assert rig.scheduler.chunked is a
    assert b.state is SequenceState.WAITING
    plan = rig.step()  # the rest of a, and a page of b
    assert plan is not None
    assert [(r.sequence, r.num_tokens) for r in plan.rows] == [(a, 3), (b, 4)]
    assert rig.scheduler.chunked is b
    rig.run()
    rig.check_answer(a)
    rig.check_answer(b)


def test_short_prompts_pass_a_long_one() -> None:
    """Whether it is amid its chunks or about to begin them: at most half of a chunk is theirs, so it goes on."""
    rig = Rig(chunk=16, caching=False)
    first = rig.submit(range(40), 2, ignore_eos=True)
    second = rig.submit(range(1, 41), 2, ignore_eos=True)
    short = [rig.submit(range(20 + i, 24 + i), 2, ignore_eos=True) for i in range(3)]
    longer = rig.submit(range(30, 41), 2, ignore_eos=True)  # more than half of a chunk: waits its turn
    spans = []
    while not spans or spans[-1]:
        plan = rig.schedule()
        assert plan is not None
        spans.append([(row.sequence, row.num_tokens) for row in plan.rows if row.prefill])
        rig.commit(plan)
    assert spans[:3] == [
        [(short[0], 4), (short[1], 4), (first, 8)],
        [(short[2], 4), (first, 12)],
        [(first, 16)],
    ]
    assert spans[3][0] == (first, 4)
    rig.run()
    for sequence in (first, second, *short, longer):
        rig.check_answer(sequence)


@pytest.mark.parametrize(
    "options",
    [{"max_running": 1}, {"max_running": 2}, {"num_pages": 17}, {"num_pages": 17, "max_running": 3}],
)
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_a_long_prompt_begins_however_many_short_ones_come(options: dict[str, int], ignore_eos: bool) -> None:
    """Neither the slot nor the pages that it waits for go to those behind it."""
    rig = Rig(chunk=16, caching=False, **options)
    others = [rig.submit(range(20, 24), 6, ignore_eos=True) for _ in range(2)]
    rig.step()
    long = rig.submit(range(40), 8, ignore_eos=ignore_eos)
    for n in range(60):
        if long.state is not SequenceState.WAITING:
            break
        others.append(rig.submit(range(n % 9, n % 9 + 4), 6, ignore_eos=True))
        rig.step()
    assert long.state is not SequenceState.WAITING
    rig.run()
    for sequence in (long, *others):
        rig.check_answer(sequence)


def test_a_short_prompt_passes_nobody_of_better_priority() -> None:
    rig = Rig(chunk=16, caching=False)
    long = rig.submit(range(40), 2, priority=-1, ignore_eos=True)
    short = rig.submit(range(20, 24), 2, ignore_eos=True)
    plan = rig.step()
    assert plan is not None
    assert [row.sequence for row in plan.rows] == [long]
    rig.run()
    rig.check_answer(long)
    rig.check_answer(short)


def test_chunks_enter_the_tree_as_they_come() -> None:
    rig = Rig(chunk=8)
    s = rig.submit(range(21), 3, ignore_eos=True)
    rig.step()
    assert s.num_tree_pages == 2
    rig.step()
    assert s.num_tree_pages == 4
    rig.step()
    assert s.num_tree_pages == 5  # the partial page stays the sequence's own
    assert len(s.pages) == 6


def test_answers_go_on_between_the_chunks_of_others() -> None:
    rig = Rig(chunk=8, fair=True, context=60)
    a = rig.submit(range(6), 20, ignore_eos=True)
    rig.step()
    b = rig.submit(range(20, 50), 2, ignore_eos=True)
    for _ in range(8):
        rig.step()
    assert rig.modes == [StepMode.EXTEND] + [StepMode.DECODE, StepMode.EXTEND] * 4
    assert (len(a.output_token_ids), len(b.output_token_ids)) == (5, 1)
    rig.run()
    rig.check_answer(a)
    rig.check_answer(b)


def test_prefills_without_end_starve_nobody() -> None:
    rig = Rig(fair=True, caching=False)
    a = rig.submit(range(6), 10, ignore_eos=True)
    for n in range(20):
        rig.submit([n] * 8, 1)
        rig.step()
        if a.finish_reason:
            break
    assert a.finish_reason == "length"
    rig.run()
    rig.check_answer(a)


def test_mixed_steps_do_not_starve_decode() -> None:
    rig = Rig(chunk=8, mixed=True)
    a = rig.submit(range(4), 12, ignore_eos=True)
    rig.step()
    b = rig.submit(range(20, 44), 4, ignore_eos=True)
    before = len(a.output_token_ids)
    plan = rig.step()
    assert plan is not None
    assert plan.mode is StepMode.MIXED
    # The decode row comes off the chunk's budget, which is then cut to whole pages.
    assert [(r.sequence, r.num_tokens, r.prefill) for r in plan.rows] == [(b, 4, True), (a, 1, False)]
    for _ in range(4):
        rig.step()
    assert len(a.output_token_ids) == before + 5
    rig.run()
    rig.check_answer(a)
    rig.check_answer(b)


def test_without_mixing_a_long_prefill_goes_first() -> None:
    rig = Rig(chunk=8)
    a = rig.submit(range(4), 12, ignore_eos=True)
    rig.step()
    rig.submit(range(20, 44), 4, ignore_eos=True)
    for _ in range(3):
        rig.step()
    assert rig.modes[1:] == [StepMode.EXTEND] * 3
    assert len(a.output_token_ids) == 1
    rig.run()


# ---- prefix cache ----


def test_whole_prompt_cached() -> None:
    """F42: a prompt of whole pages that is cached to its last token still computes one page."""
    rig = Rig()
    a = rig.submit(range(16), 3, ignore_eos=True)
    rig.run()
    b = rig.submit(range(16), 3, ignore_eos=True)
    plan = rig.step()
    assert plan is not None
    assert [(r.start, r.num_tokens) for r in plan.rows] == [(12, 4)]
    assert b.num_cached == 12
    rig.run()
    assert b.output_token_ids == a.output_token_ids
    rig.check_answer(b)
    assert rig.scheduler.counts["cached_tokens"] == 12


def test_generated_tokens_are_reused() -> None:
    """The next turn of a conversation finds the answer of this one."""
    rig = Rig()
    a = rig.submit(range(8), 9, ignore_eos=True)
    rig.run()
    history = [*range(8), *a.output_token_ids]
    b = rig.submit([*history, 40, 41], 3, ignore_eos=True)
    rig.run()
    assert b.num_cached == 16  # the last generated token was never computed
    rig.check_answer(b)


def test_namespaces() -> None:
    rig = Rig()
    rig.submit(range(16), 2, ignore_eos=True)
    rig.run()
    b = rig.submit(range(16), 2, key="lora", ignore_eos=True)
    rig.run()
    assert b.num_cached == 0


def test_switched_off() -> None:
    rig = Rig(caching=False)
    for _ in range(2):
        s = rig.submit(range(16), 2, ignore_eos=True)
        rig.run()
        assert s.num_cached == 0
        rig.check_answer(s)
    assert rig.allocator.free_pages == rig.allocator.capacity


def test_equal_prompts_at_once_keep_one_copy() -> None:
    rig = Rig()
    made = [rig.submit(range(16), 2, ignore_eos=True) for _ in range(3)]
    rig.step()
    assert rig.radix.num_pages == 4  # duplicates are free again
    assert len({tuple(s.pages[:4]) for s in made}) == 1
    rig.run()
    for s in made:
        rig.check_answer(s)
    rig.check_idle()


def test_siblings_wait_for_their_prompt() -> None:
    rig = Rig()
    made = rig.make(range(16), 4, n=3, ignore_eos=True)
    for s in made:
        rig.scheduler.submit(s)
    other = rig.submit(range(30, 35), 2, ignore_eos=True)
    plan = rig.step()
    assert plan is not None
    assert [r.sequence for r in plan.rows] == [made[0], other]  # others are not held up
    plan = rig.step()
    assert plan is not None
    assert [(r.sequence, r.start) for r in plan.rows] == [(made[1], 12), (made[2], 12)]
    rig.run()
    for s in made:
        rig.check_answer(s)
    assert len({tuple(s.output_token_ids) for s in made}) == 3


def test_siblings_of_an_aborted_leader_go_on() -> None:
    rig = Rig()
    made = rig.make(range(16), 4, n=3, ignore_eos=True)
    for s in made:
        rig.scheduler.submit(s)
    rig.scheduler.finish(made[0], "abort")
    rig.run()
    for s in made[1:]:
        assert s.finish_reason == "length"
        rig.check_answer(s)


def test_siblings_without_a_tree_compute_their_own() -> None:
    rig = Rig(caching=False)
    made = rig.make(range(16), 4, n=3, ignore_eos=True)
    for s in made:
        rig.scheduler.submit(s)
    plan = rig.step()
    assert plan is not None
    assert len(plan.rows) == 3


def test_hit_is_counted_when_scheduled() -> None:
    """F45: a hit is not pinned while waiting; it is counted again when the request starts."""
    rig = Rig(num_pages=12, context=44)  # 44 tokens
    a = rig.submit(range(16), 1, ignore_eos=True)
    rig.run()
    assert rig.radix.num_pages == 4
    hog = rig.submit(range(20, 32), 20, ignore_eos=True)
    rig.step()
    b = rig.submit([*range(16), 40, 41], 18, ignore_eos=True)
    for _ in range(3):
        rig.step()  # b sees its hit and cannot run
    assert b.state is SequenceState.WAITING
    assert rig.scheduler.counts["admission_no_token"] > 0
    rig.radix.evict(3)
    rig.run()
    assert b.num_cached < 16
    assert rig.scheduler.counts["admission_continue"] >= 3
    for s in (a, hog, b):
        rig.check_answer(s)


def test_prompt_logprobs_take_no_shortcut() -> None:
    rig = Rig()
    rig.submit(range(16), 2, ignore_eos=True)
    rig.run()
    s = rig.submit(range(16), 2, ignore_eos=True, prompt_logprobs=0)
    plan = rig.step()
    assert plan is not None
    assert [(r.start, r.num_tokens) for r in plan.rows] == [(0, 16)]
    assert s.num_cached == 0
    rig.run()
    rig.check_answer(s)


def test_prompt_logprobs_after_a_retraction() -> None:
    """Amid its chunks it starts from the beginning again; once it has generated, all of them were there."""
    rig = Rig(chunk=8)
    s = rig.submit(range(16), 4, ignore_eos=True, prompt_logprobs=0)
    rig.step()
    rig.scheduler._retract(s)
    for expected in (0, 8):
        plan = rig.step()
        assert plan is not None
        assert [r.start for r in plan.rows] == [expected]
    assert s.output_token_ids
    rig.scheduler._retract(s)
    plan = rig.step()
    assert plan is not None
    assert [r.start for r in plan.rows] == [16]
    rig.run()
    rig.check_answer(s)


def test_scoring_only() -> None:
    """F50: max_tokens 0 yields no token, and a prompt may then fill the context."""
    rig = Rig(chunk=16, context=32)
    s = rig.submit(range(32), 0, prompt_logprobs=0)
    rig.run()
    assert rig.modes == [StepMode.EXTEND] * 2
    assert (s.finish_reason, s.output_token_ids) == ("length", [])
    rig.check_idle()


# ---- pressure ----


def test_retracted_requests_answer_the_same() -> None:
    """F43: a small pool, many requests, preemption; counts are made after pages are found."""
    rig = Rig(num_pages=14, context=40, max_running=16)  # 52 tokens
    made = [rig.submit([i % 3, 1, 2, i % 5, i], 18) for i in range(60)]
    while rig.scheduler.has_work:
        rig.scheduler.ratio.value = 0.0  # admission never learns
        assert rig.step() is not None or not rig.scheduler.has_work
    assert rig.scheduler.counts["retractions"] > 10
    for s in made:
        assert s.finish_reason in ("stop", "length")
        rig.check_answer(s)
    rig.check_idle()


def _endless(rig: Rig, prompt: Any, max_new: int) -> Sequence:
    """Queue a request that nothing but its length stops, though admission hopes for less."""
    (s,) = rig.make(prompt, max_new)
    s.stop_token_ids = frozenset()
    rig.scheduler.submit(s)
    return s


def test_shortest_output_goes_first_and_returns_to_the_front() -> None:
    rig = Rig(num_pages=9, context=32, caching=False, conservativeness=0.0)  # 32 tokens
    a = _endless(rig, range(4), 20)
    rig.step()
    rig.step()
    b = _endless(rig, range(10, 13), 16)
    rig.step()
    assert rig.scheduler.running == [a, b]
    later = rig.submit(range(20), 7)
    rig.until_retraction()
    assert len(a.output_token_ids) > len(b.output_token_ids) > 1  # it keeps what it has said
    assert (a.state, b.state, b.retractions) == (SequenceState.RUNNING, SequenceState.WAITING, 1)
    assert b.num_computed == 0
    assert rig.scheduler.waiting == [b, later]
    rig.run()
    assert rig.ended == [a, b, later]
    for s in rig.ended:
        rig.check_answer(s)
    rig.check_idle()


def test_no_kv_is_trusted_after_recompute() -> None:
    """Running and chunked requests compute prompt and output again, from nothing, and answer the same."""
    rig = Rig(chunk=8)
    done = rig.submit(range(16), 4, ignore_eos=True)
    rig.run()
    running = rig.submit(range(30, 36), 12, ignore_eos=True)
    for _ in range(4):
        rig.step()
    chunked = rig.submit(range(50, 74), 4, ignore_eos=True)
    rig.step()
    assert rig.scheduler.chunked is chunked
    said = list(running.output_token_ids)
    rig.scheduler.recompute()
    assert rig.radix.num_pages == 0
    assert rig.scheduler.waiting == [running, chunked]
    assert running.output_token_ids == said
    again = rig.submit(range(16), 4, ignore_eos=True)
    rig.run()
    assert again.num_cached == 0
    for s in (done, running, chunked, again):
        rig.check_answer(s)
    rig.check_idle()


def test_retraction_leaves_the_tree_alone() -> None:
    """KV of a retracted request is freed, not cached: it made no room otherwise."""
    rig = Rig(num_pages=9, context=32)
    s = rig.submit(range(8), 12, ignore_eos=True)
    for _ in range(6):
        rig.step()
    assert rig.radix.num_pages == 2
    rig.scheduler._retract(s)
    rig.check()
    assert rig.radix.num_pages == 2  # the prompt, from its prefill
    assert rig.allocator.free_pages == rig.allocator.capacity - 2
    rig.run()
    rig.check_answer(s)


def test_ratio_after_a_retraction() -> None:
    rig = Rig(num_pages=10, context=30, caching=False, conservativeness=0.0)  # 36 tokens
    made = [_endless(rig, range(i, i + 6), 14) for i in range(2)]
    rig.until_retraction()
    (kept,) = rig.scheduler.running
    assert kept is made[0]
    # The step that followed added one token to those that the estimate saw.
    assert rig.scheduler.ratio.value == min(1.0, (len(kept.output_token_ids) - 1 + 20) / (14 + 1))
    rig.run()
    rig.check_idle()


def test_growth_of_what_starts_in_the_same_step_counts_in_full() -> None:
    rig = Rig(num_pages=10, context=30, caching=False, conservativeness=0.0)  # 36 tokens
    made = [_endless(rig, range(i, i + 6), 14) for i in range(2)]
    for s in made:
        plan = rig.step()
        assert plan is not None
        assert [r.sequence for r in plan.rows] == [s]


def test_no_more_is_retracted_than_needed() -> None:
    rig = Rig(num_pages=13, context=30, caching=False, conservativeness=0.0)  # 48 tokens
    for i in range(3):
        _endless(rig, range(i, i + 6), 14)
    rig.until_retraction()
    assert len(rig.scheduler.running) == 2


def test_ratio_decays_with_decoding_and_comes_back_when_idle() -> None:
    rig = Rig()
    ratio = rig.scheduler.ratio
    rig.submit(range(6), 5, ignore_eos=True)
    rig.step()
    assert ratio.value == 0.7
    rig.step()
    assert ratio.value == pytest.approx(0.7 - (0.7 - 0.098) / 600)
    rig.run()
    assert ratio.value == 0.7


@pytest.mark.parametrize("mixed", [False, True])
def test_a_chunk_in_hand_is_retracted_first(mixed: bool) -> None:
    rig = Rig(chunk=8, mixed=mixed, conservativeness=0.0)
    running = [_endless(rig, range(0, 3), 16), _endless(rig, range(10, 12), 16)]
    rig.step()
    rig.step()
    chunked = _endless(rig, range(20, 43), 3)
    rig.step()
    assert rig.scheduler.chunked is chunked
    rig.take_all()
    rig.until_retraction()
    assert chunked.retractions == 1
    assert rig.scheduler.running == running
    rig.give_back()
    rig.run()
    for s in (*running, chunked):
        rig.check_answer(s)
    rig.check_idle()


def test_a_full_pool_still_decodes() -> None:
    """F19: every page is taken; the trash page was never among them and steps go on."""
    rig = Rig(caching=False)
    s = rig.submit(range(4), 9, ignore_eos=True)
    rig.step()
    rig.step()
    rig.take_all()
    assert TRASH_PAGE not in [*s.pages, *rig.spare]
    for _ in range(3):
        plan = rig.step()
        assert plan is not None
        assert plan.mode is StepMode.DECODE
    assert rig.allocator.free_pages == 0
    rig.give_back()
    rig.run()
    rig.check_answer(s)


def test_never_fits_although_submitted() -> None:
    """F44: should intake be bypassed, the request ends with an error; it does not wait or spin for ever."""
    rig = Rig(num_pages=6, context=60)
    (s,) = rig.make(range(7), 4)
    s.max_new_tokens = 50
    rig.scheduler.submit(s)
    other = rig.submit([1, 2], 2, ignore_eos=True)
    rig.run(20)
    assert (s.finish_reason, s.stop_reason) == ("error", "it does not fit the KV cache even alone")
    assert other.finish_reason == "length"
    rig.check_idle()


def test_grows_beyond_the_pool() -> None:
    """F44: nor does one that was let in and then outgrows the pool all alone."""
    rig = Rig(num_pages=6, context=60)
    (s,) = rig.make(range(7), 4)
    s.stop_token_ids = frozenset()
    rig.scheduler.submit(s)
    rig.step()
    s.max_new_tokens = 50
    rig.run(50)
    assert (s.finish_reason, s.stop_reason) == ("error", "the KV cache is full")
    assert rig.ended == [s]
    rig.check_answer(s)
    rig.check_idle()


# ---- abort ----


def test_abort_in_any_state() -> None:
    rig = Rig(chunk=8, max_running=3)
    running = rig.submit(range(6), 9, ignore_eos=True)
    rig.step()
    chunked = rig.submit(range(20, 50), 3, ignore_eos=True)
    waiting = rig.submit(range(6), 3, ignore_eos=True)
    rig.step()
    assert rig.scheduler.chunked is chunked
    for s in (waiting, chunked, running):
        rig.scheduler.finish(s, "abort")
        rig.check()
        assert s.finish_reason == "abort"
    rig.check_idle()
    # What was computed stays useful.
    again = rig.submit(range(20, 50), 3, ignore_eos=True)
    rig.run()
    assert again.num_cached == 8
    rig.check_answer(again)


@pytest.mark.parametrize("which", ["decode", "chunk", "last chunk"])
def test_abort_while_its_step_runs(which: str) -> None:
    """F49: the token of an aborted request has nobody; the engine goes on."""
    rig = Rig(chunk=8)
    s = rig.submit(range(6 if which == "decode" else 12), 9, ignore_eos=True)
    other = rig.submit(range(30, 33), 5, ignore_eos=True)
    for _ in range({"decode": 2, "chunk": 0, "last chunk": 1}[which]):
        rig.step()
    plan = rig.schedule()
    assert plan is not None
    assert s in [r.sequence for r in plan.rows]
    said = list(s.output_token_ids)
    rig.scheduler.finish(s, "abort")
    rig.commit(plan)
    assert s.output_token_ids == said
    assert s not in rig.ended
    rig.run()
    rig.check_answer(other)
    rig.check_idle()


def test_numbers_for_stats() -> None:
    rig = Rig()
    rig.submit(range(16), 2, ignore_eos=True)
    rig.submit(range(16), 2, ignore_eos=True)
    rig.step()
    stats = rig.scheduler.as_dict()
    assert (stats["running"], stats["waiting"]) == (2, 0)
    assert stats["admission_continue"] == 2
    assert stats["kv_pages_total"] == 32
    assert stats["kv_pages_used"] == 4
    rig.run()
    assert rig.scheduler.as_dict()["finished_length"] == 2


# ---- the vote of data-parallel ranks ----


@dataclass
class Vote:
    """Stands for the peers: says `verdict`, remembers what it was asked."""

    verdict: bool = True
    asked: list[bool] = field(default_factory=list)

    def __call__(self, prefillable: bool) -> bool:
        self.asked.append(prefillable)
        return self.verdict


def _hogged(vote: Vote, **options: Any) -> tuple[Rig, Sequence]:
    """A pool of 40 tokens: 5 pages cached, 3 held by a running request, 2 free."""
    rig = Rig(num_pages=11, context=40, negotiate=vote, **options)
    rig.submit(range(20), 1, ignore_eos=True)
    rig.run()
    hog = rig.make(range(30, 42), 3)[0]
    hog.stop_token_ids = frozenset()
    rig.scheduler.submit(hog)
    rig.step()
    assert (rig.allocator.free_pages, rig.radix.evictable_pages) == (2, 5)
    vote.asked.clear()
    return rig, hog


def test_no_budget_no_vote() -> None:
    vote = Vote()
    rig, _ = _hogged(vote)
    s = rig.make(range(50, 66), 10)[0]
    rig.scheduler.submit(s)
    rig.step()
    assert s.state is SequenceState.WAITING
    assert vote.asked == []
    assert rig.scheduler.counts["admission_no_token"] == 1


def test_rejected_after_the_lock_no_vote() -> None:
    """Its own prefix counted as evictable before the lock, and is protected by it."""
    vote = Vote()
    rig, _ = _hogged(vote)
    s = rig.make([*range(20), 60, 61, 62, 63], 5)[0]
    rig.scheduler.submit(s)
    rig.step()
    assert s.state is SequenceState.WAITING
    assert vote.asked == []
    assert rig.radix.evictable_pages == 5  # the lock is gone
    assert rig.scheduler.counts["admission_no_token"] == 1


def test_voted_down() -> None:
    vote = Vote()
    rig, _ = _hogged(vote)
    vote.verdict = False
    s = rig.make([*range(12), 60], 2)[0]
    rig.scheduler.submit(s)
    evictable = rig.radix.evictable_pages
    plan = rig.step()
    assert plan is not None
    assert plan.mode is StepMode.DECODE
    assert vote.asked == [True]
    assert s.state is SequenceState.WAITING
    assert rig.radix.evictable_pages == evictable
    assert rig.scheduler.counts["admission_other"] == 1


def test_voted_through() -> None:
    vote = Vote()
    rig, _ = _hogged(vote)
    s = rig.make([*range(12), 60], 2)[0]
    rig.scheduler.submit(s)
    plan = rig.step()
    assert plan is not None
    assert [r.sequence for r in plan.rows] == [s]
    assert vote.asked == [True]


def test_a_continued_chunk_votes_and_ignores_the_verdict() -> None:
    vote = Vote()
    rig = Rig(chunk=8, negotiate=vote)
    s = rig.submit(range(20), 2, ignore_eos=True)
    rig.step()
    vote.verdict = False
    vote.asked.clear()
    plan = rig.step()
    assert plan is not None
    assert [(r.sequence, r.start) for r in plan.rows] == [(s, 8)]
    assert vote.asked == [True]


# ---- anything at all ----

REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 2),  # which of three stems
        st.integers(1, 14),  # length of the prompt
        st.integers(0, 20),  # max_tokens
        st.sampled_from(["", "", "ignore_eos", "n", "prompt_logprobs", "lora", "priority"]),
        st.integers(0, 8),  # steps before the next one arrives
    ),
    min_size=1,
    max_size=10,
)
FATES = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 40), st.sampled_from(["abort", "stop", "mid"])), max_size=4
)


@settings(deadline=None, max_examples=120)
@given(
    requests=REQUESTS,
    fates=FATES,
    page=st.sampled_from([1, 2, 4]),
    tokens=st.integers(28, 60),
    chunk=st.sampled_from([None, 4, 8, 12]),
    mixed=st.booleans(),
    fair=st.booleans(),
    caching=st.booleans(),
    running=st.integers(1, 5),
    conservativeness=st.sampled_from([0.0, 1.0]),
)
def test_any_load_answers_right_and_loses_nothing(
    requests: list[tuple[int, int, int, str, int]],
    fates: list[tuple[int, int, str]],
    page: int,
    tokens: int,
    chunk: int | None,
    mixed: bool,
    fair: bool,
    caching: bool,
    running: int,
    conservativeness: float,
) -> None:
    """Small pools, shared prefixes, chunks, retraction, aborts at any moment: each answer is the lonely one's."""
    rig = Rig(
        num_pages=tokens // page + 1,
        page_size=page,
        max_running=running,
        max_prefill=16,
        context=40,
        chunk=chunk,
        mixed=mixed and chunk is not None,
        fair=fair,
        caching=caching,
        conservativeness=conservativeness,
    )
    made: list[Sequence] = []
    arrivals = []
    at = 0
    for stem, length, max_new, kind, pause in requests:
        prompt = [(stem * (i > 4) + i) % VOCAB for i in range(length)]
        options: dict[str, Any] = {
            "ignore_eos": {"ignore_eos": True},
            "n": {"n": 3},
            "lora": {"key": "lora"},
            "priority": {"priority": -1},
        }.get(kind, {})
        if kind == "prompt_logprobs" or max_new == 0:
            options = {**options, "prompt_logprobs": 0}
        try:
            sequences = rig.make(prompt, max_new, **options)
        except RequestError:
            continue
        made += sequences
        arrivals.append((at, sequences))
        at += pause
    for now in range(5000):
        while arrivals and arrivals[0][0] <= now:
            for s in arrivals.pop(0)[1]:
                rig.scheduler.submit(s)
        if conservativeness == 0.0:
            rig.scheduler.ratio.value = 0.0  # it never learns, so that retraction is common
        plan = rig.schedule()
        due = [(made[i % len(made)], how) for i, when, how in fates if when == now and made]
        for s, how in due:
            if how == "mid" and s.output_token_ids:
                rig.scheduler.finish(s, "abort")
        if plan is not None:
            rig.commit(plan)
        elif rig.scheduler.has_work:
            raise AssertionError("no progress")
        elif not arrivals:
            break
        for s, how in due:
            if s in rig.scheduler.waiting or s in rig.live:
                rig.scheduler.finish(s, "stop" if how == "stop" and s.output_token_ids else "abort", how)
        rig.check()
    else:
        raise AssertionError("it does not come to an end")
    rig.check_idle()
    for s in made:
        assert s.state is SequenceState.FINISHED
        assert s.finish_reason != "error"
        if s.stop_reason not in ("stop", "abort", "mid"):
            rig.check_answer(s)
