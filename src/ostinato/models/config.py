"""`ModelConfig`: everything the decoder needs to know of a checkpoint, read from its `config.json`.

Old and new spellings give the same value, a key that is left out has its family's default, and whatever the
decoder could not honour is refused by name. Knows nothing of weights. Invariant: after `read_config` nobody
looks at raw JSON again, and every per-layer question is answered by `layers[i]`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch

from ostinato.errors import ModelError
from ostinato.models.families import Family, find_family
from ostinato.models.layers import LayerSpec, layer_specs, tunes_temperature
from ostinato.models.raw import RawConfig

_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
)
_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_SILU = ("silu", "swish")


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """The sparse layers of a model; one set of numbers for all of them.

    `renormalize`: routing weights are divided by their sum. `custom`: a named router instead of softmax
    top-k. `shared_intermediate_size` is None without a shared expert; `shared_gated` multiplies it by a
    sigmoid.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalize: bool
    custom: Literal["llama4", "phimoe"] | None
    weights_on_input: bool
    shared_intermediate_size: int | None
    shared_gated: bool


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model's numbers and flags; sizes in elements, `norm_eps` and `scale` dimensionless.

    `eos_token_ids` unites config.json and generation_config.json. `temperature` holds (floor_scale,
    attn_scale) for layers that scale queries by position. `qk_norm`: none, per head, over the full width, or
    "l2" (unscaled, after rope, on layers with rope).
    """

    family: Family
    dtype: torch.dtype
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    tie_word_embeddings: bool
    qk_norm: Literal["none", "head", "full", "l2"]
    qkv_bias: bool
    out_bias: bool
    ffn_bias: bool
    head_bias: bool
    clip_qkv: float | None
    temperature: tuple[float, float] | None
    layers: tuple[LayerSpec, ...]
    moe: MoEConfig | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention_scale(self) -> float:
        return float(self.head_dim**-0.5)


def read_config(path: str | Path, *, dtype: torch.dtype | None = None) -> ModelConfig:
    """Read `config.json` and, if present, `generation_config.json` of a checkpoint directory.

    `dtype` replaces the checkpoint's own: weights and activations are kept in it. Raises ModelError for a
    missing or damaged file, an unknown architecture or rope type, or an unusable value.
    """
    directory = Path(path)
    if not (directory / "config.json").is_file():
        raise ModelError(
            f"{directory} has no config.json; give the directory of a Hugging Face checkpoint, or a hub id"
        )
    generation = directory / "generation_config.json"
    config = parse_config(
        _read_json(directory / "config.json"),
        _read_json(generation) if generation.is_file() else {},
        origin=str(directory / "config.json"),
    )
    return config if dtype is None else replace(config, dtype=dtype)


def recommended_sampling(directory: Path) -> dict[str, Any]:
    """What a checkpoint's `generation_config.json` says about sampling, as fields of `SamplingParams`.

    Nothing where it says `do_sample: false`, which switches the others off. Raises ModelError for a damaged file.
    """
    file = directory / "generation_config.json"
    raw = _read_json(file) if file.is_file() else {}
    if raw.get("do_sample") is False:
        return {}
    return {name: raw[name] for name in _RECOMMENDED if raw.get(name) is not None}


def parse_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None, *, origin: str = "config.json"
) -> ModelConfig:
    """`ModelConfig` of a parsed config.json; see `read_config`. `origin` names it in errors."""
    family = find_family(raw, origin)
    nested = raw.get(family.text_config) if family.text_config else None
    text = RawConfig(nested if isinstance(nested, Mapping) else raw, family.defaults, origin)
    _refuse_unsupported(raw, text)
    layers = layer_specs(family, text)
    num_heads = text.size("num_attention_heads")
    num_kv_heads = text.optional_size("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise text.error(f"{num_heads} attention heads are not a multiple of {num_kv_heads} key-value heads")
    temperature = None
    if tunes_temperature(text):
        temperature = (text.positive("floor_scale"), text.number("attn_scale"))
    clip = text.get("clip_qkv")
    return ModelConfig(
        family=family,
        dtype=_dtype(raw, text),
        vocab_size=text.size("vocab_size"),
        hidden_size=text.size("hidden_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=text.head_dim(),
        max_position_embeddings=text.size("max_position_embeddings"),
        norm_eps=_norm_eps(text),
        tie_word_embeddings=_tied(raw, text),
        qk_norm="none" if family.qk_norm == "l2" and not text.flag("use_qk_norm") else family.qk_norm,
        qkv_bias=text.flag(family.qkv_bias),
        out_bias=text.flag(family.out_bias),
        ffn_bias=text.flag(family.ffn_bias),
        head_bias=text.flag(family.head_bias),
        clip_qkv=None if clip is None else text.positive("clip_qkv"),
        temperature=temperature,
        layers=layers,
        moe=_moe(family, text) if any(layer.sparse for layer in layers) else None,
        eos_token_ids=_token_ids(text, raw, generation or {}),
        bos_token_id=text.optional_int("bos_token_id"),
        pad_token_id=text.optional_int("pad_token_id"),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({error}); download the checkpoint again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object; download the checkpoint again")
    return value


def _refuse_unsupported(raw: Mapping[str, Any], text: RawConfig) -> None:
    quantization = raw.get("quantization_config") or text.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise text.error(f"quantised weights ({method}) are not supported; give an unquantised checkpoint")
    activation = text.get("hidden_act", "silu")
    if activation not in _SILU:
        raise text.error(f"hidden_act {activation!r} is not supported; ostinato runs silu")


def _dtype(raw: Mapping[str, Any], text: RawConfig) -> torch.dtype:
    """Either spelling, outer config first; float32 where neither is there."""
    for source in (raw, text.values):
        for key in ("dtype", "torch_dtype"):
            name = source.get(key)
            if name is not None:
                dtype = _DTYPES.get(str(name).removeprefix("torch."))
                if dtype is None:
                    known = ", ".join(_DTYPES)
                    raise text.error(f"{key} {name!r} is not supported; convert the weights to {known}")
                return dtype
    return torch.float32


def _norm_eps(text: RawConfig) -> float:
    eps = text.number("rms_norm_eps")
    if eps < 0:
        raise text.error(f"rms_norm_eps must not be below 0, got {eps:g}; correct it")
    return eps


def _tied(raw: Mapping[str, Any], text: RawConfig) -> bool:
    return text.flag("tie_word_embeddings") or bool(raw.get("tie_word_embeddings", False))


def _moe(family: Family, text: RawConfig) -> MoEConfig:
    router = family.router
    assert router is not None, f"family {family.name} has sparse layers but no router"
    num_experts = text.size("num_local_experts", "num_experts")
    top_k = text.size("num_experts_per_tok")
    if top_k > num_experts:
        raise text.error(f"num_experts_per_tok {top_k} is more than the {num_experts} experts")
    renormalize = router.norm_topk_prob == "always"
    if isinstance(router.norm_topk_prob, bool):
        renormalize = text.flag("norm_topk_prob", default=router.norm_topk_prob)
    if router.custom == "phimoe" and text.number("router_jitter_noise", 0.01) != 0.01:
        raise text.error("router_jitter_noise other than 0.01 is not supported by the PhiMoE router")
    return MoEConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=text.size(family.expert_width),
        renormalize=renormalize,
        custom=router.custom,
        weights_on_input=router.weights_on_input,
        shared_intermediate_size=None if family.shared_expert == "none" else text.size(family.shared_width),
        shared_gated=family.shared_expert == "gated",
    )


def _token_ids(text: RawConfig, *others: Mapping[str, Any]) -> tuple[int, ...]:
    """Union of every `eos_token_id` (a number, a list, or nothing), in ascending order."""
    found: set[int] = set()
    for source in (text.values, *others):
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, bool) or not isinstance(token, (int, type(None))):
                raise text.error(f"eos_token_id {value!r} is neither a token id nor a list of them")
            if token is not None:
                found.add(token)
    return tuple(sorted(found))
