"""What serving costs: the same requests over HTTP and offline, and how long a short request waits among long ones.

    throughput  32 requests in flight, streamed over HTTP, beside the offline engine on the same prompts; both in their
                own processes, in turns that change places, the one that does not run is stopped or idle
    waiting     time to first token of short requests while long prompts are being prefilled without end, as a multiple
                of the time that one chunk of a long prompt takes in the same run

Writes JSON and a table under --out. Invariant: a ratio is of one turn; turns in which others used the machine are kept
in the file but count in no median.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import machine
from checkpoints import checkpoint
from engines import PEER_TABLE, Runner
from ostinato.config import cache_dir
from ostinato.loadgen.client import Client, Outcome
from ostinato.loadgen.drive import closed_loop
from ostinato.loadgen.figures import summarise
from ostinato.loadgen.workload import Job

CHUNK = 1024
READY_S = 300.0


def jobs(prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Job]:
    """Greedy requests of exactly `max_tokens`."""
    fixed = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    return [Job({"prompt": list(prompt)} | fixed) for prompt in prompts]


@contextmanager
def served(model: Path, threads: int, context: int, log: Path) -> Iterator[tuple[str, int]]:
    """A server on a free port of loopback: its address and its process group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "ostinato", "serve", "--model", str(model), "--port", str(port)]
    command += [
        "--threads",
        str(threads),
        "--context-length",
        str(context),
        "--chunked-prefill-size",
        str(CHUNK),
    ]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + READY_S
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the server does not come up; its log is {log}")
            time.sleep(0.2)
        yield url, process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=60)


def children(pid: int) -> list[int]:
    """Processes that a process has started; the server's engine leads a session of its own."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


async def in_flight(url: str, work: Sequence[Job], concurrency: int) -> list[Outcome]:
    """Outcomes of a closed loop. Raises SystemExit for the first request that failed: figures would be of less work."""
    async with Client(url, model=None, clock=time.perf_counter) as client:
        outcomes = await closed_loop(client, work, concurrency, done=lambda _: None)
    for outcome in outcomes:
        if outcome.error:
            raise SystemExit(f"a request failed: {outcome.error}: {outcome.message}")
    return outcomes


def draw_prompts(name: str, number: int, length: int, options: argparse.Namespace) -> list[list[int]]:
    """Prompts of ordinary tokens, the same ones for the same name."""
    draw = random.Random(name)
    return [draw.choices(range(3, options.vocab), k=length) for _ in range(number)]


def throughput(url: str, server: int, offline: Runner, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Turns of output tokens a second, over HTTP and offline; turn 0 warms up."""
    turns = []
    for number in range(options.rounds + 1):
        prompts = draw_prompts(f"throughput {number}", options.requests, options.input_len, options)
        turn: dict[str, Any] = {"number": number, "cores_of_others": {}}
        for side in ("http", "offline")[:: 1 if number % 2 == 0 else -1]:
            machine.wait_until_quiet(options.others, options.patience)
            if side == "http":
                meter = machine.Meter.start(server, *children(server))
                work = jobs(prompts, options.output_len)
                outcomes = asyncio.run(in_flight(url, work, options.concurrency))
                turn["http"] = summarise(outcomes, {})
                turn["cores_of_others"][side] = meter.others()
                turn["http_tokens_per_s"] = turn["http"]["output_tokens_per_s"]
            else:
                answer = offline.ask("generate", prompts=prompts, max_tokens=options.output_len)
                turn["cores_of_others"][side] = answer.others
                turn["offline_tokens_per_s"] = answer.value["tokens"] / answer.value["seconds"]
        turn["ratio"] = turn["http_tokens_per_s"] / turn["offline_tokens_per_s"]
        turn["kept"] = number > 0 and max(turn["cores_of_others"].values()) < options.others
        turns.append(turn)
        print(
            f"  {number}: HTTP {turn['http_tokens_per_s']:.1f}, offline {turn['offline_tokens_per_s']:.1f} tokens/s, "
            f"ratio {turn['ratio']:.3f}{'' if turn['kept'] else '  (does not count)'}",
            flush=True,
        )
    return turns


async def waiting(url: str, background: int, options: argparse.Namespace) -> dict[str, Any]:
    """Short requests one after the other while `background` long prompts are always in flight."""
    draw = random.Random(f"waiting {background}")

    def long_prompts() -> Iterator[Job]:
        for number in count():
            if stop:
                return
            yield jobs(draw_prompts(f"long {background} {number}", 1, options.chunks * CHUNK, options), 1)[0]

    endless = long_prompts()

    stop = False
    async with Client(url, model=None, clock=time.perf_counter) as client:
        alone = [await client.run(job) for job, _ in zip(endless, range(2), strict=False)]
        chunk_s = statistics.median(o.end - o.start for o in alone) / options.chunks
        loop = asyncio.create_task(closed_loop(client, endless, background, done=lambda _: None))
        short: list[Outcome] = []
        for number in range(options.short):
            await asyncio.sleep(chunk_s * (0.5 + draw.random()))
            prompts = draw_prompts(f"short {background} {number}", 1, 64, options)
            short.append(await client.run(jobs(prompts, 4)[0]))
        stop = True
        long = await loop
    for outcome in (*alone, *short, *long):
        if outcome.error:
            raise SystemExit(f"a request failed: {outcome.error}: {outcome.message}")
    ttft = [outcome.pieces[0] - outcome.start for outcome in short]
    result = {
        "background": background,
        "chunk_s": chunk_s,
        "ttft_s": ttft,
        "chunks_waited": {"median": statistics.median(ttft) / chunk_s, "most": max(ttft) / chunk_s},
        "long_prompts": len(long),
    }
    print(
        f"  {background} long prompts in flight: one chunk {chunk_s:.2f} s, first token of a short request after "
        f"{result['chunks_waited']['median']:.2f} chunks (most {result['chunks_waited']['most']:.2f})",
        flush=True,
    )
    return result


def write(record: dict[str, Any], directory: Path) -> Path:
    """The record as JSON, and a page about it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "serving.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    options = record["options"]
    lines = [
        "# What serving costs\n",
        "Written by `python bench/serving.py`; the figures are in serving.json.\n",
    ]
    described = record["machine"]
    lines.append(
        f"{described['processor']}, {described['cpus']} cores, {described['system']}; {record['date']}.\n"
    )
    kept = [turn for turn in record["throughput"] if turn["kept"]]
    if kept:
        ratios = [turn["ratio"] for turn in kept]
        middle = f"**{statistics.median(ratios):.3f}** ({min(ratios):.3f}–{max(ratios):.3f})"
        lines += [
            f"**Throughput**, {options['requests']} requests of {options['input_len']} tokens answered by "
            f"{options['output_len']}, {options['concurrency']} in flight, {len(kept)} turns that count:\n",
            "| | output tokens a second |",
            "|---|---|",
            f"| over HTTP, streamed | {statistics.median(t['http_tokens_per_s'] for t in kept):.1f} |",
            f"| offline engine | {statistics.median(t['offline_tokens_per_s'] for t in kept):.1f} |",
            f"| ratio, median (least–most) | {middle} |\n",
        ]
    lines += [
        f"**Waiting** of a request of 64 tokens beside prompts of {options['chunks'] * CHUNK}, in chunks of {CHUNK}:\n",
        "| long prompts in flight | one chunk | first token after, median | most |",
        "|---|---|---|---|",
    ]
    for row in record["waiting"]:
        found = row["chunks_waited"]
        after = f"{found['median']:.2f} chunks | {found['most']:.2f} chunks"
        lines.append(f"| {row['background']} | {row['chunk_s']:.2f} s | {after} |")
    page = directory / "serving.md"
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return page


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="moe", help="a name of bench/checkpoints.py")
    parser.add_argument("--what", choices=("all", "throughput", "waiting"), default="all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="turns after the one that warms up")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=4, help="chunks of a long prompt")
    parser.add_argument("--short", type=int, default=6, help="short requests among the long ones")
    parser.add_argument("--background", type=int, nargs="+", default=[1, 4], help="long prompts in flight")
    parser.add_argument("--others", type=float, default=0.2, help="cores that others may use")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for a quiet machine")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "serving")
    return parser.parse_args()


def main() -> int:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server and the engine end as well
    cache = cache_dir() / "bench"
    model = checkpoint(options.model, cache / "checkpoints", cache_dir())
    options.vocab = model.config["vocab_size"]
    context = max(options.chunks * CHUNK, options.input_len + options.output_len) + 128
    named = vars(options) | {"out": str(options.out)}
    record: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine.describe(),
        "options": named,
    }
    record |= {"throughput": [], "waiting": []}
    with ExitStack() as stack:
        url, server = stack.enter_context(
            served(model.directory, options.threads, context, cache / "logs" / "serving.log")
        )
        print(f"{model.name} served", flush=True)
        if options.what != "waiting":
            log = cache / "logs" / "serving-offline.log"
            offline = Runner("offline", PEER_TABLE["ostinato"], Path(sys.executable), log, options.threads)
            stack.callback(offline.close)
            offline.load(
                model=str(model.directory),
                threads=options.threads,
                max_batch=options.concurrency,
                max_context=context,
                options={},
            )
            record["throughput"] = throughput(url, server, offline, options)
        if options.what != "throughput":
            for background in options.background:
                machine.wait_until_quiet(options.others, options.patience)
                record["waiting"].append(asyncio.run(waiting(url, background, options)))
    print(f"written to {write(record, options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
