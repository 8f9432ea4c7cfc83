"""`ostinato fetch`: make a ready model in the user's cache directory.

Must not import torch before the name is known to be good. Prints the directory on stdout, and nothing else
there.
"""

from __future__ import annotations

from typing import Annotated

import typer

from ostinato.cli.screen import note
from ostinato.config import cache_dir
from ostinato.engine.progress import bars


def fetch(
    name: Annotated[str, typer.Argument(help="smollm2, or smollm2-moe (its mixture of experts).")],
) -> None:
    """Download a model once (93 MB) and convert it; prints its directory."""
    from ostinato.models import fetch as models

    with bars() as report:
        path = models.fetch(name, cache_dir=cache_dir(), progress=report)
    print(path)
    note(f"Run it with: ostinato chat --model {name}")
