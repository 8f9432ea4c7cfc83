"""Bit-for-bit comparison of answers, and a message that says where they part and by how much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

Rows = dict[int, torch.Tensor]


@dataclass(slots=True)
class Answer:
    """What one completion was given.

    logits: fp32 [vocab] by the position of the token that they choose. `first` is the position of its first own
    token: rows before it are logits of the prompt, where they were asked for.
    """

    first: int
    logits: Rows = field(default_factory=dict)
    tokens: tuple[int, ...] = ()
    text: str = ""
    cached: int = 0


class NotExactError(AssertionError):
    """Bits differ: who, where, what played around it, first position, how many values and how much."""


def bits(row: torch.Tensor) -> torch.Tensor:
    """The row as integers: a NaN is then equal to itself, and 0 differs from -0."""
    return row.view(torch.int32)


def compare(where: str, want: Mapping[str, Answer], got: Mapping[str, Answer]) -> None:
    """Raise NotExactError unless every answer of `got` has the bits, tokens and text of its namesake.

    An answer may have begun later, or asked for logits of its prompt: positions that both know are compared, and
    every position that `got` chose a token at must be known.
    """
    for name, answer in got.items():
        _compare(f"{where}: request {name!r}", want[name], answer)


def _compare(where: str, want: Answer, answer: Answer) -> None:
    positions = sorted(want.logits.keys() & answer.logits.keys())
    chosen = range(answer.first, answer.first + len(answer.tokens))
    assert positions, where
    assert set(chosen) <= set(positions), f"{where} chose tokens at positions that it never reached alone"
    expected = torch.stack([want.logits[at] for at in positions])
    found = torch.stack([answer.logits[at] for at in positions])
    differs = bits(expected) != bits(found)
    rows = differs.any(1).nonzero().flatten().tolist()
    other = [at for at in chosen if want.tokens[at - want.first] != answer.tokens[at - answer.first]]
    if rows and not (other and other[0] < positions[rows[0]]):
        column = int(differs[rows[0]].nonzero()[0])
        ours, theirs = expected[rows[0]], found[rows[0]]
        raise NotExactError(
            f"{where}: logits differ first at position {positions[rows[0]]}, token id {column}: "
            f"{float(ours[column])!r} alone, {float(theirs[column])!r} here; "
            f"{int(differs[rows[0]].sum())} of {len(ours)} values differ, by {float((ours - theirs).abs().max()):.3g} "
            f"at most; {len(rows)} of {len(positions)} positions differ"
        )
    if other:
        at = other[0]
        raise NotExactError(
            f"{where}: logits are equal but another token was sampled at position {at}: "
            f"{want.tokens[at - want.first]} alone, {answer.tokens[at - answer.first]} here"
        )
    if chosen == range(want.first, want.first + len(want.tokens)) and answer.text != want.text:
        raise NotExactError(f"{where}: equal tokens, but the text is {answer.text!r}, alone {want.text!r}")
