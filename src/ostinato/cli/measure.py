"""What `ostinato bench` measures: times of whole calls, from which rates are derived.

Knows the engine through its public face only. Times come in rounds; engines that are compared take turns
within every round, so that a machine that slows down slows both. Prefix caching is off: every round prefills
again.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ostinato.cli.screen import bars, open_engine
from ostinato.config import EngineConfig
from ostinato.engine.llm import LLM
from ostinato.engine.request import SamplingParams
from ostinato.errors import ConfigError


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

    def params(self, output_len: int) -> SamplingParams:
        """Greedy, and exactly `output_len` tokens."""
        return SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)

    def fit(self, config: EngineConfig, batch: int | None = None) -> EngineConfig:
        """The options to measure with: no prefix hits, and room for the whole batch at once."""
        batch = self.batch if batch is None else batch
        running = max(config.max_running_requests, batch)
        return config.replace(enable_prefix_caching=False, max_running_requests=running)


def latency(config: EngineConfig, load: Workload) -> dict[str, Any]:
    """One batch: tokens per second of prefill and of decode, and the time of one decode step."""
    with open_engine(load.fit(config)) as llm:
        batch = _Batch(llm, load)
        batch.run()  # captures
        rounds = _rounds("latency", load.rounds, batch.run)
        step = [(whole - prefill) / (load.output_len - 1) for prefill, whole in rounds]
        return {
            "prefill_tokens_per_s": summary([load.batch * load.input_len / prefill for prefill, _ in rounds]),
            "decode_tokens_per_s": summary([load.batch / seconds for seconds in step]),
            "decode_step_s": summary(step),
            "batch_s": summary([whole for _, whole in rounds]),
            "stats": llm.stats(),
        }


def replay(config: EngineConfig, load: Workload) -> dict[str, Any]:
    """A decode step replayed against the same step run eagerly, in alternated rounds."""
    if config.graph == "eager":
        raise ConfigError(
            "graph 'eager' has nothing to replay; choose tape, cuda or auto to compare with eager"
        )
    config = load.fit(config)
    with open_engine(config.replace(graph="eager")) as eager, open_engine(config) as captured:
        batches = (_Batch(eager, load), _Batch(captured, load))
        for batch in batches:
            batch.run()
        rounds = _rounds("replay", load.rounds, lambda: (batches[0].step(), batches[1].step()))
        return {
            "eager_step_s": summary([eager_s for eager_s, _ in rounds]),
            "replay_step_s": summary([replay_s for _, replay_s in rounds]),
            "ratio": summary([replay_s / eager_s for eager_s, replay_s in rounds]),
            "stats": captured.stats(),
        }


def throughput(config: EngineConfig, load: Workload) -> dict[str, Any]:
    """All prompts at once, as many running together as the engine admits."""
    with open_engine(load.fit(config, 1)) as llm:
        prompts, params = load.prompts(llm, load.num_prompts), load.params(load.output_len)
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


class _Batch:
    """One batch on one engine. The prefill is what the first token takes; a decode step is a mean over the
    rest.
    """

    def __init__(self, llm: LLM, load: Workload) -> None:
        self._llm = llm
        self._load = load
        self._prompts = load.prompts(llm, load.batch)

    def run(self) -> tuple[float, float]:
        """Seconds of the prefill alone, and of the whole batch."""
        return self._time(1), self._time(self._load.output_len)

    def step(self) -> float:
        """Seconds of one decode step."""
        prefill, whole = self.run()
        return (whole - prefill) / (self._load.output_len - 1)

    def _time(self, output_len: int) -> float:
        start = time.perf_counter()
        self._llm.generate(self._prompts, self._load.params(output_len), progress=False)
        return time.perf_counter() - start


def _rounds(name: str, count: int, run: Callable[[], tuple[float, float]]) -> list[tuple[float, float]]:
    results = []
    with bars() as report:
        for number in range(count):
            report(name, number, count)
            results.append(run())
    return results
