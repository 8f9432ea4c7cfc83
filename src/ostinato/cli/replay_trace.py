"""`ostinato replay-trace`: run a recorded step again, eager and replayed, and say which recorded bits each repeats.

Must not import torch or the engine before the arguments were found good. Invariant: exit status 0 means that all
results, recorded and new, have the same bits, 1 that some differ, 2 that the step cannot be run here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ostinato.cli.generate import MODEL_HELP
from ostinato.cli.screen import lasting
from ostinato.errors import TraceError

if TYPE_CHECKING:
    from ostinato.engine.rerun import Rerun

DIFFERS = 1
_NOW: Mapping[str, str] = {"eager": "eager now", "replayed": "captured and replayed now"}
_RECORDED: Mapping[str, str] = {"seen": "recorded: graph", "expected": "recorded: eager"}


def replay_trace(
    *,
    file: Annotated[Path, typer.Argument(help="A .trace file, or a directory: its newest one.")],
    model: Annotated[str | None, typer.Option("--model", "-m", help=MODEL_HELP, show_default=False)] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
) -> None:
    """Run a recorded step again (see --shadow-rate, --trace-steps). Exit status: 0 all agree, 1 some differ."""
    if not file.exists():
        raise TraceError(f"there is no {file}; give a .trace file or a directory with some")
    with lasting():
        from ostinato.engine.progress import bars
        from ostinato.engine.rerun import default_trace, rerun
        from ostinato.engine.trace import read_trace
    path = default_trace(file) if file.is_dir() else file
    trace = read_trace(path)
    with bars() as report:
        result = rerun(trace, model, report)
    if as_json:
        print(json.dumps(_as_dict(path, result)))
    else:
        _show(path, result)
    raise typer.Exit(0 if result.agrees else DIFFERS)


def _as_dict(path: Path, result: Rerun) -> dict[str, object]:
    cells = {f"{now} / {then}": result.cell(now, then) for now in _NOW for then in _RECORDED}
    return {
        "trace": str(path),
        "agrees": result.agrees,
        "verdict": result.verdict,
        "compared": cells,
        "header": result.header,
    }


def _show(path: Path, result: Rerun) -> None:
    from rich.console import Console
    from rich.table import Table

    header, shape = result.header, result.header["shape"]
    versions, kernels = header["versions"], header["kernels"]
    console = Console(highlight=False, markup=False)
    console.print(
        f"{path}\nstep {header['step']} of {header['model']['name'] or 'the bundled demo'}, a {shape['mode']} of "
        f"{shape['num_tokens'][shape['dp_rank']]} rows in bucket {header['key']}; ostinato {versions['ostinato']}, "
        f"torch {versions['torch']}, {kernels['ops']}, {kernels['threads']} threads\nwhen it was recorded: "
        f"{header['where']}"
    )
    for line in header["differing_inputs"]:
        console.print(f"an input of the graph was wrong: {line}")
    table = Table("", *_RECORDED.values())
    for now, text in _NOW.items():
        table.add_row(text, *(result.cell(now, then) for then in _RECORDED))
    console.print(table)
    console.print(result.verdict)
