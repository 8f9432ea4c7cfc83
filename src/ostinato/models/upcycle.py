"""Make a mixture of experts from a dense Llama checkpoint: a Mixtral whose experts are noisy copies of the
FFN.

Knows nothing of the engine. The renormalised top-k weights of a token sum to one, so with little noise the
mixture computes nearly the dense FFN whatever the router picks; the router is random, so it really picks by
token (sparse upcycling: Komatsuzaki et al., 2023, without the further training). The same seed gives the same
file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ostinato.errors import ModelError

_EXPERT_PARTS: Mapping[str, str] = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


@dataclass(frozen=True, slots=True)
class Upcycling:
    """How a dense model becomes a mixture; `noise` is relative to the RMS of each matrix, `router_spread` is
    the standard deviation of the router logits for a normalised hidden row."""

    experts: int = 8
    top_k: int = 2
    noise: float = 0.02
    router_spread: float = 1.0
    seed: int = 140


def upcycle(
    source: Path, target: Path, how: Upcycling, progress: Callable[[str, int, int], None] | None = None
) -> None:
    """Write the mixture of the dense Llama checkpoint `source` into the existing directory `target`."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if config["architectures"] != ["LlamaForCausalLM"]:
        raise ModelError(f"only LlamaForCausalLM can be upcycled, not {config['architectures']} of {source}")
    layers = config["num_hidden_layers"]
    tensors: dict[str, torch.Tensor] = {}
    with safe_open(source / "model.safetensors", framework="pt") as weights:
        names = set(weights.keys())
        for layer in range(layers):
            generator = torch.Generator().manual_seed(how.seed * 1000 + layer)
            dense = {n: weights.get_tensor(n) for n in names if n.startswith(f"model.layers.{layer}.")}
            tensors.update(_layer(dense, f"model.layers.{layer}", how, generator))
            names -= dense.keys()
            if progress:
                progress("upcycle", layer + 1, layers)
        tensors |= {name: weights.get_tensor(name) for name in names}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(_mixtral_config(config, how), indent=2)
    (target / "config.json").write_text(text + "\n", encoding="utf-8")
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, target / name)


def _mixtral_config(dense: dict[str, Any], how: Upcycling) -> dict[str, Any]:
    kept = {key: value for key, value in dense.items() if key not in ("attention_bias", "mlp_bias")}
    return kept | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": how.experts,
        "num_experts_per_tok": how.top_k,
        "sliding_window": None,
        "output_router_logits": False,
    }


def _layer(
    dense: dict[str, torch.Tensor], prefix: str, how: Upcycling, generator: torch.Generator
) -> Iterator[tuple[str, torch.Tensor]]:
    mlp, moe = f"{prefix}.mlp", f"{prefix}.block_sparse_moe"
    norm = dense[f"{prefix}.post_attention_layernorm.weight"].float()
    # A row scaled by the norm's weights has length |norm| (unit RMS before it), so this spread holds for the
    # logits.
    router = torch.randn(how.experts, len(norm), generator=generator) * (how.router_spread / norm.norm())
    yield f"{moe}.gate.weight", router.to(torch.bfloat16)
    for part, name in _EXPERT_PARTS.items():
        weight = dense[f"{mlp}.{part}.weight"].float()
        scale = how.noise * weight.square().mean().sqrt()
        for expert in range(how.experts):
            noise = torch.randn(weight.shape, generator=generator)
            yield (
                f"{moe}.experts.{expert}.{name}.weight",
                weight.add(noise, alpha=scale.item()).to(torch.bfloat16),
            )
    yield from ((name, tensor) for name, tensor in dense.items() if not name.startswith(mlp))
