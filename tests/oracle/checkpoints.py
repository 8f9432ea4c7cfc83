"""Tiny random checkpoints of every family, built offline with transformers, and its answers as the oracle.

`build(family, directory)` writes a checkpoint, with a tokenizer; `FAMILIES` names them. Weights are drawn so that
faults show: routers are scaled up (else every expert weighs the same), norms and biases are not the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB = 160
MAX_POSITIONS = 256
SEED = 1234

_DENSE: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}
_HEADS_64: Mapping[str, Any] = {**_DENSE, "head_dim": 64}
# Families whose head size is hidden size over heads.
_WIDE: Mapping[str, Any] = {**_DENSE, "hidden_size": 256}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.05 * i for i in range(32)],
    "long_factor": [1.0 + 0.5 * i for i in range(32)],
    "short_mscale": 1.2,
    "long_mscale": 1.3,
    "original_max_position_embeddings": MAX_POSITIONS,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}

_CONFIGS: Mapping[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(
        **_HEADS_64, rope_parameters=dict(_LLAMA3_ROPE), attention_bias=True, mlp_bias=True
    ),
    "llama_tied": lambda: transformers.LlamaConfig(**_HEADS_64, tie_word_embeddings=True),
    "mistral": lambda: transformers.MistralConfig(**_HEADS_64, sliding_window=7),
    "qwen2": lambda: transformers.Qwen2Config(
        **_WIDE, use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**_HEADS_64, rope_parameters=dict(_YARN)),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **_WIDE,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        mlp_only_layers=[1],
        norm_topk_prob=False,
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_HEADS_64,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        decoder_sparse_step=2,
        norm_topk_prob=True,
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **_HEADS_64, num_local_experts=8, num_experts_per_tok=2, sliding_window=9
    ),
    "olmoe": lambda: transformers.OlmoeConfig(**_WIDE, num_experts=8, num_experts_per_tok=3, clip_qkv=1.0),
    "phimoe": lambda: transformers.PhimoeConfig(
        **_WIDE,
        num_local_experts=8,
        attention_bias=True,
        lm_head_bias=True,
        rope_parameters=dict(_LONGROPE),
    ),
    "llama4": lambda: transformers.Llama4TextConfig(
        **{**_HEADS_64, "num_hidden_layers": 4},
        intermediate_size_mlp=80,
        num_local_experts=8,
        num_experts_per_tok=2,
        interleave_moe_layer_step=2,
        no_rope_layer_interval=2,
        attention_chunk_size=8,
        floor_scale=4,
        attn_scale=0.3,
    ),
}
FAMILIES = tuple(_CONFIGS)


def build(family: str, directory: Path, *, max_shard_size: str = "1GB") -> Path:
    """Write a checkpoint of `family` (fp32, seeded) into `directory` and return it."""
    config = _CONFIGS[family]()
    torch.manual_seed(SEED)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _draw(name, parameter)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.Fuse()
    words.save(str(directory / "tokenizer.json"))
    return directory


def build_multimodal_llama4(directory: Path) -> Any:
    """Write a Llama 4 checkpoint with a vision tower, as the hub's are, and return its language model."""
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "image_size": 28,
        "patch_size": 14,
        "vision_output_dim": 32,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
    }
    text = _CONFIGS["llama4"]().to_dict()
    torch.manual_seed(SEED)
    config = transformers.Llama4Config(text_config=text, vision_config=vision)
    model = transformers.Llama4ForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _draw(name, parameter)
    model.save_pretrained(directory)
    return model.language_model


def _draw(name: str, parameter: torch.Tensor) -> None:
    if name.endswith("bias"):
        parameter.normal_(0.0, 0.3)
    elif "norm" in name:
        parameter.normal_(1.0, 0.2)
    elif name.endswith(("gate.weight", "router.weight")) and "shared" not in name:
        parameter.normal_(0.0, 0.3)
    elif "embed_tokens" in name:
        parameter.normal_(0.0, 1.0)
    else:
        parameter.normal_(0.0, 0.08)


def oracle(directory: Path) -> Any:
    """The transformers model of a checkpoint, in evaluation mode, fp32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()
