"""The two kinds of answers, as `Shape`s for `frames.py`: messages of an assistant, and plain completions.

Knows nothing of usage or of how frames are joined. A chat answer's text may be split into fields by a `MessageParser`
(reasoning, tool calls); without one it is the message's content, and costs nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from ostinato.engine.delta import SequenceDelta, TokenLogprobs
from ostinato.server.frames import Json
from ostinato.server.token_text import LegacyLogprobs, TokenText, chat_logprobs


class MessageParser(Protocol):
    """Splits the text of one choice into fields of an assistant's message, while it comes."""

    def push(self, text: str) -> list[dict[str, Any]]:
        """`delta` objects that this text completes: {"content": ...}, {"reasoning_content": ...}, ..."""

    def finish(self) -> list[dict[str, Any]]:
        """What was held back; the choice has ended."""

    def message(self) -> dict[str, Any]:
        """All fields of the message beside `role`, for an answer that is not streamed."""

    def finish_reason(self, reason: str) -> str:
        """The engine's reason, or "tool_calls" in its place."""


class ChatShape:
    """An assistant's message. `new_parser` makes a parser for each choice; `top_logprobs` None is no logprobs."""

    chunk_object = "chat.completion.chunk"
    body_object = "chat.completion"

    def __init__(
        self,
        tokens: TokenText,
        *,
        top_logprobs: int | None,
        every_token: bool = False,
        new_parser: Callable[[], MessageParser] | None = None,
    ) -> None:
        self.every_token = every_token or top_logprobs is not None
        self._tokens = tokens
        self._top = top_logprobs
        self._new_parser = new_parser
        self._parsers: dict[int, MessageParser] = {}

    def opening(self, choice: int, delta: SequenceDelta) -> bytes | None:
        return b'"delta":{"role":"assistant","content":""}'

    def pieces(self, choice: int, delta: SequenceDelta) -> list[bytes]:
        if self._new_parser is None:
            return [b'"delta":{"content":' + Json.encode(delta.text) + b"}" if delta.text else b'"delta":{}']
        parser = self._parser(choice)
        objects = parser.push(delta.text)
        if delta.finish_reason is not None:
            objects += parser.finish()
        return [b'"delta":' + Json.encode(value) for value in objects or [{}]]

    def logprobs(self, choice: int, delta: SequenceDelta) -> Any:
        return None if self._top is None else {"content": self._content([delta]), "refusal": None}

    def finish_reason(self, choice: int, delta: SequenceDelta) -> str | None:
        reason = delta.finish_reason
        if reason is None or self._new_parser is None:
            return reason
        return self._parser(choice).finish_reason(reason)

    def whole(self, choice: int, news: Sequence[SequenceDelta]) -> dict[str, Any]:
        text = "".join(delta.text for delta in news)
        fields: dict[str, Any] = {"content": text}
        if self._new_parser is not None:
            parser = self._parser(choice)
            parser.push(text)
            parser.finish()
            fields = parser.message()
        logprobs = None if self._top is None else {"content": self._content(news), "refusal": None}
        return {"message": {"role": "assistant", "refusal": None, **fields}, "logprobs": logprobs}

    def _parser(self, choice: int) -> MessageParser:
        assert self._new_parser is not None
        if choice not in self._parsers:
            self._parsers[choice] = self._new_parser()
        return self._parsers[choice]

    def _content(self, news: Sequence[SequenceDelta]) -> list[dict[str, Any]]:
        assert self._top is not None
        content: list[dict[str, Any]] = []
        for delta in news:
            content += chat_logprobs(self._tokens, delta.token_ids, delta.logprobs or [], self._top)
        return content


class CompletionShape:
    """A plain completion. `echoed`: the text and ids of each prompt, when it stands before its completions. `silent`:
    tokens that a completion's text leaves out.
    """

    chunk_object = body_object = "text_completion"

    def __init__(
        self,
        tokens: TokenText,
        *,
        n: int,
        logprobs: bool,
        every_token: bool = False,
        echoed: Sequence[tuple[str, list[int]]] | None = None,
        silent: Collection[int] = (),
    ) -> None:
        self.every_token = every_token or logprobs
        self._silent = silent
        self._tokens = tokens
        self._n = n
        self._logprobs = logprobs
        self._echoed = echoed
        self._lists: dict[int, LegacyLogprobs] = {}
        self._prompt_rows: dict[int, list[TokenLogprobs | None]] = {}

    def opening(self, choice: int, delta: SequenceDelta) -> bytes | None:
        return None if self._echoed is None else b'"text":' + Json.encode(self._echo(choice))

    def pieces(self, choice: int, delta: SequenceDelta) -> list[bytes]:
        return [b'"text":' + Json.encode(delta.text)]

    def logprobs(self, choice: int, delta: SequenceDelta) -> Any:
        return self._take(choice, [delta]) if self._logprobs else None

    def finish_reason(self, choice: int, delta: SequenceDelta) -> str | None:
        return delta.finish_reason

    def whole(self, choice: int, news: Sequence[SequenceDelta]) -> dict[str, Any]:
        text = ("" if self._echoed is None else self._echo(choice)) + "".join(delta.text for delta in news)
        return {"text": text, "logprobs": self._take(choice, news) if self._logprobs else None}

    def _echo(self, choice: int) -> str:
        assert self._echoed is not None
        return self._echoed[choice // self._n][0]

    def _take(self, choice: int, news: Sequence[SequenceDelta]) -> dict[str, list[Any]]:
        """Lists of the next tokens; an echoed prompt's come before the first."""
        ids: list[int] = []
        rows: list[TokenLogprobs | None] = []
        place = choice // self._n
        if news[0].prompt_logprobs is not None:
            self._prompt_rows[place] = news[0].prompt_logprobs
        lists = self._lists.get(choice)
        if lists is None:
            echoed = None if self._echoed is None else self._echoed[place]
            lists = self._lists[choice] = LegacyLogprobs(self._tokens, echoed, silent=self._silent)
            if echoed is not None and place in self._prompt_rows:
                ids += echoed[1]
                rows += self._prompt_rows[place]
        prompt = len(ids)
        for delta in news:
            ids += delta.token_ids
            rows += delta.logprobs or []
        return lists.take(ids, rows, prompt=prompt)
