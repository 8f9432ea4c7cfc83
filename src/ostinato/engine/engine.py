"""The engine: requests in, outputs out, one step at a time.

    submit ─▶ scheduler ─▶ worker ─▶ sampler ─▶ scheduler.commit ─▶ output streams ─▶ RequestOutput

Single-threaded: `submit`, `step` and `abort` are called from one thread, and Ctrl-C waits for their end. Invariant:
whatever a step raises, no page and no request is lost; the requests of that step end with reason "error" and the engine
goes on.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as TokenIds
from itertools import count
from typing import Any

import torch

from ostinato.config import EngineConfig
from ostinato.engine.choosing import choose
from ostinato.engine.delta import SequenceDelta
from ostinato.engine.interrupts import delayed_interrupts
from ostinato.engine.launch import launch
from ostinato.engine.live import LiveRequest
from ostinato.engine.output import OutputStream
from ostinato.engine.plan import StepPlan
from ostinato.engine.program import RankProgram
from ostinato.engine.progress import Report
from ostinato.engine.request import (
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    as_token_ids,
    check_text,
)
from ostinato.engine.sampler import needs_history, rule_of, score
from ostinato.engine.sequence import Sequence, SequenceState
from ostinato.errors import RequestError
from ostinato.ops.choice import mix64
from ostinato.parallel.rendezvous import World, single_world
from ostinato.text.chat import ChatTemplate
from ostinato.text.grammar import Grammar, Grammars, Matcher
from ostinato.text.stop import StopSet
from ostinato.text.tokenizer import Tokenizer, stop_token_ids


class Engine:
    """One model, served step by step. Raises ConfigError or ModelError when it cannot be launched.

    world: this rank's place among several that run one model together; all of them step together then. program: what
    `call` runs.
    """

    def __init__(
        self,
        config: EngineConfig,
        report: Report,
        world: World | None = None,
        program: RankProgram | None = None,
    ) -> None:
        self.config = config
        self.program = program
        self.world = world or single_world()
        parts = launch(config, report, self.world)
        self.directory = parts.directory
        self.model_config = parts.model_config
        self.worker = parts.worker
        self.scheduler = parts.scheduler
        self._parts = parts
        self.tokenizer = Tokenizer.from_dir(parts.directory)
        self.chat_template: ChatTemplate = self.tokenizer.chat_template
        ends = stop_token_ids(parts.directory, self.tokenizer) | frozenset(self.model_config.eos_token_ids)
        # What has no logit is never chosen: it ends nothing, and there is nothing to keep back before `min_tokens`.
        self.stop_token_ids = frozenset(token for token in ends if token < self.model_config.vocab_size)
        self.grammars = Grammars(self.tokenizer, self.model_config.vocab_size, self.stop_token_ids)
        self._live: dict[str, LiveRequest] = {}
        self._touched: dict[str, LiveRequest] = {}  # those with news that nobody has taken
        self._arrivals = count()
        self._names = count()
        self._tokens = {"prompt": 0, "generated": 0}
        self.digest = 0  # of all tokens chosen so far, by which ranks that share requests are compared
        self._digests = self.world.topology.attn_tp > 1

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
        """Queue a prompt (text or token ids); returns its id. Raises RequestError for what can never be served."""
        request = self.checked(prompt, params, request_id, priority, extra_key, add_special_tokens)
        with delayed_interrupts():
            self.enqueue(request)
        return request.request_id

    def checked(
        self,
        prompt: str | TokenIds[int],
        params: SamplingParams,
        request_id: str | None,
        priority: int,
        extra_key: str,
        add_special_tokens: bool,
    ) -> Request:
        """The request as `submit` would queue it, or RequestError."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling parameters must be SamplingParams, got {params!r}")
        name = self._new_name() if request_id is None else request_id
        if self.is_live(name):
            raise RequestError(f"request id {name!r} is in use; choose another")
        text = prompt if isinstance(prompt, str) else None
        ids = self._prompt_ids(prompt, add_special_tokens)
        self._check_token_ids("logit_bias", params.logit_bias or ())
        self._check_token_ids("stop_token_ids", params.stop_token_ids)
        self.scheduler.limits.clamp(len(ids), params.max_tokens)
        if params.form is not None:
            self.grammars.compile(params.form)  # kept for `enqueue`
        return Request(name, ids, params, text, priority, extra_key)

    def _new_name(self) -> str:
        """One that no request has, whatever names callers chose."""
        return next(name for i in self._names if not self.is_live(name := f"request-{i}"))

    def enqueue(self, request: Request) -> None:
        """Queue what `checked` made, here or on another rank."""
        params, ids = request.params, request.prompt_token_ids
        grammar = None if params.form is None else self.grammars.compile(params.form)
        limit = self.scheduler.limits.clamp(len(ids), params.max_tokens)
        sequences = self._sequences(request, limit, grammar)
        stops = StopSet(params.stop_strings)
        streams = [OutputStream(s.index, params, stops, self.tokenizer, ids) for s in sequences]
        live = LiveRequest(request, sequences, streams)
        if params.prompt_logprobs is not None:
            live.prompt_logprobs = [None] * len(ids)
        self._live[request.request_id] = live
        for sequence in sequences:
            self.scheduler.submit(sequence)
        self._tokens["prompt"] += len(ids)

    def _prompt_ids(self, prompt: str | TokenIds[int], add_special_tokens: bool) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError("the prompt is empty; give some text")
            check_text(prompt)
            ids = tuple(self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens))
            self._check_encoded(ids)
        else:
            ids = as_token_ids(prompt)
            self._check_token_ids("the prompt", ids)
        if not ids:
            raise RequestError("the prompt has no tokens; give at least one")
        return ids

    def _check_encoded(self, ids: tuple[int, ...]) -> None:
        """A tokenizer may know more tokens than the embedding has rows, and past its end lies foreign memory."""
        last = max(ids, default=0)
        if last >= self.model_config.vocab_size:
            raise RequestError(
                f"the prompt has the token {self.tokenizer.token(last)!r}, whose id {last} is past the model's "
                f"vocabulary of {self.model_config.vocab_size}; leave it out, or take the tokenizer of these weights"
            )

    def _check_token_ids(self, what: str, ids: Iterable[object]) -> None:
        size = self.model_config.vocab_size
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < size:
                raise RequestError(
                    f"{what} holds {token!r}, token ids of this model are whole numbers from 0 to {size - 1}"
                )

    def _sequences(self, request: Request, limit: int, grammar: Grammar | None) -> list[Sequence]:
        params = request.params
        seed = self.config.seed if params.seed is None else params.seed
        stops = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stops |= self.stop_token_ids
        by_step = grammar is None and not needs_history(params)
        sequences: list[Sequence] = []
        for index in range(params.n):
            sequence = Sequence(
                request,
                index,
                next(self._arrivals),
                seed if index == 0 else mix64(seed, index),
                self.config.page_size,
                limit,
                stops,
                leader=sequences[0] if sequences else None,
                rule=rule_of(params),
                by_step=by_step,
                bare=by_step and params.logprobs is None,
                matcher=None if grammar is None else grammar.matcher(),
            )
            sequences.append(sequence)
        return sequences

    # ---- steps ----

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def replay_seconds(self) -> float:
        """Seconds spent within replays of decode steps so far; the rest of a step is the engine's own."""
        return self.worker.decode.stats.replay_s

    def is_live(self, request_id: str) -> bool:
        """Whether a request is here, its last output not handed out yet."""
        return request_id in self._live

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the new state of every request that it changed.

        When it raises, the requests of the step have ended with reason "error"; the next call returns them.
        """
        with delayed_interrupts():
            self._advance()
        return self._collect()

    def step_deltas(self) -> list[SequenceDelta]:
        """Run one step as `step` does; returns only what it added. Give a request to one of the two, not to both."""
        with delayed_interrupts():
            self._advance()
        return self._collect_deltas()

    def _advance(self) -> None:
        plan = self._parts.schedule()
        if self.scheduler.failed:
            for sequence in self.scheduler.take_failed():
                self._end(sequence)
        if plan is None:
            self.worker.idle()  # other ranks may have something to run, and need this one
        else:
            try:
                self._run(plan)
            except BaseException:  # a second interrupt, too, leaves rows half computed
                for row in plan.rows:
                    self._finish_request(row.sequence.request.request_id, "error")
                raise
        if self.worker.checks.on and self.worker.checks.take_wrong():
            self.scheduler.recompute()

    def _run(self, plan: StepPlan) -> None:
        result = self.worker.execute(plan, self._take_prompt_logits)
        chosen, more = choose(result, self.worker)
        ended = self.scheduler.commit(plan, chosen)
        for sequence, token in chosen.items():
            name = sequence.request.request_id
            live = self._touched[name] = self._live[name]
            sampled = more.get(sequence) if more else None
            at_stop = sequence.finish_reason == "stop"
            if live.streams[sequence.index].push(token, sampled, ends_sequence=at_stop):
                self.scheduler.finish(sequence, "stop")
                self._end(sequence)
            if sequence.matcher is not None:
                self._follow(sequence, sequence.matcher)
        for sequence in ended:
            self._end(sequence)
        self._tokens["generated"] += len(chosen)
        if self._digests:
            self.digest = zlib.crc32(array("q", chosen.values()).tobytes(), self.digest)

    def _follow(self, sequence: Sequence, matcher: Matcher) -> None:
        """End a sequence whose form is complete."""
        if sequence.state is not SequenceState.FINISHED and matcher.finished:
            self.scheduler.finish(sequence, "stop")
            self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        name = sequence.request.request_id
        live = self._touched[name] = self._live[name]
        assert sequence.finish_reason is not None
        live.streams[sequence.index].finish(sequence.finish_reason, sequence.stop_reason)

    def _take_prompt_logits(self, sequence: Sequence, first: int, logits: torch.Tensor) -> None:
        """Log-probabilities of the prompt tokens that follow positions first, first + 1, ..."""
        request = sequence.request
        found = self._live[request.request_id].prompt_logprobs
        assert found is not None
        assert request.params.prompt_logprobs is not None
        tokens = request.prompt_token_ids[first + 1 : first + 1 + logits.shape[0]]
        rows = score(logits[: len(tokens)], tokens, request.params.prompt_logprobs)
        found[first + 1 : first + 1 + len(tokens)] = rows

    def _collect(self) -> list[RequestOutput]:
        outputs = []
        touched, self._touched = self._touched, {}
        for name, live in touched.items():
            output = live.output()
            outputs.append(output)
            if output.finished:
                del self._live[name]
        return outputs

    def _collect_deltas(self) -> list[SequenceDelta]:
        deltas: list[SequenceDelta] = []
        touched, self._touched = self._touched, {}
        for name, live in touched.items():
            news = live.deltas()
            if news and news[-1].done:
                del self._live[name]
            deltas += news
        return deltas

    def call(self, message: bytes) -> list[bytes]:
        """Run the program that the engine was made with on `message`, on all ranks; their answers, by rank."""
        return [self.run_program(message)]

    def run_program(self, message: bytes) -> bytes:
        """This rank's part of `call`."""
        assert self.program is not None, "the engine was made without a program"
        return self.program.run(self, message)

    # ---- ends ----

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; its pages are free when this returns. None when it is not (or no longer) there."""
        live = self._live.get(request_id)
        if live is None:
            return None
        with delayed_interrupts():
            self._finish_request(request_id, "abort")
            del self._live[request_id], self._touched[request_id]
        return live.output()

    def _finish_request(self, request_id: str, reason: FinishReason) -> None:
        live = self._live.get(request_id)
        if live is None:
            return
        self._touched[request_id] = live
        for sequence, stream in zip(live.sequences, live.streams, strict=True):
            self.scheduler.finish(sequence, reason)
            # Not by the sequence's own reason: a step that failed between the two has kept the last token from us.
            stream.finish(reason, None)

    def check(self) -> None:
        """Raise ParallelError when a rank that shares the model has failed; for those who wait for requests."""

    def close(self) -> None:
        """Give back what other processes hold for this engine; it cannot step afterwards."""
        self.world.close()

    def expert_rows(self) -> dict[str, int]:
        """Rows that this rank's experts computed, and that came home to it; counted where ranks exchange rows."""
        load = self.worker.load
        return {} if load is None else load.rows.as_dict()

    def stats(self) -> dict[str, Any]:
        """Plain values: model, tokens, scheduler, graph accounting, expert load."""
        model, size = self.model_config, self.worker.model.ops.packed_size
        return {
            "model": {
                "family": model.family.name,
                "layers": model.num_layers,
                "hidden_size": model.hidden_size,
                "experts": None if model.moe is None else model.moe.num_experts,
                "dtype": str(model.dtype).removeprefix("torch."),
            },
            "backend": self.worker.decode.backend.name,
            "ops": self.worker.model.ops.name,
            "weights": None if size is None else {"stored_bytes": size.stored, "uncoded_bytes": size.uncoded},
            "threads": torch.get_num_threads(),
            "tokens": dict(self._tokens),
            "scheduler": self.scheduler.as_dict(),
            "prefill_delay": self._parts.prefill_delays(),
            **self.worker.stats(),
        }
