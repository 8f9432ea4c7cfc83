"""What one token contributes to the text: its bytes, read off a tokenizer's decoder pipeline.

A decoder of the `tokenizers` library is a function of the whole sequence. The pipelines that language models
use factor into one piece of bytes per token plus a rule for the very start of the text; where that holds,
decoding is exact and costs the same for every token. `PieceTable.of` answers None for a pipeline it cannot
factor. Knows nothing of requests or streams. Invariant: the pieces of a sequence, joined, are what the
decoder makes of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


@dataclass(frozen=True, slots=True)
class Piece:
    """`data` is UTF-8, possibly a fragment of a character; `is_byte` marks a byte-fallback token
    (`<0xE4>`).
    """

    data: bytes
    is_byte: bool = False


@dataclass(frozen=True, slots=True)
class PieceRules:
    """A decoder pipeline in factored form.

    byte_level:     token characters stand for bytes (GPT-2's printable alphabet).
    byte_fallback:  tokens spelt `<0xE4>` are raw bytes, and an ill-formed byte among them is one U+FFFD each.
    replace:        (from, to) string replacements inside a token, in order.
    first_replace:  replacements for the first token of the text instead (Metaspace drops its space there).
    lead:           what stands before every token but the first (no decoder at all: tokens joined by spaces).
    strip, strip_count: how many leading characters `strip` the whole text loses.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replace: tuple[tuple[str, str], ...] = ()
    first_replace: tuple[tuple[str, str], ...] | None = None
    lead: str = ""
    strip: str = ""
    strip_count: int = 0


def read_rules(decoder: Mapping[str, Any] | None) -> PieceRules | None:
    """Factor a decoder, given as in `tokenizer.json`; None when it does not factor."""
    if decoder is None:
        return PieceRules(lead=" ")
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return PieceRules(byte_level=True)
    if kinds == ["Metaspace"]:
        mark = steps[0]["replacement"]
        first = None if steps[0].get("prepend_scheme", "always") == "never" else ((mark, ""),)
        return PieceRules(replace=((mark, " "),), first_replace=first)
    return _read_sentencepiece(steps)


def _read_sentencepiece(steps: list[Mapping[str, Any]]) -> PieceRules | None:
    """`Replace* ByteFallback? Fuse? Strip?` in this order: the pipeline of Llama, Mistral and Gemma."""
    order = ("Replace", "ByteFallback", "Fuse", "Strip")
    kinds = [step["type"] for step in steps]
    if any(kind not in order for kind in kinds):
        return None
    ranks = [order.index(kind) for kind in kinds]
    once = all(kinds.count(kind) <= 1 for kind in order[1:])
    if ranks != sorted(ranks) or not once:
        return None
    replace = []
    for step in steps:
        if step["type"] != "Replace":
            continue
        pattern = step["pattern"].get("String")
        if not pattern:
            return None  # a regular expression
        replace.append((pattern, step["content"]))
    rules = PieceRules(byte_fallback="ByteFallback" in kinds, replace=tuple(replace))
    if kinds[-1] != "Strip":
        return rules
    strip = steps[-1]
    if strip["stop"] or "Fuse" not in kinds:
        return None  # the end of the text is not known yet, or every token is stripped by itself
    return PieceRules(
        rules.byte_level, rules.byte_fallback, rules.replace, None, "", strip["content"], strip["start"]
    )


class PieceTable:
    """Pieces of one tokenizer by token id, made when first asked for.

    whole: texts of those that are whole characters by themselves and not special, amid a text.
    """

    def __init__(self, backend: Backend, rules: PieceRules) -> None:
        self.rules = rules
        self._backend = backend
        self._alphabet = _byte_alphabet() if rules.byte_level else {}
        self._pieces: dict[int, Piece | None] = {}
        self.whole: dict[int, str] = {}
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)

    @classmethod
    def of(cls, backend: Backend) -> Self | None:
        """The table of a tokenizer, or None when its decoder does not factor into pieces."""
        state = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        rules = read_rules(state)
        return None if rules is None else cls(backend, rules)

    def piece(self, token_id: int, *, first: bool = False) -> Piece | None:
        """The piece of a token; None for an id outside the vocabulary. `first`: nothing stands before it."""
        if first:
            return self._make(token_id, first=True)
        if token_id not in self._pieces:
            piece = self._pieces[token_id] = self._make(token_id, first=False)
            if piece is not None and not piece.is_byte and token_id not in self.special_ids:
                self._note_whole(token_id, piece)
        return self._pieces[token_id]

    def _note_whole(self, token_id: int, piece: Piece) -> None:
        try:
            self.whole[token_id] = piece.data.decode()
        except UnicodeDecodeError:
            return  # begins or ends amid a character

    def _make(self, token_id: int, *, first: bool) -> Piece | None:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return None
        rules = self.rules
        if rules.byte_level:
            return Piece(self._from_alphabet(token))
        replace = rules.replace
        if first and rules.first_replace is not None:
            replace = rules.first_replace
        for old, new in replace:
            token = token.replace(old, new)
        value = _fallback_byte(token) if rules.byte_fallback else None
        if value is not None:
            return Piece(bytes((value,)), is_byte=True)
        return Piece(("" if first else rules.lead).encode() + token.encode())

    def _from_alphabet(self, token: str) -> bytes:
        """A token with any character outside the alphabet (an added token) stands for itself."""
        values = [self._alphabet.get(char) for char in token]
        known = [value for value in values if value is not None]
        return bytes(known) if len(known) == len(values) else token.encode()


def _fallback_byte(token: str) -> int | None:
    """The value of a token spelt `<0xE4>`."""
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    digits = token[3:5]
    return int(digits, 16) if all(d in "0123456789abcdefABCDEF" for d in digits) else None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable alphabet: visible Latin-1 stands for itself, the other 68 bytes for U+0100 onwards.

    Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.2.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [value for value in range(256) if value not in visible]
    alphabet = {chr(value): value for value in visible}
    alphabet.update({chr(0x100 + i): value for i, value in enumerate(hidden)})
    return alphabet
