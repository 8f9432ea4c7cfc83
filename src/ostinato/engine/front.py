"""The engine of a parallel run as its user sees it: rank 0, which leads the others round by round.

    submit ─▶ checked here ─▶ router ─▶ the next round ─▶ engines of one data-parallel group, each on all its ranks
    step   ─▶ one round: every rank steps once ─▶ own news and those of the other leaders

Knows nothing of what ranks compute. Invariant: ranks that share requests get the same ones in the same order, so their
schedulers and samplers, which are deterministic, never differ; once a rank has failed nothing is asked of any.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence as TokenIds
from typing import Any, Literal

import torch
from torch.distributed.rendezvous import rendezvous

from ostinato.config import EngineConfig, LaunchedRank, launched_rank
from ostinato.engine.delta import SequenceDelta
from ostinato.engine.engine import Engine
from ostinato.engine.interrupts import delayed_interrupts
from ostinato.engine.launch import locate_model
from ostinato.engine.layout import check_layout
from ostinato.engine.load_reports import LoadReports
from ostinato.engine.program import RANK_MODULE, RankProgram
from ostinato.engine.progress import Report
from ostinato.engine.rank import run_rank
from ostinato.engine.ranks import LOCALHOST, RankProcesses, meet, own_threads
from ostinato.engine.remote import RemoteRequest
from ostinato.engine.request import Request, RequestOutput, SamplingParams
from ostinato.engine.rounds import Courier, News, Round, Submit, accepted, params_as_dict
from ostinato.engine.router import Router
from ostinato.errors import ConfigError, OstinatoError, ParallelError
from ostinato.models.config import read_config
from ostinato.parallel.rendezvous import World, join
from ostinato.parallel.topology import Topology
from ostinato.parallel.watchdog import Watchdog


def open_engine(config: EngineConfig, report: Report, program: RankProgram | None = None) -> Engine:
    """The engine that `config` asks for: in this process alone, or over several. Close it when it is done with.

    program: what `Engine.call` runs, on all ranks.

    Under torchrun its processes are the ranks: on rank 0 this returns, on the others it serves rank 0 and then ends the
    process (SystemExit). Raises ConfigError for a layout that cannot be, ModelError for a checkpoint that cannot be
    loaded in it.
    """
    launched = launched_rank()
    size = config.tp_size if launched is None or config.tp_size is not None else launched.size
    topology = Topology.of(tp=size, dp=config.dp_size, ep=config.ep_size)
    if launched is not None:
        return _open_launched(config, report, topology, launched, program)
    if topology.tp == 1:
        return Engine(config, report, program=program)
    check_layout(config, read_config(locate_model(config.model)), topology)
    shared = config.replace(threads=own_threads(config, topology.tp, os.cpu_count() or 1))
    processes = RankProcesses(topology, shared, RANK_MODULE if program is None else program.module)
    try:
        watchdog = Watchdog(float(config.rank_timeout), processes.check)
        world = meet(topology, processes.store, shared, watchdog)
        end = processes.end  # a call that keeps no engine alive
        world.on_missing(lambda error: end())
        return FrontEngine(shared, report, world, processes, program)
    except OstinatoError as error:
        told = LoadReports(topology, processes.store).merged(error)
        processes.kill()
        raise told from error
    except BaseException:
        processes.kill()
        raise


def _open_launched(
    config: EngineConfig,
    report: Report,
    topology: Topology,
    launched: LaunchedRank,
    program: RankProgram | None,
) -> Engine:
    if topology.tp != launched.size:
        raise ConfigError(
            f"torchrun started {launched.size} ranks, tp is {topology.tp}; start as many, or leave tp out"
        )
    if config.pin_threads and launched.local_size > 1:
        raise ConfigError(
            f"pin_threads would put all {launched.local_size} ranks of this machine on the same cores; leave it out"
        )
    config = config.replace(threads=own_threads(config, launched.local_size, os.cpu_count() or 1))
    store, _, _ = next(rendezvous("env://"))
    watchdog = Watchdog(float(config.rank_timeout))
    local = launched.address in ("127.0.0.1", "localhost", "::1")
    world = join(
        topology.at(launched.rank),
        store,
        watchdog,
        transport=config.transport,
        host=LOCALHOST if local else None,
    )
    reports = LoadReports(world.topology, store)
    if launched.rank:
        raise SystemExit(run_rank(config, world, reports, program))
    try:
        return FrontEngine(config, report, world, program=program)
    except OstinatoError as error:
        raise reports.merged(error) from error


class FrontEngine(Engine):
    """Rank 0. Requests of its own data-parallel group run in the engine that it is, others in those that it leads."""

    def __init__(
        self,
        config: EngineConfig,
        report: Report,
        world: World,
        processes: RankProcesses | None = None,
        program: RankProgram | None = None,
    ) -> None:
        super().__init__(config, report, world, program)
        self._processes = processes
        self._courier = Courier(world.control)
        self.router = Router(world.topology.dp, most=self.worker.options.max_bs)
        self._next = Round("step")
        self._queued: dict[str, Request] = {}  # of the own group, not yet in this engine
        self._remote: dict[str, RemoteRequest] = {}
        self._told: list[dict[str, Any]] = []
        self._expert_rows: list[dict[str, int]] = []
        self._answers: list[bytes] = []
        self._aborted: RequestOutput | None = None
        self._broken: str = ""
        self._round(Round("tell"))  # comes to its end when all ranks are loaded
        world.wait_for(float(config.rank_timeout))

    # ---- intake ----

    def submit(
        self,
        prompt: str | TokenIds[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        extra_key: str = "",
        add_special_tokens: bool = True,
    ) -> str:
        self._check()
        request = self.checked(prompt, params, request_id, priority, extra_key, add_special_tokens)
        name, ids = request.request_id, request.prompt_token_ids
        dp_rank = self.router.route(name, ids, extra_key)
        self._next.submits.append(
            Submit(dp_rank, name, list(ids), params_as_dict(params), priority, extra_key)
        )
        if dp_rank == 0:
            self._queued[name] = request
        else:
            self._remote[name] = RemoteRequest(request)
        return name

    @property
    def has_work(self) -> bool:
        return bool(self._queued or self._remote) or super().has_work

    def is_live(self, request_id: str) -> bool:
        return request_id in self._queued or request_id in self._remote or super().is_live(request_id)

    # ---- steps ----

    def step(self) -> list[RequestOutput]:
        with delayed_interrupts():
            return self._step()

    def _step(self) -> list[RequestOutput]:
        theirs = self._round(self._take_round("step"))
        outputs = self._collect()
        touched: dict[str, RemoteRequest] = {}
        for delta in theirs:
            if delta.request_id in self._remote:  # else it was aborted meanwhile
                touched[delta.request_id] = self._remote[delta.request_id]
                touched[delta.request_id].add(delta)
        outputs += [remote.output() for remote in touched.values()]
        for output in outputs:
            name, generated = output.request_id, sum(len(o.token_ids) for o in output.outputs)
            self.router.hold(name, len(output.prompt_token_ids) + generated)
            if output.finished:
                self._forget(name)
        return outputs

    def step_deltas(self) -> list[SequenceDelta]:
        theirs = self._round(self._take_round("step"))
        deltas = self._collect_deltas()
        deltas += [delta for delta in theirs if delta.request_id in self._remote]
        for delta in deltas:
            name = delta.request_id
            self.router.hold(name, self.router.held(name) + len(delta.token_ids))
            if delta.done:
                self._forget(name)
        return deltas

    def call(self, message: bytes) -> list[bytes]:
        self._round(Round("call", message=message))
        return self._answers

    def _take_round(self, op: Literal["step", "tell"]) -> Round:
        round_, self._next = self._next, Round("step")
        round_.op = op
        return round_

    def _round(self, round_: Round) -> list[SequenceDelta]:
        """Lead one round; the news of the other groups. What they tell goes to `_told`."""
        with delayed_interrupts():
            return self._led(round_)

    def _led(self, round_: Round) -> list[SequenceDelta]:
        self._check()
        try:
            self._courier.lead(round_)
            for submit in accepted(round_.submits, 0):
                self.enqueue(self._queued.pop(submit.request_id))
            for request_id in round_.aborts:
                self._aborted = super().abort(request_id)
            if round_.op == "step":
                self._advance()
            answer = self.run_program(round_.message) if round_.op == "call" else b""
            mine = News(digest=self.digest, answer=answer)
            if round_.op == "tell":
                mine.expert_rows = self.expert_rows()
            news = self._courier.gather(mine)
            self._compare(news)
        except BaseException as error:
            self._give_up(error)
            raise
        self._told = [json.loads(one.stats) for one in news if one.stats]
        self._answers = [one.answer for one in news]
        if round_.op == "tell":
            self._expert_rows = [one.expert_rows for one in news]
        return [delta for one in news for delta in one.deltas]

    def _compare(self, news: list[News]) -> None:
        """Raise ParallelError when ranks that share requests have chosen different tokens."""
        for rank, leader in enumerate(self.world.topology.leader_of_each()):
            if news[rank].digest != news[leader].digest:
                raise ParallelError(
                    f"rank {rank} has chosen other tokens than rank {leader}, which shares its requests; they compute "
                    "differently: run them on CPUs of one kind, with the same kernels"
                )

    # ---- ends ----

    def abort(self, request_id: str) -> RequestOutput | None:
        if not self.is_live(request_id):
            return None
        remote = self._remote.get(request_id)
        queued = self._queued.pop(request_id, None)
        if queued is not None:
            # No rank has heard of it, and none needs to.
            self._next.submits = [s for s in self._next.submits if s.request_id != request_id]
            remote = RemoteRequest(queued)
        last = None if remote is None else remote.end("abort")
        if queued is None:
            if self._broken:
                self._aborted = super().abort(request_id)
            else:
                round_ = self._take_round("tell")
                round_.aborts.append(request_id)
                self._round(round_)
            last = last or self._aborted
        self._forget(request_id)
        return last

    def stats(self) -> dict[str, Any]:
        own = super().stats()
        if not self._broken:
            self._round(self._take_round("tell"))
        return merged_stats([own, *self._told]) | {
            "parallel": {
                **self.world.topology.as_dict(),
                "transport": self.world.transport,
                "router": dict(self.router.counts),
                "kv_tokens": list(self.router.tokens),
                "groups": [one["scheduler"] for one in (own, *self._told)],
                "expert_rows": list(self._expert_rows),
            }
        }

    def close(self) -> None:
        """Stop all ranks and give their memory back."""
        if self._broken == "closed":
            return
        if not self._broken:
            try:
                self._courier.lead(Round("stop"))
            except (
                ParallelError
            ) as error:  # some rank had failed since the last round; it ends with this all the same
                self._give_up(error)
        self._broken = "closed"
        if self._processes is not None:
            self._processes.wait()
        self.world.close()

    def _forget(self, name: str) -> None:
        self.router.finish(name)
        self._remote.pop(name, None)

    def check(self) -> None:
        if self._broken:
            self._check()
        try:
            self.world.check()
            if self._processes is not None:
                self._processes.check()
        except ParallelError as error:
            self._give_up(error)
            raise

    def _check(self) -> None:
        if not self._broken:
            self.check()
        if self._broken:
            raise ParallelError(f"this engine has ended ({self._broken}); make a new one")

    def _give_up(self, error: BaseException) -> None:
        """A round that did not come to its end leaves ranks out of step: there is no next one."""
        self._broken = f"{type(error).__name__}: {error}"
        self.world.fail()
        if self._processes is not None:
            self._processes.kill()


def merged_stats(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Statistics of all data-parallel groups as those of one engine: counts are added, rows among them, the rest is the
    first one's: steps, which groups may take together.
    """
    first = dict(groups[0])
    for key in ("tokens", "scheduler"):
        named = {name: value for one in reversed(groups) for name, value in one[key].items()}
        first[key] = {
            name: sum(one[key].get(name, 0) for one in groups) if isinstance(value, int) else value
            for name, value in named.items()
        }
    # Groups that take their steps together have counted the same checks, others their own.
    first["graph"] = {kind: dict(stats) for kind, stats in first["graph"].items()}
    for kind, stats in first["graph"].items():
        for name in ("checked", "mismatches"):
            stats[name] = max(one["graph"][kind][name] for one in groups)
        for name in ("real_rows", "pad_rows"):
            stats[name] = sum(one["graph"][kind][name] for one in groups)
        stats["keys"] = _with_rows_of_all([one["graph"][kind]["keys"] for one in groups])
        stats["quarantined"] = sorted({key for one in groups for key in one["graph"][kind]["quarantined"]})
    loads = [one["expert_load"] for one in groups]
    if loads[0] is not None:
        first["expert_load"] = torch.tensor(loads).sum(0).tolist()
    return first


def _with_rows_of_all(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Each key as the first group that has it counted it, with the rows of all."""
    named = {key: counts for keys in reversed(groups) for key, counts in keys.items()}
    rows = ("real_rows", "pad_rows")
    return {
        key: counts | {name: sum(keys[key][name] for keys in groups if key in keys) for name in rows}
        for key, counts in sorted(named.items())
    }
