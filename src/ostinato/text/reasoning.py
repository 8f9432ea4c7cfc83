"""Reasoning beside the answer: what stands between `<think>` and `</think>` is told apart while it comes.

Knows nothing of tools or of HTTP. Invariant: the pieces handed out, with the marks put back, are the text that came in;
nothing waits longer than a mark may still be forming.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from ostinato.text.stop import begun

OPEN, CLOSE = "<think>", "</think>"


class Piece(NamedTuple):
    """Some text of an answer, and which part of it it belongs to."""

    kind: Literal["reasoning", "content"]
    text: str


class ReasoningSplitter:
    """Splits one answer. `inside`: the prompt ended with the opening mark already.

    Only an answer that opens with `<think>` (behind whitespace) is split, once; later marks are content. Newlines
    around the marks belong to neither part.
    """

    def __init__(self, *, inside: bool) -> None:
        self._state: Literal["start", "inside", "after", "content"] = "inside" if inside else "start"
        self._held = ""
        self._spoken = False  # whether any reasoning was handed out

    def push(self, text: str) -> list[Piece]:
        """What this text completes."""
        self._held += text
        pieces: list[Piece] = []
        while (piece := self._next()) is not None:
            pieces += [piece] if piece.text else []
        return pieces

    def finish(self) -> list[Piece]:
        """What was held back; the answer has ended."""
        held, self._held = self._held, ""
        if self._state == "after":
            return []
        kind: Literal["reasoning", "content"] = "reasoning" if self._state == "inside" else "content"
        return [Piece(kind, held)] if held else []

    def _next(self) -> Piece | None:
        """One piece, perhaps empty, when the state moves on or text can go; None when more must come first."""
        if self._state == "start":
            return self._open()
        if self._state == "inside":
            return self._close()
        if self._state == "after":
            self._held = self._held.lstrip("\n")
            if self._held:
                self._state = "content"
        return self._take("content", len(self._held)) if self._state == "content" and self._held else None

    def _open(self) -> Piece | None:
        seen = self._held.lstrip()
        if seen.startswith(OPEN):
            self._held, self._state = seen[len(OPEN) :], "inside"
            return Piece("reasoning", "")
        if OPEN.startswith(seen):
            return None
        self._state = "content"
        return Piece("content", "")

    def _close(self) -> Piece | None:
        if not self._spoken:
            self._held = self._held.lstrip("\n")
        at = self._held.find(CLOSE)
        if at >= 0:
            piece = Piece("reasoning", self._held[:at].rstrip("\n"))
            self._held, self._state = self._held[at + len(CLOSE) :], "after"
            return piece
        # A line's end may be the one before the mark, and the end of the text the beginning of it.
        ready = len(self._held) - begun(self._held, CLOSE)
        ready = len(self._held[:ready].rstrip("\n"))
        if not ready:
            return None
        self._spoken = True
        return self._take("reasoning", ready)

    def _take(self, kind: Literal["reasoning", "content"], size: int) -> Piece:
        piece, self._held = Piece(kind, self._held[:size]), self._held[size:]
        return piece
