"""Progress bars on stderr, for people only: nothing is printed when stderr is no terminal.

Light to import (rich is loaded when a bar is shown); knows nothing of what is measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ostinato.config import environment_options

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

Report = Callable[[str, int, int], None]
"""Progress of a stage: (name, done, total)."""


def is_interactive() -> bool:
    """Whether a person can be watching."""
    return sys.stderr.isatty()


@contextmanager
def bars(*, shown: bool | None = None) -> Iterator[Report]:
    """Progress bars, one per stage, gone when the block ends; where no option says so, NO_PROGRESS decides."""
    if shown is None:
        shown = environment_options().get("progress", True)
    if not (shown and is_interactive()):
        yield _ignore
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
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
