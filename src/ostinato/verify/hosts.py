"""The check of host values: whatever a step reads on the host is in the graph's key or in a buffer that is refreshed.

A graph is captured over one step and replayed for others, each of which differs from it in one respect. Invariant: a
replay gives what an eager step gives; where it does not, the respect in which the steps differ names the value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ostinato.verify.cells import CellId
from ostinato.verify.outcome import Outcome
from ostinato.verify.requests import Span
from ostinato.verify.stage import Counts, Played, Stage, Way


@dataclass(frozen=True, slots=True, eq=False)
class _Changed:
    """A step that differs from the captured one in `name`."""

    name: str
    parts: Sequence[Span]
    counts: Counts
    ids: torch.Tensor | None = None
    swap: tuple[int, int] | None = None


def hosts(stage: Stage, cell: CellId) -> Outcome:
    """Capture over the cell's rows; replay with other tokens, lengths, order, page-table rows, counts, each alone."""
    out, counts = Outcome(), stage.counts(cell)
    parts = stage.parts(cell, counts[stage.group])
    for changed in _changes(stage, cell, parts, counts):
        base = stage.play_captured(cell.mode, parts, counts, cell.bucket)
        stage.kv.restore(base.batch.out_cache_loc)
        if changed.swap is not None:
            stage.requests.swap_rows(*changed.swap)
        # The replay comes first: an eager step would leave behind what a replay should have made anew.
        replayed = _play(stage, cell, changed, "replay")
        stage.kv.restore(replayed.batch.out_cache_loc)
        eager = _play(stage, cell, changed, "eager")
        how = f"between eager and a replay when {changed.name} differs from the captured step"
        out.same(changed.name, eager, replayed, how, slot=changed.name)
        if changed.swap is not None:
            stage.requests.swap_rows(*changed.swap)
        stage.kv.restore(eager.batch.out_cache_loc)
    return out


def _play(stage: Stage, cell: CellId, changed: _Changed, way: Way) -> Played:
    return stage.play(cell.mode, changed.parts, changed.counts, cell.bucket, way, ids=changed.ids)


def _changes(stage: Stage, cell: CellId, parts: list[Span], counts: Counts) -> Iterator[_Changed]:
    """Each respect in which a step may differ without another graph. As many on every rank."""
    own = stage.requests.ids(parts)
    other = own % (stage.worker.model.config.vocab_size - 1) + 1
    yield _Changed("input_ids", parts, counts, other)
    earlier = [(request, max(first - 1, 0), count) for request, first, count in parts]
    yield _Changed("seq_lens", earlier, counts)
    yield _Changed("order of requests", parts[::-1], counts)
    if len(stage.requests) > 1:
        first = parts[0][0] if parts else 0
        yield _Changed("req_pool_indices", parts, counts, swap=(first, (first + 1) % len(stage.requests)))
    elsewhere = stage.parts(cell, counts[stage.group], "elsewhere")
    yield _Changed("out_cache_loc", elsewhere, counts)
    if cell.n > 1:
        fewer = tuple(max(count - 1, min(count, 1)) for count in counts)
        yield _Changed("num_token_non_padded", stage.parts(cell, fewer[stage.group], "fewer"), fewer)
