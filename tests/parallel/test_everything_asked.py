"""Whatever a request may ask for, over four ranks: sampling, several answers, shared prefixes, mixed steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ostinato.config import EngineConfig
from ostinato.engine.engine import Engine
from ostinato.engine.request import RequestOutput, SamplingParams
from ostinato.parallel.shm import shm_supported
from ostinato.parallel.topology import Topology

pytestmark = pytest.mark.skipif(not shm_supported(), reason="needs memfd and x86")

SHARED = [(3 * j) % 160 for j in range(34)]
ASKED: list[tuple[list[int], SamplingParams]] = [
    (
        [*SHARED, 5, 6],
        SamplingParams(max_tokens=6, temperature=1.0, seed=7, n=3, logprobs=4, ignore_eos=True),
    ),
    ([*SHARED, 9], SamplingParams(max_tokens=5, temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, seed=1)),
    ([4, 4, 4, 4], SamplingParams(max_tokens=9, temperature=0, repetition_penalty=1.5, presence_penalty=0.5)),
    (
        [*SHARED, 9],
        SamplingParams(max_tokens=4, temperature=0, logit_bias={17: 100.0, 3: -100.0}, logprobs=2),
    ),
    (
        [8, 1],
        SamplingParams(max_tokens=8, temperature=0, stop_token_ids=[17], logit_bias={17: 4.0}, min_tokens=2),
    ),
    (SHARED[:20], SamplingParams(max_tokens=0, prompt_logprobs=3)),
    ([2] * 50, SamplingParams(max_tokens=3, temperature=1.0, seed=3, stop="w5 w5")),
]
OPTIONS: dict[str, Any] = {
    "context_length": 128,
    "max_running_requests": 6,
    "num_pages": 64,
    "chunked_prefill_size": 16,
}


def _run(generate: Callable[..., list[RequestOutput]]) -> Any:
    # Twice: the second time prefixes are cached.
    outputs = [*generate([p for p, _ in ASKED], [q for _, q in ASKED])]
    outputs += generate([p for p, _ in ASKED], [q for _, q in ASKED])
    return [
        (
            [(o.token_ids, o.text, o.logprobs, o.finish_reason, o.stop_reason) for o in out.outputs],
            out.prompt_logprobs,
        )
        for out in outputs
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mixed_prefill": True},
        {"enable_prefix_caching": False, "disable_padding": True, "prefill_delay": 2},
    ],
    ids=["plain", "mixed", "bare"],
)
def test_answers_of_one_rank(
    options: dict[str, Any], checkpoint: Callable[[str], Path], ensembles: ModuleType
) -> None:
    model = str(checkpoint("qwen2_moe"))
    config = EngineConfig(model=model, progress=False, threads=1, **OPTIONS)
    engine = Engine(config, lambda *args: None)
    expected = _run(lambda prompts, params: ensembles.generate(engine, prompts, params))
    with ensembles.ensemble(Topology(4, 2, 4), model=model, **OPTIONS, **options) as ranks:
        assert _run(ranks.generate) == expected
        for one in ranks.engines:
            one.scheduler.check_leaks()
