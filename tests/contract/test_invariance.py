"""A request's tokens are its own: alone or beside others, in any order, graph, chunking or cache state (F40, F41).

Through the whole engine, on the bundled demo model, fp32 and bf16. What must be equal is equal exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ostinato import LLM, SamplingParams
from ostinato.engine.engine import Engine

NEW_TOKENS = 8
PAGES = {"reference": 4, "numba": 16}
TEXTS = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of",
    "In the beginning",
    "And the Lord said unto Moses, Stretch out thine hand over the sea, that the waters may come again upon",
    "She",
    "To be, or not to be, that is the question: Whether 'tis nobler in the mind to suffer the slings and arrows of",
    "It is a truth universally acknowledged, that a single man in possession of a good temper, is",
    "The family of Dashwood had long been settled in Sussex. Their estate was large, and",
    "Now is the winter of our discontent",
    "Elizabeth, having rather expected to affront him, was amazed at his gallantry; but there was a mixture of",
    "Blessed are the",
)
Tokens = dict[int, tuple[int, ...]]


def params(index: int) -> SamplingParams:
    """Greedy, seeded and filtered requests take turns; each of another length."""
    sampled: dict[str, Any] = (
        {"temperature": 0},
        {"temperature": 1.0, "seed": 7 + index},
        {"temperature": 0.8, "seed": index, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
    )[index % 3]
    length = NEW_TOKENS - index % 3
    # No end before the length, but not by ignore_eos: then admission would know the length, and never retract.
    return SamplingParams(max_tokens=length, min_tokens=length, **sampled)


@dataclass(frozen=True)
class Serving:
    """An engine and its prompts as token ids."""

    engine: Engine
    prompts: list[list[int]]
    page: int

    def run(self, order: list[int], *, arrivals: int | None = None) -> tuple[Tokens, dict[int, int]]:
        """Tokens and cached prompt tokens of the requests of `order`; `arrivals` of them before each step, or all."""
        waiting, names, tokens, cached = list(order), {}, {}, {}
        while waiting or self.engine.has_work:
            now = len(waiting) if arrivals is None else arrivals
            for index in waiting[:now]:
                names[self.engine.submit(self.prompts[index], params(index))] = index
            del waiting[:now]
            for output in self.engine.step():
                if output.finished and output.request_id in names:
                    index = names[output.request_id]
                    tokens[index] = output.outputs[0].token_ids
                    cached[index] = output.num_cached_tokens
        self.engine.scheduler.check_leaks()
        return tokens, cached

    def forget(self) -> None:
        """Empty the prefix cache."""
        radix = self.engine.scheduler.kv.radix
        radix.evict(radix.num_pages)
        assert radix.num_pages == 0


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[..., Serving]]:
    """serve(kernels, dtype, **options) -> a serving, made once for the same options.

    Pages are as small as the kernels take them; `chunk_pages` is the size of prefill chunks in pages.
    """
    made: dict[str, tuple[LLM, Serving]] = {}

    def get(
        kernels: str, dtype: str, *, chunk_pages: int = 0, kv_tokens: int = 4096, **options: Any
    ) -> Serving:
        key = f"{kernels} {dtype} {chunk_pages} {kv_tokens} {sorted(options.items())}"
        if key not in made:
            page = PAGES[kernels]
            llm = LLM(
                kernels=kernels,
                dtype=dtype,
                threads=1,
                progress=False,
                **{
                    "page_size": page,
                    "num_pages": kv_tokens // page + 1,
                    "context_length": 128,
                    "max_running_requests": 16,
                    "chunked_prefill_size": chunk_pages * page,
                    "graph": "eager",
                    **options,
                },
            )
            made[key] = llm, Serving(llm.engine, [llm.tokenizer.encode(text) for text in TEXTS], page)
        return made[key][1]

    yield get
    for llm, _ in made.values():
        llm.close()


@pytest.fixture(scope="module")
def alone(serve: Callable[..., Serving]) -> Callable[[str, str], Tokens]:
    """alone(kernels, dtype) -> tokens of each request by itself: eager, prefilled whole, nothing cached."""
    made: dict[tuple[str, str], Tokens] = {}

    def get(*key: str) -> Tokens:
        if key not in made:
            serving = serve(*key, enable_prefix_caching=False)
            tokens: Tokens = {}
            for index in range(len(TEXTS)):
                tokens |= serving.run([index])[0]
            assert len(set(tokens.values())) == len(TEXTS), "ten requests that all differ"
            made[key] = tokens
        return made[key]

    return get


NUMERICS = pytest.mark.parametrize(
    ("kernels", "dtype"),
    [("reference", "float32"), ("numba", "float32"), ("numba", "bfloat16")],
    ids=["reference-float32", "numba-float32", "numba-bfloat16"],
)


@NUMERICS
def test_any_number_of_mates(kernels: str, dtype: str, serve: Any, alone: Any) -> None:
    """Alone and beside 1 to 9 others, in the middle of them."""
    serving = serve(kernels, dtype, graph="tape", chunk_pages=2)
    for mates in range(len(TEXTS)):
        order = [(mates + i) % len(TEXTS) for i in range(mates + 1)]
        serving.forget()
        tokens, _ = serving.run(order[::-1])
        assert tokens == {index: alone(kernels, dtype)[index] for index in order}
    stats = serving.engine.stats()["graph"]["decode"]
    assert stats["replays"] > 0
    assert stats["pad_rows"] > 0


@NUMERICS
@pytest.mark.parametrize(
    "options",
    [
        {"graph": "eager", "chunk_pages": 1},
        {"graph": "tape", "chunk_pages": 1},
        {"graph": "tape", "chunk_pages": 2},
        {"graph": "eager", "chunk_pages": 2, "mixed_prefill": True},
        {"graph": "tape", "chunk_pages": 3, "mixed_prefill": True},
        {"graph": "tape", "capture": "startup", "prefill_buckets": (16, 64, 128)},
        {"graph": "tape", "chunk_pages": 4, "max_running_requests": 3, "kv_tokens": 80},
    ],
    ids=["eager-1", "tape-1", "tape-2", "eager-2-mixed", "tape-3-mixed", "tape-whole", "tape-little-memory"],
)
def test_any_chunking_order_and_cache_state(
    kernels: str, dtype: str, options: dict[str, Any], serve: Any, alone: Any
) -> None:
    serving = serve(kernels, dtype, **options)
    serving.forget()
    want = alone(kernels, dtype)
    order = list(range(len(TEXTS)))
    cold, cached = serving.run(order)
    assert cold == want
    assert cached[0] == 0
    warm, cached = serving.run(order[::-1], arrivals=1)
    assert warm == want
    assert sum(cached.values()) > 0
    shuffled, _ = serving.run([3, 8, 0, 5, 1, 9, 2, 7, 6, 4], arrivals=2)
    assert shuffled == want
    if options.get("kv_tokens"):
        assert serving.engine.stats()["scheduler"].get("admission_no_token", 0) > 0, "memory was short"


@NUMERICS
def test_a_hit_of_any_length(kernels: str, dtype: str, serve: Any, alone: Any) -> None:
    """The same request behind cached prefixes of every length, and all of it cached (a prefill of one page)."""
    serving = serve(kernels, dtype, graph="tape", chunk_pages=2)
    prompt = serving.prompts[0]
    for length in [*range(0, len(prompt), serving.page), len(prompt)]:
        serving.forget()
        if length:
            engine = serving.engine
            engine.submit(prompt[:length], SamplingParams(max_tokens=1, temperature=0))
            while engine.has_work:
                engine.step()
        tokens, cached = serving.run([0])
        assert cached[0] == min(length, len(prompt) - 1) // serving.page * serving.page
        assert tokens[0] == alone(kernels, dtype)[0]


@NUMERICS
def test_a_retracted_request_goes_on_as_if_nothing_had_happened(kernels: str, dtype: str, serve: Any) -> None:
    """Three requests that outgrow the cache: one is sent back, and prefills what it had generated."""
    answers = []
    # Whole pages for each: 3 * 52 tokens, or 3 * 64; admission hopes for fewer.
    for options in ({}, {"kv_tokens": {"reference": 144, "numba": 176}[kernels]}):
        engine = serve(kernels, dtype, graph="tape", enable_prefix_caching=False, **options).engine
        finished: dict[str, tuple[int, ...]] = {}
        for seed in range(3):
            length = SamplingParams(max_tokens=48, min_tokens=48, temperature=0.7 * seed, seed=seed)
            engine.submit([20 + seed, 40, 60, 80], length, request_id=str(seed))
        while engine.has_work:
            finished |= {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
        answers.append(finished)
        retractions = engine.stats()["scheduler"].get("retractions", 0)
        assert (retractions > 0) == bool(options)
    assert answers[0] == answers[1]


def test_f41_unseeded_mates_disturb_nobody(serve: Any, alone: Any) -> None:
    """F41: a seeded request beside requests that use the engine's seed."""
    serving = serve("numba", "float32", graph="tape", chunk_pages=2)
    engine = serving.engine
    for index in (3, 6):
        engine.submit(serving.prompts[index], SamplingParams(temperature=1.3, max_tokens=5))
    tokens, _ = serving.run([1, 4])
    assert tokens == {index: alone("numba", "float32")[index] for index in (1, 4)}


def test_tokens_depend_on_what_they_should(serve: Any) -> None:
    """Not the same by being constant: another seed, another prompt, another temperature."""
    serving = serve("numba", "float32", graph="tape", chunk_pages=2)
    engine = serving.engine
    seen = set()
    for prompt, options in ((0, {"seed": 1}), (0, {"seed": 2}), (2, {"seed": 1}), (0, {"temperature": 0})):
        sampled = SamplingParams(max_tokens=8, ignore_eos=True, **options)
        name = engine.submit(serving.prompts[prompt], sampled)
        while engine.has_work:
            for output in engine.step():
                if output.finished and output.request_id == name:
                    seen.add(output.outputs[0].token_ids)
    assert len(seen) == 4


def test_a_kernel_that_feels_its_mates_is_caught(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests can fail: arithmetic that depends on the number of rows changes tokens."""
    serving = serve("reference", "float32", chunk_pages=31)
    ops = type(serving.engine.worker.model.ops)
    right = ops.linear

    def linear(self: Any, x: torch.Tensor, weight: Any, out: torch.Tensor, *live: Any) -> None:
        right(self, x, weight, out, *live)
        out.add_(torch.arange(out.shape[1]).remainder(2) * (0.02 * x.shape[0]))

    monkeypatch.setattr(ops, "linear", linear)
    by_itself, _ = serving.run([0])
    serving.forget()
    with_mates, _ = serving.run([0, 1, 2, 3])
    assert by_itself[0] != with_mates[0]
