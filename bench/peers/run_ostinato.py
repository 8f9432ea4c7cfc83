"""ostinato behind the protocol, as its users meet it: `LLM` with its scheduler, sampler and detokenizer.

Verbs of its own: "margin" tells how near a tie a choice was, "experts" how many experts a decode step reads, "generate"
answers all prompts as fast as it can.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from protocol import Decoded, Ids, Request, decode_in_steps, serve_engine

from ostinato import LLM, SamplingParams, __version__


class Ostinato:
    def __init__(self, request: Request) -> None:
        self.llm = LLM(
            request["model"],
            threads=request["threads"],
            max_running_requests=request["max_batch"],
            context_length=request["max_context"],
            progress=False,
            **request["options"],
        )

    def decode(self, prompts: Sequence[Ids], warmup: int, steps: int, request: Request) -> Decoded:
        engine = self.llm.engine
        params = SamplingParams(temperature=0.0, max_tokens=1 + warmup + steps, ignore_eos=True)
        rows = {engine.submit(prompt, params): n for n, prompt in enumerate(prompts)}

        def step() -> dict[int, Ids]:
            return {rows[output.request_id]: output.outputs[0].token_ids for output in engine.step()}

        return decode_in_steps(len(prompts), step, warmup, steps)

    def prefill(self, prompt: Ids, request: Request) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        start = time.perf_counter()
        self.llm.generate(prompt, params)
        return time.perf_counter() - start


def margin(engine: Ostinato, request: Request) -> float | None:
    """Difference of the log-probabilities of two tokens after a prompt; None when one is not among the likeliest."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=20)
    choices = engine.llm.generate(request["prompt"], params)[0].outputs[0].logprobs[0]
    first, second = (choices.get(token) for token in request["tokens"])
    return None if first is None or second is None else abs(first.logprob - second.logprob)


def experts(engine: Ostinato, request: Request) -> float | None:
    """Mean number of different experts of a layer in a decode step of the batch; None for a dense model."""
    import torch

    def load() -> torch.Tensor:
        return torch.tensor(engine.llm.stats()["expert_load"])

    if engine.llm.stats()["expert_load"] is None:
        return None
    params = SamplingParams(temperature=0.0, max_tokens=1 + request["steps"], ignore_eos=True)
    for prompt in request["prompts"]:
        engine.llm.engine.submit(prompt, params)
    engine.llm.engine.step()  # the prefill
    counts = []
    while engine.llm.engine.has_work:
        before = load()
        engine.llm.engine.step()
        counts.append((load() != before).sum(dim=1).float().mean().item())
    return sum(counts) / len(counts)


def generate(engine: Ostinato, request: Request) -> Mapping[str, Any]:
    """Seconds for all prompts together, `max_tokens` each, and the tokens of all answers."""
    params = SamplingParams(temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True)
    start = time.perf_counter()
    outputs = engine.llm.generate(request["prompts"], params)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "tokens": sum(len(output.outputs[0].token_ids) for output in outputs)}


def load(request: Request) -> tuple[Ostinato, Mapping[str, str]]:
    import numba
    import torch

    engine = Ostinato(request)
    stats: dict[str, Any] = engine.llm.stats()
    versions = {"ostinato": __version__, "torch": torch.__version__, "numba": numba.__version__}
    weights = stats["weights"]
    stored = 1.0 if weights is None else weights["stored_bytes"] / weights["uncoded_bytes"]
    how = {"ops": str(stats["ops"]), "graphs": str(stats["backend"]), "weights stored": f"{stored:.3f}"}
    return engine, versions | how


if __name__ == "__main__":
    serve_engine(load, {"margin": margin, "experts": experts, "generate": generate})
