"""A parallel engine whose ranks are threads of this process: real engines over real shared memory, soon started.

What only processes can show (their ends, their start) is in `tests/multi`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ostinato.config import EngineConfig
from ostinato.engine.engine import Engine
from ostinato.engine.front import FrontEngine
from ostinato.engine.program import RankProgram
from ostinato.engine.rank import follow
from ostinato.engine.request import RequestOutput, SamplingParams
from ostinato.parallel.collectives import Group, SingleGroup
from ostinato.parallel.rendezvous import World
from ostinato.parallel.shm import ShmGroup, create_memory, map_memory
from ostinato.parallel.topology import Topology
from ostinato.parallel.watchdog import Watchdog

CAPACITY = 1 << 16


def _group(ranks: tuple[int, ...], name: str) -> list[Group]:
    size = len(ranks)
    if size == 1:
        return [SingleGroup(name)]
    fd = create_memory(size, capacity=CAPACITY)
    dog = Watchdog(30.0)
    groups: list[Group] = [
        ShmGroup(map_memory(fd, size, capacity=CAPACITY), r, ranks, dog, capacity=CAPACITY, name=name)
        for r in range(size)
    ]
    os.close(fd)
    return groups


def worlds(layout: Topology) -> list[World]:
    """Of every rank."""
    everybody = tuple(range(layout.tp))
    control, world = _group(everybody, "control"), _group(everybody, "world")
    attn = [group for d in range(layout.dp) for group in _group(layout.ranks_of_dp(d), "attn")]
    return [World(layout.at(r), control[r], world[r], attn[r], "shm") for r in everybody]


class Ensemble:
    """`engines`: that of every rank, rank 0's first; `errors`: what ended a rank too early."""

    def __init__(self, front: FrontEngine, engines: list[Engine], errors: list[BaseException]) -> None:
        self.front = front
        self.engines = engines
        self.errors = errors
        self.expects_errors = False

    def generate(
        self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
    ) -> list[RequestOutput]:
        """Complete prompts, as `LLM.generate` does."""
        return generate(self.front, prompts, params)


def generate(
    engine: Engine, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[RequestOutput]:
    """Complete prompts on any engine."""
    each = params if isinstance(params, list) else [params] * len(prompts)
    names = [engine.submit(prompt, one) for prompt, one in zip(prompts, each, strict=True)]
    done: dict[str, RequestOutput] = {}
    while len(done) < len(names):
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
    return [done[name] for name in names]


def _as_it_is(engine: Engine) -> None:
    return


@contextmanager
def ensemble(
    layout: Topology,
    program: RankProgram | None = None,
    *,
    prepare: Callable[[Engine], None] = _as_it_is,
    **options: Any,
) -> Iterator[Ensemble]:
    """All ranks of a layout; options are those of the engine, without sizes. program: what they can be asked to run.
    `prepare` is called with every engine before its first step.
    """
    sizes = {"tp_size": layout.tp, "dp_size": layout.dp, "ep_size": layout.ep}
    config = EngineConfig(progress=False, threads=1, **sizes, **options)
    everybody = worlds(layout)
    engines: list[Engine] = []
    errors: list[BaseException] = []

    def run(world: World) -> None:
        try:
            engine = Engine(config, lambda *args: None, world, program)
            prepare(engine)
            engines.append(engine)
            follow(engine, world)
        except BaseException as error:
            errors.append(error)
            world.fail()

    threads = [threading.Thread(target=run, args=(world,)) for world in everybody[1:]]
    for thread in threads:
        thread.start()
    front, made = None, None
    try:
        front = FrontEngine(config, lambda *args: None, everybody[0], program=program)
        prepare(front)
        made = Ensemble(front, [front, *engines], errors)
        yield made
    finally:
        if front is not None:
            front.close()
        else:
            everybody[0].fail()
        for thread in threads:
            thread.join(60)
    assert not errors or (made is not None and made.expects_errors), errors
