"""Digests of what the portable kernels compute, to compare CPUs: run it on two machines and compare what it prints.

Operands are small whole numbers over powers of two, so they are the same everywhere. Invariant: two lines of one name
are equal exactly when all results behind them have the same bits.

    python tools/portable_bits.py --threads 2 > here.txt        (--text: what the demo model says, too)
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import sys
from collections.abc import Iterator

import torch

from ostinato import LLM, SamplingParams
from ostinato.models.rope import RopeConfig, rope_table
from ostinato.ops.cpu.opset import NumbaOps, open_numba_ops

PROMPTS = ("It is a truth universally acknowledged, that", "My dear Mr. Bennet,", "In the beginning")
ROWS = (1, 2, 7, 33)


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers in [-2, 2) that every machine draws alike (`randn` differs)."""
    whole = torch.randint(-4096, 4096, shape, generator=torch.Generator().manual_seed(seed))
    return (whole.float() / 2048).to(dtype)


def digest(*tensors: torch.Tensor) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def products(ops: NumbaOps, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Linear layers, plain and gated, and fused experts."""
    weight = draw(90, 301, seed=1, dtype=dtype)
    plain = ops.pack_linear(weight, draw(90, seed=2))
    gated = ops.pack_gated(weight)
    experts = ops.pack_experts(draw(4, 60, 70, seed=3, dtype=dtype), draw(4, 70, 30, seed=4, dtype=dtype))
    for rows in ROWS:
        x = draw(rows, 301, seed=rows, dtype=dtype)
        for layer, columns in ((plain, 90), (gated, 45)):
            out = torch.empty(rows, columns, dtype=dtype)
            ops.linear(x, layer, out)
            yield out
        ids = torch.randint(
            -1, 4, (rows, 2), generator=torch.Generator().manual_seed(rows), dtype=torch.int32
        )
        out = torch.empty(rows, 70, dtype=dtype)
        ops.moe_experts(
            draw(rows, 70, seed=5, dtype=dtype), draw(rows, 2, seed=6).abs(), ids, experts, False, out
        )
        yield out


def row_kernels(ops: NumbaOps, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Norms, rotation, and choosing tokens."""
    for rows in ROWS:
        x, weight = draw(rows, 300, seed=rows, dtype=dtype), draw(300, seed=7, dtype=dtype)
        out = torch.empty_like(x)
        ops.rms_norm(x, weight, 1e-6, out)
        yield out
        ops.layer_norm(x, weight, weight, 1e-5, out)
        yield out
        q, k = (draw(rows, heads, 64, seed=heads, dtype=dtype) for heads in (4, 2))
        ops.rope(q, k, torch.arange(rows), draw(40, 64, seed=8), False)
        yield from (q, k)
        logits, chosen = 4 * draw(rows, 500, seed=9), torch.empty(rows, dtype=torch.int64)
        rules = torch.tensor([[0.8, 40.0, 0.9, 0.0]], dtype=torch.float64).repeat(rows, 1)
        ops.sample(logits, rules, torch.arange(rows), torch.arange(rows), chosen)
        yield chosen


def text(threads: int, quantization: str | None) -> Iterator[tuple[str, str]]:
    """What the demo model says, greedily and with seeds, alone and together, with log-probabilities to fp32."""
    greedy = SamplingParams(max_tokens=12, temperature=0, logprobs=3, prompt_logprobs=2)
    seeded = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.95, seed=5, logprobs=3)
    name = quantization or "bf16"
    with LLM(isa="portable", threads=threads, quantization=quantization, progress=False) as llm:
        calls = [(f"{name} alone", [PROMPTS[0]], greedy), (f"{name} together", [*PROMPTS], greedy)]
        calls.append((f"{name} seeded", [*PROMPTS], seeded))
        for label, prompts, params in calls:
            outputs = llm.generate(prompts, params)
            values = [
                [entry.logprob for step in steps if step for entry in step.values()]
                for output in outputs
                for steps in (output.prompt_logprobs or (), output.outputs[0].logprobs or ())
            ]
            # They are logarithms in fp64 of sums that torch takes in another order elsewhere: equal once rounded.
            flat = torch.tensor([value for part in values for value in part], dtype=torch.float32)
            ids = [list(output.outputs[0].token_ids) for output in outputs]
            yield f"text {label}", f"{digest(flat)} {ids}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--text", action="store_true", help="what the demo model says, too")
    asked = parser.parse_args()
    print(platform.machine(), f"{asked.threads} threads", file=sys.stderr)
    print("rope table", digest(rope_table(RopeConfig("default", 10000.0, 64, 1024, 1024, {}), 1024)))
    for dtype in (torch.bfloat16, torch.float32):
        for quantization in (None, "int8"):
            ops = open_numba_ops(isa="portable", num_threads=asked.threads, quantization=quantization)
            print("products", dtype, quantization, digest(*products(ops, dtype)), flush=True)
            if quantization is None:
                print("rows", dtype, digest(*row_kernels(ops, dtype)), flush=True)
    for quantization in (None, "int8") if asked.text else ():
        for name, found in text(asked.threads, quantization):
            print(name, found, flush=True)


if __name__ == "__main__":
    main()
