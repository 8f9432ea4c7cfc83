"""Checks that compare steps with each other: graphs with eager, buckets, neighbours, chunks, prefixes, idle groups.

Each runs one cell in two or more ways that must give a row the same bits. Invariant: all ranks run the same steps, so
what runs never depends on what was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from ostinato.verify.cells import CellId
from ostinato.verify.outcome import Outcome
from ostinato.verify.requests import Span
from ostinato.verify.stage import Counts, Played, Stage, Way


def graphs(stage: Stage, cell: CellId) -> Outcome:
    """Eager at the bucket's width, captured over these very rows, replayed after other rows, advanced on the device."""
    out, counts, mode = Outcome(), stage.counts(cell), cell.mode
    parts = stage.parts(cell, counts[stage.group])
    eager = stage.play(mode, parts, counts, cell.bucket, "eager")
    captured = stage.play_captured(mode, parts, counts, cell.bucket)
    out.same("capture", eager, captured, "between eager and the run that was captured")
    again = stage.play(mode, parts, counts, cell.bucket, "replay")
    out.same("replay", eager, again, "between eager and a replay of the same rows")
    most = min(cell.bucket, stage.most(mode))
    stage.capture(mode, cell.bucket, stage.parts(cell, most, "captured"))
    other = stage.play(mode, parts, counts, cell.bucket, "replay")
    out.same("other", eager, other, "between eager and a replay of a graph that was captured over other rows")
    if mode == "decode":
        _advanced(stage, cell, parts, out)
    _clean(stage, eager)
    return out


def _advanced(stage: Stage, cell: CellId, parts: Sequence[Span], out: Outcome) -> None:
    """A step whose inputs were made on the device of the last one's, against one whose inputs come from the host."""
    counts = stage.counts(cell)
    before = stage.play("decode", parts, counts, cell.bucket, "replay")
    tokens = stage.worker.chooser.tokens[: len(parts)].to("cpu", copy=True)
    went_on = stage.advance(before, counts, cell.bucket)
    following = [(request, first + 1, 1) for request, first, _ in parts]
    fresh = stage.play("decode", following, counts, cell.bucket, "eager", ids=tokens)
    if went_on is not None:
        out.same("advance", fresh, went_on, "between inputs from the host and inputs advanced on the device")
    _clean(stage, fresh)


def buckets(stage: Stage, cell: CellId) -> Outcome:
    """The cell's rows without a bucket, in its bucket, in the next one and in the largest."""
    out, counts = Outcome(), stage.counts(cell)
    parts = stage.parts(cell, counts[stage.group])
    alone = stage.play(cell.mode, parts, counts)
    behind = [size for size in stage.buckets(cell.mode) if size > cell.bucket]
    ways: tuple[tuple[int, Way], ...] = ((cell.bucket, "eager"),)
    if stage.captures(cell.mode):
        ways = ((cell.bucket, "replay"), *((size, "replay") for size in behind[:1]), *ways)
    for bucket, way in (*ways, *((size, "eager") for size in behind[-1:])):
        played = stage.play(cell.mode, parts, counts, bucket, way)
        out.same("bucket", alone, played, f"between no bucket and bucket {bucket}, {way}")
    _clean(stage, alone)
    return out


def mates(stage: Stage, cell: CellId) -> Outcome:
    """The cell's requests together, in reverse order, and three of them each by itself."""
    out, counts = Outcome(), stage.counts(cell)
    parts = stage.parts(cell, counts[stage.group])
    way: Way = "replay" if stage.captures(cell.mode) else "eager"
    together = stage.play(cell.mode, parts, counts, cell.bucket, way)
    rows = _split(together, parts)
    backwards = stage.play(cell.mode, parts[::-1], counts, cell.bucket, way)
    for one, other in zip(rows, _split(backwards, parts[::-1])[::-1], strict=True):
        out.same("order", one, other, "with the order of the requests")
    for at in (0, len(parts) // 2, len(parts) - 1):  # as many steps on every rank, whatever it has
        own = parts[at : at + 1] if parts else []
        single = stage.play(cell.mode, own, stage.gathered(sum(count for _, _, count in own)))
        if own:
            out.same("mates", single, rows[at], "between a request alone and beside others")
    _clean(stage, together)
    return out


def chunks(stage: Stage, cell: CellId) -> Outcome:
    """Prefill: each request whole, and in two steps. Decode: a token decoded, and the same token prefilled."""
    out, counts = Outcome(), stage.counts(cell)
    parts = stage.parts(cell, counts[stage.group])
    way: Way = "replay" if stage.captures(cell.mode) else "eager"
    whole = stage.play(cell.mode, parts, counts, cell.bucket, way)
    if cell.mode == "decode":
        prefilled = stage.play("prefill", parts, counts)
        logits = replace(prefilled, rows=stage.logits(prefilled.rows))
        out.same("decoded", whole, logits, "between a token decoded and the same token prefilled")
        _clean(stage, whole)
        return out
    rows = _split(whole, parts)
    head = [(request, first, -(-count // 2)) for request, first, count in parts]
    tail = [(request, first + -(-count // 2), count // 2) for request, first, count in parts]
    for chunk, behind in ((head, False), (tail, True)):
        kept = [part for part in chunk if part[2]]
        every = stage.gathered(sum(count for _, _, count in kept))
        if not any(every):
            continue
        played = stage.play("prefill", kept, every)
        pieces = iter(_split(played, kept))
        for want, (_, _, count) in zip(rows, chunk, strict=True):
            if count:
                where = (len(want.rows) - count, len(want.rows)) if behind else (0, count)
                out.same(
                    "chunks", _rows(want, *where), next(pieces), "between a prompt whole and in two chunks"
                )
    _clean(stage, whole)
    return out


def wanted(stage: Stage, cell: CellId) -> Outcome:
    """A prefill of which all rows come out, the last of each request, some in another order, and none."""
    out, counts = Outcome(), stage.counts(cell)
    parts = stage.parts(cell, counts[stage.group])
    way: Way = "replay" if stage.captures(cell.mode) else "eager"
    whole = stage.play(cell.mode, parts, counts, cell.bucket, way)
    ends = list(accumulate(count for _, _, count in parts))
    every = range(counts[stage.group])
    for rows in ([end - 1 for end in ends], [*every][::-2], []):
        played = stage.play(cell.mode, parts, counts, cell.bucket, way, wanted=rows)
        want = replace(whole, rows=torch.zeros_like(whole.rows), taps=None)
        want.rows[: len(rows)] = whole.rows[rows]
        out.same("wanted", want, played, f"between all rows of a prefill and {len(rows)} wanted ones")
    _clean(stage, whole)
    return out


def prefix(stage: Stage, cell: CellId) -> Outcome:
    """Rows behind cached pages of another request, and the same tokens computed from the first one on."""
    out, requests = Outcome(), stage.requests
    hit, cold = len(requests) - 2, len(requests) - 1
    counts: Counts = (cell.n,) * stage.groups
    way: Way = "replay" if stage.captures(cell.mode) else "eager"
    cached = stage.play(cell.mode, [(hit, requests.shared, cell.n)], counts, cell.bucket, way)
    whole = [(cold, 0, requests.shared + cell.n)]
    fresh = stage.play(cell.mode, whole, (requests.shared + cell.n,) * stage.groups)
    rows = _rows(fresh, requests.shared, requests.shared + cell.n)
    out.same("prefix", rows, cached, "between a prompt computed whole and one behind a cached prefix")
    _clean(stage, cached)
    _clean(stage, fresh)
    return out


def idle(stage: Stage, cell: CellId) -> Outcome:
    """The leading group's rows, whatever the others have: nothing, one row, as many, a full bucket."""
    out, lead = Outcome(), stage.lead(cell)
    first: Played | None = None
    others = dict.fromkeys((0, 1, cell.n, min(cell.bucket, stage.most(cell.mode))))
    for other in others:
        counts = tuple(cell.n if group == lead else other for group in range(stage.groups))
        parts = stage.parts(cell, counts[stage.group])
        way: Way = "replay" if stage.captures(cell.mode) else "eager"
        played = stage.play(cell.mode, parts, counts, cell.bucket, way)
        if stage.group == lead:
            if first is not None:
                out.same("idle", first, played, f"between idle groups and groups with {other} rows")
            first = first or played
        _clean(stage, played)
    return out


# ---- rows of a step ----


def _split(played: Played, parts: Sequence[Span]) -> list[Played]:
    """Rows of each request."""
    ends, found = 0, []
    for _, _, count in parts:
        found.append(_rows(played, ends, ends + count))
        ends += count
    return found


def _rows(played: Played, first: int, last: int) -> Played:
    taps = played.taps
    if taps is not None:
        taps = replace(taps, parts=taps.parts[:, first:last], ids=None)
    return replace(played, rows=played.rows[first:last], taps=taps)


def _clean(stage: Stage, *played: Played) -> None:
    """Put back the pages that these steps wrote."""
    stage.kv.restore(torch.cat([one.batch.out_cache_loc for one in played]))
