"""transformers behind the protocol: the model's forward pass in a bare greedy loop, without `generate`'s overhead.

The mode is how its experts run (eager, grouped_mm, ...); a dense model has none.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
import transformers
from protocol import Decoded, Ids, Request, decode_in_rounds, serve_engine
from transformers import AutoModelForCausalLM, DynamicCache


class Transformers:
    def __init__(self, request: Request) -> None:
        torch.set_num_threads(request["threads"])
        self.model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def decode(self, prompts: Sequence[Ids], warmup: int, steps: int, request: Request) -> Decoded:
        self._set_mode(request)
        cache = DynamicCache(config=self.model.config)
        return decode_in_rounds(
            lambda: self._forward(torch.tensor(prompts), cache),
            lambda last: self._forward(torch.tensor(last)[:, None], cache),
            warmup,
            steps,
        )

    @torch.inference_mode()
    def prefill(self, prompt: Ids, request: Request) -> float:
        self._set_mode(request)
        start = time.perf_counter()
        self._forward(torch.tensor([prompt]), DynamicCache(config=self.model.config))
        return time.perf_counter() - start

    def _set_mode(self, request: Request) -> None:
        if request["mode"]:
            self.model.set_experts_implementation(request["mode"])

    def _forward(self, ids: torch.Tensor, cache: DynamicCache) -> list[int]:
        output = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        tokens: list[int] = output.logits[:, -1].argmax(dim=-1).tolist()
        return tokens


def load(request: Request) -> tuple[Transformers, Mapping[str, str]]:
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    return Transformers(request), versions


if __name__ == "__main__":
    serve_engine(load)
