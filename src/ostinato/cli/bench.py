"""`ostinato bench`: one batch, eager against replayed steps, and offline throughput, on random prompts.

Must not import torch or the engine before the arguments were found good. Invariant: the last line of stdout
is one JSON object with everything that was measured, the engine's options and the load of the machine.
"""

from __future__ import annotations

import json
import os
import platform
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ostinato import __version__
from ostinato.cli.flags import engine_flags
from ostinato.cli.generate import MODEL_HELP
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError

WHAT = ("all", "latency", "replay", "throughput")


@engine_flags
def bench(
    *,
    what: Annotated[
        str, typer.Argument(help="What to measure.", metavar="[all|latency|replay|throughput]")
    ] = "all",
    model: Annotated[str | None, typer.Option("--model", "-m", help=MODEL_HELP)] = None,
    batch: Annotated[int, typer.Option(min=1, help="Requests of one batch (latency, replay).")] = 8,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 64,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 32,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests in all (throughput).")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; medians are reported.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random prompts.")] = 0,
    engine: dict[str, Any],
) -> None:
    """Measure an engine. The last line of the output is JSON."""
    if what not in WHAT:
        raise ConfigError(f"there is no benchmark {what!r}; choose one of {', '.join(WHAT)}")
    config = EngineConfig.of(model=model, **engine)
    from ostinato.cli import measure

    load = measure.Workload(batch, input_len, output_len, num_prompts, rounds, seed)
    before = os.getloadavg()
    result: dict[str, Any] = {"version": __version__, "workload": load.as_dict()}
    if what in ("all", "latency"):
        result["latency"] = measure.latency(config, load)
    if what in ("all", "replay"):
        result["replay"] = measure.replay(config, load)
    if what in ("all", "throughput"):
        result["throughput"] = measure.throughput(config, load)
    result["machine"] = {
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "load_before": before,
        "load_after": os.getloadavg(),
    }
    show(result)
    print(json.dumps(result))


def show(result: dict[str, Any]) -> None:
    """A table for people, above the JSON."""
    table = Table("measure", "median", "least", "most", title="ostinato bench")
    for part in ("latency", "replay", "throughput"):
        for name, value in result.get(part, {}).items():
            if isinstance(value, float):
                table.add_row(f"{part} {name}", f"{value:.4g}")
            elif isinstance(value, dict) and "median" in value:
                table.add_row(f"{part} {name}", *(f"{value[key]:.4g}" for key in ("median", "least", "most")))
    console = Console()
    console.print(table)
    cpus, load = result["machine"]["cpus"], result["machine"]["load_before"][0]
    if load > 0.5 * cpus:
        console.print(f"The machine was busy (load {load:.1f} on {cpus} CPUs); compare ratios, not times.")
