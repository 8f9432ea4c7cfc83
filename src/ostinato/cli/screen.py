"""What is shown beside the answer: progress bars and notes, on stderr, and only where a person is looking.

Must not write to stdout, and imports the engine only when one is opened. Invariant: without a terminal
nothing is drawn, so logs and pipes stay clean.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from ostinato.config import EngineConfig
    from ostinato.engine.llm import LLM


class Report(Protocol):
    """Told how far a stage is: `report("load", done, total)`."""

    def __call__(self, stage: str, done: int, total: int, /) -> None: ...


def is_interactive() -> bool:
    """Whether a person sees stderr."""
    return sys.stderr.isatty()


def note(text: str) -> None:
    """A dim line for a person; nothing without a terminal."""
    if is_interactive():
        from rich.console import Console

        Console(stderr=True).print(text, style="dim", highlight=False, markup=False)


@contextmanager
def open_engine(config: EngineConfig) -> Iterator[LLM]:
    """An engine for the length of a block."""
    from ostinato.engine.llm import LLM

    llm = LLM(config=config.replace(progress=config.progress and is_interactive()))
    try:
        yield llm
    finally:
        llm.close()


@contextmanager
def bars(*, shown: bool = True) -> Iterator[Report]:
    """Progress bars, one per stage, gone when the block ends."""
    if not (shown and is_interactive()):
        yield _ignore
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield _Bars(progress)


def _ignore(stage: str, done: int, total: int, /) -> None:
    return None


class _Bars:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, stage: str, done: int, total: int, /) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=total)
        self._progress.update(self._tasks[stage], completed=done, total=total)
