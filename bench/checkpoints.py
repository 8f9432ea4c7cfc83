"""The checkpoints that are compared, in the form each engine reads, made once and kept in a cache directory.

Two random models (a mixture of experts and a dense one, both large enough to be bound by memory) and the two small
real ones that `ostinato fetch` makes. Knows nothing of engines. Invariant: every form of a model holds the same
weights; a directory or file that is there is whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gguf_file import write_gguf
from ostinato.models.fetch import FETCHABLE, fetch

REVISION = 1  # part of every name; raise it when what is written changes
_STD = 0.02
_SPECIAL = ("<pad>", "<s>", "</s>")


@dataclass(frozen=True, slots=True)
class Shape:
    """A random model. `num_experts` 0 makes a dense Llama, more a Qwen3-MoE with experts in every layer."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int = 32768
    head_dim: int = 64
    num_experts: int = 0
    top_k: int = 0


RANDOM: Mapping[str, Shape] = {
    "moe": Shape(1024, 16, 16, 4, 512, num_experts=64, top_k=8),
    "dense": Shape(768, 16, 12, 4, 2048),
    "tiny": Shape(128, 2, 4, 2, 64, vocab=2048, head_dim=32, num_experts=8, top_k=2),
}
MODELS = (*RANDOM, *FETCHABLE)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk. `real` says that its text means something, so that texts can be compared."""

    name: str
    directory: Path
    real: bool
    cache: Path

    @property
    def config(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.directory / "config.json").read_text())
        return loaded

    def path(self, form: str) -> Path:
        """The checkpoint as "hf", "gguf-bf16" or "gguf-q8_0", written when it is not there yet."""
        if form == "hf":
            return self.directory
        kind = form.removeprefix("gguf-")
        target = self.cache / f"{self.name}-{kind}-r{REVISION}.gguf"
        if not target.exists():
            print(f"writing {target.name}", flush=True)
            scratch = target.with_suffix(".part")
            write_gguf(self.directory, scratch, kind)
            scratch.rename(target)
        return target


def checkpoint(name: str, cache: Path, fetched: Path) -> Checkpoint:
    """The model `name` of MODELS under `cache` (under `fetched` if it is a fetched one), made on the first call."""
    cache.mkdir(parents=True, exist_ok=True)
    if name in FETCHABLE:
        return Checkpoint(name, fetch(name, cache_dir=fetched), True, cache)
    target = cache / f"{name}-r{REVISION}"
    if not target.is_dir():
        print(f"writing {target.name}", flush=True)
        scratch = cache / f".{target.name}.part"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        _write_random(RANDOM[name], scratch)
        scratch.rename(target)
    return Checkpoint(name, target, False, cache)


def _config(shape: Shape) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if shape.num_experts:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "intermediate_size": 3 * shape.hidden,  # of dense layers, which there are none of
            "moe_intermediate_size": shape.intermediate,
            "num_experts": shape.num_experts,
            "num_experts_per_tok": shape.top_k,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config


def _layer(shape: Shape, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and sizes of one layer's tensors."""
    prefix = f"model.layers.{layer}."
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield prefix + "input_layernorm.weight", (shape.hidden,)
    yield prefix + "post_attention_layernorm.weight", (shape.hidden,)
    yield prefix + "self_attn.q_proj.weight", (queries, shape.hidden)
    yield prefix + "self_attn.k_proj.weight", (keys, shape.hidden)
    yield prefix + "self_attn.v_proj.weight", (keys, shape.hidden)
    yield prefix + "self_attn.o_proj.weight", (shape.hidden, queries)
    blocks = ["mlp."]
    if shape.num_experts:
        yield prefix + "self_attn.q_norm.weight", (shape.head_dim,)
        yield prefix + "self_attn.k_norm.weight", (shape.head_dim,)
        yield prefix + "mlp.gate.weight", (shape.num_experts, shape.hidden)
        blocks = [f"mlp.experts.{expert}." for expert in range(shape.num_experts)]
    for block in blocks:
        yield prefix + block + "gate_proj.weight", (shape.intermediate, shape.hidden)
        yield prefix + block + "up_proj.weight", (shape.intermediate, shape.hidden)
        yield prefix + block + "down_proj.weight", (shape.hidden, shape.intermediate)


def _write_random(shape: Shape, target: Path) -> None:
    """Weights as a fresh model has them (normal, norms one), a shard for each layer and one for the rest."""
    draw = torch.Generator().manual_seed(0)

    def tensor(size: tuple[int, ...]) -> torch.Tensor:
        if len(size) == 1:
            return torch.ones(size, dtype=torch.bfloat16)
        return torch.empty(size).normal_(0.0, _STD, generator=draw).bfloat16()

    rest = [
        ("model.embed_tokens.weight", (shape.vocab, shape.hidden)),
        ("model.norm.weight", (shape.hidden,)),
    ]
    rest.append(("lm_head.weight", (shape.vocab, shape.hidden)))
    shards: list[list[tuple[str, tuple[int, ...]]]] = [list(_layer(shape, n)) for n in range(shape.layers)]
    shards.append(rest)
    index: dict[str, str] = {}
    size = 0
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {name: tensor(dims) for name, dims in shard}
        save_file(tensors, target / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
        size += sum(t.nbytes for t in tensors.values())
    _dump(target / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": index})
    _dump(target / "config.json", _config(shape))
    _dump(target / "generation_config.json", {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2})
    _write_tokenizer(shape.vocab, target)


def _write_tokenizer(vocab_size: int, target: Path) -> None:
    """A byte-level tokenizer of the right size: all bytes, then pairs of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*_SPECIAL, *alphabet]
    pairs = [(first, second) for first in alphabet for second in alphabet][: vocab_size - len(tokens)]
    tokens += [first + second for first, second in pairs]
    tokenizer = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    tokenizer.save(str(target / "tokenizer.json"))
    special = dict(zip(("pad_token", "bos_token", "eos_token"), _SPECIAL, strict=True))
    _dump(target / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"} | special)


def _dump(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
