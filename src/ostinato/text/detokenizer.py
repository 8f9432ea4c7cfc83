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
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ostinato.text.pieces import PieceTable
    from ostinato.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_CONTEXT = 8  # prompt tokens that can matter: an unfinished character, or whether any text stands before
_WINDOW = 16  # tokens that an unknown decoder may keep open before its text is taken as it is


class _Decode(Protocol):
    def __call__(self, ids: Sequence[int], /) -> str: ...


class Detokenizer(Protocol):
    """Incremental decoding of one sequence."""

    def push(self, token_id: int) -> str:
        """Take the next token; returns the text that it completes (may be empty)."""
        ...

    def finish(self) -> str:
        """The sequence has ended: returns what was held, an unfinished character as U+FFFD."""
        ...


def open_detokenizer(
    tokenizer: Tokenizer, *, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True
) -> Detokenizer:
    """The detokenizer of a sequence behind `prompt_ids`.

    Text continues them (the space before a first word is kept, a character begun there is finished). Without them, or
    when all are special, the text starts fresh, as `decode` does.
    """
    context = prompt_ids[-_CONTEXT:]
    if tokenizer.pieces is None:
        return _WindowStream(
            lambda ids: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens), context
        )
    stream = _PieceStream(tokenizer.pieces, skip_special_tokens)
    stream.seed(context, fresh=len(prompt_ids) == len(context))
    return stream


class _PieceStream:
    """Exact decoding from per-token bytes; holds at most three bytes."""

    __slots__ = ("_first", "_held", "_settled", "_skip", "_table", "_to_strip")

    def __init__(self, table: PieceTable, skip_special_tokens: bool) -> None:
        self._table = table
        self._skip = table.special_ids if skip_special_tokens else frozenset()
        self._held = b""
        self._first = True  # no token stands before the next one
        self._settled = False  # and no rule for the start of the text holds any more
        self._to_strip = table.rules.strip_count

    def seed(self, context: Sequence[int], *, fresh: bool) -> None:
        """Go on after `context`; `fresh` says that it is all there is, not the end of something longer."""
        for token_id in context:
            self.push(token_id)
        if not fresh:
            self._first, self._settled, self._to_strip = False, True, 0

    def push(self, token_id: int) -> str:
        if self._settled and not self._held:
            text = self._table.whole.get(token_id)
            if text is not None:
                return text
        if token_id in self._skip:
            return ""
        piece = self._table.piece(token_id, first=self._first)
        if piece is None:
            return ""
        self._first = False
        self._settled = not self._to_strip
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
