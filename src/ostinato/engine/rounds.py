"""What rank 0 and the others say to each other: one round, led by rank 0, for each step of its engine.

    rank 0: Round(op, submits, aborts) ──broadcast──▶ every rank carries it out, in order, then steps once
    leaders of other data-parallel groups: news of their requests ──gather──▶ rank 0

msgspec structs over the control group; small ones in one frame of fixed size. Knows nothing of steps. Invariant: all
ranks take part in every round, whatever it is about, so the control group never runs out of step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import accumulate
from typing import Any, Literal

import msgspec
import torch

from ostinato.engine.delta import SequenceDelta
from ostinato.engine.request import Request, SamplingParams
from ostinato.parallel.collectives import Group

FRAME = 4096
"""Bytes of a message that travel at once; longer ones need a second operation."""


class Submit(msgspec.Struct, array_like=True):
    """A checked request, for the ranks of data-parallel group `dp_rank`."""

    dp_rank: int
    request_id: str
    prompt_token_ids: list[int]
    params: dict[str, Any]
    priority: int = 0
    extra_key: str = ""

    def request(self) -> Request:
        """As its engine takes it."""
        params = SamplingParams(**self.params)
        ids = tuple(self.prompt_token_ids)
        return Request(self.request_id, ids, params, None, self.priority, self.extra_key)


class Round(msgspec.Struct, array_like=True):
    """step: carry out submits and aborts, then run one step. tell: carry them out and send statistics. call: run the
    program on `message`. stop: end.
    """

    op: Literal["step", "tell", "call", "stop"]
    submits: list[Submit] = []
    aborts: list[str] = []
    message: bytes = b""


class News(msgspec.Struct, array_like=True):
    """What a rank sends after a round: leaders their news, or, after a "tell", statistics as JSON; all their digest,
    after a "call" their answer, and after a "tell" the rows that their experts computed.
    """

    deltas: list[SequenceDelta] = []
    stats: bytes = b""
    digest: int = 0
    answer: bytes = b""
    expert_rows: dict[str, int] = {}


def params_as_dict(params: SamplingParams) -> dict[str, Any]:
    """`SamplingParams(**params_as_dict(p)) == p`, in types that msgpack knows."""
    values = {spec.name: getattr(params, spec.name) for spec in fields(params)}
    if values["logit_bias"] is not None:
        values["logit_bias"] = dict(values["logit_bias"])
    return values


class Courier:
    """Messages of any length over a group: one to all, and all to rank 0."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._frame = torch.zeros(FRAME, dtype=torch.uint8)
        self._frames = torch.zeros(group.size, FRAME, dtype=torch.uint8)
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
        self._rounds = msgspec.msgpack.Decoder(Round)
        self._news = msgspec.msgpack.Decoder(News)

    def lead(self, round_: Round) -> None:
        """Rank 0: tell all others."""
        data = self._encoder.encode(round_)
        self._write(data)
        self._group.broadcast(self._frame, 0)
        if len(data) > FRAME - 8:
            self._group.broadcast(_tensor(data), 0)

    def follow(self) -> Round:
        """Other ranks: wait for rank 0's next round, for ever."""
        self._group.broadcast(self._frame, 0)
        size = _size(self._frame)
        if size <= FRAME - 8:
            return self._rounds.decode(_payload(self._frame, size))
        whole = torch.zeros(size, dtype=torch.uint8)
        self._group.broadcast(whole, 0)
        return self._rounds.decode(whole.numpy().tobytes())

    def gather(self, news: News) -> list[News]:
        """All ranks: everybody's news, in rank order; only rank 0 decodes them."""
        data = self._encoder.encode(news)
        self._write(data)
        self._group.all_gather(self._frame, self._frames)
        sizes = [_size(frame) for frame in self._frames]
        if max(sizes) <= FRAME - 8:
            parts = [_payload(frame, size) for frame, size in zip(self._frames, sizes, strict=True)]
        else:
            whole = torch.zeros(sum(sizes), dtype=torch.uint8)
            self._group.all_gather_rows(_tensor(data), sizes, whole)
            ends = list(accumulate(sizes))
            parts = [whole[end - n : end].numpy().tobytes() for n, end in zip(sizes, ends, strict=True)]
        return [self._news.decode(part) for part in parts] if self._group.rank == 0 else []

    def _write(self, data: bytes) -> None:
        head = data[: FRAME - 8]
        self._frame[:8] = _tensor(len(data).to_bytes(8, "little"))
        self._frame[8 : 8 + len(head)] = _tensor(head)


def _plain(value: object) -> object:
    """A number or text of a class of its own, such as numpy.float64, as the plain one that one rank takes it for."""
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, str):
        return str.__str__(value)
    raise NotImplementedError(f"{value!r} cannot be sent to other ranks")


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _size(frame: torch.Tensor) -> int:
    return int.from_bytes(frame[:8].numpy().tobytes(), "little")


def _payload(frame: torch.Tensor, size: int) -> bytes:
    return frame[8 : 8 + size].numpy().tobytes()


def accepted(submits: Sequence[Submit], dp_rank: int) -> list[Submit]:
    """The requests of one data-parallel group."""
    return [submit for submit in submits if submit.dp_rank == dp_rank]
