"""What every rank runs: a stage for its engine, and one check in one cell each time rank 0 asks.

    Ask ──all ranks──▶ Stage ─▶ Check.run ─▶ Answer ──▶ rank 0

Run as `python -m ostinato.verify.rank` by the processes of ranks 1 and up. Knows nothing of budgets or reports.
Invariant: an `Ask` is all that decides what runs, so ranks run the same.
"""

from __future__ import annotations

from typing import Literal
from weakref import WeakKeyDictionary

import msgspec
import torch

from ostinato.engine.engine import Engine
from ostinato.engine.program import RankProgram
from ostinato.errors import OstinatoError
from ostinato.verify.cells import CellId
from ostinato.verify.checks import Facts, check_named
from ostinato.verify.faults import fault_named
from ostinato.verify.outcome import Found
from ostinato.verify.reference import Prompt, compare
from ostinato.verify.seam import Seam
from ostinato.verify.stage import Stage

RANK_MODULE = "ostinato.verify.rank"


class Ask(msgspec.Struct, frozen=True):
    """begin: make the stage. break: put `fault` into one rank, in place of any other. cell: run `check` in a cell.
    locate: the same, with every layer watched. prompt: compare with what transformers made of it.
    """

    op: Literal["begin", "break", "cell", "locate", "prompt"]
    seed: int = 0
    check: str = ""
    mode: str = ""
    bucket: int = 0
    n: int = 0
    fault: str = ""
    rank: int = 0
    layer: int = 0
    prompt: Prompt | None = None


class Answer(msgspec.Struct, frozen=True):
    """facts: after a begin. checks, found: after a cell or a prompt. distance: from transformers, after a prompt."""

    facts: Facts | None = None
    checks: int = 0
    found: list[Found] = []
    distance: float = 0.0


def program() -> RankProgram:
    """The program for engines to verify."""
    return RankProgram(_Verifier().run, RANK_MODULE)


class _Verifier:
    def __init__(self) -> None:
        self._stages: WeakKeyDictionary[Engine, Stage] = WeakKeyDictionary()
        self._seams: WeakKeyDictionary[Engine, Seam] = WeakKeyDictionary()
        self._asks = msgspec.msgpack.Decoder(Ask)

    def run(self, engine: Engine, message: bytes) -> bytes:
        """Carry out one `Ask`."""
        ask = self._asks.decode(message)
        with torch.no_grad():
            answer = self._answer(engine, ask)
        return msgspec.msgpack.encode(answer)

    def _answer(self, engine: Engine, ask: Ask) -> Answer:
        if ask.op == "begin":
            return self._begin(engine, ask)
        if ask.op == "break":
            return self._break(engine, ask)
        if ask.prompt is not None:
            out, distance = compare(self._stages[engine], ask.prompt)
            return Answer(checks=out.checks, found=list(out.found.values()), distance=distance)
        return self._cell(engine, ask)

    def _begin(self, engine: Engine, ask: Ask) -> Answer:
        stage = self._stages.get(engine)
        if stage is None:
            stage = self._stages[engine] = Stage(engine, ask.seed)
        stage.seed = ask.seed
        modes, requests = stage.modes, stage.requests
        suffix = min(requests.capacity, stage.worker.options.max_num_tokens) - requests.shared
        return Answer(
            Facts(
                {mode: stage.buckets(mode) for mode in modes},
                {mode: stage.most(mode) for mode in modes},
                {mode: stage.captures(mode) for mode in modes},
                min(requests.capacity, stage.worker.options.max_num_tokens),
                stage.groups,
                suffix if requests.shared else 0,
            )
        )

    def _break(self, engine: Engine, ask: Ask) -> Answer:
        seam = self._seams.pop(engine, None)
        if seam is not None:
            seam.undo()
        stage = self._stages[engine]
        stage.recover()
        if ask.fault and ask.rank == stage.rank:
            seam = self._seams[engine] = Seam(stage)
            fault_named(ask.fault).put(seam, ask.layer)
        stage.cache_contexts()  # a build that is broken has computed them, too
        return Answer()

    def _cell(self, engine: Engine, ask: Ask) -> Answer:
        stage, cell = self._stages[engine], CellId(ask.mode, ask.bucket, ask.n)
        check = check_named(ask.check)
        try:
            if ask.op == "locate":
                with stage.tapped(max(ask.bucket, stage.requests.capacity)):
                    out = check.run(stage, cell)
            else:
                out = check.run(stage, cell)
        except OstinatoError as error:
            if engine.world.topology.tp > 1:
                raise  # the others may wait for this rank within a step: the engine has to end
            stage.recover()
            return Answer(checks=1, found=[Found(f"the step raised {type(error).__name__}: {error}")])
        return Answer(checks=out.checks, found=list(out.found.values()))
