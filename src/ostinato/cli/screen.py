"""What commands share around the engine: opening one for a block, notes for a person, checks of files to write.

Must not write to stdout, and imports the engine only when one is opened. Invariant: without a terminal nothing
is written, so logs and pipes stay clean.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.engine.progress import is_interactive
from ostinato.errors import ConfigError

if TYPE_CHECKING:
    from ostinato.config import EngineConfig
    from ostinato.engine.llm import LLM


def note(text: str) -> None:
    """A dim line on stderr; nothing without a terminal."""
    if is_interactive():
        from rich.console import Console

        Console(stderr=True).print(text, style="dim", highlight=False, markup=False)


def check_writable(*paths: Path | None) -> None:
    """Before a long run whose result goes to these files. Raises ConfigError for one that could not be written."""
    for path in paths:
        if path is None:
            continue
        why = ""
        if path.is_dir():
            why = "it is a directory; name a file"
        elif not path.parent.is_dir():
            why = f"there is no directory {path.parent}; make it first"
        elif not os.access(path if path.exists() else path.parent, os.W_OK):
            why = "permission denied; choose another place"
        if why:
            raise ConfigError(f"{path} cannot be written: {why}")


def digits(value: float) -> str:
    """A figure for people: four digits that count, and all before the point."""
    return f"{value:.0f}" if value >= 1e4 else f"{value:.4g}"


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
