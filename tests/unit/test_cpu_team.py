"""Chains of launches: one team for all of them, whose members come late, or not at all, and never change a bit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch

from ostinato.ops.cpu.launch import COUNTER, FOLLOWS, FOLLOWS_SHARE, NO_TEAM, SOON, TEAM, Launch, open_runtime
from ostinato.ops.cpu.linear import LinearWeights
from ostinato.ops.cpu.opset import NumbaOps

ROWS, HIDDEN, INNER, EXPERTS = 3, 96, 256, 4


@functools.cache
def opset(threads: int, quantization: str | None) -> NumbaOps:
    """An op set whose team has so many threads, however many cores there are."""
    runtime = open_runtime()
    pool = dataclasses.replace(runtime.pool, num_threads=threads)
    return NumbaOps(dataclasses.replace(runtime, pool=pool), quantization=quantization)


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul(0.1).bfloat16()


def layers(ops: NumbaOps, out: torch.Tensor, depth: int = 4) -> list[Launch]:
    """Norm, product, experts and sum, again and again: large launches, and small ones that are run by one thread."""
    launches = [ops.add.bind(draw(ROWS, HIDDEN, seed=0), torch.zeros_like(out), out)]
    for i in range(depth):
        wide = ops.pack_linear(draw(INNER, HIDDEN, seed=5 * i + 1))
        narrow = ops.pack_linear(draw(HIDDEN, INNER, seed=5 * i + 2))
        experts = ops.pack_experts(
            draw(EXPERTS, 2 * INNER, HIDDEN, seed=5 * i + 3), draw(EXPERTS, HIDDEN, INNER, seed=5 * i + 4)
        )
        ids = torch.tensor([[0, 1], [i % 4, 3], [-1, 2]], dtype=torch.int32)
        normed, mixed, inner = torch.empty_like(out), torch.empty_like(out), draw(ROWS, INNER, seed=0)
        weight = torch.ones(HIDDEN, dtype=torch.bfloat16)
        launches += [
            ops.rms_norm.bind(out, weight, 1e-6, normed),
            ops.linear.bind(normed, wide, inner),
            ops.linear.bind(inner, narrow, mixed),
            ops.moe_experts.bind(mixed, torch.full((ROWS, 2), 0.5), ids, experts, False, normed),
            ops.add.bind(normed, out, out),
        ]
    return launches


def run(out: torch.Tensor, call: Callable[[], object]) -> torch.Tensor:
    out.fill_(7.0)
    call()
    return out.clone()


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_chain_computes_what_its_launches_do(quantization: str | None) -> None:
    """With a thread alone and with more threads than cores, whose helpers often miss a launch."""
    found = []
    for threads in (1, 2, 5):
        out = torch.empty(ROWS, HIDDEN, dtype=torch.bfloat16)
        launches = layers(opset(threads, quantization), out)
        chain = Launch.chain(launches)
        found.append(run(out, lambda launches=launches: [launch() for launch in launches]))
        found += [run(out, chain) for _ in range(20)]
        assert all(int(launch.block[TEAM]) == NO_TEAM for launch in launches)
    assert found[0].isfinite().all()
    assert all(torch.equal(found[0], other) for other in found)


def test_a_chain_of_small_launches_needs_no_team() -> None:
    """The pool's entry is never called."""
    runtime = open_runtime()
    pool = dataclasses.replace(runtime.pool, num_threads=4, parallel=1)  # an address that would crash
    ops = NumbaOps(dataclasses.replace(runtime, pool=pool))
    x, out = torch.ones(2, 8), torch.zeros(2, 8)
    Launch.chain([ops.add.bind(x, out, out) for _ in range(6)])()
    assert torch.equal(out, torch.full((2, 8), 6.0))


def test_chains_of_chains_are_one_chain() -> None:
    """Launches keep their order, and each is told what the next one reads that is known."""
    ops = opset(2, None)
    out = torch.empty(ROWS, HIDDEN, dtype=torch.bfloat16)
    launches = layers(ops, out, depth=2)
    expected = run(out, Launch.chain(launches))
    chain = Launch.chain([Launch.chain(launches[:4]), launches[4], Launch.chain(launches[5:])])
    assert chain.parts == tuple(launches)
    assert torch.equal(run(out, chain), expected)
    add, norm, wide, narrow, experts, *_ = launches
    weights = [part for part in narrow.kept if isinstance(part, LinearWeights)]
    assert int(wide.block[FOLLOWS]) == weights[0].panels.words.data_ptr()
    assert int(wide.block[FOLLOWS_SHARE]) == 2 * INNER * 32 * 2  # half of three panels, rounded up
    assert int(narrow.block[FOLLOWS]) == 0  # experts are chosen by what runs
    assert int(add.block[FOLLOWS]) == int(norm.block[FOLLOWS]) == int(wide.streamed.address)  # type: ignore[union-attr]
    assert int(experts.block[FOLLOWS]) == int(launches[7].streamed.address)  # type: ignore[union-attr]


def test_a_chain_shares_counters_and_knows_what_small_launches_touch() -> None:
    """Behind a launch that streams: blocks and weights up to the next one that does; behind a small one nothing."""
    launches = layers(opset(2, None), torch.empty(ROWS, HIDDEN, dtype=torch.bfloat16), depth=2)
    chain = Launch.chain(launches)
    assert len({int(launch.block[COUNTER]) for launch in launches}) == 1
    experts, add, norm, wide = launches[4:8]
    lists = next(words for words in reversed(experts.kept) if isinstance(words, torch.Tensor))

    def asked(launch: Launch) -> set[int]:
        start = (int(launch.block[SOON]) - lists.data_ptr()) // 8
        return set(lists[start + 1 : start + 1 + int(lists[start])].tolist())

    wanted = [add.address, norm.address, wide.address, *(address for address, _ in norm.touched)]
    assert len(norm.touched) == 3  # x, weight, out
    assert {address // 64 * 64 for address in wanted} <= asked(experts)
    assert not asked(add)
    assert not asked(launches[-1])
    assert len(chain.parts) == len(launches)
