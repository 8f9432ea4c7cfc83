"""From token ids to text, one step at a time.

The joined stream is the text: no piece is ever taken back, repeated or lost, whatever way the ids arrive, and
a character is held until its last byte is there. Work per token is bounded; earlier tokens are not decoded
again. Must not know of requests, stop strings or sampling. Where a tokenizer's decoder factors into pieces
(`pieces.py`) the text equals `Tokenizer.decode` of all ids; one deviation: ill-formed bytes of a
byte-fallback tokenizer become one U+FFFD each, while the library retracts well-formed characters beside them,
which a stream cannot.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ostinato.text.pieces import PieceTable
    from ostinato.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_CONTEXT = 8  # prompt tokens that can matter: an unfinished character, or whether any text stands before
_WINDOW = 16  # tokens that an unknown decoder may keep open before its text is taken as it is


class _Decode(Protocol):
    def __call__(self, ids: Sequence[int], /) -> str: ...


class Detokenizer:
    """Incremental decoding of one sequence.

    `prompt_ids` are the tokens before it: text continues them (the space before a first word is kept, a
    character begun there is finished). Without them, or when all are special, the text starts fresh, as
    `decode` does.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._text: list[str] = []
        context = prompt_ids[-_CONTEXT:]
        self._stream: _PieceStream | _WindowStream
        if tokenizer.pieces is not None:
            self._stream = _PieceStream(tokenizer.pieces, skip_special_tokens)
            self._stream.seed(context, fresh=len(prompt_ids) == len(context))
        else:
            self._stream = _WindowStream(
                lambda ids: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens), context
            )

    @property
    def text(self) -> str:
        """Everything handed out so far."""
        if len(self._text) > 1:
            self._text = ["".join(self._text)]
        return self._text[0] if self._text else ""

    def push(self, token_ids: Iterable[int]) -> str:
        """Take the next tokens; returns the text that they complete (may be empty)."""
        return self._hand_out("".join([self._stream.push(token_id) for token_id in token_ids]))

    def finish(self) -> str:
        """The sequence has ended: returns what was held, an unfinished character as U+FFFD."""
        return self._hand_out(self._stream.finish())

    def _hand_out(self, text: str) -> str:
        if text:
            self._text.append(text)
        return text


class _PieceStream:
    """Exact decoding from per-token bytes; holds at most three bytes."""

    def __init__(self, table: PieceTable, skip_special_tokens: bool) -> None:
        self._table = table
        self._skip = table.special_ids if skip_special_tokens else frozenset()
        self._held = b""
        self._first = True  # no token stands before the next one
        self._to_strip = table.rules.strip_count

    def seed(self, context: Sequence[int], *, fresh: bool) -> None:
        """Go on after `context`; `fresh` says that it is all there is, not the end of something longer."""
        for token_id in context:
            self.push(token_id)
        if not fresh:
            self._first, self._to_strip = False, 0

    def push(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        piece = self._table.piece(token_id, first=self._first)
        if piece is None:
            return ""
        self._first = False
        if not self._table.rules.byte_fallback:
            text, self._held = decode_utf8(self._held + piece.data)
        elif piece.is_byte:
            text, self._held = decode_utf8(self._held + piece.data, per_byte=True)
        else:
            text = self.finish() + piece.data.decode()
        return self._strip(text)

    def finish(self) -> str:
        held, self._held = self._held, b""
        return decode_utf8(held, final=True, per_byte=self._table.rules.byte_fallback)[0]

    def _strip(self, text: str) -> str:
        """Drop the leading characters that the decoder strips from the start of the whole text."""
        while text and self._to_strip:
            self._to_strip -= 1
            if text[0] != self._table.rules.strip:
                self._to_strip = 0
            else:
                text = text[1:]
        return text


class _WindowStream:
    """For decoders that do not factor: decode a short window of tokens and hand out what was added to it.

    The window starts at a token whose text is out already, so that decoders which look one token back see it.
    Text is never taken back: when a decoder rewrites what is out, only what lies past it is handed out.
    """

    def __init__(self, decode: _Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(context)
        self._known = len(self._ids)  # leading ids of the window whose text is out
        self._out = len(decode(self._ids)) if self._ids else 0  # characters of the window's text that are out

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        pending = len(self._ids) - self._known
        if text.endswith(_REPLACEMENT) and pending < _WINDOW:
            return ""
        new = text[self._out :]
        self._ids = self._ids[-_CONTEXT:] if pending < _CONTEXT else self._ids[self._known :]
        self._known = len(self._ids)
        self._out = len(self._decode(self._ids))
        return new

    def finish(self) -> str:
        new = self._decode(self._ids)[self._out :] if len(self._ids) > self._known else ""
        self._known, self._out = len(self._ids), self._out + len(new)
        return new


def decode_utf8(data: bytes, *, final: bool = False, per_byte: bool = False) -> tuple[str, bytes]:
    """Decode as far as characters are complete: `(text, rest)`; the rest (under 4 bytes) may still become
    one.

    Ill-formed input becomes one U+FFFD for each maximal ill-formed subsequence (Unicode 15, section 3.9), or
    for each of its bytes when `per_byte`. `final` leaves no rest.
    """
    parts = []
    while data:
        try:
            text, used = codecs.utf_8_decode(data, "strict", final)
        except UnicodeDecodeError as error:
            parts.append(data[: error.start].decode())
            parts.append(_REPLACEMENT * (error.end - error.start if per_byte else 1))
            data = data[error.end :]
        else:
            parts.append(text)
            return "".join(parts), data[used:]
    return "".join(parts), b""
