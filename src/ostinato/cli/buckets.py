"""`ostinato bench buckets`: bucket lists for the step sizes of a workload, and what they save beside the present ones.

    sizes   from a run of its own, a file with `stats()` in it, or a running server
    costs   measured on this machine, or counted in padded rows

Must not import torch or the engine before the arguments were found good. Invariant: the last line of stdout is one JSON
object.
"""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ostinato.cli.flags import engine_flags
from ostinato.cli.generate import MODEL_HELP
from ostinato.config import EngineConfig, ServerConfig
from ostinato.errors import ConfigError
from ostinato.options import parse_bytes

if TYPE_CHECKING:
    from ostinato.engine.llm import LLM
    from ostinato.graphs.planner import Budget, Costs, Outcome
    from ostinato.padding import ShapeRules

KINDS = ("decode", "prefill")
Sizes = dict[str, dict[int, int]]
Lists = Mapping[str, list[int]]


@engine_flags
def bench_buckets(
    *,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="File with stats in JSON, or URL of a server; else a run of its own.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help=MODEL_HELP)] = None,
    rows: Annotated[
        bool, typer.Option("--rows", help="Count padded rows; do not measure what they cost here.")
    ] = False,
    max_graphs: Annotated[int, typer.Option(min=1, help="Graphs of each kind at most.")] = 16,
    graph_memory: Annotated[
        str | None, typer.Option(help="Memory of the graphs of a kind, like 2GiB.")
    ] = None,
    capture_seconds: Annotated[
        float | None, typer.Option(min=0, help="Time to capture the graphs of a kind.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests of its own run.")] = 48,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, half to twice as many.")] = 64,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens of an answer, half to twice as many.")] = 48,
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts and lengths.")] = 0,
    engine: dict[str, Any],
) -> None:
    """Plan bucket lists for the steps of a workload. The last line of the output is JSON."""
    config = _config(EngineConfig.of(model=model, **engine), measured=not rows)
    budget = _budget(max_graphs, graph_memory, capture_seconds, measured=not rows)
    from ostinato.graphs.planner import Costs

    sizes, lists = ({}, {}) if source is None else read_sizes(source)
    costs: Mapping[str, Costs] = dict.fromkeys(KINDS, Costs(pad_row=1.0, eager=64.0))
    if source is None or not rows:
        from ostinato.cli.screen import open_engine

        with open_engine(config) as llm:
            if source is None:
                sizes = run_workload(llm, num_prompts, input_len, output_len, seed)
            if not rows:
                from ostinato.cli.bucket_costs import measured_costs

                costs = measured_costs(llm.engine.worker)
            rules = llm.engine.worker.rules
    if source is not None:
        rules = rules_for(config, sizes, lists)
    result = {kind: compare(kind, sizes[kind], rules, costs[kind], budget) for kind in KINDS}
    _show(result, costs, in_rows=rows)
    print(
        json.dumps(
            {"unit": "rows" if rows else "seconds"} | {k: _as_dict(v, costs[k]) for k, v in result.items()}
        )
    )


def _budget(graphs: int, memory: str | None, capture_s: float | None, *, measured: bool) -> Budget:
    """Raises ConfigError for limits of what nobody measures."""
    if not measured and (memory is not None or capture_s is not None):
        raise ConfigError("what a graph takes is not measured with --rows; leave out --rows, or the limits")
    size = None if memory is None else parse_bytes(memory, name="graph_memory")
    from ostinato.graphs.planner import Budget

    return Budget(graphs, size, capture_s)


def compare(
    kind: str, sizes: Mapping[int, int], rules: ShapeRules, costs: Costs, budget: Budget
) -> tuple[Outcome, Outcome]:
    """What the present list costs for these sizes, and what the planned one does: of both what the steps fall into."""
    from ostinato.graphs.planner import Limits, evaluate, plan, used

    buckets = rules.decode if kind == "decode" else rules.extend
    factor = rules.max_pad_factor if kind == "prefill" else None
    limits = Limits(rules.attn_tp_size, buckets.largest, factor)
    fitting = {size: steps for size, steps in sizes.items() if size <= buckets.largest}
    planned = plan(fitting, costs, budget, limits)
    now, then = (
        evaluate(used(sizes, fitting), fitting, costs, limits) for sizes in (buckets.sizes, planned.sizes)
    )
    return now, then._replace(sizes=planned.sizes)


def rules_for(config: EngineConfig, sizes: Sizes, lists: Lists) -> ShapeRules:
    """The lists that were in use; where they are not known, those of an engine of these options."""
    from ostinato.graphs import decode_buckets, prefill_buckets
    from ostinato.padding import ShapeRules

    bs = max([config.max_running_requests, *sizes["decode"]])
    rows = max([config.chunked_prefill_size or config.max_prefill_tokens, *sizes["prefill"]])
    decode = decode_buckets(bs, sizes=lists.get("decode") or config.decode_buckets)
    return ShapeRules(decode, prefill_buckets(rows, sizes=lists.get("prefill") or config.prefill_buckets))


def _config(config: EngineConfig, *, measured: bool) -> EngineConfig:
    """The options to measure with. Raises ConfigError for those that cannot be measured."""
    if (config.tp_size or 1) > 1 or config.dp_size > 1:
        raise ConfigError(
            "bench buckets measures one process; leave out tp and dp, and read a server with --from URL"
        )
    if config.graph == "eager" and measured:
        raise ConfigError(
            "graph 'eager' has no graphs whose cost could be measured; choose another, or --rows"
        )
    return config.replace(capture="lazy")  # what a capture costs is seen where graphs are captured at use


def read_sizes(source: str) -> tuple[Sizes, Lists]:
    """Steps by size of both kinds, and the buckets that were in use, where they are told. Raises ConfigError."""
    served = source.startswith(("http://", "https://"))
    try:
        found, lists = _served(source) if served else _written(Path(source).read_text(encoding="utf-8"))
    except (OSError, HTTPException) as error:
        remedy = "give the address of a server that runs" if served else "give a file"
        why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ConfigError(f"{source} cannot be read ({why}); {remedy}") from error
    except ValueError as error:
        told = "the address of a server of ostinato" if served else "what `--json` or `bench` printed"
        raise ConfigError(f"{source} holds no JSON ({error}); give {told}") from error
    try:
        return {kind: {int(size): steps + 0 for size, steps in found[kind].items()} for kind in KINDS}, lists
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{source} has no step sizes; give stats of an engine that has run, with graph.decode.sizes"
        ) from error


def _served(address: str) -> tuple[Any, Lists]:
    """Sizes and lists as a server tells its dashboard; of the sizes, what it may be."""
    keys = ServerConfig.of().api_keys
    headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    request = urllib.request.Request(f"{address.rstrip('/')}/dashboard/data?after=0", headers=headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        data = json.load(answer)
    graphs = data.get("graphs") if isinstance(data, dict) else None
    return (graphs.get("sizes"), graphs.get("lists") or {}) if isinstance(graphs, dict) else (None, {})


def _written(text: str) -> tuple[Any, Lists]:
    """Those of the last line, if it is an object, else of all of the text."""
    lines = text.strip().split("\n")  # JSON may hold what `splitlines` takes for a line's end
    sizes, lists = _graphs(json.loads(lines[-1] if lines and lines[-1].startswith("{") else "\n".join(lines)))
    return sizes, lists or {}


def _graphs(value: Any) -> tuple[dict[str, dict[str, int]] | None, Lists | None]:
    """Sizes and lists of the first `Engine.stats()` anywhere in a JSON value."""
    if isinstance(value, dict):
        graph = value.get("graph")
        if isinstance(graph, dict) and all("sizes" in (graph.get(kind) or ()) for kind in KINDS):
            return {kind: graph[kind]["sizes"] for kind in KINDS}, value.get("buckets")
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            found = _graphs(item)
            if found[0] is not None:
                return found
    return None, None


def run_workload(llm: LLM, count: int, input_len: int, output_len: int, seed: int) -> Sizes:
    """Requests of random lengths that come at random steps; the sizes of the steps that served them."""
    from ostinato.engine.request import SamplingParams

    draw, engine = random.Random(seed), llm.engine
    special = llm.tokenizer.special_ids
    vocabulary = [i for i in range(llm.tokenizer.vocab_size) if i not in special]

    def about(length: int) -> int:
        return draw.randint(max(length // 2, 1), 2 * length)

    while count or engine.has_work:
        while count and draw.random() < 0.3:
            params = SamplingParams(temperature=0.0, max_tokens=about(output_len), ignore_eos=True)
            engine.submit(draw.choices(vocabulary, k=about(input_len)), params)
            count -= 1
        engine.step()
    graph = engine.stats()["graph"]
    return {kind: {int(size): steps for size, steps in graph[kind]["sizes"].items()} for kind in KINDS}


def _as_dict(pair: tuple[Outcome, Outcome], costs: Costs) -> dict[str, Any]:
    now, planned = (one._asdict() | {"pad_share": one.pad_share} for one in pair)
    prices = {
        "pad_row": costs.pad_row,
        "eager": costs.eager,
        "graph": costs.graph,
        "graph_bytes": costs.graph_bytes,
        "capture_s": costs.capture_s,
    }
    return {"present": now, "planned": planned, "costs": prices}


def _show(result: dict[str, tuple[Outcome, Outcome]], costs: Mapping[str, Costs], *, in_rows: bool) -> None:
    console = Console(highlight=False)
    table = Table(
        "steps", "list", "graphs used", "pads", "eager", "cost, rows" if in_rows else "cost, ms", "buckets"
    )
    for kind, pair in result.items():
        for name, one in zip(("present", "planned"), pair, strict=True):
            cost = f"{one.cost:.0f}" if in_rows else f"{1e3 * one.cost:.3g}"
            sizes = " ".join(map(str, one.sizes))
            table.add_row(
                kind, name, str(len(one.sizes)), f"{one.pad_share:.1%}", str(one.eager_steps), cost, sizes
            )
    console.print(table)
    if in_rows:
        console.print("Counted in rows: a padded row costs 1, a step without a graph 64, a graph nothing.")
        return
    for kind, price in costs.items():
        free = price.pad_row * 32 < price.graph
        console.print(
            f"{kind}: here a padded row costs {1e6 * price.pad_row:.2f} us, a graph {1e3 * price.graph:.2f} ms and "
            f"{price.graph_bytes / 2**20:.2f} MiB, an eager step {1e3 * price.eager:.2f} ms more than a replay"
            + ("; pads are nearly free, so few buckets are best" if free else "")
        )
