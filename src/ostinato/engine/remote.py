"""A request that another rank's engine serves, put together from its news.

Knows nothing of transports. Invariant: after each piece of news it is what that engine's own `RequestOutput` would be.
"""

from __future__ import annotations

from typing import cast

from ostinato.engine.delta import SequenceDelta, TokenLogprobs
from ostinato.engine.output import as_position
from ostinato.engine.request import CompletionOutput, FinishReason, Logprob, Request, RequestOutput


class _RemoteSequence:
    """One completion so far."""

    def __init__(self, index: int, logprobs: bool) -> None:
        self.index = index
        self.text = ""
        self.delta = ""
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = [] if logprobs else None
        self.cumulative = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    def add(self, news: SequenceDelta) -> None:
        self.text += news.text
        self.delta += news.text
        self.token_ids += news.token_ids
        if self.logprobs is not None:
            for token, rows in zip(news.token_ids, news.logprobs or (), strict=True):
                position = as_position(rows)
                self.logprobs.append(position)
                self.cumulative += position[token].logprob
        if news.finish_reason is not None:
            self.finish_reason = cast("FinishReason", news.finish_reason)
            self.stop_reason = news.stop_reason

    def take(self) -> CompletionOutput:
        delta, self.delta = self.delta, ""
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=tuple(self.token_ids),
            cumulative_logprob=None if self.logprobs is None else self.cumulative,
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            delta=delta,
        )


class RemoteRequest:
    """`add` its news, `output` its state."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.finished = False
        with_logprobs = request.params.logprobs is not None
        self._sequences = [_RemoteSequence(i, with_logprobs) for i in range(request.params.n)]
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._num_cached = 0

    def add(self, news: SequenceDelta) -> None:
        """Take one piece of news."""
        self._sequences[news.index].add(news)
        self.finished = self.finished or news.done
        self._num_cached = self._num_cached or news.num_cached_tokens
        if news.prompt_logprobs is not None:
            self._prompt_logprobs = news.prompt_logprobs

    def end(self, reason: FinishReason) -> RequestOutput:
        """Its last output when it ends from here; completions that have not ended take `reason`."""
        self.finished = True
        for sequence in self._sequences:
            sequence.finish_reason = sequence.finish_reason or reason
        return self.output()

    def output(self) -> RequestOutput:
        """The state as a value."""
        scored = self._prompt_logprobs if self.finished else None
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=tuple(sequence.take() for sequence in self._sequences),
            finished=self.finished,
            prompt_logprobs=None
            if scored is None
            else tuple(None if rows is None else as_position(rows) for rows in scored),
            num_cached_tokens=self._num_cached,
        )
