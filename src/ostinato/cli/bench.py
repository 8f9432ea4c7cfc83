"""`ostinato bench`: one batch, eager against replayed steps, throughput, pads, on random prompts; or the CPU kernels.

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
from ostinato.cli.screen import digits
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError

WHAT = ("all", "latency", "replay", "throughput", "padding", "kernels")


@engine_flags
def bench(
    *,
    what: Annotated[
        str,
        typer.Argument(
            help="What to measure: all, latency, replay, throughput, padding or kernels; padding and kernels "
            "(which need no model) are not among all.",
            metavar="what",
        ),
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
        raise ConfigError(f"there is no benchmark {what!r}; choose one of {', '.join(WHAT)}, serve, buckets")
    config = EngineConfig.of(model=model, **engine)
    before = os.getloadavg()
    result: dict[str, Any] = {"version": __version__}
    if what == "kernels":
        from ostinato.cli.kernels import measure_kernels

        result["kernels"] = measure_kernels(config, rounds)
    else:
        from ostinato.cli import measure

        load = measure.Workload(batch, input_len, output_len, num_prompts, rounds, seed)
        result["workload"] = load.as_dict()
        for part in ("latency", "replay", "throughput"):
            if what in ("all", part):
                result[part] = getattr(measure, part)(config, load)
        if what == "padding":
            result["padding"] = measure.padding(config, load)
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
    console = Console()
    console.print(_kernel_table(result["kernels"]) if "kernels" in result else _step_table(result))
    cpus, load = result["machine"]["cpus"], result["machine"]["load_before"][0]
    if load > 0.5 * cpus:
        console.print(f"The machine was busy (load {load:.1f} on {cpus} CPUs); compare ratios, not times.")


def _step_table(result: dict[str, Any]) -> Table:
    table = Table("measure", "median", "least", "most", title="ostinato bench")
    for part in ("latency", "replay", "throughput", "padding"):
        for name, value in result.get(part, {}).items():
            figures = [value] if isinstance(value, float) else []
            if isinstance(value, dict) and "median" in value:
                figures = [value[key] for key in ("median", "least", "most")]
            if figures:
                words, scale = _spelt(name)
                table.add_row(f"{part}: {words}", *(digits(scale * figure) for figure in figures))
    return table


def _spelt(name: str) -> tuple[str, float]:
    """A figure's name for people, and what to multiply it by."""
    words = name.replace("_", " ")
    if name.endswith("_per_s"):
        return f"{words.removesuffix(' per s')} a second", 1
    if name.endswith("_s"):
        return f"{words.removesuffix(' s')}, ms", 1000
    if name.endswith("_share"):
        return f"{words.removesuffix(' share')}, %", 100
    return words, 1


def _kernel_table(found: dict[str, Any]) -> Table:
    """Medians, and the share of the ceiling with its extremes."""
    how = f"{found['threads']} threads, weights {found['weight_coding']}, bytes as stored"
    title = f"CPU kernels: {found['isa']}, {how}"
    table = Table("kernel", "us", "GB/s", "GFLOP/s", "of ceiling", "least", "most", title=title)
    peaks = ", ".join(
        f"{peak['median'] / 1e9:.0f} {name}" for name, peak in found["operations_per_s"].items()
    )
    table.add_row("ceilings", "", f"{found['bytes_per_s']['median'] / 1e9:.1f}", peaks)
    for name, kernel in found["kernels"].items():
        seconds, share = kernel["seconds"]["median"], kernel["share"]
        speeds = (
            f"{1e6 * seconds:.1f}",
            *(f"{kernel[key] / seconds / 1e9:.1f}" for key in ("bytes", "operations")),
        )
        table.add_row(name, *speeds, *(f"{100 * share[key]:.0f} %" for key in ("median", "least", "most")))
    return table
