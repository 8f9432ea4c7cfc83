"""What runs next: continuous batching over a paged pool, host side only.

    submit ─▶ waiting ──admission──▶ (chunked) ─▶ running ─▶ finished
                 ▲─────────retraction────────────────┘

`schedule` picks a step (prefill first, else decode; when fair, in turns), `commit` takes its tokens. Knows nothing of
tensors but the page table, and nothing of text. Invariant: after every call each page is free, in the tree, or held by
one live sequence.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ostinato.engine.admission import (
    RETRACT_HEADROOM,
    Admission,
    NewTokenRatio,
    PoolLimits,
    StepBudget,
    expected_growth,
    fits_by_simulation,
    held_decodes,
    reserved_tokens,
    retraction_order,
)
from ostinato.engine.plan import ScheduledSequence, StepPlan
from ostinato.engine.request import FinishReason
from ostinato.engine.residency import Residency
from ostinato.engine.sequence import Sequence, SequenceState
from ostinato.kv.radix import PrefixMatch
from ostinato.padding import StepMode, align_up


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Limits and policies. `chunked_prefill_size` None switches chunking off; it is a multiple of the page.

    `fair`: a decode step follows a prefill step that holds up answers, so that prompts without end cannot. `together`:
    whose turn it is, is agreed with other ranks (`StepPlan.held`, `decode_turn`); else it is decided here.
    """

    max_running_requests: int
    max_prefill_tokens: int
    context_length: int
    chunked_prefill_size: int | None = None
    mixed_prefill: bool = False
    fair: bool = False
    together: bool = False
    conservativeness: float = 1.0


PrefillNegotiation = Callable[[bool], bool]
"""Asked once per admission, after every local gate has passed, with True ("this rank can prefill"); False delays it."""


class Scheduler:
    """Continuous batching with chunked prefill, prefix reuse and retraction. See the module for the picture."""

    def __init__(
        self, options: SchedulerOptions, kv: Residency, negotiate: PrefillNegotiation | None = None
    ) -> None:
        self.options = options
        self.kv = kv
        self.limits = PoolLimits(kv.total_tokens, kv.page_size, options.context_length)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.chunked: Sequence | None = None
        self.ratio = NewTokenRatio(options.conservativeness)
        self.counts: Counter[str] = Counter()
        self._page = kv.page_size
        self._negotiate = negotiate
        self.failed: list[Sequence] = []
        self._takes_turns = options.fair and not options.mixed_prefill  # mixed decode rows never wait
        self._decode_due = False

    # ---- intake and exit ----

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence whose length `limits.clamp` has accepted."""
        insort(self.waiting, sequence, key=lambda s: s.queue_key)

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a sequence in any state, now: its finished pages go to the prefix tree, the rest are free."""
        if sequence.state is SequenceState.FINISHED:
            return
        if sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
        else:
            if sequence is self.chunked:
                self.chunked = None
            else:
                self.running.remove(sequence)
            self.kv.cache(sequence)
            self.kv.release(sequence)
        sequence.state = SequenceState.FINISHED
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        self.counts[f"finished_{reason}"] += 1
        if not self.has_work:
            self.ratio.reset()  # here, since nobody asks an idle scheduler for a step

    def take_failed(self) -> list[Sequence]:
        """Sequences that `schedule` had to end because the pool could not hold even one of them."""
        failed, self.failed = self.failed, []
        return failed

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.chunked)

    def check_leaks(self) -> None:
        """Raise AssertionError unless every page is free, in the tree, or held by exactly one live sequence."""
        live = [*self.running, *([self.chunked] if self.chunked else [])]
        self.kv.check_leaks(live)

    def as_dict(self) -> dict[str, int | float]:
        """Plain numbers for `stats()`."""
        return {
            "running": len(self.running) + (self.chunked is not None),
            "waiting": len(self.waiting),
            **self.kv.as_dict(),
            "new_token_ratio": self.ratio.value,
            **self.counts,
        }

    # ---- one step ----

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can run now. Page tables are ready when it returns."""
        # Decode rows of a mixed step take their pages first: admission then sees what is really left.
        decode = self._decode_rows() if self.options.mixed_prefill else []
        if self._decode_due:
            self._decode_due = False
            if turn := self.decode_turn():
                return turn
        rows = self._admit(len(decode)) if self.waiting or self.chunked is not None else ()
        if rows:
            held = held_decodes(self.running, [row.sequence for row in rows]) if self._takes_turns else 0
            self._decode_due = held > 0 and not self.options.together
            return StepPlan(StepMode.MIXED if decode else StepMode.EXTEND, (*rows, *decode), held)
        decode = decode or self._decode_rows()
        return StepPlan(StepMode.DECODE, tuple(decode)) if decode else None

    def decode_turn(self) -> StepPlan | None:
        """A step that is left to decode rows: whatever could prefill waits for this one step, and is counted."""
        rows = self._decode_rows()
        if rows or self.options.together:
            self.counts["fair_decode_turns"] += 1
            self.counts["fair_prefills_held"] += len(self.waiting) + (self.chunked is not None)
        return StepPlan(StepMode.DECODE, tuple(rows)) if rows else None

    def commit(self, plan: StepPlan, tokens: Mapping[Sequence, int]) -> list[Sequence]:
        """Take the tokens of a step that ran, by sequence; returns those that it ended (length, token, problem)."""
        ended: list[Sequence] = []
        for row in plan.rows:
            sequence = row.sequence
            if sequence.state is SequenceState.FINISHED:
                continue  # aborted while the step ran: its pages are free already, its token has nobody
            assert sequence.state is SequenceState.RUNNING
            sequence.num_computed = row.start + row.num_tokens
            if row.prefill:
                self.kv.cache(sequence)
            token = tokens.get(sequence)
            if token is not None:
                output = sequence.output_token_ids
                output.append(token)
                at_end = len(output) >= sequence.max_new_tokens or token in sequence.stop_token_ids
                if (at_end or sequence.problem is not None) and self._ends(sequence, token):
                    ended.append(sequence)
            elif sequence.max_new_tokens == 0 and sequence.num_computed == sequence.num_tokens:
                self.finish(sequence, "length")
                ended.append(sequence)
        return ended

    def _ends(self, sequence: Sequence, token: int) -> bool:
        generated = len(sequence.output_token_ids)
        if sequence.problem is not None:  # also if the token would have ended it
            self.finish(sequence, "error", sequence.problem)
        elif token in sequence.stop_token_ids and generated > sequence.request.params.min_tokens:
            self.finish(sequence, "stop", token)
        elif generated >= sequence.max_new_tokens:
            self.finish(sequence, "length")
        return sequence.state is SequenceState.FINISHED

    def recompute(self) -> None:
        """Trust no KV: what runs goes back to the queue with all that it has said, and no prefix is cached any more."""
        for sequence in [*self.running, *([self.chunked] if self.chunked else [])]:
            self._retract(sequence)
        self.kv.radix.evict(self.kv.radix.num_pages)

    # ---- prefill ----

    def _admit(self, decode_rows: int) -> list[ScheduledSequence]:
        """Prefill rows of this step: the chunk in hand first, then the queue in order while budgets last."""
        options = self.options
        chunk = options.chunked_prefill_size
        tokens = align_up(options.max_prefill_tokens, self._page) - decode_rows
        budget = StepBudget(self._page, tokens, None if chunk is None else chunk - decode_rows)
        started: list[Sequence] = []
        rows = self._let_pass(budget, started)
        if self.chunked is not None:
            row = self._continue_chunk(self.chunked, budget)
            rows += [row] if row else []
        for sequence in list(self.waiting):
            if self.chunked is not None:
                break  # one chunked request at a time
            if self._held_back(sequence, started):
                continue
            verdict, row = self._try(sequence, budget, started)
            self.counts[f"admission_{verdict.value}"] += 1
            if row is None:
                if verdict is Admission.NO_TOKEN and not self.running:
                    # Nothing runs, so nothing will ever be given back: waiting on would be for ever.
                    self._fail(sequence, "it does not fit the KV cache even alone")
                    continue
                break
            rows.append(row)
            started.append(sequence)
        return rows

    def _let_pass(self, budget: StepBudget, started: list[Sequence]) -> list[ScheduledSequence]:
        """Short prompts before a long one: those that fit whole in half of this step's chunk, in the queue's order.

        So a first token never waits for another's long prompt; that one keeps the other half, and until it has begun a
        slot and its KV, so it never starves.
        """
        chunk = budget.chunk_tokens
        first = self.chunked or (self.waiting[0] if self.waiting else None)
        if chunk is None or first is None or (first is not self.chunked and first.num_tokens <= chunk):
            return []
        rows: list[ScheduledSequence] = []
        left = min(chunk, budget.input_tokens) // 2
        for sequence in list(self.waiting):
            if sequence.request.priority > first.request.priority:
                break
            tokens = align_up(sequence.num_tokens, self._page)  # at most: no cached prefix is looked up here
            if tokens > left or self._held_back(sequence, started):
                continue
            if first is not self.chunked and not self._leaves_room(sequence, first, started):
                break
            verdict, row = self._try(sequence, budget, started)
            self.counts[f"admission_{verdict.value}"] += 1
            if row is None:
                break
            left -= tokens
            rows.append(row)
            started.append(sequence)
        return rows

    def _leaves_room(self, sequence: Sequence, first: Sequence, started: list[Sequence]) -> bool:
        """Whether `first` could begin beside `sequence`, if that one began before it."""
        if min(self.options.max_running_requests - len(self.running), self.kv.pool.free_rows) < 2:
            return False
        beside = reserved_tokens(sequence.num_tokens, sequence.remaining_new, self._page)
        return self._passes(first, first.num_tokens, started, beside)

    def _held_back(self, sequence: Sequence, started: list[Sequence]) -> bool:
        """A sibling waits until its leader's prompt is in the prefix tree, instead of computing it twice."""
        leader = sequence.leader
        if leader is None or not self.kv.radix.enabled or leader.state is SequenceState.FINISHED:
            return False
        return leader.num_computed < leader.prompt_len or leader in started

    def _passes(self, sequence: Sequence, extend: int, started: list[Sequence], beside: int = 0) -> bool:
        """The KV gate, with `beside` tokens for another. Growth of what started in this very step counts in full."""
        available = self.kv.available_tokens - beside
        live = [*self.running, *([self.chunked] if self.chunked else [])]
        if sequence.request.params.ignore_eos:
            return fits_by_simulation(available - self._page, extend, sequence, live)
        offset = expected_growth([s for s in live if s not in started], self.ratio.value)
        offset += expected_growth(started, 1.0)
        return reserved_tokens(extend, sequence.remaining_new, self._page) < available - offset

    def _try(
        self, sequence: Sequence, budget: StepBudget, started: list[Sequence]
    ) -> tuple[Admission, ScheduledSequence | None]:
        """One waiting sequence: pre-lock gates, lock, re-check, negotiate, commit."""
        if len(self.running) >= self.options.max_running_requests or self.kv.pool.free_rows == 0:
            return Admission.OTHER, None
        # The last known token is computed again, as its logits choose the next one; so is a prompt whose logits are
        # all wanted, which uses no cached prefix.
        known = sequence.tokens(0, 0 if sequence.wants_prompt_logits else sequence.num_tokens - 1)
        match = self.kv.radix.match(known, sequence.request.extra_key)
        start = len(match.pages) * self._page
        extend = sequence.num_tokens - start
        if not self._passes(sequence, extend, started):
            return Admission.NO_TOKEN, None
        now = budget.extend_for(extend)
        if now == 0:
            return Admission.OTHER, None
        self.kv.radix.lock(match.node)  # moves evictable pages to protected, so the gate is asked again
        if not self._passes(sequence, extend, started):
            self.kv.radix.unlock(match.node)
            return Admission.NO_TOKEN, None
        if self._negotiate is not None and not self._negotiate(True):
            self.kv.radix.unlock(match.node)
            return Admission.OTHER, None
        self._start(sequence, match)
        return Admission.CONTINUE, self._extend(sequence, now, budget)

    def _start(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Move an admitted sequence out of the queue, onto its cached prefix."""
        self.waiting.remove(sequence)
        sequence.state = SequenceState.RUNNING
        self.kv.start(sequence, match)
        if sequence.retractions == 0:
            sequence.num_cached = sequence.num_computed
        self.counts["cached_tokens"] += sequence.num_computed
        self.counts["prefill_tokens"] += sequence.num_tokens - sequence.num_computed

    def _extend(self, sequence: Sequence, num_tokens: int, budget: StepBudget) -> ScheduledSequence:
        """Schedule the next tokens of a prefill; the sequence is then chunked, or running if they are the last."""
        budget.take(num_tokens)
        self.kv.grow(sequence, sequence.num_computed + num_tokens)
        row = ScheduledSequence(sequence, sequence.num_computed, num_tokens, prefill=True)
        if row.samples:
            if sequence is self.chunked:
                self.chunked = None
            self.running.append(sequence)
        else:
            self.chunked = sequence
        return row

    def _continue_chunk(self, sequence: Sequence, budget: StepBudget) -> ScheduledSequence | None:
        """The next chunk of the request being prefilled; its pages were part of what admission reserved."""
        if self._negotiate is not None:
            self._negotiate(True)  # takes part in the vote; a continuation does not wait for its verdict
        extend = sequence.num_tokens - sequence.num_computed
        now = budget.extend_for(extend)
        need = align_up(sequence.num_computed + now, self._page) - len(sequence.pages) * self._page
        if now == 0 or need > self.kv.available_tokens:
            return None
        return self._extend(sequence, now, budget)

    # ---- decode ----

    def _decode_rows(self) -> list[ScheduledSequence]:
        """A row for each running sequence, with the page that it takes; most steps take none."""
        if not self.running:
            return []
        page, rows, growing = self._page, [], False
        for sequence in self.running:
            known = sequence.prompt_len + len(sequence.output_token_ids)
            growing = growing or known > len(sequence.pages) * page
            rows.append(ScheduledSequence(sequence, known - 1, 1, False))
        if growing and self._make_room():
            rows = [row for row in rows if row.sequence.state is SequenceState.RUNNING]
        else:
            self.ratio.decay()
        if growing:
            for row in rows:
                self.kv.grow(row.sequence, row.start + 1)
        return rows

    def _make_room(self) -> bool:
        """Retract sequences while the next decode step does not fit after eviction; whether one had to go.

        A request amid its chunks goes first: it has generated nothing, and its whole pages stay in the tree for it.
        """
        if self._fit(self.running):
            return False
        order = retraction_order(self.running)
        if self.chunked is not None:
            self._retract(self.chunked)
        while len(order) > 1 and not self._fit(order):
            self._retract(order.pop())
        if not self._fit(order):
            self._fail(order[0], "the KV cache is full")
            return True
        # Room for the steps to come, so that they need not evict one page at a time.
        self.kv.evict_for(len(order) * RETRACT_HEADROOM)
        self.ratio.after_retraction(order)
        return True

    def _fit(self, sequences: Iterable[Sequence]) -> bool:
        """Whether the pages that one more step of these sequences takes can be had."""
        pages = sum([s.num_tokens > len(s.pages) * self._page for s in sequences])
        return pages == 0 or pages * self._page <= self.kv.available_tokens

    def _fail(self, sequence: Sequence, why: str) -> None:
        self.finish(sequence, "error", why)
        self.failed.append(sequence)

    def _retract(self, sequence: Sequence) -> None:
        """Send a running sequence back to the queue; it will prefill prompt and output again."""
        if sequence is self.chunked:
            self.chunked = None
        else:
            self.running.remove(sequence)
        self.kv.release(sequence)
        sequence.state = SequenceState.WAITING
        sequence.num_computed = 0
        sequence.retractions += 1
        self.counts["retractions"] += 1
        self.submit(sequence)
