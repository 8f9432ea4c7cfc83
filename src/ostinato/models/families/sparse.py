"""Tables of the mixture-of-experts families.

Data only. Expert tensors are named in two ways: one tensor per expert (the files of the hub, and what
transformers writes) and fused over experts (the parameters of transformers 5 as they stand in memory).
Defaults are those of the configuration classes of transformers, for keys that a checkpoint leaves out.
"""

from __future__ import annotations

from types import MappingProxyType

from ostinato.models.families.table import ExpertNames, Family, RouterTable, WeightNames

MLP_EXPERTS = ExpertNames(
    gate="mlp.experts.{e}.gate_proj.weight",
    up="mlp.experts.{e}.up_proj.weight",
    down="mlp.experts.{e}.down_proj.weight",
    fused_gate_up="mlp.experts.gate_up_proj",
    fused_down="mlp.experts.down_proj",
)

BLOCK_SPARSE_EXPERTS = ExpertNames(
    gate="block_sparse_moe.experts.{e}.w1.weight",
    up="block_sparse_moe.experts.{e}.w3.weight",
    down="block_sparse_moe.experts.{e}.w2.weight",
    fused_gate_up="mlp.experts.gate_up_proj",
    fused_down="mlp.experts.down_proj",
)

QWEN2_MOE = Family(
    name="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    model_types=("qwen2_moe",),
    names=WeightNames(experts=MLP_EXPERTS),
    qkv_bias="qkv_bias",
    window="alternate",
    sparse="step",
    router=RouterTable(norm_topk_prob=False),
    shared_expert="gated",
    shared_width="shared_expert_intermediate_size",
    expert_width="moe_intermediate_size",
    defaults=MappingProxyType(
        {
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
            "qkv_bias": True,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "decoder_sparse_step": 1,
            "sliding_window": 4096,
            "max_window_layers": 28,
        }
    ),
)

QWEN3_MOE = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    model_types=("qwen3_moe",),
    names=WeightNames(experts=MLP_EXPERTS),
    qk_norm="head",
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    window="enabled",
    sparse="step",
    router=RouterTable(norm_topk_prob=False),
    expert_width="moe_intermediate_size",
    defaults=MappingProxyType(
        {
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "decoder_sparse_step": 1,
            "sliding_window": 4096,
        }
    ),
)

MIXTRAL = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    model_types=("mixtral",),
    names=WeightNames(
        router=("block_sparse_moe.gate.weight", "mlp.gate.weight"), experts=BLOCK_SPARSE_EXPERTS
    ),
    window="all",
    sparse="all",
    router=RouterTable(norm_topk_prob="always"),
    defaults=MappingProxyType(
        {
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "num_key_value_heads": 8,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        }
    ),
)

OLMOE = Family(
    name="olmoe",
    architectures=("OlmoeForCausalLM",),
    model_types=("olmoe",),
    names=WeightNames(experts=MLP_EXPERTS),
    qk_norm="full",
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    sparse="all",
    router=RouterTable(norm_topk_prob=False),
    defaults=MappingProxyType(
        {"rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "num_experts": 64, "num_experts_per_tok": 8}
    ),
)

PHIMOE = Family(
    name="phimoe",
    architectures=("PhimoeForCausalLM", "PhiMoEForCausalLM"),
    model_types=("phimoe",),
    names=WeightNames(
        router=("block_sparse_moe.gate.weight", "mlp.router.weight"), experts=BLOCK_SPARSE_EXPERTS
    ),
    norm="layer",
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    head_bias="lm_head_bias",
    window="all",
    sparse="all",
    router=RouterTable(custom="phimoe"),
    defaults=MappingProxyType(
        {
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "num_key_value_heads": 8,
            "num_experts": 16,
            "num_experts_per_tok": 2,
        }
    ),
)

LLAMA4 = Family(
    name="llama4",
    architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    model_types=("llama4_text", "llama4"),
    names=WeightNames(
        dense_ffn="feed_forward",
        router=("feed_forward.router.weight",),
        experts=ExpertNames(
            fused_gate_up="feed_forward.experts.gate_up_proj",
            fused_down="feed_forward.experts.down_proj",
            fused_transposed=True,
        ),
        shared_expert="feed_forward.shared_expert",
    ),
    qk_norm="l2",
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    rope_interleaved=True,
    window="chunked",
    sparse="interleave",
    router=RouterTable(custom="llama4", weights_on_input=True),
    shared_expert="plain",
    dense_width="intermediate_size_mlp",
    defaults=MappingProxyType(
        {
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "head_dim": 128,
            "num_key_value_heads": 8,
            "num_experts": 16,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 16384,
            "interleave_moe_layer_step": 1,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "use_qk_norm": True,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        }
    ),
    text_config="text_config",
    renamed=(("language_model.", ""), ("model.language_model.", "model.")),
    ignored=(
        "vision_model.",
        "multi_modal_projector.",
        "model.vision_model.",
        "model.multi_modal_projector.",
    ),
)
