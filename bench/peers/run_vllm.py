"""vLLM for CPU behind the protocol, compiled (its default): `LLM` in this process, advanced step by step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import count

import vllm
from protocol import Decoded, Ids, Request, decode_in_steps, serve_engine
from vllm import LLM, SamplingParams


class Vllm:
    def __init__(self, request: Request) -> None:
        self.llm = LLM(
            request["model"],
            dtype="bfloat16",
            max_model_len=request["max_context"],
            max_num_seqs=request["max_batch"],
            max_num_batched_tokens=4096,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            **request["options"],
        )
        self._names = count()

    def decode(self, prompts: Sequence[Ids], warmup: int, steps: int, request: Request) -> Decoded:
        engine = self.llm.llm_engine
        params = SamplingParams(
            temperature=0.0, max_tokens=1 + warmup + steps, ignore_eos=True, detokenize=False
        )
        rows: dict[str, int] = {}
        for n, prompt in enumerate(prompts):
            name = f"request-{next(self._names)}"
            rows[name] = n
            engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)

        def step() -> dict[int, Ids]:
            return {
                rows[output.request_id]: list(output.outputs[0].token_ids)
                for output in engine.step()
                if output.request_id in rows
            }

        return decode_in_steps(len(prompts), step, warmup, steps)

    def prefill(self, prompt: Ids, request: Request) -> float:
        start = time.perf_counter()
        self.decode([prompt], 0, 0, request)
        return time.perf_counter() - start


def load(request: Request) -> tuple[Vllm, Mapping[str, str]]:
    import torch

    return Vllm(request), {"vllm": vllm.__version__, "torch": torch.__version__}


if __name__ == "__main__":
    serve_engine(load)
