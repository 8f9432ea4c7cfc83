"""Logits of every family against transformers, fp32, ragged batches: prefill whole, in chunks, and decode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ostinato.padding import StepMode

FAMILIES = (
    "llama",
    "llama_tied",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen2_moe",
    "qwen3_moe",
    "mixtral",
    "olmoe",
    "phimoe",
    "llama4",
)
LENGTHS = (1, 23, 70, 40)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def prompts(checkpoints: ModuleType) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, checkpoints.VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


def test_every_family_has_a_checkpoint(checkpoints: ModuleType) -> None:
    assert checkpoints.FAMILIES == FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(
    family: str,
    checkpoint: Callable[[str], Path],
    oracle: Callable[[str], Any],
    driver: ModuleType,
    prompts: list[list[int]],
) -> None:
    expected = [oracle(family)(torch.tensor([p])).logits[0] for p in prompts]
    run = driver.Driver.load(checkpoint(family), len(prompts), max(LENGTHS))
    whole = run.step(prompts)
    for got, want in zip(whole, expected, strict=True):
        assert (got - want).abs().max() < TOLERANCE

    # The same in pieces, beside poisoned pads: chunks that end anywhere, mixed steps, decoding. Bit for bit.
    run = driver.Driver.load(checkpoint(family), len(prompts), max(LENGTHS), padding=3)
    pieces: list[list[torch.Tensor]] = [[] for _ in prompts]
    for sizes, mode in (
        ((1, 9, 30, 20), StepMode.EXTEND),
        ((0, 11, 1, 17), StepMode.MIXED),
        ((0, 1, 37, 1), StepMode.MIXED),
        ((0, 1, 1, 1), StepMode.DECODE),
        ((0, 1, 1, 1), StepMode.DECODE),
    ):
        tokens = [p[done : done + n] for p, done, n in zip(prompts, run.lengths, sizes, strict=True)]
        for piece, got in zip(pieces, run.step(tokens, mode=mode), strict=True):
            piece.append(got)
    assert run.lengths == [len(p) for p in prompts]
    for piece, want in zip(pieces, whole, strict=True):
        assert torch.equal(torch.cat(piece), want)
