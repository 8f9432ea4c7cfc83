"""`LLM`: the engine for offline use, from a checkpoint to text in a few lines.

Drives one `Engine` to completion for each call; calls of several threads take turns at its steps, which serve them all.
Knows nothing of the command line or of HTTP. Invariant: when a call ends, however it ends, its requests are gone and
their pages free.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from collections.abc import Sequence as TokenIds
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from msgspec.structs import replace as replace_fields

from ostinato.config import EngineConfig
from ostinato.engine.engine import Engine
from ostinato.engine.front import open_engine
from ostinato.engine.interrupts import delayed_interrupts
from ostinato.engine.progress import bars
from ostinato.engine.remote import RemoteRequest
from ostinato.engine.request import RequestOutput, SamplingParams
from ostinato.errors import ConfigError, ModelError, RequestError
from ostinato.models.config import recommended_sampling
from ostinato.text.tokenizer import Tokenizer

Prompt = str | TokenIds[int]
Params = SamplingParams | TokenIds[SamplingParams] | None
Messages = TokenIds[Mapping[str, Any]]


class LLM:
    """A loaded model that completes prompts.

    model: checkpoint directory, hub id or fetched model; the bundled demo MoE by default. config: all options at once,
    instead of model and options. options: fields of `EngineConfig`. Raises ConfigError or ModelError.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        config: EngineConfig | None = None,
        **options: Any,
    ) -> None:
        if config is not None and (model is not None or options):
            raise ConfigError("give either config or model and options, not both")
        name = os.fspath(model) if isinstance(model, os.PathLike) else model
        self.config = config or EngineConfig.of(model=name, **options)
        self._engine: Engine | None = None
        # Outputs that wait for their reader: several streams, and calls between them, share the engine's steps.
        self._mail: dict[str, list[RequestOutput]] = {}
        # Held by whoever touches the engine or the mail.
        self._turn = threading.RLock()
        self._within = (
            False  # the engine, which nothing else may enter then: not even a stream that is collected
        )
        self._dropped: list[
            str
        ] = []  # requests that nobody waits for, to be ended as soon as the engine may be entered
        with bars(shown=self.config.progress) as report:
            self._engine = open_engine(self.config, report)

    @property
    def engine(self) -> Engine:
        """The engine below, for step-by-step use. Raises ConfigError after `close`."""
        if self._engine is None:
            raise ConfigError("this LLM is closed; make a new one")
        return self._engine

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    def sampling_params(self, **given: Any) -> SamplingParams:
        """Parameters with what the checkpoint's `generation_config.json` recommends in place of what is not given.

        Raises ModelError for a recommendation that cannot work.
        """
        params = SamplingParams(**given)
        advice = recommended_sampling(self.engine.directory)
        try:
            return replace(params, **{name: value for name, value in advice.items() if name not in given})
        except RequestError as error:
            raise ModelError(
                f"{self.engine.directory / 'generation_config.json'}: {error}; correct it"
            ) from None

    def generate(
        self,
        prompts: Prompt | TokenIds[Prompt],
        sampling_params: Params = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all batched together; outputs in the order of the prompts.

        prompts: one text or list of token ids, or a list of such. sampling_params: one for all, or one for each.
        Raises RequestError, before anything runs, when one of them can never be served. A request that somebody aborts
        through `engine` ends with "abort" and what was last seen of it.
        """
        return self._complete(_as_list(prompts), sampling_params, progress, add_special_tokens=True)

    def chat(
        self,
        messages: Messages | TokenIds[Messages],
        sampling_params: Params = None,
        *,
        tools: TokenIds[Mapping[str, Any]] | None = None,
        progress: bool | None = None,
        **template_variables: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several, through the model's chat template."""
        # What is no list at all goes on whole, to be refused by what it is.
        listed = isinstance(messages, TokenIds) and not isinstance(messages, str)
        many = listed and bool(messages) and not isinstance(messages[0], Mapping)
        conversations = cast("list[Messages]", list(messages) if many else [messages])
        prompts = [self._chat_prompt(c, tools, template_variables) for c in conversations]
        return self._complete(list(prompts), sampling_params, progress, add_special_tokens=False)

    def generate_stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Complete one prompt; yields its state after each step that changed it (`delta` is the new text)."""
        return self._stream(prompt, sampling_params, add_special_tokens=True)

    def chat_stream(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        tools: TokenIds[Mapping[str, Any]] | None = None,
        **template_variables: Any,
    ) -> Iterator[RequestOutput]:
        """Answer one conversation, as `generate_stream` does."""
        prompt = self._chat_prompt(messages, tools, template_variables)
        return self._stream(prompt, sampling_params, add_special_tokens=False)

    def stats(self) -> dict[str, Any]:
        """Accounting as plain values: graphs (captures, replays, eager steps by reason), KV, expert load."""
        with self._turn:
            return self.engine.stats()

    def close(self) -> None:
        """Drop the model and its memory, and end the ranks that share it. Further calls raise ConfigError."""
        with delayed_interrupts(), self._turn:
            engine, self._engine = self._engine, None
            if engine is not None:
                engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _chat_prompt(
        self, messages: Messages, tools: TokenIds[Mapping[str, Any]] | None, variables: dict[str, Any]
    ) -> str:
        if not messages:
            raise RequestError("the conversation is empty; give at least one message")
        if "continue_final_message" in variables:
            raise RequestError(
                "continue_final_message is not supported: a chat's answer is a message of its own; render the "
                "conversation yourself and give its text to generate"
            )
        return self.engine.chat_template.render(messages, tools=tools, **variables)

    def _complete(
        self,
        prompts: list[Prompt],
        sampling_params: Params,
        progress: bool | None,
        *,
        add_special_tokens: bool,
    ) -> list[RequestOutput]:
        params = _params_for(prompts, sampling_params)
        shown = self.config.progress if progress is None else progress
        names: list[str] = []
        seen: dict[str, RequestOutput] = {}
        done: dict[str, RequestOutput] = {}
        try:
            for prompt, one in zip(prompts, params, strict=True):
                with delayed_interrupts():  # what is submitted has its name here
                    names.append(self._submit(prompt, one, add_special_tokens))
            with bars(shown=shown and len(prompts) > 1) as report:
                while len(done) < len(names):
                    for output in self._take(*names):
                        (done if output.finished else seen)[output.request_id] = output
                    for i in self._gone(names, done):
                        last = seen.get(names[i])
                        done[names[i]] = self._aborted(last, prompts[i], params[i], add_special_tokens)
                    report("Generating", len(done), len(names))
                    if len(done) < len(names):
                        self._step()
        finally:
            with delayed_interrupts():
                for name in names:
                    self._drop(name)
        return [done[name] for name in names]

    def _stream(
        self, prompt: Prompt, params: SamplingParams | None, *, add_special_tokens: bool
    ) -> Iterator[RequestOutput]:
        params = SamplingParams() if params is None else params
        name: str | None = None
        try:
            with delayed_interrupts():
                name = self._submit(prompt, params, add_special_tokens)
            while True:
                for output in self._take(name):
                    yield output
                    if output.finished:
                        return
                if self._gone([name], ()):
                    return  # aborted through the engine: whoever did that has its last output
                self._step()
        finally:
            if name is not None:
                self._drop(name)

    def _submit(self, prompt: Prompt, params: SamplingParams, add_special_tokens: bool) -> str:
        with self._entered() as engine:
            name = engine.submit(prompt, params, add_special_tokens=add_special_tokens)
            self._mail[name] = []
            return name

    def _gone(self, names: TokenIds[str], done: Container[str]) -> list[int]:
        """Places of requests that are not done, and of which nothing can come any more."""
        with self._turn:
            live = self.engine.is_live
            return [
                i
                for i, name in enumerate(names)
                if name not in done and not self._mail[name] and not live(name)
            ]

    def _aborted(
        self, seen: RequestOutput | None, prompt: Prompt, params: SamplingParams, add_special_tokens: bool
    ) -> RequestOutput:
        """The end of a request that somebody aborted through the engine: what was last seen of it."""
        if seen is None:
            with self._turn:
                request = self.engine.checked(prompt, params, None, 0, "", add_special_tokens)
            return RemoteRequest(request).end("abort")
        outputs = [
            replace_fields(o, finish_reason=o.finish_reason or "abort", delta="") for o in seen.outputs
        ]
        return replace_fields(seen, outputs=tuple(outputs), finished=True)

    def _step(self) -> None:
        """One step of the engine; outputs go to their readers' boxes, also when Ctrl-C ends the call."""
        with self._entered() as engine:
            for output in engine.step():
                if output.request_id in self._mail:
                    self._mail[output.request_id].append(output)

    def _take(self, *names: str) -> list[RequestOutput]:
        found: list[RequestOutput] = []
        with self._turn:
            for name in names:
                mail, self._mail[name] = self._mail[name], []
                found += mail
        return found

    def _drop(self, name: str) -> None:
        """Forget a request, and end it if it has not ended."""
        with delayed_interrupts(), self._turn:
            if self._engine is None:
                self._mail.pop(name, None)
                return
            self._dropped.append(name)
            if not self._within:
                with self._entered():
                    pass

    @contextmanager
    def _entered(self) -> Iterator[Engine]:
        """The engine, for one call of it; behind that, what was dropped meanwhile is ended."""
        with delayed_interrupts(), self._turn:
            engine, self._within = self.engine, True
            try:
                yield engine
            finally:
                try:
                    while self._dropped:
                        name = self._dropped.pop()
                        self._mail.pop(name, None)
                        engine.abort(name)
                finally:
                    self._within = False


def _as_list(prompts: Prompt | TokenIds[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes):
        raise RequestError(f"prompts must be text or token ids, or a list of such, got {prompts!r}")
    items = list(prompts)
    if not items:
        raise RequestError("there is no prompt; give at least one")
    if all(isinstance(item, int) for item in items):
        return [cast("list[int]", items)]
    return cast("list[Prompt]", items)


def _params_for(prompts: list[Prompt], params: Params) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [SamplingParams() if params is None else params] * len(prompts)
    if isinstance(params, str | Mapping) or not isinstance(params, Collection):
        raise RequestError(f"sampling_params must be SamplingParams, or one for each prompt, got {params!r}")
    if len(params) != len(prompts):
        raise RequestError(
            f"{len(params)} sampling_params for {len(prompts)} prompts; give one, or one for each"
        )
    return list(params)
