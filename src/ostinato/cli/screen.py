"""What commands share around the engine: opening one for the length of a block, and notes for a person.

Must not write to stdout, and imports the engine only when one is opened. Invariant: without a terminal nothing
is written, so logs and pipes stay clean.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ostinato.engine.progress import is_interactive

if TYPE_CHECKING:
    from ostinato.config import EngineConfig
    from ostinato.engine.llm import LLM


def note(text: str) -> None:
    """A dim line on stderr; nothing without a terminal."""
    if is_interactive():
        from rich.console import Console

        Console(stderr=True).print(text, style="dim", highlight=False, markup=False)


@contextmanager
def lasting() -> Iterator[None]:
    """For what makes objects that stay to the end, such as importing torch: no garbage collection walks over them,
    neither meanwhile nor ever after.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def open_engine(config: EngineConfig) -> Iterator[LLM]:
    """An engine for the length of a block."""
    with lasting():
        from ostinato.engine.llm import LLM

        llm = LLM(config=config)
    try:
        yield llm
    finally:
        llm.close()
