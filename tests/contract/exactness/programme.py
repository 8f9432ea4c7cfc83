"""Which settings each subject is played in: a sample in every run of the tests, the full product when asked for.

The samples of all subjects together hold every value of every axis (`test_families` checks it): each takes the next
value of each axis, and the lists of values have lengths that do not divide one another. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from ostinato.graphs.buckets import default_prefill_sizes
from ostinato.ops.cpu.isa import PORTABLE, select_isa

from .paths import DEMO, FAMILIES, PATHS, NumericPath
from .score import CONTEXT, ENSEMBLE, Part, ensemble, long_answers
from .stage import Setting

ALWAYS = tuple(path for path in PATHS[:3] if path.isa in (select_isa().name, PORTABLE))
GRAPHS = ("eager", "tape")
SMALL_ENSEMBLE = 8
"""On the reference kernels, which are some ten times slower."""
RUNNING = (ENSEMBLE, 13, 5, 21, 8)
PREFILL_BUCKETS = tuple(size for size in default_prefill_sizes(CONTEXT) if size <= CONTEXT)
TWO_THREADS = (5, 21, 38)
"""Turns of the subjects that are played on two threads as well: they wait for one another at every step."""


def programmes(exhaustive: bool) -> list[Programme]:
    """Every model on every path; without `exhaustive`, on this machine's own, the portable one and some others."""
    played = [
        (name, path)
        for i, path in enumerate(PATHS)
        for j, name in enumerate((DEMO, *FAMILIES))
        if exhaustive or path in ALWAYS or i % 3 == j % 3
    ]
    return [Programme(turn, name, path, exhaustive) for turn, (name, path) in enumerate(played)]


@dataclass(frozen=True, slots=True)
class Programme:
    """The settings of a subject by axis; those with the same `turn` take the same values."""

    turn: int
    name: str
    path: NumericPath
    exhaustive: bool

    def __str__(self) -> str:
        return f"{self.name}-{self.path}"

    @property
    def size(self) -> int:
        """Requests of the ensemble."""
        return ENSEMBLE if self.path.kernels == "numba" else SMALL_ENSEMBLE

    def parts(self, vocab: int) -> list[Part]:
        if self.size < ENSEMBLE:
            return ensemble(vocab, self.size)
        if self.exhaustive:
            return ensemble(vocab, self.size, leaving=2, shift=PATHS.index(self.path) % 2)
        return ensemble(vocab, self.size, leaving=6, stay=2, shift=self.turn % 6)

    def long_parts(self, vocab: int) -> list[Part]:
        """Requests that outgrow a cache of `kv_tokens`."""
        return long_answers(vocab, length=44 if self.path.page == 16 else 30)

    @property
    def kv_tokens(self) -> int:
        return 144 if self.path.page == 16 else 96

    @property
    def chunks(self) -> tuple[int, ...]:
        """Every chunk size that cuts some prompt, in pages; 0 is whole."""
        pages = tuple(range(1, 8)) if self.path.page == 16 else (1, 2, 3, 5, 8, 11, 17, 24)
        return *pages, 0

    @property
    def growing_chunks(self) -> tuple[int, ...]:
        """Those that cut some of `long_parts` when it is prefilled again."""
        longest = max(len(part.prompt) + part.length for part in self.long_parts(100))
        return tuple(pages for pages in self.chunks if pages * self.path.page < longest)

    @property
    def chunk(self) -> int:
        return self.chunks[self.turn % len(self.chunks)]

    @property
    def main(self) -> Setting:
        """Captured, in default buckets, chunked: what most axes are played in."""
        return Setting(graph="tape", chunk_pages=self.chunk)

    @property
    def mixed(self) -> Setting:
        """Prefill and decode in one step, with a bucket and a limit on running requests of its own."""
        chunks = self.chunks[:-1]
        return Setting(
            graph=GRAPHS[self.turn % 2],
            chunk_pages=chunks[(self.turn + 3) % len(chunks)],
            mixed=True,
            decode_buckets=(1 + self.turn % ENSEMBLE,),
            max_running=RUNNING[self.turn % len(RUNNING)],
        )

    @property
    def whole(self) -> Setting:
        """Whole prompts in one prefill bucket, all captured at the start."""
        bucket = PREFILL_BUCKETS[self.turn % len(PREFILL_BUCKETS)]
        return Setting(
            graph="tape",
            capture="startup",
            decode_buckets=(1, 3 + self.turn % 5, ENSEMBLE),
            prefill_buckets=(bucket,),
            max_prefill_tokens=(CONTEXT, 64, 4096)[self.turn % 3],
            threads=1 + (self.turn in TWO_THREADS),
        )

    def together(self) -> Iterator[Setting]:
        yield self.main
        yield self.whole
        if self.exhaustive:
            yield Setting(graph="tape", exact_buckets=True)
            for size in range(1, self.size + 1):
                yield Setting(graph="tape", decode_buckets=(size,), prefill_buckets=(), shared=True)

    def prefills(self) -> Iterator[tuple[Setting, int]]:
        """Settings with one prefill bucket, and its size."""
        assert self.whole.prefill_buckets is not None
        yield self.whole, *self.whole.prefill_buckets
        if self.exhaustive:
            for size in PREFILL_BUCKETS:
                yield Setting(graph="tape", prefill_buckets=(size,), shared=True), size

    def orders(self) -> Iterator[Setting]:
        yield self.mixed
        if not self.exhaustive:
            return
        for graph, chunk in product(GRAPHS, self.chunks):
            yield Setting(graph=graph, chunk_pages=chunk, shared=True)
        for chunk in self.chunks[:-1]:
            graph = GRAPHS[(self.turn + self.chunks.index(chunk)) % 2]  # the next model takes the other one
            yield Setting(graph=graph, chunk_pages=chunk, mixed=True, shared=True)
        for running in RUNNING:
            yield Setting(graph="tape", chunk_pages=2, max_running=running, shared=True)
        yield Setting(graph="tape", chunk_pages=2, threads=2)

    def chunkings(self) -> Iterator[Setting]:
        yield self.main
        if self.exhaustive:
            for graph, chunk in product(GRAPHS, self.chunks):
                yield Setting(graph=graph, chunk_pages=chunk, shared=True)

    def hit_pages(self) -> tuple[int, ...] | None:
        """Lengths of the hits; None for all."""
        return None if self.exhaustive else (0, 1 + self.turn % 6)

    def mates(self) -> tuple[int, ...]:
        if self.exhaustive:
            return tuple(range(1, self.size))
        return (1 + self.turn % (self.size - 1),)

    def retractions(self) -> Iterator[Setting]:
        sample = Setting(
            graph=GRAPHS[(self.turn + 1) % 2],
            chunk_pages=self.chunk,
            caching=self.turn % 3 > 0,
            kv_tokens=self.kv_tokens,
            hopeful=True,
        )
        yield sample
        if self.exhaustive:
            for graph, chunk, caching in product(GRAPHS, self.growing_chunks, (False, True)):
                yield replace(sample, graph=graph, chunk_pages=chunk, caching=caching, shared=True)
