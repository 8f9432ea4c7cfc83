"""A request in the engine: its sequences, and what callers have seen of them.

Knows requests, sequences and their output streams; nothing of steps, pages or models. Invariant: news are handed out
once, by `output` or by `deltas`; a caller uses one of the two.
"""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.engine.delta import SequenceDelta, TokenLogprobs
from ostinato.engine.output import OutputStream, as_position
from ostinato.engine.request import Request, RequestOutput
from ostinato.engine.sequence import Sequence, SequenceState


@dataclass(slots=True, eq=False)
class LiveRequest:
    """`streams` follow `sequences`, one each. `cached_told`: whether a delta has told how much was cached."""

    request: Request
    sequences: list[Sequence]
    streams: list[OutputStream]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_told: bool = False

    @property
    def finished(self) -> bool:
        """Whether every sequence has ended."""
        first = self.sequences[0].state is SequenceState.FINISHED  # of most requests there is no other
        return first and all(s.state is SequenceState.FINISHED for s in self.sequences)

    def output(self) -> RequestOutput:
        """Its state as a value."""
        finished, request = self.finished, self.request
        scored = self.prompt_logprobs if finished else None
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=tuple([stream.take() for stream in self.streams]),
            finished=finished,
            prompt_logprobs=None
            if scored is None
            else tuple(None if rows is None else as_position(rows) for rows in scored),
            num_cached_tokens=self.sequences[0].num_cached,
        )

    def deltas(self) -> list[SequenceDelta]:
        """What came since the last time; the last of them is `done` when the request is."""
        name = self.request.request_id
        news = [delta for stream in self.streams if (delta := stream.take_delta(name)) is not None]
        if news and self.prompt_logprobs is not None:
            news[0].prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        if news and not self.cached_told:
            self.cached_told = True
            news[0].num_cached_tokens = self.sequences[0].num_cached
        if self.finished:
            news[-1].done = True
        return news
