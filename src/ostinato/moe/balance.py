"""Which expert lies in which physical slot, so that expert-parallel ranks have even work.

    load of each expert ─▶ replicas: the next one to whichever has most load per replica
                        ─▶ packing: heaviest replica first, onto the least loaded rank with a free slot

The idea is that of DeepSeek's published EPLB (greedy replication and balanced packing), written afresh. Plain numbers;
knows nothing of weights or ranks' processes. Invariant: every expert has a slot, every slot an expert, the same on
whoever computes it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ostinato.errors import ConfigError

Slots = tuple[int, ...]
"""The logical expert of each physical slot; slots [r * n, (r + 1) * n) are those of expert-parallel rank r."""


@dataclass(frozen=True, slots=True)
class Balance:
    """A layer's slots and how even they are: mean over maximum of the ranks' loads, 1 when all are equal."""

    slots: Slots
    evenness: float


def replicas(load: Sequence[float], num_physical: int, num_ranks: int) -> list[int]:
    """How many slots each expert gets: one, and the rest where load per replica is highest; one for each rank at most.

    Raises ConfigError when there are fewer slots than experts.
    """
    if num_physical < len(load):
        raise ConfigError(f"{num_physical} slots cannot hold {len(load)} experts; give at least one for each")
    counts = [1] * len(load)
    for _ in range(num_physical - len(load)):
        # Equal ones in order, so that every rank finds the same.
        wanting = [e for e in range(len(load)) if counts[e] < num_ranks] or range(len(load))
        chosen = max(wanting, key=lambda e: (load[e] / counts[e], -e))
        counts[chosen] += 1
    return counts


def most_slots(num_experts: int, num_ranks: int) -> int:
    """Slots of a layer that can be of use, with some to spare: each expert once, and once more on each rank."""
    return num_experts * (num_ranks + 1)


def balance(load: Sequence[float], num_physical: int, num_ranks: int, held: Slots | None = None) -> Balance:
    """Slots for experts of the given load. With `held`, experts that stay on a rank stay in their slots.

    Raises ConfigError for slots that ranks cannot share out equally.
    """
    if num_physical % num_ranks:
        raise ConfigError(
            f"{num_physical} expert slots cannot be shared out over ep {num_ranks}: {num_physical} / {num_ranks} = "
            f"{num_physical / num_ranks:g}; change the number of redundant experts"
        )
    counts = replicas(load, num_physical, num_ranks)
    share = [load[e] / counts[e] for e in range(len(load))]
    pieces = sorted((e for e in range(len(load)) for _ in range(counts[e])), key=lambda e: (-share[e], e))
    room = num_physical // num_ranks
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for e in pieces:
        free = [r for r in range(num_ranks) if len(ranks[r]) < room]
        # A second replica on one rank would be of no use, so another rank is preferred.
        best = min(free, key=lambda r: (e in ranks[r], loads[r], r))
        ranks[best].append(e)
        loads[best] += share[e]
    slots: list[int] = []
    for r, experts in enumerate(ranks):
        before = () if held is None else held[r * room : (r + 1) * room]
        slots += _in_place(experts, before)
    return Balance(tuple(slots), evenness(load, tuple(slots), num_ranks))


def _in_place(experts: list[int], before: Sequence[int]) -> list[int]:
    """The experts of a rank, those that were there already at their old places."""
    left = list(experts)
    placed: list[int | None] = [None] * len(experts)
    for i, e in enumerate(before):
        if e in left:
            placed[i] = e
            left.remove(e)
    return [left.pop(0) if e is None else e for e in placed]


def evenness(load: Sequence[float], slots: Slots, num_ranks: int) -> float:
    """Mean over maximum of the ranks' loads, when each expert's load is shared evenly by its replicas."""
    room = len(slots) // num_ranks
    loads = [0.0] * num_ranks
    for i, e in enumerate(slots):
        loads[i // room] += load[e] / slots.count(e)
    return sum(loads) / num_ranks / max(loads) if max(loads) > 0 else 1.0


def replica_table(slots: Slots, num_experts: int) -> list[list[int]]:
    """Physical slots of each expert."""
    table: list[list[int]] = [[] for _ in range(num_experts)]
    for i, e in enumerate(slots):
        table[e].append(i)
    return table


def logical_load(load: Sequence[int], slots: Slots, num_experts: int) -> list[int]:
    """Counts by slot as counts by expert."""
    counts = [0] * num_experts
    for i, e in enumerate(slots):
        counts[e] += load[i]
    return counts


def read_placement(path: Path, layers: Sequence[int], num_experts: int, num_ranks: int) -> dict[int, Slots]:
    """Slots of the sparse `layers` from a JSON file: {"slots": [[expert of each slot], ... for each sparse layer]}.

    Raises ConfigError naming what is wrong in the file.
    """
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))["slots"]
        rows = [tuple(int(e) for e in row) for row in listed]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); correct expert_placement") from error
    except (ValueError, OverflowError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f'{path} is no expert placement; it must hold {{"slots": [[expert of each slot], ...]}}, a list for each '
            "sparse layer"
        ) from error
    if len(rows) != len(layers):
        raise ConfigError(
            f"{path} places experts of {len(rows)} layers, the model has {len(layers)} with experts"
        )
    for layer, row in zip(layers, rows, strict=True):
        if len(row) > (most := most_slots(num_experts, num_ranks)):
            raise ConfigError(
                f"{path}: layer {layer} has {len(row)} slots, over {most} for {num_experts} experts on ep {num_ranks}; "
                "more than one slot for an expert on each rank is of no use: leave some out"
            )
        wrong = sorted({e for e in row if not 0 <= e < num_experts} | (set(range(num_experts)) - set(row)))
        if wrong or len(row) != len(rows[0]):
            raise ConfigError(
                f"{path}: layer {layer} has {len(row)} slots; experts {wrong} are unknown or have none; every expert "
                f"of 0..{num_experts - 1} needs a slot, and all layers as many slots"
            )
    return dict(zip(layers, rows, strict=True))
