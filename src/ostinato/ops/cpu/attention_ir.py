"""The inner loops of paged attention: scores, softmax and mixing of values over one block of keys.

All work on a tile of query rows of one KV head, in scratch memory given by address. Knows nothing of requests
or pages beyond addresses. Invariant: a row's arithmetic is a sequence that depends on its own query, keys and
mask alone; how many rows stand beside it, and which register tile computes it, never changes it.

Row state, STATE_BYTES each: 16 copies of the running maximum (in units of log2), 16 partial sums of the
probabilities (one a lane), 16 copies of the factor by which the last block's maximum rescaled the row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ostinato.ops.cpu.lane_kinds import Kind, tile_shape
from ostinato.ops.cpu.vector_ir import F32, I32, I64, LANES, VI, Lanes, Value

PAGE = 16  # positions of one KV block in memory: the lanes of a vector of scores
BLOCK = 128  # positions between two updates of a row's maximum
CHUNK = 512  # positions summed on their own, then merged in order
STATE_BYTES = 192
SCORE_BYTES = BLOCK * 4  # a row of scores, and the stride of a row of probabilities
LOWEST = -3.0e38  # score of a masked position, and the maximum of a row that saw nothing
_MOST_ROWS = 6  # rows that share a pass over the pages; passes of fewer wait for memory and ask for it ahead
STREAM_ROWS = 6  # most rows of a KV head whose pages are streamed, all heads of a page together
_AHEAD = 2  # parts of pages (of one head) that a stream is asked for ahead of use


def score_rows(lanes: Lanes, kind: Kind, args: list[Value]) -> None:
    """(rows, n, pages, ahead, words, out): scores of `n` query rows against 4 K pages, all given by address.

    Row r gets 64 fp32 at out + r * SCORE_BYTES. Pages at `ahead` are prefetched along the way.
    """
    rows, n, pages, ahead, words, out = args
    most_rows, most_pages = tile_shape()
    keys = [lanes.load(lanes.at(pages, 8 * j), I64, 8) for j in range(4)]
    next_keys = [lanes.load(lanes.at(ahead, 8 * j), I64, 8) for j in range(4)]

    def tile(first: Value, count: int, columns: range, streamed: bool) -> None:
        queries = [lanes.load(lanes.at(rows, lanes.times(first, 8), 8 * m), I64, 8) for m in range(count)]

        def step(word: Value, totals: list[Value]) -> list[Value]:
            across, along = lanes.times(word, 64), lanes.times(word, 4)
            if streamed:
                for j in columns:
                    lanes.prefetch(lanes.at(next_keys[j], across), nearest=False)
            loaded = [lanes.load(lanes.at(keys[j], across), VI) for j in columns]
            words_of_rows = [lanes.load(lanes.at(query, along), I32) for query in queries]
            return multiply(lanes, kind, totals, loaded, words_of_rows)

        sums = lanes.loop(words, [lanes.floats(0.0)] * (count * len(columns)), step)
        for m in range(count):
            line = lanes.at(out, lanes.times(first, SCORE_BYTES), m * SCORE_BYTES)
            for j, column in enumerate(columns):
                lanes.store(sums[m * len(columns) + j], lanes.at(line, 64 * column))

    def body(first: Value, count: int) -> None:
        for m in range(0, count, most_rows):
            for j in range(0, 4, most_pages):
                part = range(j, j + most_pages)
                tile(lanes.at(first, m), min(most_rows, count - m), part, count < _MOST_ROWS)

    lanes.rows(n, _MOST_ROWS, body)


def multiply(
    lanes: Lanes, kind: Kind, totals: list[Value], vectors: list[Value], words: Sequence[Value]
) -> list[Value]:
    """One step of an outer product: totals[row][vector] += vector * word of the row."""
    result = []
    for m, word in enumerate(words):
        value = lanes.splat(word)
        for j, vector in enumerate(vectors):
            result.append(kind.dot(lanes, totals[m * len(vectors) + j], vector, value))
    return result


def softmax_rows(lanes: Lanes, kind: Kind, args: list[Value]) -> None:
    """(scores, probs, n, low, high, masked, bounds, start, state, factor): probabilities, and the state.

    Probabilities are exp2(score * factor - maximum) over the pages [low, high); `factor` is the address of an
    fp32. With `masked`, position j of row r counts only if bounds[r][0] <= start + j < bounds[r][1] (int64
    pairs).
    """
    scores, probs, n, low, high, masked, bounds, start, state, factor = args
    b = lanes.b
    scale = lanes.splat(lanes.load(factor, F32, 4))

    def rows(is_masked: bool) -> None:
        def row(r: Value) -> None:
            seen: tuple[Value, Value] | None = None
            if is_masked:
                pair = lanes.at(bounds, lanes.times(r, 16))
                first, last = (b.sub(lanes.load(lanes.at(pair, k), I64, 8), start) for k in (0, 8))
                seen = (lanes.splat(b.trunc(first, I32)), lanes.splat(b.trunc(last, I32)))
            at = lanes.at(scores, lanes.times(r, SCORE_BYTES))
            to = lanes.at(probs, lanes.times(r, SCORE_BYTES))
            here = lanes.at(state, lanes.times(r, STATE_BYTES))
            _softmax_row(lanes, kind, at, to, here, low, high, seen, scale)

        lanes.each(n, row)

    with b.if_else(b.icmp_signed("!=", masked, lanes.i64(0))) as (then, otherwise):
        with then:
            rows(True)
        with otherwise:
            rows(False)


def _softmax_row(
    lanes: Lanes,
    kind: Kind,
    scores: Value,
    probs: Value,
    state: Value,
    low: Value,
    high: Value,
    seen: tuple[Value, Value] | None,
    scale: Value,
) -> None:
    """One row of `softmax_rows`; `seen` is the visible range relative to the block (None: all of it)."""
    b = lanes.b
    count = b.sub(high, low)

    def visible(page: Value) -> Value | None:
        if seen is None:
            return None
        base = lanes.splat(b.trunc(lanes.times(page, PAGE), I32))
        index = b.add(base, lanes.lane_numbers())
        return b.and_(b.icmp_signed(">=", index, seen[0]), b.icmp_signed("<", index, seen[1]))

    def peak(i: Value, carried: list[Value]) -> list[Value]:
        page = b.add(low, i)
        value = lanes.load(lanes.at(scores, lanes.times(page, 64)))
        mask = visible(page)
        if mask is not None:
            value = b.select(mask, value, lanes.floats(LOWEST))
        return [lanes.max(carried[0], value)]

    (highest,) = lanes.loop(count, [lanes.floats(LOWEST)], peak)
    before = lanes.load(state)
    maximum = lanes.max(before, b.fmul(lanes.max_lanes(highest), scale))
    minus = b.fneg(maximum)

    def exponential(i: Value, carried: list[Value]) -> list[Value]:
        page = b.add(low, i)
        value = lanes.load(lanes.at(scores, lanes.times(page, 64)))
        value = lanes.exp2(lanes.fma(value, scale, minus))
        mask = visible(page)
        if mask is not None:
            value = b.select(mask, value, lanes.floats(0.0))
        kind.store(lanes, value, lanes.at(probs, lanes.times(page, PAGE * kind.value_bytes)))
        return [b.fadd(carried[0], value)]

    rescale = lanes.exp2(b.fsub(before, maximum))
    total = b.fmul(lanes.load(lanes.at(state, 64)), rescale)
    (total,) = lanes.loop(count, [total], exponential)
    lanes.store(maximum, state)
    lanes.store(total, lanes.at(state, 64))
    lanes.store(rescale, lanes.at(state, 128))


class _Mix(NamedTuple):
    """The arguments of `mix_rows`, by name."""

    probs: Value
    n: Value
    pages: Value
    ahead: Value
    low: Value
    high: Value
    dim: Value
    acc: Value
    acc_stride: Value
    state: Value


def mix_rows(lanes: Lanes, kind: Kind, args: list[Value]) -> None:
    """(see `_Mix`): acc = acc * rescale + probs @ values over the V pages [low, high); acc is fp32.

    `acc_stride` is in bytes, `dim` in values; V pages at `ahead` are prefetched along the way.
    """
    mix = _Mix(*args)
    most_rows, most_vectors = tile_shape()

    def columns(vectors: int, column: Value, tail: Value | None) -> None:
        """All rows, over `vectors` vectors of dimensions from `column` on."""

        def body(first: Value, count: int) -> None:
            for m in range(0, count, most_rows):
                for j in range(0, vectors, most_vectors):
                    wide = min(most_vectors, vectors - j)
                    mask = tail if j + wide == vectors else None
                    rows = [lanes.at(first, r) for r in range(m, min(m + most_rows, count))]
                    _mix_tile(
                        lanes, kind, mix, rows, wide, lanes.at(column, LANES * j), mask, count < _MOST_ROWS
                    )

        lanes.rows(mix.n, _MOST_ROWS, body)

    lanes.column_groups(mix.dim, columns)


def _mix_tile(
    lanes: Lanes,
    kind: Kind,
    mix: _Mix,
    rows: list[Value],
    vectors: int,
    column: Value,
    tail: Value | None,
    streamed: bool,
) -> None:
    """`rows` x `vectors` of `mix_rows` in registers; `tail` masks the last vector."""
    words = PAGE * kind.value_bytes // 4
    v_stride, offset = lanes.times(mix.dim, 4), lanes.times(column, 4)
    sums_at = [lanes.at(mix.acc, lanes.b.mul(row, mix.acc_stride), offset) for row in rows]
    lines = [lanes.at(mix.probs, lanes.times(row, SCORE_BYTES)) for row in rows]
    sums = []
    for row, at in zip(rows, sums_at, strict=True):
        rescale = lanes.load(lanes.at(mix.state, lanes.times(row, STATE_BYTES), 128))
        sums += [lanes.b.fmul(lanes.load(lanes.at(at, 64 * j)), rescale) for j in range(vectors)]

    def over_pages(i: Value, sums: list[Value]) -> list[Value]:
        page = lanes.b.add(mix.low, i)
        entry = lanes.times(page, 8)
        values = lanes.at(lanes.load(lanes.at(mix.pages, entry), I64, 8), offset)
        following = lanes.at(lanes.load(lanes.at(mix.ahead, entry), I64, 8), offset)

        def over_words(word: Value, sums: list[Value]) -> list[Value]:
            down = lanes.b.mul(word, v_stride)
            if streamed:
                for j in range(vectors):
                    lanes.prefetch(lanes.at(following, down, 64 * j), nearest=False)
            places = [lanes.at(values, down, 64 * j) for j in range(vectors)]
            loaded = [lanes.load(place, VI) for place in places[: vectors - (tail is not None)]]
            if tail is not None:
                loaded.append(lanes.load_masked(places[-1], tail, VI))
            along = lanes.at(lanes.times(page, words * 4), lanes.times(word, 4))
            return multiply(
                lanes, kind, sums, loaded, [lanes.load(lanes.at(line, along), I32) for line in lines]
            )

        return lanes.loop(lanes.i64(words), sums, over_words)

    sums = lanes.loop(lanes.b.sub(mix.high, mix.low), sums, over_pages)
    for m, at in enumerate(sums_at):
        for j in range(vectors):
            lanes.store(sums[m * vectors + j], lanes.at(at, 64 * j))


def _stream(
    lanes: Lanes,
    args: tuple[Value, Value, Value, Value, Value],
    size: Value,
    body: Callable[[int, Value, Value, Value, Value], None],
) -> None:
    """`body(n, page, head, part, following)` for every page of [low, high) and every head, in the order of memory.

    `args` are (n, heads, pages, low, high). `part` is the address of the head's `size` bytes of the page, `following`
    that of the part to ask memory for; the addresses behind `pages` go on with what is read after these pages.
    """
    n, heads, pages, low, high = args
    b = lanes.b

    def of_rows(count: int) -> None:
        def over_pages(k: Value) -> None:
            page = b.add(low, k)

            def over_heads(head: Value) -> None:
                part = lanes.at(lanes.load(lanes.at(pages, lanes.times(page, 8)), I64, 8), b.mul(head, size))
                place = lanes.at(b.mul(page, heads), head, _AHEAD)
                further = b.sdiv(place, heads)
                following = lanes.load(lanes.at(pages, lanes.times(further, 8)), I64, 8)
                following = lanes.at(following, b.mul(b.sub(place, b.mul(further, heads)), size))
                body(count, page, head, part, following)

            lanes.each(heads, over_heads)

        lanes.each(b.sub(high, low), over_pages)

    done = b.append_basic_block("streamed")
    choice = b.switch(n, done)
    for count in range(1, STREAM_ROWS + 1):
        block = b.append_basic_block(f"stream_{count}")
        choice.add_case(lanes.i64(count), block)
        b.position_at_end(block)
        of_rows(count)
        b.branch(done)
    b.position_at_end(done)


def score_stream(lanes: Lanes, kind: Kind, args: list[Value]) -> None:
    """(rows, n, heads, pages, low, high, words, out): scores of `n` query rows of each head against the pages [low,
    high).

    `rows` and `out` hold all rows of the first head, then of the next; a row of scores is as in `score_rows`.
    """
    rows, n, heads, pages, low, high, words, out = args

    def body(count: int, page: Value, head: Value, part: Value, following: Value) -> None:
        first = lanes.times(head, count)
        queries = [lanes.load(lanes.at(rows, lanes.times(first, 8), 8 * m), I64, 8) for m in range(count)]

        def step(word: Value, totals: list[Value]) -> list[Value]:
            across, along = lanes.times(word, 64), lanes.times(word, 4)
            lanes.prefetch(lanes.at(following, across), nearest=False)
            loaded = [lanes.load(lanes.at(part, across), VI)]
            return multiply(
                lanes, kind, totals, loaded, [lanes.load(lanes.at(query, along), I32) for query in queries]
            )

        sums = lanes.loop(words, [lanes.floats(0.0)] * count, step)
        line = lanes.at(out, lanes.times(first, SCORE_BYTES), lanes.times(page, 64))
        for m, total in enumerate(sums):
            lanes.store(total, lanes.at(line, m * SCORE_BYTES))

    _stream(lanes, (n, heads, pages, low, high), lanes.times(words, 64), body)


def mix_stream(lanes: Lanes, kind: Kind, args: list[Value]) -> None:
    """(probs, n, heads, pages, low, high, dim, acc, acc_stride, state): `mix_rows` for `n` rows of each head, rows
    lying as in `score_stream`.
    """
    probs, n, heads, pages, low, high, dim, acc, acc_stride, state = args
    words = PAGE * kind.value_bytes // 4
    b = lanes.b

    def body(count: int, page: Value, head: Value, part: Value, following: Value) -> None:
        rows = [lanes.at(lanes.times(head, count), m) for m in range(count)]
        is_first = b.icmp_signed("==", page, low)
        rescales = [lanes.load(lanes.at(state, lanes.times(row, STATE_BYTES), 128)) for row in rows]
        rescales = [b.select(is_first, rescale, lanes.floats(1.0)) for rescale in rescales]
        lines = [lanes.at(probs, lanes.times(row, SCORE_BYTES), lanes.times(page, 4 * words)) for row in rows]

        def columns(vectors: int, column: Value, tail: Value | None) -> None:
            offset, v_stride = lanes.times(column, 4), lanes.times(dim, 4)
            sums_at = [lanes.at(acc, b.mul(row, acc_stride), offset) for row in rows]
            sums = [
                b.fmul(lanes.load(lanes.at(at, 64 * j)), rescale)
                for at, rescale in zip(sums_at, rescales, strict=True)
                for j in range(vectors)
            ]

            def step(word: Value, sums: list[Value]) -> list[Value]:
                down = lanes.at(offset, b.mul(word, v_stride))
                for j in range(vectors):
                    lanes.prefetch(lanes.at(following, down, 64 * j), nearest=False)
                places = [lanes.at(part, down, 64 * j) for j in range(vectors)]
                loaded = [lanes.load(place, VI) for place in places[: vectors - (tail is not None)]]
                if tail is not None:
                    loaded.append(lanes.load_masked(places[-1], tail, VI))
                along = lanes.times(word, 4)
                return multiply(
                    lanes, kind, sums, loaded, [lanes.load(lanes.at(line, along), I32) for line in lines]
                )

            sums = lanes.loop(lanes.i64(words), sums, step)
            for m, at in enumerate(sums_at):
                for j in range(vectors):
                    lanes.store(sums[m * vectors + j], lanes.at(at, 64 * j))

        lanes.column_groups(dim, columns)

    _stream(lanes, (n, heads, pages, low, high), lanes.times(dim, 4 * words), body)
