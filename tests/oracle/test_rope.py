"""Rope tables of every type against transformers, short and long contexts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ostinato.models.rope import ROPE_TYPES, RopeConfig, rope_table

DIM = 64
POSITIONS = 2048
THETA = 500_000.0
LONGROPE = {
    "short_factor": [1.0 + 0.01 * i for i in range(DIM // 2)],
    "long_factor": [1.0 + 0.7 * i for i in range(DIM // 2)],
}
CASES: dict[str, list[dict[str, Any]]] = {
    "default": [{}],
    "linear": [{"factor": 2.5}],
    "dynamic": [{"factor": 4.0}],
    "llama3": [
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
        # Llama 4 Scout's: no wavelength lies between.
        {
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 256,
        },
    ],
    "yarn": [
        {"factor": 4.0, "original_max_position_embeddings": 512},
        {
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 16,
            "beta_slow": 2,
            "truncate": False,
        },
        {"factor": 4.0, "original_max_position_embeddings": 512, "mscale": 0.7, "mscale_all_dim": 1.1},
        {"factor": 4.0, "original_max_position_embeddings": 512, "attention_factor": 1.3},
    ],
    "longrope": [
        {**LONGROPE, "original_max_position_embeddings": 512},
        {**LONGROPE, "original_max_position_embeddings": 512, "factor": 3.0},
    ],
}


def test_every_type_has_a_case() -> None:
    assert set(CASES) == set(ROPE_TYPES)


@pytest.mark.parametrize("num_positions", [300, POSITIONS])
@pytest.mark.parametrize(("rope_type", "params"), [(kind, p) for kind, cases in CASES.items() for p in cases])
def test_table_equals_transformers(rope_type: str, params: dict[str, Any], num_positions: int) -> None:
    original = params.get("original_max_position_embeddings", POSITIONS)
    table = rope_table(RopeConfig(rope_type, THETA, DIM, POSITIONS, original, params), num_positions)

    raw = {**params, "rope_type": rope_type, "rope_theta": THETA}
    config = LlamaConfig(
        hidden_size=4 * DIM, num_attention_heads=4, max_position_embeddings=POSITIONS, rope_parameters=raw
    )
    if rope_type == "default":
        inv_freq, scale = 1.0 / THETA ** (torch.arange(0, DIM, 2) / DIM), 1.0
    else:
        inv_freq, scale = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=num_positions)
    angles = torch.arange(num_positions).unsqueeze(1) * inv_freq
    expected = torch.cat((angles.cos(), angles.sin()), dim=-1) * scale
    torch.testing.assert_close(table, expected, rtol=0, atol=1e-6)


def test_table_has_the_same_bits_on_every_cpu() -> None:
    """Cosines and sines of the C library's, in fp64, rounded once: torch's own in fp32 are not."""
    table = rope_table(RopeConfig("default", THETA, DIM, POSITIONS, POSITIONS, {}), POSITIONS)
    inv_freq = 1.0 / THETA ** (torch.arange(0, DIM, 2) / DIM)
    angles = (torch.arange(POSITIONS).unsqueeze(1) * inv_freq)[::7].double()
    for half, function in ((0, math.cos), (DIM // 2, math.sin)):
        expected = angles.clone().apply_(function).float()
        assert torch.equal(table[::7, half : half + DIM // 2], expected)
