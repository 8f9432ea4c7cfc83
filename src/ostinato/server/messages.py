"""What crosses between server and engine process: msgspec structs, encoded as MessagePack.

    server ──Submit, Abort, Drain──▶ engine        engine ──Ready | Failed, Deltas, Refused, Stats──▶ server

Knows nothing of sockets. Invariant: one message holds all news of one step, so messages do not grow with streams.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ostinato.engine.delta import SequenceDelta

LAUNCH_REFUSED = 2
"""Exit status of an engine process that has said `Failed`."""


class Submit(msgspec.Struct, tag="submit", array_like=True):
    """A prompt to complete. `params`: fields of `SamplingParams` that differ from its defaults."""

    request_id: str
    prompt_token_ids: list[int]
    params: dict[str, Any]
    priority: int = 0
    extra_key: str = ""


class Abort(msgspec.Struct, tag="abort", array_like=True):
    """End these requests now; those no longer there are passed over."""

    request_ids: list[str]


class Stop(msgspec.Struct, tag="stop", array_like=True):
    """Exit with status 0."""


class EngineInfo(msgspec.Struct):
    """What the server must know of a loaded model. Sizes in tokens; `total_tokens` is the KV pool's; `chat`: it has a
    chat template; `fingerprint`: of all that decides an answer's bits beside its request.
    """

    directory: str
    family: str
    dtype: str
    layers: int
    experts: int | None
    vocab_size: int
    context_length: int
    total_tokens: int
    page_size: int
    max_running_requests: int
    backend: str
    ops: str
    threads: int
    chat: bool
    fingerprint: str


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The engine is loaded and takes requests."""

    info: EngineInfo


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """The engine cannot be launched as configured; the process exits. `message` is for the user."""

    message: str


class Refused(msgspec.Struct, tag="refused", array_like=True):
    """The engine will not take a request; nothing of it was kept. `message` is for the client."""

    request_id: str
    message: str


class Deltas(msgspec.Struct, tag="deltas", array_like=True):
    """The news of one step, of all requests that it changed."""

    items: list[SequenceDelta]


class Stats(msgspec.Struct, tag="stats", array_like=True):
    """`Engine.stats()`, about once a second while there is work, and when it ends."""

    values: dict[str, Any]


Command = Submit | Abort | Stop
Event = Ready | Failed | Refused | Deltas | Stats


class Launch(msgspec.Struct):
    """What the engine process reads from its first line of stdin (JSON): options and where to meet."""

    config: dict[str, Any]
    commands: str
    events: str


def command_decoder() -> msgspec.msgpack.Decoder[Command]:
    return msgspec.msgpack.Decoder(Command)


def event_decoder() -> msgspec.msgpack.Decoder[Event]:
    return msgspec.msgpack.Decoder(Event)
