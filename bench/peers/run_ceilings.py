"""What the machine can do at this moment, behind the protocol: bytes read and multiply-adds done in a second."""

from __future__ import annotations

import time
from typing import Any

import torch
from protocol import Request, serve

from ostinato.ops.cpu.ceilings import arithmetic_ceiling, read_ceilings
from ostinato.ops.cpu.huge_pages import prefer_huge_pages
from ostinato.ops.cpu.launch import Launch, open_runtime

BUFFER_BYTES = 384 * 2**20  # far larger than any cache
TURNS = 3

# Ways to do something, and how much of it each does.
_launches: dict[str, tuple[tuple[Launch, ...], int]] = {}


def load(request: Request) -> dict[str, str]:
    runtime = open_runtime(num_threads=request["threads"])
    # In huge pages as the engine's weights are, or it would outrun its own ceiling; and written, not just zeroed by
    # the system: pages that nobody wrote to are all one page, not memory.
    buffer = torch.empty(BUFFER_BYTES + 64, dtype=torch.uint8)
    prefer_huge_pages(buffer)
    buffer.fill_(1)
    _launches["bytes"] = read_ceilings(runtime, buffer[-buffer.data_ptr() % 64 :])
    multiply_adds, operations = arithmetic_ceiling(runtime, torch.bfloat16)
    _launches["operations"] = (multiply_adds,), operations
    measure(request)
    return {"isa": runtime.isa.name}


def measure(request: Request) -> dict[str, Any]:
    """The best of some turns of each way: {"bytes": a second, "operations": a second}."""
    best = {}
    for name, (launches, amount) in _launches.items():
        seconds = []
        for launch in launches * TURNS:
            start = time.perf_counter()
            launch()
            seconds.append(time.perf_counter() - start)
        best[name] = amount / min(seconds)
    return best


if __name__ == "__main__":
    serve({"load": load, "measure": measure})
