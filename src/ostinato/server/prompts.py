"""From what a request says to token ids: tokenizer and chat template, on threads of their own.

The event loop never waits for either. Knows nothing of sampling or of the engine process beyond the sizes it has
announced. Invariant: what is handed on fits the engine, or was refused with both numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ostinato.engine.admission import PoolLimits
from ostinato.engine.request import SamplingParams
from ostinato.errors import ModelError, RequestError
from ostinato.server.api_errors import ApiError, bad_field
from ostinato.server.messages import EngineInfo
from ostinato.server.protocol import ChatMessage
from ostinato.text.detokenizer import open_detokenizer
from ostinato.text.reasoning import OPEN
from ostinato.text.tokenizer import Tokenizer

_T = TypeVar("_T")

_LONG = 1 << 16
"""Characters from which on a text waits for other long ones only, and no short text waits for it."""

_MESSAGE = 16
"""Characters that a message counts for beside its text: a template handles each by itself."""


class Prompts:
    """The text side of one model."""

    def __init__(self, tokenizer: Tokenizer, info: EngineInfo) -> None:
        self.tokenizer = tokenizer
        self.limits = PoolLimits(info.total_tokens, info.page_size, info.context_length)
        self.vocab_size = info.vocab_size
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="ostinato-text")
        self._long_texts = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ostinato-long-text")

    def close(self) -> None:
        for threads in (self._threads, self._long_texts):
            threads.shutdown(wait=False, cancel_futures=True)

    async def completion(self, prompt: Any, *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each prompt of a checked `prompt` field. Raises ApiError 400 naming the bad one."""
        items: list[Any]
        if isinstance(prompt, str):
            items = [prompt]
        else:
            items = [prompt] if prompt and isinstance(prompt[0], int) else prompt
        if isinstance(items[0], str):
            size = sum(map(len, items))
            return await self._run(lambda: [self._encode(text, add_special_tokens) for text in items], size)
        for ids in items:
            self.check_ids("prompt", ids)
        return items

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[list[int], bool]:
        """Token ids of a conversation, through the model's chat template, and whether it ends in an open `<think>`.

        Raises ApiError 400.
        """
        names = {"messages", "tools", "add_generation_prompt", "template"} & set(variables or ())
        if names:
            raise bad_field(
                "chat_template_kwargs", f"chat_template_kwargs may not hold {sorted(names)}; remove it"
            )

        def fill(plain: list[dict[str, Any]]) -> str:
            return self.tokenizer.chat_template.render(
                plain, tools=tools, add_generation_prompt=add_generation_prompt, **dict(variables or {})
            )

        def render() -> tuple[list[int], bool]:
            plain = [_plain(message) for message in messages]
            try:
                try:
                    text = fill(plain)
                except RequestError:
                    # What calls a tool may have no content; templates that know no tools want a text all the same.
                    silent = [m for m in plain if m.get("tool_calls") and m["content"] is None]
                    if not silent:
                        raise
                    for message in silent:
                        message["content"] = ""
                    text = fill(plain)
            except (RequestError, ModelError) as error:
                raise bad_field("messages", str(error)) from None
            return self._encode(text, False, field="messages"), text.rstrip().endswith(OPEN)

        return await self._run(render, sum(map(_length, messages)) + _MESSAGE * len(messages))

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids. Raises ApiError 400 for an id outside of the vocabulary."""

        def decode() -> str:
            self.check_ids("tokens", token_ids)
            return self.tokenizer.decode(token_ids, skip_special_tokens=False)

        return await self._run(decode, len(token_ids))

    async def echo(self, token_ids: Sequence[int]) -> str:
        """The text of a prompt in front of its completion, which begins with a character that is unfinished here."""
        return await self._run(lambda: self._settled(token_ids), len(token_ids))

    def _settled(self, token_ids: Sequence[int]) -> str:
        if self.tokenizer.pieces is None:  # then a completion takes all of its prompt's text for handed out
            return self.tokenizer.decode(token_ids, skip_special_tokens=False)
        stream = open_detokenizer(self.tokenizer, skip_special_tokens=False)
        return "".join(map(stream.push, token_ids))

    def check_ids(self, field: str, ids: Sequence[int]) -> None:
        """Raises ApiError 400 for an id outside of the vocabulary."""
        low, high = min(ids, default=0), max(ids, default=0)
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise bad_field(
                field,
                f"{field} holds {bad}, token ids of this model are whole numbers from 0 to {self.vocab_size - 1}",
            )

    def check_lengths(self, field: str, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
        """Raises ApiError 400, with the numbers, for a prompt that the engine can never serve."""
        for ids in prompts:
            if not ids:
                raise bad_field(field, f"{field} has no tokens; give some text")
            try:
                self.limits.clamp(len(ids), params.max_tokens)
            except RequestError as error:
                raise ApiError(400, str(error), param=field, code="context_length_exceeded") from None
        for name, tokens in (
            ("logit_bias", params.logit_bias or ()),
            ("stop_token_ids", params.stop_token_ids),
        ):
            self.check_ids(name, list(tokens))

    def _encode(self, text: str, add_special_tokens: bool, *, field: str = "prompt") -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start]
            raise bad_field(
                field, f"{field} has half a surrogate pair, {half!r}, at character {error.start}; remove it"
            ) from None
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    async def _run(self, call: Callable[[], _T], size: int) -> _T:
        """What the call gives, on a thread for texts of this size, in characters or tokens."""
        threads = self._threads if size < _LONG else self._long_texts
        return await asyncio.get_running_loop().run_in_executor(threads, call)


def _length(message: ChatMessage) -> int:
    content = message.content or ""
    return len(content) if isinstance(content, str) else sum(len(part.text) for part in content)


def _plain(message: ChatMessage) -> dict[str, Any]:
    """A message as templates know them: only what was given, `developer` under its older name."""
    value = message.model_dump(exclude_none=True)
    if value["role"] == "developer":
        value["role"] = "system"
    value.setdefault("content", None)
    for call in value.get("tool_calls", ()):
        # Templates write arguments as JSON themselves; what is no object stays the text that it is.
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(call["function"]["arguments"])
            if isinstance(arguments, dict):
                call["function"]["arguments"] = arguments
    return value
