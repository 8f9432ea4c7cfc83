"""Turn a GGUF file into a Hugging Face checkpoint directory: config, bf16 safetensors, tokenizer, chat
template.

Knows the `llama` architecture and byte-level BPE vocabularies, and nothing of downloads, caches or the
engine. It keeps one invariant: every tensor of the file and every metadatum that changes the arithmetic is
either converted or refused by name; nothing is dropped in silence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ostinato.errors import ModelError

Progress = Callable[[str, int, int], None]
"""Told (stage, done, total) as work goes on; `done == total` closes a stage."""

_TOP: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QUANTISATIONS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
_DIGITS: Mapping[str, Any] = {"type": "Digits", "individual_digits": True}
_BYTES: Mapping[str, Any] = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
_PRE_TOKENIZERS: Mapping[str, Mapping[str, Any]] = {
    "smollm": {"type": "Sequence", "pretokenizers": [_DIGITS, _BYTES]},
    "gpt-2": _BYTES,
}
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
# What llama.cpp would do beside a Llama's arithmetic, and the values with which it does nothing.
_NEUTRAL: Mapping[str, tuple[float | bool, ...]] = {
    "llama.logit_scale": (0.0, 1.0),
    "llama.residual_scale": (0.0, 1.0),
    "llama.embedding_scale": (0.0, 1.0),
    "llama.attn_logit_softcapping": (0.0,),
    "llama.final_logit_softcapping": (0.0,),
    "llama.attention.scale": (0.0,),
    "llama.attention.clamp_kqv": (0.0,),
    "llama.attention.max_alibi_bias": (0.0,),
    "llama.attention.sliding_window": (0,),
    "llama.attention.causal": (True,),
    "llama.use_parallel_residual": (False,),
    "llama.rope.scale_linear": (0.0, 1.0),
    "tokenizer.ggml.add_eos_token": (False,),
}


def convert_gguf(source: Path, target: Path, progress: Progress | None = None) -> None:
    """Write the checkpoint of `source` into the existing directory `target`.

    Raises ModelError for a file that is not GGUF, or that has an architecture, rope scaling, tensor,
    quantisation or tokenizer outside the tables above.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(source)
    except (ValueError, IndexError, OSError) as error:
        raise ModelError(f"{source} cannot be read as GGUF ({error}); fetch or download it again") from error
    try:
        meta = {key: field.contents() for key, field in reader.fields.items()}
    except ValueError as error:
        raise ModelError(
            f"the metadata of {source} are damaged ({error}); fetch or download it again"
        ) from error
    config = model_config(meta)
    tensors = _tensors(reader.tensors, config, progress)
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    tokenizer = tokenizer_json(meta)
    special = _special_tokens(meta)
    ids = {f"{role}_token_id": index for role, index in special.items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    _write(
        target / "config.json",
        config | {key: ids[key] for key in ("bos_token_id", "eos_token_id") if key in ids},
    )
    _write(target / "generation_config.json", ids)
    _write(target / "tokenizer.json", tokenizer)
    _write(target / "tokenizer_config.json", _tokenizer_config(meta, special))


def model_config(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` of a `llama` file, from its metadata (names as in the GGUF specification)."""
    architecture = meta.get("general.architecture")
    if architecture != "llama":
        raise ModelError(
            f"GGUF architecture {architecture!r} is not supported (only 'llama'); use its safetensors"
        )
    for key, neutral in _NEUTRAL.items():
        if meta.get(key, neutral[0]) not in neutral:
            raise ModelError(f"GGUF {key} {meta[key]!r} is not supported; use the model's safetensors")
    # A factor without a type is linear scaling.
    factor = meta.get("llama.rope.scaling.factor", 1.0)
    scaling = meta.get("llama.rope.scaling.type", "none" if factor in (0.0, 1.0) else "linear")
    if scaling != "none":
        raise ModelError(f"GGUF rope scaling {scaling!r} is not supported; use the model's safetensors")
    if meta.get("llama.expert_count", 0):
        raise ModelError(
            f"GGUF llama.expert_count {meta['llama.expert_count']} is not supported, only dense models are"
        )
    hidden, heads = _need(meta, "embedding_length"), _need(meta, "attention.head_count")
    head_dim = meta.get("llama.attention.key_length", hidden // heads)
    rotated = meta.get("llama.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ModelError(
            f"GGUF llama.rope.dimension_count {rotated} differs from the head size {head_dim}: unsupported"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(_tokens(meta)),
        "hidden_size": hidden,
        "intermediate_size": _need(meta, "feed_forward_length"),
        "num_hidden_layers": _need(meta, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": _need(meta, "context_length"),
        "rms_norm_eps": float(f"{_need(meta, 'attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": meta.get("llama.rope.freq_base", 10000.0),
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
    }


def _need(meta: Mapping[str, Any], name: str) -> Any:
    if (value := meta.get(f"llama.{name}")) is None:
        raise ModelError(
            f"the GGUF file has no llama.{name}; it is damaged or not a whole model: download it again"
        )
    return value


def _tensors(
    entries: list[Any], config: dict[str, Any], progress: Progress | None
) -> dict[str, torch.Tensor]:
    from gguf.quants import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors: dict[str, torch.Tensor] = {}
    for done, entry in enumerate(entries, 1):
        if entry.tensor_type.name not in _QUANTISATIONS:
            raise ModelError(f"tensor {entry.name} has the unsupported GGUF type {entry.tensor_type.name}")
        name, part = hf_name(entry.name, config["num_hidden_layers"])
        weight = torch.from_numpy(dequantize(entry.data, entry.tensor_type).copy())
        if part in heads:
            rows = heads[part] * config["head_dim"]
            if weight.dim() != 2 or weight.shape[0] != rows:
                raise ModelError(
                    f"tensor {entry.name} has shape {list(weight.shape)}, the GGUF file's metadata ask for {rows} "
                    "rows: download it again"
                )
            weight = unpermute(weight, heads[part])
        tensors[name] = weight.to(torch.bfloat16).contiguous()
        if progress:
            progress("convert", done, len(entries))
    wanted = [
        f"model.layers.{n}.{name}.weight"
        for n in range(config["num_hidden_layers"])
        for name in _BLOCK.values()
    ]
    wanted += [_TOP["token_embd.weight"], _TOP["output_norm.weight"]]
    if missing := [name for name in wanted if name not in tensors]:
        raise ModelError(f"the GGUF file lacks {missing[0]} (and {len(missing) - 1} more): download it again")
    return tensors


def hf_name(name: str, layers: int) -> tuple[str, str]:
    """(Hugging Face name, part of the block or "") of a GGUF tensor; ModelError when it is unknown."""
    if name in _TOP:
        return _TOP[name], ""
    pieces = name.split(".")
    known = len(pieces) == 4 and pieces[0] == "blk" and pieces[1].isdigit() and pieces[3] == "weight"
    if not known or pieces[2] not in _BLOCK or int(pieces[1]) >= layers:
        raise ModelError(f"the GGUF file has an unexpected tensor {name!r}; use the model's safetensors")
    return f"model.layers.{int(pieces[1])}.{_BLOCK[pieces[2]]}.weight", pieces[2]


def unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's row order of q and k, [heads * head_dim, in] -> same shape.

    GGUF stores the two rotated halves of each head interleaved (pair i in rows 2i and 2i+1); Hugging Face
    keeps them apart (rows i and i + head_dim/2).
    """
    rows, width = weight.shape
    return weight.view(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


def _tokens(meta: Mapping[str, Any]) -> list[str]:
    tokens: list[str] = meta.get("tokenizer.ggml.tokens") or []
    if not tokens:
        raise ModelError(
            "the GGUF file has no tokenizer.ggml.tokens; use the model's safetensors and tokenizer.json"
        )
    return tokens


def tokenizer_json(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The `tokenizer.json` of a byte-level BPE vocabulary in GGUF metadata."""
    model, pre = meta.get("tokenizer.ggml.model"), str(meta.get("tokenizer.ggml.pre"))
    if model != "gpt2" or pre not in _PRE_TOKENIZERS:
        known = ", ".join(map(repr, _PRE_TOKENIZERS))
        raise ModelError(
            f"GGUF tokenizer {model!r} with pre-tokenizer {pre!r} is unknown (only 'gpt2' with {known})"
        )
    tokens = _tokens(meta)
    types = meta.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    added = [(index, kind) for index, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": tokens[index], **flags, "special": kind == _CONTROL}
            for index, kind in added
        ],
        "normalizer": None,
        "pre_tokenizer": _PRE_TOKENIZERS[pre],
        "post_processor": _post_processor(meta, tokens),
        "decoder": {**_BYTES, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in _merges(meta)],
        },
    }


def _post_processor(meta: Mapping[str, Any], tokens: list[str]) -> dict[str, Any] | None:
    """A template that puts BOS before the text, where the file asks for it."""
    if not meta.get("tokenizer.ggml.add_bos_token", False):
        return None
    index = _special_tokens(meta).get("bos", -1)
    if index < 0:
        raise ModelError(
            "the GGUF file adds a BOS token and has no tokenizer.ggml.bos_token_id: download it again"
        )
    bos = {"SpecialToken": {"id": tokens[index], "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, second],
        "special_tokens": {tokens[index]: {"id": tokens[index], "ids": [index], "tokens": [tokens[index]]}},
    }


def _merges(meta: Mapping[str, Any]) -> list[str]:
    if (merges := meta.get("tokenizer.ggml.merges")) is None:
        raise ModelError(
            "the GGUF file has no tokenizer.ggml.merges; use the model's safetensors and tokenizer.json"
        )
    return list(merges)


def _special_tokens(meta: Mapping[str, Any]) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    keys = {role: f"tokenizer.ggml.{name}_token_id" for role, name in names.items()}
    found = {role: meta[key] for role, key in keys.items() if key in meta}
    for role, index in found.items():
        if not 0 <= index < len(_tokens(meta)):
            raise ModelError(
                f"{keys[role]} {index} of the GGUF file is no token of its vocabulary: download it again"
            )
    return found


def _tokenizer_config(meta: Mapping[str, Any], special: dict[str, int]) -> dict[str, Any]:
    tokens = _tokens(meta)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    config |= {f"{role}_token": tokens[index] for role, index in special.items()}
    config["model_max_length"] = _need(meta, "context_length")
    if template := meta.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
