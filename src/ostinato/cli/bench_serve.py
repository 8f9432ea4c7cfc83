"""`ostinato bench serve`: load on an OpenAI-compatible server, and figures of how it bore it.

Must not import torch, the engine, or an HTTP client before the arguments were found good. Invariant: the last line of
stdout is one JSON object with every figure and the options that led to it; the exit code is 1 when no request
went well.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ostinato import __version__
from ostinato.cli.screen import check_writable, digits
from ostinato.config import ServerConfig
from ostinato.engine.progress import bars
from ostinato.errors import ConfigError
from ostinato.loadgen.workload import Job, RandomJobs, Span, read_jobs

if TYPE_CHECKING:
    from ostinato.loadgen.client import Outcome

DEFAULT_CONCURRENCY = 16
DEFAULT_REQUESTS = 100
RANDOM_SETS = ("random", "shared-prefix")

# The options.
_Url = Annotated[str, typer.Argument(help="The server.")]
_Model = Annotated[str | None, typer.Option("--model", "-m", help="Its first model when left out.")]
_Key = Annotated[
    str | None, typer.Option(help="Sent as a bearer token; better: OSTINATO_API_KEY.", show_default=False)
]
_Rate = Annotated[
    float | None,
    typer.Option(min=1e-6, help="Requests a second, at random moments (open loop)."),
]
_Concurrency = Annotated[
    int | None,
    typer.Option(min=1, help=f"Requests in flight instead ({DEFAULT_CONCURRENCY})."),
]
_Count = Annotated[
    int | None,
    typer.Option(min=1, help=f"Requests in all ({DEFAULT_REQUESTS}; of a file: its lines)."),
]
_Dataset = Annotated[str, typer.Option(help="random, shared-prefix, or a .jsonl file of requests.")]
_InputLen = Annotated[str, typer.Option(help="Tokens of a prompt, like 128 or 16:256.")]
_OutputLen = Annotated[str, typer.Option(help="Tokens of an answer, likewise.")]
_PrefixLen = Annotated[int, typer.Option(min=1, help="Tokens of a shared prefix.")]
_Prefixes = Annotated[int, typer.Option(min=1, help="How many shared prefixes there are.")]
_TokenIds = Annotated[
    str | None,
    typer.Option(help="Prompts of ids in this range, like 3:31999; words when left out."),
]
_Chat = Annotated[bool, typer.Option("--chat", help="Send random prompts as chats.")]
_IgnoreEos = Annotated[
    bool, typer.Option(help="Ask for answers of full length; not every server knows this field.")
]
_Extra = Annotated[str, typer.Option(help="JSON object of fields for every request.")]
_Slo = Annotated[
    list[str] | None,
    typer.Option(help="Limits in ms that goodput asks for, like ttft:500,tpot:50."),
]
_Timeout = Annotated[float, typer.Option(min=0.001, help="Seconds that a request may take.")]
_Warmup = Annotated[int, typer.Option(min=0, help="Requests sent first and not counted.")]
_Seed = Annotated[int, typer.Option(min=0, help="Seed of prompts, lengths and moments.")]
_Out = Annotated[Path | None, typer.Option(help="Write the JSON here too, with every request.")]
_Plot = Annotated[Path | None, typer.Option(help="Draw an SVG.")]


@dataclass(frozen=True, slots=True)
class Target:
    """The server, and how long it may take."""

    url: str
    model: str | None
    key: str | None
    timeout: float


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent and when: at `rate` if there is one, else `concurrency` at a time."""

    warmup: Sequence[Job]
    jobs: Sequence[Job]
    rate: float | None
    concurrency: int
    seed: int


def bench_serve(
    url: _Url = "http://127.0.0.1:8000",
    *,
    model: _Model = None,
    api_key: _Key = None,
    rate: _Rate = None,
    concurrency: _Concurrency = None,
    num_requests: _Count = None,
    dataset: _Dataset = "random",
    input_len: _InputLen = "128",
    output_len: _OutputLen = "64",
    prefix_len: _PrefixLen = 256,
    prefixes: _Prefixes = 4,
    token_ids: _TokenIds = None,
    chat: _Chat = False,
    ignore_eos: _IgnoreEos = True,
    extra: _Extra = "{}",
    slo: _Slo = None,
    timeout: _Timeout = 600.0,
    warmup: _Warmup = 1,
    seed: _Seed = 0,
    out: _Out = None,
    plot: _Plot = None,
) -> int:
    """Measure a server: TTFT, TPOT, ITL, E2E, goodput. The last line of the output is JSON."""
    if rate is not None and concurrency is not None:
        raise ConfigError(f"--rate {rate} and --concurrency {concurrency} are two ways to send; give one")
    check_writable(out, plot)
    from ostinato.loadgen.figures import parse_limits, summarise

    limits, fields = parse_limits(slo or []), _object(extra)
    if dataset in RANDOM_SETS:
        count = (num_requests or DEFAULT_REQUESTS) + warmup
        lengths = Span.parse(input_len, name="--input-len"), Span.parse(output_len, name="--output-len")
        shared = prefixes if dataset == "shared-prefix" else 0
        ids = _ids(token_ids, chat)
        jobs = list(RandomJobs(count, *lengths, seed, shared, prefix_len, ids, chat, ignore_eos, fields))
        warm, jobs = jobs[:warmup], jobs[warmup:]  # other prompts, or the first ones would be prefix hits
    elif dataset.endswith(".jsonl"):
        warm, jobs = _from_file(Path(dataset), num_requests, warmup, fields)
    else:
        raise ConfigError(f"there is no dataset {dataset!r}; choose random, shared-prefix, or a .jsonl file")
    load = Load(warm, jobs, rate, concurrency or DEFAULT_CONCURRENCY, seed)
    key = api_key or next(iter(ServerConfig.of().api_keys), None)
    name, outcomes = asyncio.run(send(Target(url, model, key, timeout), load))
    options = {"version": __version__, "url": url, "model": name, "dataset": dataset, "rate": rate}
    options |= {"concurrency": None if rate is not None else load.concurrency, "seed": seed}
    result = options | {"repeated_prompts": _repeated(load)} | summarise(outcomes, limits)
    _show(result)
    _write(result, outcomes, out, plot)
    print(json.dumps(result))
    return 0 if result["completed"] else 1


def _from_file(
    path: Path, count: int | None, warmup: int, extra: dict[str, Any]
) -> tuple[list[Job], list[Job]]:
    """Jobs to warm up with, the first of the file, and those behind them; where it holds no more, the same again."""
    lines = read_jobs(path, None, extra=extra)
    warm = [lines[number % len(lines)] for number in range(warmup)]
    rest = lines[warmup:] or lines
    return warm, rest if count is None else [rest[number % len(rest)] for number in range(count)]


def _repeated(load: Load) -> int:
    """Measured requests that were sent before: a server with a prefix cache answers them sooner."""
    texts = [json.dumps(dict(job.body), sort_keys=True) for job in (*load.warmup, *load.jobs)]
    first = {text: number for number, text in reversed([*enumerate(texts)])}
    return sum(first[text] < number for number, text in enumerate(texts) if number >= len(load.warmup))


def _ids(text: str | None, chat: bool) -> Span | None:
    if text is None:
        return None
    if chat:
        raise ConfigError(f"--token-ids {text} and --chat do not go together: a chat is text; drop one")
    return Span.parse(text, name="--token-ids", floor=0)


def _object(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ConfigError(f"--extra {text!r} is no JSON object; give one like '{{\"top_k\": 5}}'")
    return fields


async def send(target: Target, load: Load) -> tuple[str | None, list[Outcome]]:
    """Warm up, then send the load; returns the model's name, and what became of the jobs. Raises TargetError."""
    from ostinato.loadgen.client import Client
    from ostinato.loadgen.drive import closed_loop, open_loop, poisson

    clock, total = time.perf_counter, len(load.jobs)
    async with Client(
        target.url, model=target.model, key=target.key, timeout=target.timeout, clock=clock
    ) as client:
        with bars() as report:
            report("Warming up", 0, len(load.warmup))
            await closed_loop(
                client,
                load.warmup,
                load.concurrency,
                done=lambda n: report("Warming up", n, len(load.warmup)),
            )

            def done(count: int) -> None:
                report("Requests", count, total)

            done(0)
            if load.rate is None:
                outcomes = await closed_loop(client, load.jobs, load.concurrency, done=done)
            else:
                moments = poisson(total, load.rate, load.seed)
                outcomes = await open_loop(client, load.jobs, moments, clock=clock, done=done)
        return client.model, outcomes


def _write(
    result: Mapping[str, Any], outcomes: Sequence[Outcome], out: Path | None, plot: Path | None
) -> None:
    if out is not None:
        start = min(outcome.start for outcome in outcomes)
        every = [
            {
                "start_s": outcome.start - start,
                "end_s": outcome.end - start,
                "pieces_s": [piece - start for piece in outcome.pieces],
                "prompt_tokens": outcome.prompt_tokens,
                "output_tokens": outcome.output_tokens,
                "error": outcome.error,
            }
            for outcome in outcomes
        ]
        out.write_text(json.dumps({**result, "every_request": every}) + "\n", encoding="utf-8")
    if plot is not None:
        from ostinato.loadgen.plot import plot as draw

        how = f"{result['rate']:g} requests/s" if result["rate"] else f"{result['concurrency']} in flight"
        title = f"{result['model']}: {result['completed']} requests, {result['failed']} failed, {how}"
        plot.write_text(draw(outcomes, title), encoding="utf-8")


def _show(result: Mapping[str, Any]) -> None:
    """Tables for people, above the JSON."""
    console = Console()
    rates = Table("", "", title=f"ostinato bench serve: {result['model']}", show_header=False)
    rates.add_row("requests", f"{result['completed']} completed, {result['failed']} failed")
    rates.add_row("seconds", f"{result['seconds']:.2f}")
    rates.add_row("in flight", "{mean:.1f} on average, {most} at most".format(**result["in_flight"]))
    for name in ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s"):
        rates.add_row(name.replace("_per_s", " a second").replace("_", " "), digits(result[name]))
    good = result["goodput"]
    if good is not None:
        asked = ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in good["limits_ms"].items())
        rates.add_row(
            "goodput", f"{digits(good['requests_per_s'])} requests a second ({good['share']:.1%}): {asked}"
        )
    console.print(rates)
    columns = ("mean", "p50", "p90", "p99", "most")
    times = Table("milliseconds", *columns)
    for name in ("ttft", "tpot", "itl", "e2e"):
        found = result[f"{name}_ms"] or {}
        times.add_row(name.upper(), *(digits(found[key]) if found else "–" for key in columns))
    console.print(times)
    for kind, error in result["errors"].items():
        console.print(f"{error['count']} × {kind}: {error['first']}", markup=False, highlight=False)
