"""`read_config`: both spellings, family defaults, per-layer rules, errors that name the value (F36, F56,
F57).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.errors import ModelError
from ostinato.models import read_config
from ostinato.models.config import parse_config
from ostinato.models.families import FAMILIES
from ostinato.models.rope import rope_table

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
}


def config_of(architecture: str, **values: Any) -> dict[str, Any]:
    return {**LLAMA, "architectures": [architecture], **values}


def test_a_plain_llama() -> None:
    config = parse_config(LLAMA)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.num_layers) == (4, 2, 16, 4)
    assert config.dtype == torch.float32
    assert config.moe is None
    assert not config.tie_word_embeddings
    assert all(layer.sliding_window is None and not layer.sparse for layer in config.layers)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("name", ["bfloat16", "torch.bfloat16"])
def test_both_spellings_of_dtype(key: str, name: str) -> None:
    assert parse_config({**LLAMA, key: name}).dtype == torch.bfloat16


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM"])
def test_both_spellings_of_num_experts(key: str, architecture: str) -> None:
    config = parse_config(config_of(architecture, **{key: 12, "num_experts_per_tok": 2}))
    assert config.moe is not None
    assert config.moe.num_experts == 12


ROPE_SPELLINGS = [
    {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_theta": 5000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 5000.0},
    {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}}},
]


@pytest.mark.parametrize("spelling", ROPE_SPELLINGS)
def test_every_spelling_of_rope_gives_one_table(spelling: dict[str, Any]) -> None:
    rope = parse_config({**LLAMA, **spelling}).layers[0].rope
    assert rope is not None
    inv_freq = 5000.0 ** (-torch.arange(0, 16, 2).float() / 16) / 2.0
    angles = torch.arange(20.0).unsqueeze(1) * inv_freq
    torch.testing.assert_close(rope_table(rope, 20), torch.cat((angles.cos(), angles.sin()), dim=-1))


def test_rope_nested_per_layer_type() -> None:
    raw = config_of(
        "Qwen3ForCausalLM",
        layer_types=["full_attention", "sliding_attention"] * 2,
        sliding_window=8,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    ropes = [layer.rope for layer in parse_config(raw).layers]
    assert [rope.theta for rope in ropes if rope is not None] == [1e6, 1e4, 1e6, 1e4]
    del raw["rope_parameters"]["sliding_attention"]
    with pytest.raises(ModelError, match="no entry for 'sliding_attention'"):
        parse_config(raw)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_an_unknown_rope_type_is_named(key: str) -> None:
    with pytest.raises(ModelError, match="rope type 'spiral' is unknown"):
        parse_config({**LLAMA, "rope_scaling": {key: "spiral", "factor": 2.0}})


def test_contradicting_rope_spellings_are_refused() -> None:
    raw = {**LLAMA, "rope_scaling": {"type": "yarn"}, "rope_parameters": {"rope_type": "linear"}}
    with pytest.raises(ModelError, match="rope_type is given twice, as 'linear' and 'yarn'"):
        parse_config(raw)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "linear"}, "needs a number 'factor'"),
        ({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0}, "needs a number 'high_freq_factor'"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 3}, "needs 8 numbers"),
    ],
)
def test_rope_parameters_that_are_missing_are_named(rope: dict[str, Any], message: str) -> None:
    parsed = parse_config({**LLAMA, "rope_parameters": rope}).layers[0].rope
    assert parsed is not None
    with pytest.raises(ModelError, match=message):
        rope_table(parsed, 16)


NO_NUMBERS: tuple[Any, ...] = (0, -1.0, float("nan"), float("inf"), 10**400, "2", [2.0], {"a": 1}, True)
SCALED: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "llama3": {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 2.0, "beta_fast": 32, "beta_slow": 1, "attention_factor": 1.0},
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8, "factor": 2.0},
}


@pytest.mark.parametrize("value", NO_NUMBERS)
@pytest.mark.parametrize(("kind", "key"), [(kind, key) for kind, params in SCALED.items() for key in params])
def test_rope_parameters_that_no_rope_can_have_are_named(kind: str, key: str, value: Any) -> None:
    """They would divide by zero, or make a table that is not finite."""
    value = [value] * 8 if isinstance(SCALED[kind][key], list) else value
    rope = {**SCALED[kind], "rope_type": kind, "original_max_position_embeddings": 32, key: value}
    parsed = parse_config({**LLAMA, "rope_parameters": rope}).layers[0].rope
    assert parsed is not None
    with pytest.raises(ModelError, match=key):
        rope_table(parsed, 16 if key == "short_factor" else 64)


@pytest.mark.parametrize("value", [0.5, *NO_NUMBERS[1:]])
def test_an_original_context_that_is_no_number_is_named(value: Any) -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": value}
    with pytest.raises(ModelError, match="original_max_position_embeddings must be a positive integer"):
        parse_config({**LLAMA, "rope_parameters": rope})


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (
            {**SCALED["llama3"], "rope_type": "llama3", "high_freq_factor": 0.5},
            "of its low_freq_factor 1 or more",
        ),
        ({**SCALED["yarn"], "rope_type": "yarn", "rope_theta": 1.0}, "needs rope_theta above 1, got 1"),
        (
            {**SCALED["longrope"], "rope_type": "longrope", "original_max_position_embeddings": 1},
            "needs original_max_position_embeddings above 1, got 1",
        ),
    ],
)
def test_rope_parameters_that_do_not_go_together_are_named(rope: dict[str, Any], message: str) -> None:
    parsed = parse_config({**LLAMA, "rope_parameters": rope}).layers[0].rope
    assert parsed is not None
    with pytest.raises(ModelError, match=message):
        rope_table(parsed, 64)


def test_more_positions_than_the_model_has_are_refused() -> None:
    rope = parse_config(LLAMA).layers[0].rope
    assert rope is not None
    with pytest.raises(ModelError, match="129 positions are more than the model's 128"):
        rope_table(rope, 129)


@pytest.mark.parametrize(
    ("architecture", "default"),
    [
        ("Qwen2MoeForCausalLM", False),
        ("Qwen3MoeForCausalLM", False),
        ("OlmoeForCausalLM", False),
    ],
)
def test_norm_topk_prob_has_a_default_per_family_and_explicit_values_win(
    architecture: str, default: bool
) -> None:
    moe = parse_config(config_of(architecture)).moe
    assert moe is not None
    assert moe.renormalize is default
    for explicit in (True, False):
        moe = parse_config(config_of(architecture, norm_topk_prob=explicit)).moe
        assert moe is not None
        assert moe.renormalize is explicit


@pytest.mark.parametrize("architecture", ["PhimoeForCausalLM", "PhiMoEForCausalLM", "Llama4ForCausalLM"])
def test_custom_routers_never_renormalise(architecture: str) -> None:
    moe = parse_config(config_of(architecture, norm_topk_prob=True)).moe
    assert moe is not None
    assert moe.custom is not None
    assert not moe.renormalize


@pytest.mark.parametrize("key", [{}, {"norm_topk_prob": True}, {"norm_topk_prob": False}])
def test_mixtral_always_renormalises(key: dict[str, bool]) -> None:
    """transformers' Mixtral reads no such key."""
    moe = parse_config(config_of("MixtralForCausalLM", **key)).moe
    assert moe is not None
    assert moe.renormalize


def test_eos_is_the_union_of_all_sources(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": [7, 2]}))
    assert read_config(tmp_path).eos_token_ids == (2, 7)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 2]}))
    assert read_config(tmp_path).eos_token_ids == (2, 7, 9)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    assert read_config(tmp_path).eos_token_ids == (2, 3, 7)


def test_no_eos_at_all() -> None:
    assert parse_config({**LLAMA, "eos_token_id": None}).eos_token_ids == ()


def windows(architecture: str, **values: Any) -> list[int | None]:
    return [layer.sliding_window for layer in parse_config(config_of(architecture, **values)).layers]


def test_sliding_windows() -> None:
    assert windows("LlamaForCausalLM", sliding_window=8) == [None] * 4
    assert windows("MistralForCausalLM") == [4096] * 4
    assert windows("MistralForCausalLM", sliding_window=None) == [None] * 4
    assert windows("MixtralForCausalLM") == [None] * 4
    assert windows("MixtralForCausalLM", sliding_window=8) == [8] * 4
    qwen = {"sliding_window": 8, "max_window_layers": 3}
    assert windows("Qwen2ForCausalLM", **qwen) == [None] * 4
    assert windows("Qwen2ForCausalLM", **qwen, use_sliding_window=True) == [None, None, None, 8]
    assert windows("Qwen2MoeForCausalLM", **qwen, use_sliding_window=True) == [8, None, 8, None]
    assert windows("Qwen3MoeForCausalLM", **qwen, use_sliding_window=True) == [8] * 4
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    assert windows("Qwen3ForCausalLM", **qwen, layer_types=kinds) == [8, None, None, 8]


def test_llama4_layers() -> None:
    raw = config_of(
        "Llama4ForCausalLM",
        no_rope_layer_interval=2,
        attention_chunk_size=16,
        interleave_moe_layer_step=2,
        intermediate_size_mlp=80,
    )
    layers = parse_config(raw).layers
    assert [layer.rope is not None for layer in layers] == [True, False, True, False]
    assert [layer.attention_chunk_size for layer in layers] == [16, None, 16, None]
    assert [layer.scale_by_position for layer in layers] == [False, True, False, True]
    for written, tuned in ((4, True), (0, False)):  # as transformers 4.51 wrote it
        parsed = parse_config({**raw, "attn_temperature_tuning": written})
        assert [layer.scale_by_position for layer in parsed.layers] == [False, tuned, False, tuned]
        assert (parsed.temperature is not None) == tuned
    assert [layer.sparse for layer in layers] == [False, True, False, True]
    assert {layer.intermediate_size for layer in layers} == {80}
    explicit = parse_config({**raw, "moe_layers": [0], "no_rope_layers": [0, 1, 1, 1]}).layers
    assert [layer.sparse for layer in explicit] == [True, False, False, False]
    assert [layer.rope is not None for layer in explicit] == [False, True, True, True]


def test_a_multimodal_llama4_is_read_through_its_text_config() -> None:
    text = {**LLAMA, "hidden_size": 32, "eos_token_id": [5]}
    del text["architectures"]
    raw = {
        "architectures": ["Llama4ForConditionalGeneration"],
        "text_config": text,
        "torch_dtype": "bfloat16",
        "eos_token_id": 4,
    }
    config = parse_config(raw)
    assert (config.hidden_size, config.dtype, config.eos_token_ids) == (32, torch.bfloat16, (4, 5))


def test_sparse_layers_by_step() -> None:
    raw = config_of("Qwen2MoeForCausalLM", decoder_sparse_step=2, mlp_only_layers=[3])
    assert [layer.sparse for layer in parse_config(raw).layers] == [False, True, False, False]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "unknown architecture GPT2LMHeadModel"),
        ({"architectures": None, "model_type": "bert"}, "unknown architecture model_type 'bert'"),
        (
            {"architectures": ["My"], "auto_map": {"AutoModelForCausalLM": "evil.My"}},
            "unknown architecture My",
        ),
        (
            {"architectures": "LlamaForCausalLM"},
            "architectures must be a list of names, got 'LlamaForCausalLM'",
        ),
        ({"architectures": 1}, "architectures must be a list of names, got 1"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"head_dim": 15}, "head_dim 15 is odd, and rope rotates pairs"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer, got '64'"),
        ({"vocab_size": 0}, "vocab_size must be a positive integer, got 0"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2, "head_dim": 16}, "not a multiple of 2"),
        ({"hidden_size": 62}, "no multiple of 4 heads"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype 'float8_e4m3fn' is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantised weights \(gptq\) are not supported"),
        (
            {"num_hidden_layers": 10**30},
            f"num_hidden_layers must be at most 10000, got {10**30}; take the config",
        ),
        (
            {"num_hidden_layers": 10**6},
            "num_hidden_layers must be at most 10000, got 1000000; take the config",
        ),
        ({"hidden_size": 10**30}, f"hidden_size must be at most 2147483647, got {10**30}; take the config"),
        ({"head_dim": 10**30}, f"head_dim must be at most 2147483647, got {10**30}; take the config"),
        ({"vocab_size": 2**31}, "vocab_size must be at most 2147483647, got 2147483648; take the config"),
        ({"max_position_embeddings": 10**30}, "max_position_embeddings must be at most 2147483647"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false, got 'yes'"),
        ({"eos_token_id": "</s>"}, "eos_token_id '</s>' is neither"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"rope_theta": -1}, "rope_theta must be a positive number, got -1"),
        ({"rope_theta": float("nan")}, "rope_theta must be a positive number, got nan"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps must not be below 0, got -1e-06"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number, got nan"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a number, got 1000"),
        ({"clip_qkv": 0}, "clip_qkv must be above 0, got 0"),
        ({"clip_qkv": float("inf")}, "clip_qkv must be a number, got inf"),
        ({"architectures": ["Llama4ForCausalLM"], "floor_scale": 0}, "floor_scale must be above 0, got 0"),
        ({"layer_types": ["full_attention"]}, "layer_types must list 4 layers"),
        ({"layer_types": ["mamba"] * 4}, "layer type 'mamba' is unknown"),
        ({"layer_types": ["sliding_attention"] * 4}, "contradicts sliding_window"),
    ],
)
def test_bad_values_are_named(values: dict[str, Any], message: str) -> None:
    raw = {
        key: value
        for key, value in {**LLAMA, **values}.items()
        if not (key == "hidden_size" and value is None)
    }
    with pytest.raises(ModelError, match=message):
        parse_config(raw)


def test_more_experts_per_token_than_experts() -> None:
    with pytest.raises(ModelError, match="num_experts_per_tok 9 is more than the 8 experts"):
        parse_config(config_of("MixtralForCausalLM", num_experts_per_tok=9))


def test_phimoe_refuses_another_jitter() -> None:
    with pytest.raises(ModelError, match=r"router_jitter_noise other than 0\.01"):
        parse_config(config_of("PhimoeForCausalLM", router_jitter_noise=0.1))


def test_a_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json; give the directory"):
        read_config(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"a": ', "[" * 100_000, '{"a":' * 100_000])
def test_a_damaged_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match="download the checkpoint again"):
        read_config(tmp_path)


def test_dtype_can_be_overridden(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "dtype": "bfloat16"}))
    assert read_config(tmp_path).dtype == torch.bfloat16
    assert read_config(tmp_path, dtype=torch.float32).dtype == torch.float32


def test_no_architecture_belongs_to_two_families() -> None:
    names = [name for family in FAMILIES for name in family.architectures]
    assert len(names) == len(set(names))
    assert {family.name for family in FAMILIES} == {
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "qwen2_moe",
        "qwen3_moe",
        "mixtral",
        "olmoe",
        "phimoe",
        "llama4",
    }
