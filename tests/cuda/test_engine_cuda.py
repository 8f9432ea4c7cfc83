"""The whole engine on a GPU: tokens of the CPU's reference, eager ≡ graph, padding that changes no bit, one ≡ many.

Written without a GPU: none of it has run yet (docs/cuda.md).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest
import torch

from ostinato import LLM, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

FAMILIES = ("qwen3_moe", "llama", "mistral", "mixtral", "phimoe", "llama4")
PROMPTS: Any = [list(range(3, 60)), [5, 9, 2], list(range(40, 53)), [7]]
PARAMS = [
    SamplingParams(max_tokens=16, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.8, top_p=0.9, seed=7, logprobs=2),
    SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.2, repetition_penalty=1.2, seed=3),
    SamplingParams(max_tokens=16, ignore_eos=True),
]
SIZES: dict[str, Any] = {"context_length": 96, "chunked_prefill_size": 32, "progress": False, "threads": 1}


def llm(path: Path, dtype: str = "float32", **options: Any) -> LLM:
    return LLM(**{"model": str(path), "device": "cuda", "dtype": dtype} | SIZES | options)


def told(outputs: Any) -> list[Any]:
    """Tokens, and log-probabilities to the last bit."""
    found = []
    for output in outputs:
        one = output.outputs[0]
        logprobs = [sorted((t, p.logprob) for t, p in top.items()) for top in one.logprobs or ()]
        found.append((list(one.token_ids), logprobs))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_the_reference_on_the_cpu(
    checkpoint: Callable[[str], Path], family: str
) -> None:
    path, greedy = checkpoint(family), SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(model=str(path), device="cpu", kernels="reference", dtype="float32", **SIZES) as cpu:
        want = [list(r.outputs[0].token_ids) for r in cpu.generate(PROMPTS, greedy)]
    with llm(path) as gpu:
        assert [list(r.outputs[0].token_ids) for r in gpu.generate(PROMPTS, greedy)] == want


@pytest.mark.parametrize("prefill_graph", ["breakable", "full", "eager"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_replayed_step_equals_an_eager_one(
    checkpoint: Callable[[str], Path], dtype: str, prefill_graph: str
) -> None:
    """Live checks of every step; decode advances on the device in between."""
    with llm(checkpoint("qwen3_moe"), dtype, prefill_graph=prefill_graph, shadow_rate=1.0) as engine:
        for _ in range(2):
            engine.generate(PROMPTS, PARAMS)
        graphs = engine.stats()["graph"]
    assert graphs["decode"]["checked"] > 0
    assert graphs["decode"]["mismatches"] == graphs["prefill"]["mismatches"] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("graph", ["eager", "cuda"])
def test_an_answer_does_not_depend_on_what_runs_beside_it(
    checkpoint: Callable[[str], Path], dtype: str, graph: str
) -> None:
    path = checkpoint("qwen3_moe")
    with llm(path, dtype, graph=graph, enable_prefix_caching=False) as engine:
        alone = [told(engine.generate([p], [s]))[0] for p, s in zip(PROMPTS, PARAMS, strict=True)]
        assert told(engine.generate(PROMPTS, PARAMS)) == alone
    with llm(
        path, dtype, graph=graph, mixed_prefill=True, chunked_prefill_size=16, capture="startup"
    ) as engine:
        assert told(engine.generate(PROMPTS, PARAMS)) == alone
        assert told(engine.generate(PROMPTS, PARAMS)) == alone  # from cached prefixes


@pytest.mark.parametrize("capture", ["startup", "lazy"])
def test_warm_ups_and_captures_count_no_expert_load(
    checkpoint: Callable[[str], Path], capture: Literal["startup", "lazy"]
) -> None:
    """The sparse layer's load is that of the real rows; dense layers have none."""
    with llm(checkpoint("qwen3_moe"), "bfloat16", graph="cuda", capture=capture) as engine:
        engine.generate(PROMPTS, PARAMS)
        stats, top_k = engine.stats(), engine.engine.model_config.moe.top_k
    rows = sum(stats["graph"][mode]["real_rows"] for mode in ("decode", "prefill"))
    assert [sum(layer) for layer in stats["expert_load"]] == [0, rows * top_k, 0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_padding_contract_holds(
    load_module: Callable[[str], ModuleType], checkpoint: Callable[[str], Path], dtype: str
) -> None:
    """Every bucket, eager and replayed, under every poison."""
    rigs = load_module("contract/rig.py")
    with torch.no_grad():
        rig = rigs.Rig(checkpoint("qwen3_moe"), dtype, device="cuda", kernels="auto", graph="auto")
        for batch, buckets in (
            (rig.decode([0, 2, 5]), (4, 8)),
            (rig.decode([8]), (1, 2, 8)),
            (rig.extend([(1, 3, 5), (4, 29, 3)]), (8, 16, 24)),
        ):
            clean = rig.clean(batch)
            for bucket in buckets:
                for way in rigs.WAYS:
                    for poison in rigs.POISONS:
                        assert not rig.broken(batch, clean, bucket, way=way, poison=poison), (bucket, way)


def test_products_of_the_library_serve_too(checkpoint: Callable[[str], Path]) -> None:
    path, greedy = checkpoint("qwen3_moe"), SamplingParams(max_tokens=8, ignore_eos=True)
    with llm(path) as exact, llm(path, gpu_products="library") as library:
        assert [r.outputs[0].token_ids for r in library.generate(PROMPTS, greedy)] == [
            r.outputs[0].token_ids for r in exact.generate(PROMPTS, greedy)
        ]


def test_a_decoded_row_is_the_row_prefilled_again(checkpoint: Callable[[str], Path]) -> None:
    with llm(checkpoint("qwen3_moe"), "bfloat16", enable_prefix_caching=False) as engine:
        one = engine.generate([PROMPTS[0]], [PARAMS[0]])[0].outputs[0]
        again = SamplingParams(max_tokens=1, ignore_eos=True, logprobs=2)
        for step in (1, 5, 12):
            longer = [*PROMPTS[0], *one.token_ids[:step]]
            next_one = engine.generate([longer], [again])[0].outputs[0]
            assert next_one.token_ids[0] == one.token_ids[step]
            assert told([_Output(next_one)])[0][1][0] == told([_Output(one)])[0][1][step]


class _Output:
    """What `told` reads of a request's output."""

    def __init__(self, one: Any) -> None:
        self.outputs = [one]
