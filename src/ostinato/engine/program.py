"""A program that all ranks of an engine carry out together when rank 0 asks, beside the engine's own steps.

    rank 0: Engine.call(message) ──one round──▶ every rank: run(engine, message) ──answers──▶ rank 0

Knows nothing of what programs do. Invariant: all ranks run the same program on the same message, in the same round, so
whatever collectives it enters stay in step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ostinato.engine.engine import Engine

RANK_MODULE = "ostinato.engine.rank"
"""What a rank's process runs where there is no program."""


@dataclass(frozen=True, slots=True, eq=False)
class RankProgram:
    """`run(engine, message) -> answer`, on each rank. module: a module that serves a rank with this very program when
    it is run (`python -m`), for the processes that rank 0 starts.
    """

    run: Callable[[Engine, bytes], bytes]
    module: str = RANK_MODULE
