"""What `ostinato bench` measures: times of engine steps, from which rates are derived.

Knows the engine through its public face only. Engines that are compared take turns step by step, so that a
machine that slows down slows both, and each round gives a ratio of its own. Prefix caching is off: every
round prefills again.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from ostinato.cli.screen import open_engine
from ostinato.config import EngineConfig
from ostinato.engine.llm import LLM
from ostinato.engine.progress import bars
from ostinato.engine.request import SamplingParams
from ostinato.errors import ConfigError

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Workload:
    """Random prompts of `input_len` tokens, answered by `output_len` tokens each."""

    batch: int
    input_len: int
    output_len: int
    num_prompts: int
    rounds: int
    seed: int

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    def prompts(self, llm: LLM, count: int) -> list[list[int]]:
        """`count` prompts of ordinary tokens."""
        rng = random.Random(self.seed)
        special = llm.tokenizer.special_ids
        vocabulary = [i for i in range(llm.tokenizer.vocab_size) if i not in special]
        return [rng.choices(vocabulary, k=self.input_len) for _ in range(count)]

    @property
    def params(self) -> SamplingParams:
        """Greedy, and exactly `output_len` tokens."""
        return SamplingParams(temperature=0.0, max_tokens=self.output_len, ignore_eos=True)

    def fit(self, config: EngineConfig, batch: int | None = None) -> EngineConfig:
        """The options to measure with: no prefix hits, and room for the whole batch at once."""
        batch = self.batch if batch is None else batch
        running = max(config.max_running_requests, batch)
        return config.replace(enable_prefix_caching=False, max_running_requests=running)


def latency(config: EngineConfig, load: Workload) -> dict[str, Any]:
    """One batch: tokens per second of its prefill and of its decode, seconds of one decode step, and how many of them
    lie outside the kernels.
    """
    with open_engine(load.fit(config)) as llm:
        prompts = load.prompts(llm, load.batch)
        run_batches([llm], prompts, load)  # captures
        rounds = _rounds(
            "latency", load.rounds, lambda: run_batches([llm], prompts, load)[0], shown=config.progress
        )
        return {
            "prefill_tokens_per_s": summary([load.batch * load.input_len / r.prefill_s for r in rounds]),
            "decode_tokens_per_s": summary([load.batch / statistics.mean(r.decode_steps_s) for r in rounds]),
            "decode_step_s": summary([statistics.median(r.decode_steps_s) for r in rounds]),
            **_outside(rounds),
            "stats": llm.stats(),
        }


def replay(config: EngineConfig, load: Workload) -> dict[str, Any]:
    """A decode step replayed against the same step run eagerly, and what of the replayed one lies outside the kernels;
    a round's ratio is that of the median steps.
    """
    if config.graph == "eager":
        raise ConfigError(
            "graph 'eager' has nothing to replay; choose tape, cuda or auto to compare with eager"
        )
    config = load.fit(config)
    with open_engine(config.replace(graph="eager")) as eager, open_engine(config) as captured:
        prompts = load.prompts(eager, load.batch)
        run_batches([eager, captured], prompts, load)
        rounds = _rounds(
            "replay",
            load.rounds,
            lambda: run_batches([eager, captured], prompts, load),
            shown=config.progress,
        )
        medians = [[statistics.median(batch.decode_steps_s) for batch in pair] for pair in rounds]
        return {
            "eager_step_s": summary([eager_s for eager_s, _ in medians]),
            "replay_step_s": summary([replay_s for _, replay_s in medians]),
            "ratio": summary([replay_s / eager_s for eager_s, replay_s in medians]),
            **_outside([batch for _, batch in rounds]),
            "stats": captured.stats(),
        }


def padding(config: EngineConfig, load: Workload) -> dict[str, Any]:
    """What pads of a prefill cost: one prompt of `input_len` + 1 tokens in a wider bucket, beside one of `input_len`
    tokens in a bucket of their own; a round's ratio is that of seconds a token.

    The wider bucket is the next of `prefill_buckets`, by default the next power of two. Raises ConfigError when there
    is none.
    """
    exact = load.input_len
    wider = [size for size in config.prefill_buckets or (1 << exact.bit_length(),) if size > exact]
    if not wider:
        raise ConfigError(
            f"no prefill bucket of {config.prefill_buckets} is wider than a prompt of {exact} tokens; name one"
        )
    config = load.fit(config, 1).replace(prefill_buckets=(exact, min(wider)))
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    with open_engine(config) as llm:
        prompts = [replace(load, input_len=n).prompts(llm, 1)[0] for n in (exact, exact + 1)]

        def both() -> list[float]:
            return [_timed_prefill(llm, [llm.engine.submit(prompt, params)]) for prompt in prompts]

        for _ in range(2):
            both()  # captures
        rounds = _rounds("padding", load.rounds, both, shown=config.progress)
        return {
            "tokens": exact,
            "bucket": min(wider),
            "exact_s": summary([seconds for seconds, _ in rounds]),
            "padded_s": summary([seconds for _, seconds in rounds]),
            "ratio": summary([padded / (exact + 1) / (plain / exact) for plain, padded in rounds]),
            "stats": llm.stats(),
        }


def throughput(config: EngineConfig, load: Workload) -> dict[str, Any]:
    """All prompts at once, as many running together as the engine admits."""
    with open_engine(load.fit(config, 1)) as llm:
        prompts, params = load.prompts(llm, load.num_prompts), load.params
        llm.generate(prompts[:2], params, progress=False)
        start = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - start
        generated = sum(len(output.outputs[0].token_ids) for output in outputs)
        return {
            "seconds": seconds,
            "requests_per_s": len(outputs) / seconds,
            "output_tokens_per_s": generated / seconds,
            "total_tokens_per_s": (generated + load.num_prompts * load.input_len) / seconds,
            "stats": llm.stats(),
        }


def summary(values: list[float]) -> dict[str, Any]:
    """Median, extremes and the values themselves, in the order they were measured."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values), "rounds": values}


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """Seconds of one batch: its prefill (all steps until every request has a token), each step after it, and what of
    each step was no replay.
    """

    prefill_s: float
    decode_steps_s: tuple[float, ...]
    outside_s: tuple[float, ...]


def _outside(rounds: Sequence[BatchTimes]) -> dict[str, Any]:
    """Seconds of a decode step outside the replayed kernels, and their share of it; nothing where no step was replayed.

    A round's figure is that of its median replayed step.
    """
    pairs = [[(o, s) for o, s in zip(r.outside_s, r.decode_steps_s, strict=True) if o < s] for r in rounds]
    if not all(pairs):
        return {}
    outside = [statistics.median(o for o, _ in pair) for pair in pairs]
    steps = [statistics.median(s for _, s in pair) for pair in pairs]
    return {
        "outside_kernels_s": summary(outside),
        "outside_kernels_share": summary([o / s for o, s in zip(outside, steps, strict=True)]),
    }


def run_batches(llms: Sequence[LLM], prompts: Sequence[list[int]], load: Workload) -> list[BatchTimes]:
    """The same batch on several engines, which take turns: each runs its prefill, then one decode step at a
    time.

    Who goes first changes from step to step, so that none is always the one that finds warm caches.
    """
    names = [[llm.engine.submit(prompt, load.params) for prompt in prompts] for llm in llms]
    prefill = [_timed_prefill(llm, waiting) for llm, waiting in zip(llms, names, strict=True)]
    steps: list[list[tuple[float, float]]] = [[] for _ in llms]
    turn = list(range(len(llms)))
    while any(llm.engine.has_work for llm in llms):
        for number in turn:
            engine = llms[number].engine
            if engine.has_work:
                replayed, start = engine.replay_seconds, time.perf_counter()
                engine.step()
                seconds = time.perf_counter() - start
                steps[number].append((seconds, seconds - (engine.replay_seconds - replayed)))
        turn.reverse()
    return [
        BatchTimes(first, tuple(s for s, _ in rest), tuple(o for _, o in rest))
        for first, rest in zip(prefill, steps, strict=True)
    ]


def _timed_prefill(llm: LLM, names: Sequence[str]) -> float:
    waiting = set(names)
    start = time.perf_counter()
    while waiting:
        waiting -= {output.request_id for output in llm.engine.step() if output.outputs[0].token_ids}
    return time.perf_counter() - start


def _rounds(name: str, count: int, run: Callable[[], _T], *, shown: bool) -> list[_T]:
    results = []
    with bars(shown=shown) as report:
        for number in range(count):
            report(name, number, count)
            results.append(run())
    return results
