"""Engines to play on, watched where the worker hands its logits over, and what each request is given alone.

Engines are made and driven through `LLM`; the one seam below it is `Worker.execute`, whose results are copied bit
by bit as they pass. A `Stage` holds the engines of one subject and closes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import Any

import torch

from ostinato import LLM
from ostinato.engine.admission import NewTokenRatio
from ostinato.padding import Buckets

from .paths import Subject
from .report import Answer, Rows, compare
from .score import CONTEXT, ENSEMBLE, Part


@dataclass(frozen=True, slots=True)
class Setting:
    """How an engine is set up, in what may not change a bit. Chunks in pages, 0 for whole prompts.

    `hopeful`: admission reserves nothing for the growth of answers, so that memory runs short all the time.
    `shared`: played on an engine that other settings use too. What an engine reads anew at each step (limits, lists of
    buckets) is changed between performances, so its graphs are captured once for all of them.
    """

    graph: str = "eager"
    chunk_pages: int = 0
    mixed: bool = False
    capture: str = "lazy"
    decode_buckets: tuple[int, ...] | None = None
    prefill_buckets: tuple[int, ...] | None = None
    exact_buckets: bool = False
    caching: bool = True
    max_running: int = ENSEMBLE
    max_prefill_tokens: int = 4096
    kv_tokens: int = 16384
    threads: int = 1
    hopeful: bool = False
    shared: bool = False

    @property
    def built(self) -> Setting:
        """What its engine is made with."""
        if not self.shared:
            return self
        kept = {
            name: getattr(self, name)
            for name in ("graph", "capture", "caching", "kv_tokens", "threads", "hopeful")
        }
        return Setting(**kept, shared=True)

    def __str__(self) -> str:
        default = Setting()
        changed = [
            f"{k}={getattr(self, k)}" for k in self.__slots__ if getattr(self, k) != getattr(default, k)
        ]
        return ", ".join(changed) or "plain"

    def options(self, page: int) -> dict[str, Any]:
        return {
            "graph": self.graph,
            "chunked_prefill_size": self.chunk_pages * page,
            "mixed_prefill": self.mixed,
            "capture": self.capture,
            "decode_buckets": self.decode_buckets,
            "prefill_buckets": self.prefill_buckets,
            "disable_padding": self.exact_buckets,
            "enable_prefix_caching": self.caching,
            "max_running_requests": self.max_running,
            "max_prefill_tokens": self.max_prefill_tokens,
            "num_pages": self.kv_tokens // page + 1,
            "threads": self.threads,
        }


ALONE = Setting(caching=False, max_running=1)
"""The truth: eager, whole prompts, nothing cached, nobody else."""


ALL = 10**6


@dataclass(slots=True)
class Player:
    """An engine, and the logits of whatever it is asked to play."""

    llm: LLM
    setting: Setting
    page: int
    _seen: dict[str, Rows] = field(default_factory=dict)
    _rules: Any = None
    performances: int = 0

    def __post_init__(self) -> None:
        worker: Any = self.llm.engine.worker
        self._rules = worker.rules
        execute = worker.execute

        def watched(plan: Any, prompt_logits: Callable[..., None]) -> Any:
            def watched_prompt(sequence: Any, first: int, logits: torch.Tensor) -> None:
                self._see(sequence, first + 1, logits.clone().unbind())
                prompt_logits(sequence, first, logits)

            result = execute(plan, watched_prompt)
            copied = result.logits[: len(result.sampling)].clone().unbind()
            for row, logits in zip(result.sampling, copied, strict=True):
                self._see(row.sequence, row.start + row.num_tokens, (logits,))
            return result

        worker.execute = watched

    def retune(self, setting: Setting) -> None:
        """Go on in another setting that shares this engine. Graphs of buckets that are not in its lists wait."""
        assert setting.built == self.setting
        worker: Any = self.llm.engine.worker
        scheduler: Any = self.llm.engine.scheduler
        lists = {"decode": setting.decode_buckets, "extend": setting.prefill_buckets}
        rules = replace(self._rules, **{k: Buckets(v) for k, v in lists.items() if v is not None})
        worker.rules, worker.coordinator = rules, replace(worker.coordinator, rules=rules)
        scheduler.options = replace(
            scheduler.options,
            chunked_prefill_size=setting.chunk_pages * self.page or None,
            mixed_prefill=setting.mixed,
            max_running_requests=setting.max_running,
            max_prefill_tokens=setting.max_prefill_tokens,
        )
        scheduler._takes_turns = scheduler.options.fair and not setting.mixed

    def _see(self, sequence: Any, first: int, rows: Iterable[torch.Tensor]) -> None:
        self._seen.setdefault(sequence.request.request_id, {}).update(enumerate(rows, start=first))

    def play(
        self, parts: Iterable[Part], *, arrivals: Sequence[int] = (ALL,), warm: str = ""
    ) -> dict[str, Answer]:
        """All requests, so many arriving before each step; the last of `arrivals` goes on (and is one at least).

        `warm`: a name; performances of the same name share cached prefixes, others none.
        """
        engine, waiting = self.llm.engine, list(parts)
        coming = chain(arrivals, repeat(max(arrivals[-1], 1)))
        namespace = warm or f"cold {self.performances}"
        self.performances += 1
        self._seen.clear()
        answers: dict[str, Answer] = {}
        while waiting or engine.has_work:
            now = next(coming)
            for part in waiting[:now]:
                engine.submit(part.prompt, part.params, request_id=part.name, extra_key=namespace)
            del waiting[:now]
            for output in engine.step():
                if output.finished:
                    (completion,) = output.outputs
                    assert completion.finish_reason == "length", output
                    answers[output.request_id] = Answer(
                        len(output.prompt_token_ids),
                        self._seen.pop(output.request_id),
                        completion.token_ids,
                        completion.text,
                        output.num_cached_tokens,
                    )
        engine.scheduler.check_leaks()
        return answers

    def count(self, name: str) -> int:
        """A count of the scheduler's, such as "retractions"."""
        return int(self.llm.stats()["scheduler"].get(name, 0))

    def on_graph(self, kind: str) -> int:
        """Steps of decode or prefill that ran on a graph, or made one."""
        return self.graph(kind, "replays") + self.graph(kind, "captures")

    def graph(self, kind: str, name: str) -> int:
        """A count of the decode or prefill graphs, such as "replays"."""
        return int(self.llm.stats()["graph"][kind][name])


class Stage:
    """The engines of one subject; `tamper` is called with each new one."""

    def __init__(
        self, subject: Subject, *, context: int = CONTEXT, tamper: Callable[[LLM], None] | None = None
    ) -> None:
        self.subject = subject
        self.context = context
        self._tamper = tamper
        self._players: dict[Setting, Player] = {}
        self._alone: dict[str, Answer] = {}
        self.vocab = self.player(ALONE).llm.engine.model_config.vocab_size

    def player(self, setting: Setting) -> Player:
        """The engine of a setting, made when first asked for."""
        if setting.built not in self._players:
            self._players[setting.built] = self._made(setting.built)
        player = self._players[setting.built]
        if setting.shared:
            player.retune(setting)
        return player

    def _made(self, setting: Setting) -> Player:
        path = self.subject.path
        model = None if self.subject.model is None else str(self.subject.model)
        options = {**path.options, **setting.options(path.page)}
        llm = LLM(model, context_length=self.context, progress=False, **options)
        if setting.hopeful:
            llm.engine.scheduler.ratio = NewTokenRatio(conservativeness=0.0)
        if self._tamper is not None:
            self._tamper(llm)
        return Player(llm, setting, path.page)

    def alone(self, parts: Sequence[Part]) -> dict[str, Answer]:
        """What each request is given by itself; computed once."""
        for part in parts:
            if part.name not in self._alone:
                self._alone |= self.player(ALONE).play([part])
        return {part.name: self._alone[part.name] for part in parts}

    def check(self, axis: str, setting: Setting, parts: Sequence[Part], got: dict[str, Answer]) -> None:
        """Raise NotExactError unless `got` is what these requests are given alone."""
        assert got.keys() == {part.name for part in parts}
        compare(f"{self.subject}, {axis} [{setting}]", self.alone(parts), got)

    def forget(self, setting: Setting) -> None:
        """Close the engine of a setting; the truth stays."""
        player = self._players.pop(setting.built, None)
        if player is not None:
            player.llm.close()

    def close(self) -> None:
        for player in self._players.values():
            player.llm.close()
        self._players.clear()
