"""Write a Hugging Face checkpoint (Llama, Mixtral, Qwen3-MoE) as a GGUF file of bf16 or q8_0 weights.

For engines that read nothing else; the tokenizer is left out, since they are given token ids. Invariant: bf16 files
hold the very bits of the checkpoint, norms and routers as fp32, as llama.cpp's own converter writes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import safe_open

KINDS: Mapping[str, tuple[gguf.GGMLQuantizationType, gguf.LlamaFileType]] = {
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
_ARCHITECTURES = {"llama": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_EXPERTS = {
    "qwen3_moe": ("mlp.gate", "mlp.experts.{e}.{part}_proj", {"gate": "gate", "up": "up", "down": "down"}),
    "mixtral": (
        "block_sparse_moe.gate",
        "block_sparse_moe.experts.{e}.{part}",
        {"gate": "w1", "up": "w3", "down": "w2"},
    ),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of the file: its size, whether it stays fp32, and how to read it."""

    name: str
    shape: tuple[int, ...]
    exact: bool
    read: Callable[[], torch.Tensor]


class Source:
    """The tensors of a checkpoint directory, by name."""

    def __init__(self, directory: Path) -> None:
        files = [safe_open(path, framework="pt") for path in sorted(directory.glob("*.safetensors"))]
        self._home = {name: file for file in files for name in file.offset_keys()}

    def __contains__(self, name: str) -> bool:
        return name in self._home

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._home[name].get_slice(name).get_shape())

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._home[name].get_tensor(name)
        return tensor


def write_gguf(directory: Path, target: Path, kind: str) -> None:
    """Write the checkpoint in `directory` to the file `target`; `kind` is one of KINDS."""
    config = json.loads((directory / "config.json").read_text())
    quantisation, file_type = KINDS[kind]
    writer = gguf.GGUFWriter(target, _ARCHITECTURES[config["model_type"]])
    _add_metadata(writer, config, file_type)
    entries = list(_entries(Source(directory), config))
    for entry in entries:
        dtype = gguf.GGMLQuantizationType.F32 if entry.exact else quantisation
        size = _num_bytes(entry.shape, dtype)
        writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.float32), size, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for entry in entries:  # one at a time: a model is larger than what may be in memory beside it
        writer.write_tensor_data(_data(entry, quantisation))
    writer.close()


def _num_bytes(shape: tuple[int, ...], dtype: gguf.GGMLQuantizationType) -> int:
    block, size = gguf.GGML_QUANT_SIZES[dtype]
    return int(np.prod(shape)) // block * size


def _data(entry: Entry, quantisation: gguf.GGMLQuantizationType) -> np.ndarray[Any, Any]:
    tensor = entry.read()
    if entry.exact:
        return tensor.float().numpy()
    if quantisation == gguf.GGMLQuantizationType.BF16:
        return tensor.bfloat16().contiguous().view(torch.int16).numpy()
    return gguf.quantize(tensor.float().numpy(), quantisation)


def _add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any], file_type: gguf.LlamaFileType) -> None:
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    head_dim = config["head_dim"]
    writer.add_file_type(file_type)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(theta))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    if config["model_type"] in _EXPERTS:
        writer.add_expert_count(_num_experts(config))
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _num_experts(config: dict[str, Any]) -> int:
    return int(config["num_experts"] if "num_experts" in config else config["num_local_experts"])


def _entries(source: Source, config: dict[str, Any]) -> Iterator[Entry]:
    def entry(name: str, origin: str, heads: int = 0) -> Entry:
        exact = len(source.shape(origin)) == 1 or name.endswith("ffn_gate_inp.weight")
        return Entry(name, source.shape(origin), exact, lambda: _rotary_order(source.read(origin), heads))

    yield entry("token_embd.weight", "model.embed_tokens.weight")
    yield entry("output_norm.weight", "model.norm.weight")
    if "lm_head.weight" in source:
        yield entry("output.weight", "lm_head.weight")
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    paired = _ARCHITECTURES[config["model_type"]] == "llama"
    for layer in range(config["num_hidden_layers"]):
        here, there = f"blk.{layer}.", f"model.layers.{layer}."
        for name, origin in _BLOCK.items():
            yield entry(
                f"{here}{name}.weight", f"{there}{origin}.weight", heads.get(name, 0) if paired else 0
            )
        for part in "qk":
            if f"{there}self_attn.{part}_norm.weight" in source:
                yield entry(f"{here}attn_{part}_norm.weight", f"{there}self_attn.{part}_norm.weight")
        if config["model_type"] not in _EXPERTS:
            for part in ("gate", "up", "down"):
                yield entry(f"{here}ffn_{part}.weight", f"{there}mlp.{part}_proj.weight")
            continue
        router, expert, parts = _EXPERTS[config["model_type"]]
        yield entry(f"{here}ffn_gate_inp.weight", f"{there}{router}.weight")
        for part, name in parts.items():
            origins = [f"{there}{expert.format(e=e, part=name)}.weight" for e in range(_num_experts(config))]
            yield _stacked(source, f"{here}ffn_{part}_exps.weight", origins)


def _stacked(source: Source, name: str, origins: list[str]) -> Entry:
    shape = (len(origins), *source.shape(origins[0]))
    return Entry(name, shape, False, lambda: torch.stack([source.read(origin) for origin in origins]))


def _rotary_order(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a head in the order that llama.cpp rotates for `llama` files: pairs side by side, not halves."""
    if not heads:
        return weight
    halves = weight.view(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)
