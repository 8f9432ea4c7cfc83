"""What differs from layer to layer: attention window or chunk, rope, and dense or sparse feed-forward.

Evaluates the rules a family's table names (`window`, `sparse`) beside a raw config. Knows nothing of weights.
Invariant: an explicit per-layer list in the config wins over a rule, and one that cannot be honoured is
refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ostinato.models.families import Family
from ostinato.models.raw import RawConfig
from ostinato.models.rope import ROPE_TYPES, RopeConfig, is_positive

_MOST_LAYERS = 10_000  # each is described before any weight is looked for
_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer. `rope` is None for a layer without positions (NoPE); `intermediate_size` is of its dense
    form.
    """

    sliding_window: int | None
    attention_chunk_size: int | None
    rope: RopeConfig | None
    scale_by_position: bool
    sparse: bool
    intermediate_size: int


def layer_specs(family: Family, raw: RawConfig) -> tuple[LayerSpec, ...]:
    """One `LayerSpec` per layer of the model."""
    count = raw.size("num_hidden_layers", most=_MOST_LAYERS)
    has_rope = _rope_layers(family, raw, count)
    kinds = _layer_types(family, raw, count, has_rope)
    ropes = _ropes(raw, set(kinds))
    sparse = _sparse_layers(family, raw, count)
    window = raw.optional_size("sliding_window") if "sliding_attention" in kinds else None
    chunk = raw.optional_size("attention_chunk_size") if "chunked_attention" in kinds else None
    for kind, size, key in (
        ("sliding_attention", window, "sliding_window"),
        ("chunked_attention", chunk, "attention_chunk_size"),
    ):
        if kind in kinds and size is None:
            raise raw.error(f"layer_types asks for {kind}, but {key} is not set; correct one of them")
    tuned = tunes_temperature(raw)
    # Widths of dense layers are read only where there are dense layers: some configs leave them out.
    dense_width = 0 if all(sparse) else raw.size(family.dense_width)
    return tuple(
        LayerSpec(
            sliding_window=window if kinds[i] == "sliding_attention" else None,
            attention_chunk_size=chunk if kinds[i] == "chunked_attention" else None,
            rope=ropes[kinds[i]] if has_rope[i] else None,
            scale_by_position=tuned and not has_rope[i],
            sparse=sparse[i],
            intermediate_size=dense_width,
        )
        for i in range(count)
    )


def tunes_temperature(raw: RawConfig) -> bool:
    """Whether queries without rope are scaled by their position: a flag that transformers 4.51 wrote as a number."""
    return raw.flag("attn_temperature_tuning", or_count=True)


def _rope_layers(family: Family, raw: RawConfig, count: int) -> list[bool]:
    if family.window != "chunked":
        return [True] * count
    listed = raw.int_list("no_rope_layers")
    if listed:
        if len(listed) < count:
            raise raw.error(f"no_rope_layers has {len(listed)} entries for {count} layers; correct it")
        return [bool(flag) for flag in listed[:count]]
    interval = raw.size("no_rope_layer_interval")
    return [(i + 1) % interval != 0 for i in range(count)]


def _layer_types(family: Family, raw: RawConfig, count: int, has_rope: list[bool]) -> list[str]:
    by_rule = _layer_types_by_rule(family, raw, count, has_rope)
    listed = raw.get("layer_types")
    if listed is None:
        return by_rule
    if not isinstance(listed, list) or len(listed) != count:
        raise raw.error(f"layer_types must list {count} layers, got {listed!r}; correct it")
    unknown = [kind for kind in listed if kind not in _LAYER_TYPES]
    if unknown:
        raise raw.error(f"layer type {unknown[0]!r} is unknown; ostinato runs {', '.join(_LAYER_TYPES)}")
    if family.window in ("none", "all", "enabled") and listed != by_rule:
        raise raw.error(
            f"layer_types {listed} contradicts sliding_window: a {family.name} model has one kind of "
            "attention in all layers; remove the one that is wrong"
        )
    return listed


def _layer_types_by_rule(family: Family, raw: RawConfig, count: int, has_rope: list[bool]) -> list[str]:
    if family.window == "chunked":
        chunked = raw.optional_size("attention_chunk_size") is not None
        return ["chunked_attention" if chunked and rope else "full_attention" for rope in has_rope]
    windowed = [False] * count
    if family.window == "all":
        windowed = [raw.optional_size("sliding_window") is not None] * count
    elif family.window != "none" and raw.flag("use_sliding_window") and raw.get("sliding_window"):
        if family.window == "enabled":
            windowed = [True] * count
        else:
            first = raw.number("max_window_layers")
            upper = family.window == "upper"
            windowed = [i >= first if upper else i % 2 == 0 and i < first for i in range(count)]
    return ["sliding_attention" if flag else "full_attention" for flag in windowed]


def _sparse_layers(family: Family, raw: RawConfig, count: int) -> list[bool]:
    if family.sparse in ("none", "all"):
        return [family.sparse == "all"] * count
    if family.sparse == "step":
        dense = raw.int_list("mlp_only_layers") or []
        step = raw.size("decoder_sparse_step")
        return [i not in dense and (i + 1) % step == 0 for i in range(count)]
    listed = raw.int_list("moe_layers")
    if listed is None:
        step = raw.size("interleave_moe_layer_step")
        listed = list(range(step - 1, count, step))
    return [i in listed for i in range(count)]


def _ropes(raw: RawConfig, kinds: set[str]) -> dict[str, RopeConfig]:
    """The rope of each kind of layer, from either spelling: `rope_parameters`, or `rope_scaling` and
    `rope_theta`.
    """
    parameters = _mapping(raw, "rope_parameters")
    scaling = _mapping(raw, "rope_scaling")
    nested = [key for key in parameters if key in _LAYER_TYPES]
    if not nested:
        return dict.fromkeys(kinds, _rope(raw, _merge(raw, parameters, scaling)))
    missing = kinds - set(nested)
    if missing:
        raise raw.error(f"rope_parameters has no entry for {sorted(missing)[0]!r}; add it")
    return {kind: _rope(raw, _merge(raw, _mapping_in(raw, parameters, kind), scaling)) for kind in kinds}


def _mapping(raw: RawConfig, key: str) -> Mapping[str, Any]:
    return _mapping_in(raw, raw.values, key)


def _mapping_in(raw: RawConfig, values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = values.get(key) or {}
    if not isinstance(value, Mapping):
        raise raw.error(f"{key} must be an object, got {value!r}; correct it")
    return value


def _merge(raw: RawConfig, parameters: Mapping[str, Any], scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Both spellings as one; `type` is the old name of `rope_type`. A contradiction is refused."""
    merged: dict[str, Any] = {}
    for source in (parameters, scaling):
        for key, value in source.items():
            name = "rope_type" if key == "type" else key
            if name in merged and merged[name] != value:
                raise raw.error(
                    f"{name} is given twice, as {merged[name]!r} and {value!r}, in rope_parameters and "
                    "rope_scaling; keep one"
                )
            merged[name] = value
    return merged


def _rope(raw: RawConfig, params: Mapping[str, Any]) -> RopeConfig:
    rope_type = params.get("rope_type") or "default"
    if rope_type not in ROPE_TYPES:
        raise raw.error(f"rope type {rope_type!r} is unknown; ostinato runs {', '.join(ROPE_TYPES)}")
    partial = params.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise raw.error(f"partial_rotary_factor {partial!r} is not supported; ostinato rotates whole heads")
    theta = params.get("rope_theta")
    if theta is None:
        theta = raw.get("rope_theta")
    if not is_positive(theta):
        raise raw.error(f"rope_theta must be a positive number, got {theta!r}; correct it")
    dim = raw.head_dim()
    if dim % 2:
        raise raw.error(f"head_dim {dim} is odd, and rope rotates pairs; give the head_dim of the weights")
    longest = raw.size("max_position_embeddings")
    original = _original_positions(raw, params) or longest
    return RopeConfig(rope_type, float(theta), dim, longest, original, dict(params))


def _original_positions(raw: RawConfig, params: Mapping[str, Any]) -> int | None:
    """The context of the pre-training, beside the rope's parameters or among them; None where nothing is said."""
    key = "original_max_position_embeddings"
    beside = raw.optional_size(key)
    among = params.get(key)
    if beside is not None or among is None:
        return beside
    if not is_positive(among) or among != int(among):
        raise raw.error(f"{key} must be a positive integer, got {among!r}; correct it")
    return int(among)
