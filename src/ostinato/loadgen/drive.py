"""When requests are sent: at random moments that do not wait for answers, or so many at a time.

    open loop    arrivals as in a Poisson process: what many independent users do, also when the server falls behind
    closed loop  a fixed number in flight: the next one goes when one has ended

Knows jobs and outcomes only by passing them on. Invariant: the moments depend on the seed alone, never on the server.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from ostinato.loadgen.client import Clock, Outcome
from ostinato.loadgen.workload import Job

Done = Callable[[int], None]
"""Told how many requests have ended."""


class Runs(Protocol):
    """What sends one job; `client.Client` is one."""

    def run(self, job: Job, due: float | None = None) -> Awaitable[Outcome]: ...


def poisson(count: int, rate: float, seed: int) -> list[float]:
    """Moments of `count` arrivals, seconds from the start; `rate` of them a second on average."""
    rng = random.Random(seed)
    moments, now = [], 0.0
    for _ in range(count):
        now += rng.expovariate(rate)
        moments.append(now)
    return moments


async def open_loop(
    client: Runs, jobs: Sequence[Job], moments: Sequence[float], *, clock: Clock, done: Done
) -> list[Outcome]:
    """Send each job at its moment; outcomes in the order of the jobs."""
    start = clock()
    ended = 0

    async def one(job: Job, due: float) -> Outcome:
        nonlocal ended
        outcome = await client.run(job, due)
        ended += 1
        done(ended)
        return outcome

    async with asyncio.TaskGroup() as group:
        tasks = []
        for job, moment in zip(jobs, moments, strict=True):
            due = start + moment
            await asyncio.sleep(max(0.0, due - clock()))
            tasks.append(group.create_task(one(job, due)))
    return [task.result() for task in tasks]


async def closed_loop(client: Runs, jobs: Iterable[Job], concurrency: int, *, done: Done) -> list[Outcome]:
    """Keep `concurrency` jobs in flight until none is left; outcomes in the order of their ends."""
    waiting = iter(jobs)
    outcomes: list[Outcome] = []

    async def worker() -> None:
        for job in waiting:
            outcomes.append(await client.run(job))
            done(len(outcomes))

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
    return outcomes
