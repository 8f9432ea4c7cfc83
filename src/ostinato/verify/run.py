"""Rank 0's part of a verification: asks all ranks for one cell after the other until the time is up, and gathers.

    (check, mode) queues ─▶ the one with the least time spent so far ─▶ Engine.call ─▶ findings of every rank
    a cell that fails ─▶ once more, with every layer watched ─▶ the first layer and row that differ

Knows nothing of how a report is shown. Invariant: cells are taken in an order that a seed decides; how many of them
run, and which are passed over as too long, depends on the clock.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from ostinato.engine.engine import Engine
from ostinato.errors import ConfigError, OstinatoError
from ostinato.verify.cells import CellId, ordered
from ostinato.verify.checks import CHECKS, Check, Facts
from ostinato.verify.faults import Injection
from ostinato.verify.findings import Cell, CheckResult, Finding, Place
from ostinato.verify.outcome import Found
from ostinato.verify.program import Answer, Ask
from ostinato.verify.reference import PROMPTS, ask_transformers

DEFAULT_BUDGET_S = 100.0
REFERENCE = "reference"
MOST_LOCATED = 3
"""Failing cells of a check that are run once more, to name the layer."""
OVERHEAD_ROWS = 32
"""Rows that the rest of a step costs as much as, for guesses of how long a cell will take."""
MOST_FAILED = 12
"""Failing cells after which a check is left."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. budget: seconds for cells. only: names of checks, all when empty. cell: that one and no other.
    inject: a fault to put in first. prompts: for the comparison with transformers; reference: whether there is one.

    reproduce: (check, cell) -> the command that runs that cell again.
    """

    budget: float = DEFAULT_BUDGET_S
    only: tuple[str, ...] = ()
    cell: str | None = None
    seed: int = 0
    inject: Injection | None = None
    prompts: tuple[str, ...] = PROMPTS
    reference: bool = True
    reproduce: Callable[[str, str], str] = lambda check, cell: f"ostinato verify --only {check} --cell {cell}"

    def checks(self) -> tuple[Check, ...]:
        return tuple(check for check in CHECKS if not self.only or check.name in self.only)


@dataclass(slots=True)
class _Queue:
    """The cells of one check in one mode, and what came of those that ran."""

    check: Check
    mode: str
    cells: list[CellId]
    done: list[Cell] = field(default_factory=list)
    seconds: float = 0.0
    failed: int = 0
    possible: int = field(init=False)

    def __post_init__(self) -> None:
        self.possible = len(self.cells)
        if self.cells:  # the narrowest that has pads comes first, and says what the others will take
            narrow = min(self.cells, key=lambda cell: (cell.n == cell.bucket, cell.bucket, cell.n))
            self.cells.remove(narrow)
            self.cells.insert(0, narrow)

    def take(self, left: float) -> CellId | None:
        """The next cell, passing over those that would take more than a quarter of the seconds that are left."""
        if self.failed >= MOST_FAILED:
            self.cells.clear()
        rows = sum(cell.bucket + OVERHEAD_ROWS for cell in self.done)
        for at, cell in enumerate(self.cells):
            if not self.done or self.seconds / rows * (cell.bucket + OVERHEAD_ROWS) <= left / 4:
                return self.cells.pop(at)
        self.cells.clear()
        return None


Progress = Callable[[str, int, float], None]
"""Called after each cell: (title of its check, cells that failed so far, share of the run that is over)."""


class Run:
    """A verification of one engine, made with `program()`; `results` when it has run."""

    def __init__(self, engine: Engine, plan: Plan) -> None:
        self._engine, self._plan = engine, plan
        self._encoder = msgspec.msgpack.Encoder()
        self._answers = msgspec.msgpack.Decoder(Answer)
        facts = self._ask(Ask("begin", plan.seed))[0].facts
        assert facts is not None
        self.facts: Facts = facts
        self.broken = ""
        self._reference: CheckResult | None = None
        only = None if plan.cell is None else CellId.parse(plan.cell, facts.modes)
        if only is not None and only.bucket > max(facts.modes[only.mode], default=0):
            raise ConfigError(
                f"cell {only} is wider than the largest bucket, {max(facts.modes[only.mode], default=0)}; "
                "give one that the deployment has"
            )
        self._inject(plan.inject)
        self._queues = [self._queue(check, mode, only) for check in plan.checks() for mode in facts.modes]

    def _inject(self, injection: Injection | None) -> None:
        """Put a fault in, or take out what an earlier run of this engine put in."""
        if injection is None:
            self._ask(Ask("break"))
            return
        fault, engine = injection.fault, self._engine
        layers, ranks = engine.model_config.layers, engine.world.topology.tp
        if injection.rank >= ranks or injection.layer >= len(layers):
            raise ConfigError(
                f"fault {fault.name!r} is for rank {injection.rank}, layer {injection.layer}; this deployment has "
                f"{ranks} ranks and {len(layers)} layers"
            )
        if fault.needs == "experts" and not layers[injection.layer].sparse:
            raise ConfigError(
                f"fault {fault.name!r} is about experts, layer {injection.layer} has none; name another"
            )
        if fault.needs == "groups" and self.facts.groups == 1:
            raise ConfigError(
                f"fault {fault.name!r} needs data-parallel groups that depend on each other; give --dp"
            )
        self._ask(Ask("break", fault=fault.name, rank=injection.rank, layer=injection.layer))

    def _queue(self, check: Check, mode: str, only: CellId | None) -> _Queue:
        facts, seed = self.facts, self._plan.seed
        if check.never(facts) or (only is not None and only.mode != mode):
            return _Queue(check, mode, [])
        if only is not None:
            return _Queue(check, mode, [only] if check.takes(only, facts) else [])
        cells = ordered(
            mode, facts.modes[mode], facts.most[mode], seed, lambda cell: check.takes(cell, facts)
        )
        return _Queue(check, mode, cells)

    def cells(self, progress: Progress) -> None:
        """Run cells until the budget is spent; every queue gets one at least."""
        started = time.monotonic()
        failed = 0
        while not self.broken:
            spent = time.monotonic() - started
            left = self._plan.budget - spent
            waiting = [q for q in self._queues if q.cells and (left > 0 or not q.done)]
            if not waiting:
                return
            queue = min(waiting, key=lambda q: q.seconds)
            taken = queue.take(left)
            if taken is None:
                continue
            before = time.monotonic()
            cell = self._cell(queue, taken)
            queue.seconds += time.monotonic() - before
            queue.done.append(cell)
            queue.failed += not cell.passed
            failed += not cell.passed
            over = sum(len(q.done) for q in self._queues) / max(sum(q.possible for q in self._queues), 1)
            progress(queue.check.title, failed, min(max(over, spent / max(self._plan.budget, 1e-9)), 1.0))

    def _cell(self, queue: _Queue, cell: CellId) -> Cell:
        name = queue.check.name
        ask = Ask("cell", self._plan.seed, name, cell.mode, cell.bucket, cell.n)
        try:
            answers = self._ask(ask)
            found = [answer.found for answer in answers]
            if any(found) and queue.failed < MOST_LOCATED:
                closer = [answer.found for answer in self._ask(msgspec.structs.replace(ask, op="locate"))]
                found = closer if any(closer) else found
            checks = sum(answer.checks for answer in answers)
        except OstinatoError as error:
            self.broken = str(error)
            named = re.search(r"rank (\d+)", self.broken)  # the watchdog's word for who is missing
            silent: list[list[Found]] = [[] for _ in range(int(named[1]) if named else 0)]
            found, checks = [*silent, [Found(f"a rank failed: {error}")]], 1
        findings = tuple(self._findings(queue.check, cell, found))
        return Cell(cell.mode, cell.bucket, cell.n, checks, findings)

    def _findings(self, check: Check, cell: CellId, found: Sequence[Sequence[Found]]) -> Iterator[Finding]:
        reproduce = self._plan.reproduce(check.name, str(cell))
        for rank, ours in enumerate(found):
            for one in ours:
                place = Place(check.name, cell.mode, cell.bucket, cell.n, rank, one.layer, one.slot, one.row)
                yield Finding(place, one.what, one.max_abs, reproduce)

    def _ask(self, ask: Ask) -> list[Answer]:
        return [self._answers.decode(answer) for answer in self._engine.call(self._encoder.encode(ask))]

    def compare(self) -> None:
        """Compare prompts with transformers, on every rank."""
        plan, started = self._plan, time.monotonic()
        if self.broken or plan.cell is not None or (plan.only and REFERENCE not in plan.only):
            return
        reason: str = "" if plan.reference else "it was switched off"
        asked = reason or ask_transformers(self._engine, plan.prompts, self.facts.prompt_rows)
        cells, notes = [], []
        for prompt in asked if not isinstance(asked, str) else ():
            try:
                answers = self._ask(Ask("prompt", prompt=prompt))
            except OstinatoError as error:
                self.broken = str(error)
                break
            place = Place(REFERENCE, "prompt", 0, len(prompt.ids))
            findings = tuple(
                Finding(replace(place, rank=rank, layer=one.layer, row=one.row), one.what, one.max_abs, again)
                for again in (plan.reproduce(REFERENCE, ""),)
                for rank, answer in enumerate(answers)
                for one in answer.found
            )
            cells.append(Cell("prompt", place.bucket, place.n, sum(a.checks for a in answers), findings))
            notes.append(max(answer.distance for answer in answers))
        prompts = [] if isinstance(asked, str) else asked
        most = max((prompt.tolerance(self._engine.model_config.dtype) for prompt in prompts), default=0.0)
        own = max((prompt.own for prompt in prompts), default=0.0)
        said = f"log-probabilities are at most {max(notes, default=0.0):.2g} away; up to {most:.2g} passes"
        said += f" (transformers in this dtype is {own:.2g} away from itself in fp32)" if own else ""
        self._reference = CheckResult(
            REFERENCE,
            "Reference",
            "Next tokens and log-probabilities are those of transformers in fp32, within the dtype's tolerance.",
            tuple(cells),
            len(cells),
            time.monotonic() - started,
            asked if isinstance(asked, str) else "",
            (said,) if cells else (),
        )

    def results(self) -> tuple[CheckResult, ...]:
        """Every check that the plan asks for, those that could not run included."""
        found = tuple(self._result(check) for check in self._plan.checks())
        return found if self._reference is None else (*found, self._reference)

    def _result(self, check: Check) -> CheckResult:
        queues = [q for q in self._queues if q.check is check]
        done = tuple(cell for q in queues for cell in q.done)
        possible = sum(q.possible for q in queues)
        skipped = check.never(self.facts)
        if not skipped and not possible:
            skipped = "it has nothing to say of this cell" if self._plan.cell else "no cell is one of its"
        elif not skipped and not done:
            skipped = f"the run ended before: {self.broken}"
        notes = []
        if done and len(done) < possible:
            notes.append(
                f"not all cells: n = 1, B//2+1, B-1 and B of every bucket B, then others by seed {self._plan.seed}, "
                f"as far as {self._plan.budget:g} s went"
            )
        if any(q.failed >= MOST_FAILED for q in queues):
            notes.append(f"left after {MOST_FAILED} failing cells of a mode")
        seconds = sum(q.seconds for q in queues)
        return CheckResult(
            check.name, check.title, check.promise, done, possible, seconds, skipped, tuple(notes)
        )


def known_checks(names: Sequence[str]) -> tuple[str, ...]:
    """The names as they are; raises ConfigError for one that is no check."""
    every = [*(check.name for check in CHECKS), REFERENCE]
    for name in names:
        if name not in every:
            raise ConfigError(f"there is no check {name!r}; choose among {', '.join(every)}")
    return tuple(names)
