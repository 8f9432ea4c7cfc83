"""Logits of every family against transformers, fp32, ragged batches: prefill whole, in chunks, and decode."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ostinato.models import ModelConfig, read_config
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


def in_pieces(run: Any, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Logits of the prompts fed in chunks that end anywhere, mixed steps, and decoding."""
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
    return [torch.cat(piece) for piece in pieces]


def test_a_tied_checkpoint_may_hold_its_head_alone(
    checkpoint: Callable[[str], Path],
    driver: ModuleType,
    prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    """As safetensors' own `save_model` writes it, which keeps one of two names."""
    source = checkpoint("llama_tied")
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, file)
    found, want = (
        driver.Driver.load(path, len(prompts), max(LENGTHS)).step(prompts) for path in (tmp_path, source)
    )
    assert all(torch.equal(*pair) for pair in zip(found, want, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(
    family: str,
    checkpoint: Callable[[str], Path],
    oracle: Callable[[str], Any],
    driver: ModuleType,
    prompts: list[list[int]],
) -> None:
    whole = driver.Driver.load(checkpoint(family), len(prompts), max(LENGTHS)).step(prompts)
    for prompt, got in zip(prompts, whole, strict=True):
        assert (got - oracle(family)(torch.tensor([prompt])).logits[0]).abs().max() < TOLERANCE
    # The same in pieces, beside poisoned pads, bit for bit.
    run = driver.Driver.load(checkpoint(family), len(prompts), max(LENGTHS), padding=3)
    for piece, want in zip(in_pieces(run, prompts), whole, strict=True):
        assert torch.equal(piece, want)


@pytest.mark.parametrize("family", ["llama", "olmoe", "qwen3_moe"])
def test_bf16_has_the_same_bits_in_pieces_and_stays_near_fp32(
    family: str, checkpoint: Callable[[str], Path], driver: ModuleType, prompts: list[list[int]]
) -> None:
    exact = driver.Driver.load(checkpoint(family), len(prompts), max(LENGTHS)).step(prompts)
    options = {"dtype": torch.bfloat16}
    whole = driver.Driver.load(checkpoint(family), len(prompts), max(LENGTHS), **options).step(prompts)
    run = driver.Driver.load(checkpoint(family), len(prompts), max(LENGTHS), padding=3, **options)
    for piece, want, near in zip(in_pieces(run, prompts), whole, exact, strict=True):
        assert torch.equal(piece, want)
        # A near-tied router may choose otherwise in bf16, so rows are compared by the median.
        assert (want - near).abs().median() < 0.05 * near.abs().median()


def test_shards_as_transformers_writes_them(
    checkpoints: ModuleType, checkpoint: Callable[[str], Path], driver: ModuleType, tmp_path: Path
) -> None:
    checkpoints.build("mixtral", tmp_path, max_shard_size="200KB")
    assert not (tmp_path / "model.safetensors").exists()
    sharded = driver.Driver.load(tmp_path, 1, 8).step([[5, 6, 7]])[0]
    assert torch.equal(sharded, driver.Driver.load(checkpoint("mixtral"), 1, 8).step([[5, 6, 7]])[0])


def test_the_language_model_of_a_multimodal_llama4(
    checkpoints: ModuleType, driver: ModuleType, prompts: list[list[int]], tmp_path: Path
) -> None:
    language_model = checkpoints.build_multimodal_llama4(tmp_path)
    prompt = prompts[1]
    got = driver.Driver.load(tmp_path, 1, len(prompt)).step([prompt])[0]
    assert (got - language_model(torch.tensor([prompt])).logits[0]).abs().max() < TOLERANCE


Change = Callable[[ModelConfig], ModelConfig]


def layers(**changes: Any) -> Change:
    return lambda c: replace(c, layers=tuple(replace(layer, **changes) for layer in c.layers))


def moe(**changes: Any) -> Change:
    def change(config: ModelConfig) -> ModelConfig:
        assert config.moe is not None
        return replace(config, moe=replace(config.moe, **changes))

    return change


def rope(**changes: Any) -> Change:
    def change(config: ModelConfig) -> ModelConfig:
        rope = config.layers[0].rope
        assert rope is not None
        return layers(rope=replace(rope, **changes))(config)

    return change


def family_flag(**changes: Any) -> Change:
    return lambda c: replace(c, family=replace(c.family, **changes))


MISTAKES: tuple[tuple[str, str, Change], ...] = (
    ("llama", "rope scaling dropped", rope(rope_type="default")),
    ("mistral", "window dropped", layers(sliding_window=None)),
    ("mistral", "window off by one", layers(sliding_window=8)),
    ("qwen2", "window in all layers", layers(sliding_window=6)),
    ("qwen3", "yarn dropped", rope(rope_type="default")),
    ("qwen2_moe", "renormalised", moe(renormalize=True)),
    ("qwen3_moe", "not renormalised", moe(renormalize=False)),
    ("mixtral", "window dropped", layers(sliding_window=None)),
    ("olmoe", "clip dropped", lambda c: replace(c, clip_qkv=None)),
    ("phimoe", "softmax instead of sparsemixer", moe(custom=None)),
    ("phimoe", "longrope dropped", rope(rope_type="default")),
    ("llama4", "chunks dropped", layers(attention_chunk_size=None)),
    ("llama4", "weights on output", moe(weights_on_input=False)),
    ("llama4", "temperature dropped", lambda c: replace(c, temperature=None)),
    ("llama4", "no L2 norm", lambda c: replace(c, qk_norm="none")),
    ("llama4", "halves rotated", family_flag(rope_interleaved=False)),
)


@pytest.mark.parametrize(("family", "change"), [pytest.param(f, c, id=f"{f}-{n}") for f, n, c in MISTAKES])
def test_the_oracle_would_see_a_mistake(
    family: str,
    change: Change,
    checkpoint: Callable[[str], Path],
    driver: ModuleType,
    prompts: list[list[int]],
) -> None:
    config = read_config(checkpoint(family))
    prompt = prompts[1]
    right = driver.Driver.load(checkpoint(family), 1, len(prompt)).step([prompt])[0]
    wrong = driver.Driver.load(checkpoint(family), 1, len(prompt), config=change(config)).step([prompt])[0]
    assert (right - wrong).abs().max() > 50 * TOLERANCE
