"""llama.cpp behind the protocol: `llama_decode` in a bare greedy loop, without its server's overhead.

Built for this machine's instruction set. A batch is one sequence per stream, each with a KV cache of its own, which
is its fastest way; weights are read into memory, so that it may repack them.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version

import llama_cpp as api
import numpy as np
from protocol import Decoded, Ids, Request, decode_in_rounds, serve_engine

BATCH_TOKENS = 2048


class LlamaCpp:
    def __init__(self, request: Request) -> None:
        api.llama_backend_init()
        model = api.llama_model_default_params()
        model.n_gpu_layers = 0
        model.use_mmap = False
        self.model = api.llama_model_load_from_file(str(request["model"]).encode(), model)
        context = api.llama_context_default_params()
        context.n_seq_max = request["max_batch"]
        context.n_ctx = request["max_batch"] * request["max_context"]
        context.n_batch = BATCH_TOKENS
        context.n_threads = context.n_threads_batch = request["threads"]
        context.kv_unified = False
        self.context = api.llama_init_from_model(self.model, context)
        if not self.model or not self.context:
            raise RuntimeError(f"llama.cpp cannot load {request['model']}")
        self.vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.batch = api.llama_batch_init(BATCH_TOKENS, 0, 1)

    def decode(self, prompts: Sequence[Ids], warmup: int, steps: int, request: Request) -> Decoded:
        lengths = [len(prompt) for prompt in prompts]

        def following(last: list[int]) -> list[int]:
            tokens = self._forward([[token] for token in last], lengths)
            lengths[:] = [length + 1 for length in lengths]
            return tokens

        return decode_in_rounds(lambda: self._start(prompts), following, warmup, steps)

    def prefill(self, prompt: Ids, request: Request) -> float:
        start = time.perf_counter()
        self._start([prompt])
        return time.perf_counter() - start

    def _start(self, prompts: Sequence[Ids]) -> list[int]:
        """Forget all sequences and prefill new ones, as many at once as a batch holds."""
        api.llama_memory_clear(api.llama_get_memory(self.context), False)
        at_once = max(1, BATCH_TOKENS // max(len(prompt) for prompt in prompts))
        tokens: list[int] = []
        for first in range(0, len(prompts), at_once):
            part = prompts[first : first + at_once]
            tokens += self._forward(part, [0] * len(part), first)
        return tokens

    def _forward(self, rows: Sequence[Ids], positions: Sequence[int], first: int = 0) -> list[int]:
        """The likeliest token after each row; row n belongs to sequence first + n and starts at positions[n]."""
        batch, at = self.batch, 0
        for sequence, (row, position) in enumerate(zip(rows, positions, strict=True), first):
            for offset, token in enumerate(row):
                batch.token[at], batch.pos[at] = token, position + offset
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
                batch.logits[at] = offset == len(row) - 1
                at += 1
        batch.n_tokens = at
        if (status := api.llama_decode(self.context, batch)) != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        address = ctypes.cast(api.llama_get_logits(self.context), ctypes.POINTER(ctypes.c_float))
        logits = np.ctypeslib.as_array(address, (len(rows), self.vocab))
        return [int(token) for token in logits.argmax(axis=1)]


def load(request: Request) -> tuple[LlamaCpp, Mapping[str, str]]:
    versions = {
        "llama-cpp-python": version("llama-cpp-python"),
        "system": api.llama_print_system_info().decode().strip(),
    }
    return LlamaCpp(request), versions


if __name__ == "__main__":
    serve_engine(load)
