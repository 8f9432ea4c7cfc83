"""Single tokens as text and bytes, for log-probabilities; the two shapes that OpenAI's APIs give these.

A token may hold a part of a character only; then it is spelt `bytes:\\xe4\\xb8`, as OpenAI does. Knows nothing of
requests.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Any

from ostinato.engine.delta import TokenLogprobs
from ostinato.text.tokenizer import Tokenizer


class TokenText:
    """Texts and bytes of a tokenizer's tokens, kept once made. `special`: what `skip_special_tokens` leaves out."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.special = tokenizer.special_ids
        self._known: dict[int, tuple[str, bytes]] = {}

    def of(self, token_id: int) -> tuple[str, bytes]:
        """(text, bytes) of a token that follows others."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._make(token_id)
        return found

    def _make(self, token_id: int) -> tuple[str, bytes]:
        pieces = self._tokenizer.pieces
        if pieces is None:
            data = self._tokenizer.decode([token_id], skip_special_tokens=False).encode()
        else:
            piece = pieces.piece(token_id)
            data = b"" if piece is None else piece.data
        try:
            return data.decode(), data
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data


def chat_logprobs(
    tokens: TokenText, ids: Sequence[int], logprobs: Sequence[TokenLogprobs], top: int
) -> list[dict[str, Any]]:
    """The `content` list of a chat completion's log-probabilities, with the `top` best of each position."""
    content = []
    for token_id, rows in zip(ids, logprobs, strict=True):
        ranked = [_chat_row(tokens, token, logprob) for token, logprob, _ in rows]
        chosen = next(place for place, row in enumerate(rows) if row[0] == token_id)
        content.append({**ranked[chosen], "top_logprobs": ranked[:top]})
    return content


def _chat_row(tokens: TokenText, token_id: int, logprob: float) -> dict[str, Any]:
    text, data = tokens.of(token_id)
    return {"token": text, "logprob": logprob, "bytes": list(data)}


class LegacyLogprobs:
    """The parallel lists of a completion's log-probabilities; offsets count characters of the choice's text.

    `echoed`: the text and ids of the prompt, if the text begins with it. A begin token that the tokenizer has put
    before a text has no place in it: its offset is 0, as is that of the token behind it. `silent`: tokens that the
    completion's text leaves out; they take no room in it.
    """

    def __init__(
        self,
        tokens: TokenText,
        echoed: tuple[str, Sequence[int]] | None = None,
        *,
        silent: Collection[int] = (),
    ) -> None:
        self._tokens = tokens
        self._silent = silent
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        if echoed is not None:
            text, ids = echoed
            spelt = b"".join(tokens.of(i)[1] for i in ids)
            # A character that is unfinished at the end is the completion's, in both texts.
            self._offset = len(text) - len(codecs.getincrementaldecoder("utf-8")("replace").decode(spelt))

    def take(
        self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], *, prompt: int = 0
    ) -> dict[str, list[Any]]:
        """The lists for the next tokens, of which the first `prompt` are the echoed prompt's."""
        lists: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for place, (token_id, rows) in enumerate(zip(ids, logprobs, strict=True)):
            text, data = self._tokens.of(token_id)
            lists["tokens"].append(text)
            lists["text_offset"].append(max(self._offset, 0))
            if place < prompt or token_id not in self._silent:
                self._offset += len(self._decoder.decode(data))
            chosen = None if rows is None else next(row[1] for row in rows if row[0] == token_id)
            lists["token_logprobs"].append(chosen)
            top = None if rows is None else {self._tokens.of(token)[0]: value for token, value, _ in rows}
            lists["top_logprobs"].append(top)
        return lists
