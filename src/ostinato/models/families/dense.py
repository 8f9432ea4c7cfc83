"""Tables of the dense families: Llama, Mistral, Qwen2 and Qwen3.

Data only. Defaults are those of the configuration classes of transformers, for keys that a checkpoint leaves
out.
"""

from __future__ import annotations

from types import MappingProxyType

from ostinato.models.families.table import Family

LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    model_types=("llama",),
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    ffn_bias="mlp_bias",
    defaults=MappingProxyType({"rms_norm_eps": 1e-6, "rope_theta": 10_000.0}),
)

MISTRAL = Family(
    name="mistral",
    architectures=("MistralForCausalLM",),
    model_types=("mistral",),
    window="all",
    defaults=MappingProxyType(
        {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "num_key_value_heads": 8, "sliding_window": 4096}
    ),
)

QWEN2 = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    model_types=("qwen2",),
    qkv_bias=True,
    window="upper",
    defaults=MappingProxyType(
        {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "sliding_window": 4096, "max_window_layers": 28}
    ),
)

QWEN3 = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    model_types=("qwen3",),
    qk_norm="head",
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    window="upper",
    defaults=MappingProxyType(
        {
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
            "head_dim": 128,
            "sliding_window": 4096,
            "max_window_layers": 28,
        }
    ),
)
