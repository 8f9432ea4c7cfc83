"""What a model family is: a table of names, flags and defaults that the one decoder is composed from.

A family is data. It knows nothing of torch, files or kernels; `models/config.py` reads its flags beside a
checkpoint's `config.json`, `models/build.py` its tensor names. Invariant: what a family leaves out of its
table has one meaning for all families, so there is no per-family code anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Flag = bool | str
"""A constant, or the name of the boolean in `config.json` that holds it."""


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Tensor names of a layer's routed experts, relative to the layer, `{e}` for the expert.

    Per expert: gate and up [I, H], down [H, I]. Fused (`fused_gate_up`, `fused_down`): [E, 2I, H] and [E, H,
    I], or [E, H, 2I] and [E, I, H] where `fused_transposed`. A checkpoint has one form or the other.
    """

    gate: str = ""
    up: str = ""
    down: str = ""
    fused_gate_up: str = ""
    fused_down: str = ""
    fused_transposed: bool = False


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Tensor names relative to the layer prefix `layers`; tuples hold alternative spellings, one of which
    exists.
    """

    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    layers: str = "model.layers.{i}."
    dense_ffn: str = "mlp"
    router: tuple[str, ...] = ("mlp.gate.weight",)
    experts: ExpertNames | None = None
    shared_expert: str = "mlp.shared_expert"
    shared_expert_gate: str = "mlp.shared_expert_gate.weight"


@dataclass(frozen=True, slots=True)
class RouterTable:
    """How a family routes.

    custom: a `custom_routing_function` of `moe/custom.py` by name; None is a softmax over all experts, then
    top-k. norm_topk_prob: the default where `config.json` has no such key (families differ), or "always" or None
        where the family's router always or never renormalises and the key means nothing.
    weights_on_input: the routing weight scales an expert's input, not its output.
    """

    custom: Literal["llama4", "phimoe"] | None = None
    norm_topk_prob: bool | Literal["always"] | None = None
    weights_on_input: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """One model family.

    window: which layers have a sliding window. "all": every layer, if `sliding_window` is set; "enabled": the
    same,
        if `use_sliding_window`; "upper": those from `max_window_layers` on, if `use_sliding_window`;
        "alternate": every other one below `max_window_layers`, if `use_sliding_window`; "chunked": chunked
        attention on layers with rope. `layer_types`, where the family has it, decides instead.
    sparse: which layers have experts. "all"; "step": by `decoder_sparse_step` and `mlp_only_layers`;
    "interleave":
        by `moe_layers` or `interleave_moe_layer_step`.
    shared_expert: "gated" multiplies its output by a sigmoid, "plain" adds it as it is.
    expert_width, dense_width: the keys of the intermediate sizes.
    defaults: values of keys that `config.json` leaves out.
    text_config: the key under which a multimodal checkpoint of the family keeps its language model's config;
        `renamed` maps prefixes of its tensor names, `ignored` lists those of the parts that are not loaded.
    """

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    names: WeightNames = WeightNames()
    norm: Literal["rms", "layer"] = "rms"
    qk_norm: Literal["none", "head", "full", "l2"] = "none"
    qkv_bias: Flag = False
    out_bias: Flag = False
    ffn_bias: Flag = False
    head_bias: Flag = False
    rope_interleaved: bool = False
    window: Literal["none", "all", "enabled", "upper", "alternate", "chunked"] = "none"
    sparse: Literal["none", "all", "step", "interleave"] = "none"
    router: RouterTable | None = None
    shared_expert: Literal["none", "gated", "plain"] = "none"
    shared_width: str = "intermediate_size"
    expert_width: str = "intermediate_size"
    dense_width: str = "intermediate_size"
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    text_config: str | None = None
    renamed: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
