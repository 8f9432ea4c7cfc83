"""Answers as bytes: JSON bodies and SSE frames, built by hand.

A frame is a few constant pieces around one encoded string; nothing is validated or copied per token. What differs
between chat and plain completions is a `Shape` (`shapes.py`). Knows nothing of engines or connections. Invariants: the
joined text of a stream's frames is the text of the whole answer; the forms are those of `answers.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from ostinato.engine.delta import SequenceDelta
from ostinato.server.api_errors import ApiError

Json = msgspec.json.Encoder()
News = Sequence[tuple[int, SequenceDelta]]
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every frame of an answer repeats, and how the request wants to see it.

    `n` choices for each of the prompts: choice `place * n + index` is completion `index` of prompt `place`.
    `fingerprint`: of the engine, see `EngineInfo`.
    """

    answer_id: str
    created: int
    model: str
    n: int
    num_choices: int
    prompt_tokens: int
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    fingerprint: str | None = None


class Shape(Protocol):
    """How one kind of answer writes a choice."""

    chunk_object: str
    body_object: str
    every_token: bool
    """Whether news without text still make a frame."""

    def opening(self, choice: int, delta: SequenceDelta) -> bytes | None:
        """Fields of a frame before the first news of a choice (`"delta":{...}`), or None for no such frame."""

    def pieces(self, choice: int, delta: SequenceDelta) -> list[bytes]:
        """Fields of the frames that these news make; the last one carries the rest of the news."""

    def logprobs(self, choice: int, delta: SequenceDelta) -> Any:
        """The `logprobs` field for these news."""

    def finish_reason(self, choice: int, delta: SequenceDelta) -> str | None:
        """Why the choice has ended, as clients see it."""

    def whole(self, choice: int, news: Sequence[SequenceDelta]) -> dict[str, Any]:
        """Fields of a choice that is not streamed, from all its news in order: its content and `logprobs`."""


class Frames:
    """The frames of one stream, or the body of one answer."""

    def __init__(self, head: AnswerHead, shape: Shape) -> None:
        self.completion_tokens = 0
        self.finish_reasons: list[str] = []
        self._head = head
        self._shape = shape
        self._cached: dict[str, int] = {}
        self._opened: set[int] = set()
        self._fields = {"id": head.answer_id, "created": head.created, "model": head.model}
        self._fields |= {"system_fingerprint": head.fingerprint}
        start = b"data: " + Json.encode(self._fields | {"object": shape.chunk_object})[:-1]
        self._prefix = start + b',"choices":[{"index":'
        self._no_choices = start + b',"choices":[],"usage":'
        self._end = b',"usage":null}\n\n' if head.include_usage else b"}\n\n"

    def usage(self) -> dict[str, Any]:
        """Tokens so far, over all choices."""
        prompt, completion = self._head.prompt_tokens, self.completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }

    def stream(self, news: News) -> bytes:
        """Frames of what came since the last call, joined. Raises ApiError for a completion that failed."""
        frames: list[bytes] = []
        for place, delta in news:
            choice = place * self._head.n + delta.index
            self._count(delta)
            if choice not in self._opened:
                self._opened.add(choice)
                opening = self._shape.opening(choice, delta)
                if opening is not None:
                    frames.append(self._frame(choice, opening, None))
            if delta.text or delta.finish_reason is not None or self._shape.every_token:
                *others, last = self._shape.pieces(choice, delta)
                frames += [self._frame(choice, piece, None) for piece in others]
                frames.append(self._frame(choice, last, delta))
        return b"".join(frames)

    def _frame(self, choice: int, content: bytes, delta: SequenceDelta | None) -> bytes:
        """One frame; with the log-probabilities, tokens and end of `delta`, when there is one."""
        parts = [self._prefix, b"%d," % choice, content]
        logprobs = None if delta is None else self._shape.logprobs(choice, delta)
        parts.append(b',"logprobs":null' if logprobs is None else b',"logprobs":' + Json.encode(logprobs))
        if delta is not None and self._head.return_token_ids:
            parts += (b',"token_ids":', Json.encode(delta.token_ids))
        if delta is not None and delta.finish_reason is not None:
            parts += (b',"finish_reason":', Json.encode(self._shape.finish_reason(choice, delta)))
            parts += (b',"stop_reason":', Json.encode(delta.stop_reason), b"}]")
        else:
            parts.append(b',"finish_reason":null}]')
        if self._head.continuous_usage:
            parts += (b',"usage":', Json.encode(self.usage()), b"}\n\n")
        else:
            parts.append(self._end)
        return b"".join(parts)

    def tail(self) -> bytes:
        """The end of a stream: the usage, when asked for, and the mark."""
        if not self._head.include_usage:
            return DONE
        return self._no_choices + Json.encode(self.usage()) + b"}\n\n" + DONE

    def body(self, news: News) -> bytes:
        """The whole answer from all news. Raises ApiError for a completion that failed."""
        by_choice: list[list[SequenceDelta]] = [[] for _ in range(self._head.num_choices)]
        for place, delta in news:
            self._count(delta)
            by_choice[place * self._head.n + delta.index].append(delta)
        choices = [self._choice(choice, own) for choice, own in enumerate(by_choice)]
        answer = self._fields | {"object": self._shape.body_object, "choices": choices, "usage": self.usage()}
        return Json.encode(answer)

    def _choice(self, choice: int, news: Sequence[SequenceDelta]) -> dict[str, Any]:
        value = {"index": choice, **self._shape.whole(choice, news)}
        value["finish_reason"] = self._shape.finish_reason(choice, news[-1])
        value["stop_reason"] = news[-1].stop_reason
        if self._head.return_token_ids:
            value["token_ids"] = [token for delta in news for token in delta.token_ids]
        return value

    def _count(self, delta: SequenceDelta) -> None:
        if delta.finish_reason == "error":
            why = str(delta.stop_reason or "a step has failed; the server's log tells more")
            if why.startswith("structured_outputs"):  # the form that was asked for is at fault
                raise ApiError(400, why, param="structured_outputs")
            raise ApiError(500, f"the engine could not finish this request: {why}", code="engine_error")
        if delta.finish_reason is not None:
            self.finish_reasons.append(delta.finish_reason)
        self.completion_tokens += len(delta.token_ids)
        if delta.num_cached_tokens:
            self._cached.setdefault(delta.request_id, delta.num_cached_tokens)


def error_frame(problem: ApiError) -> bytes:
    """A stream's last frame when it cannot go on."""
    return b"data: " + problem.body() + b"\n\n"
