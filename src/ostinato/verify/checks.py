"""The checks: their names, what each promises, which cells each takes, and what runs it on a rank.

A table over pads.py, steps.py and hosts.py. Knows nothing of how a run is driven or shown. Invariant: a check that
cannot say anything in a deployment takes no cell, with a reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from ostinato.verify import hosts, pads, steps
from ostinato.verify.cells import CellId, corners
from ostinato.verify.outcome import Outcome
from ostinato.verify.stage import Stage


class Facts(msgspec.Struct, frozen=True):
    """What a stage knows of its deployment; equal on all ranks.

    modes: buckets of each kind of step, most: real rows that it can have, captured: whether it is. prompt_rows: longest
    prompt of one step. groups: data-parallel groups that step together. prefix_rows: longest suffix behind a cached
    prefix, 0 where none is shared.
    """

    modes: dict[str, tuple[int, ...]]
    most: dict[str, int]
    captured: dict[str, bool]
    prompt_rows: int
    groups: int
    prefix_rows: int


@dataclass(frozen=True, slots=True)
class Check:
    """takes: whether a cell is one of its. never: why it can take none in this deployment, or nothing."""

    name: str
    title: str
    promise: str
    run: Callable[[Stage, CellId], Outcome]
    takes: Callable[[CellId, Facts], bool] = lambda cell, facts: True
    never: Callable[[Facts], str] = lambda facts: ""


def _no_graph(facts: Facts) -> str:
    return "" if any(facts.captured.values()) else "nothing is captured with this graph option"


CHECKS: tuple[Check, ...] = (
    Check(
        "pads",
        "Pads",
        "NaN, Inf, 1e30, wild ids and stale rows in all that a pad can reach move no bit of a real row, write no live "
        "page, go to no expert and count as no load.",
        pads.pads,
    ),
    Check(
        "graphs",
        "Graphs",
        "A step gives the same bits eager, while it is captured, replayed, and with inputs advanced on the device.",
        steps.graphs,
        lambda cell, facts: facts.captured[cell.mode],
        _no_graph,
    ),
    Check(
        "hosts",
        "Host values",
        "Whatever a step reads on the host is part of the graph's key or refreshed before a replay.",
        hosts.hosts,
        lambda cell, facts: facts.captured[cell.mode] and cell.n in corners(cell.bucket),
        _no_graph,
    ),
    Check(
        "buckets",
        "Buckets",
        "A row has the same bits without a bucket, in the smallest that holds it, and in larger ones.",
        steps.buckets,
    ),
    Check(
        "mates",
        "Batch-mates",
        "A request has the same bits alone, beside others, and in any order.",
        steps.mates,
        lambda cell, facts: cell.n > 1,
    ),
    Check(
        "chunks",
        "Chunks",
        "A prompt has the same bits whole and in chunks, and a token the same ones decoded and prefilled.",
        steps.chunks,
        lambda cell, facts: cell.mode == "decode" or cell.n > 1,
    ),
    Check(
        "wanted",
        "Wanted rows",
        "A row of a prefill has the same bits whether all rows pass the last layer or those alone whose logits are "
        "wanted.",
        steps.wanted,
        lambda cell, facts: cell.mode != "decode",
    ),
    Check(
        "prefix",
        "Prefix hits",
        "Rows behind a cached prefix have the bits of a prompt that was computed whole.",
        steps.prefix,
        lambda cell, facts: cell.mode != "decode" and cell.n <= facts.prefix_rows,
        lambda facts: "" if facts.prefix_rows else "there are too few requests or pages to share a prefix",
    ),
    Check(
        "idle",
        "Idle groups",
        "A data-parallel group's rows have the same bits whatever the other groups run, or when they are idle.",
        steps.idle,
        lambda cell, facts: facts.groups > 1,
        lambda facts: (
            ""
            if facts.groups > 1
            else "there is one data-parallel group, or groups do not depend on each other"
        ),
    ),
)


def check_named(name: str) -> Check:
    """The check of that name; KeyError when there is none."""
    return {check.name: check for check in CHECKS}[name]
