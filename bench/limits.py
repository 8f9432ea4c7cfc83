"""The least time a step can take: the bytes it must read and the multiply-adds it must do, over what the machine can.

From a checkpoint's config alone, for bf16 weights, or weights that are stored in fewer bytes. Knows nothing of engines.
Invariant: only what no engine with weights of that size can avoid is counted, so a share of the limit is never
flattered: weights once a step, each active expert once, the KV cache once, no activations; in a prefill's last layer,
keys and values of all rows, and the rest for the row whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WEIGHT_BYTES = 2


@dataclass(frozen=True, slots=True)
class Costs:
    """Parameters by how often they are used: in each step, in each step per active expert of a layer, by the head.

    behind: those of the body that the last layer uses for rows whose logits are wanted alone.
    """

    layers: int
    body: int
    behind: int
    expert: int
    top_k: int
    num_experts: int
    head: int
    kv_per_token: int
    queries: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Costs:
        """From a config.json of a Llama, Mixtral or Qwen3-MoE model."""
        hidden, layers, head_dim = config["hidden_size"], config["num_hidden_layers"], config["head_dim"]
        queries = config["num_attention_heads"] * head_dim
        keys = config["num_key_value_heads"] * head_dim
        attention = 2 * hidden * (queries + keys)
        num_experts = config.get("num_experts") or config.get("num_local_experts") or 0
        intermediate = config.get("moe_intermediate_size") or config["intermediate_size"]
        block = 3 * hidden * intermediate
        feed_forward = num_experts * hidden if num_experts else block
        return cls(
            layers=layers,
            body=layers * (attention + feed_forward),
            behind=2 * hidden * queries + feed_forward,
            expert=block if num_experts else 0,
            top_k=config["num_experts_per_tok"] if num_experts else 0,
            num_experts=num_experts,
            head=hidden * config["vocab_size"],
            kv_per_token=layers * 2 * keys,
            queries=layers * queries,
        )

    def num_bytes(self, active_experts: float, kv_tokens: float, stored: float = 1.0) -> float:
        """Read by one step with so many different experts in each layer, over so many tokens of KV.

        stored: bytes of the weights as a share of their bf16 bytes.
        """
        weights = self.body + self.head + self.layers * active_experts * self.expert
        return WEIGHT_BYTES * (stored * weights + self.kv_per_token * kv_tokens)

    def operations(self, tokens: int, sampled: int, pairs: float) -> float:
        """Of a step over so many tokens, of which `sampled` pass the head, with so many (query, key) pairs."""
        per_token = self.body + self.layers * self.top_k * self.expert
        return 2.0 * (tokens * per_token + sampled * self.head + 2 * self.queries * pairs)

    def spared(self, tokens: int, kept: int) -> float:
        """Operations that a prompt's last layer need not do where only its last `kept` rows leave it."""
        left = tokens - kept
        per_token = self.behind + self.top_k * self.expert
        return 2.0 * (left * per_token + 2 * self.queries / self.layers * left * (left + 1) / 2)


def decode_seconds(
    costs: Costs,
    batch: int,
    kv_tokens: float,
    active_experts: float | None,
    ceilings: Mapping[str, float],
    stored: float = 1.0,
) -> float | None:
    """Least seconds of a decode step; `kv_tokens` is one row's context. None when the active experts are not known."""
    if costs.num_experts and batch == 1:
        active_experts = costs.top_k
    if costs.num_experts and active_experts is None:
        return None
    moved = costs.num_bytes(active_experts or 0.0, batch * kv_tokens, stored)
    done = costs.operations(batch, batch, batch * kv_tokens)
    return max(moved / ceilings["bytes"], done / ceilings["operations"])


def prefill_seconds(
    costs: Costs, tokens: int, ceilings: Mapping[str, float], stored: float = 1.0, *, kept: int | None = None
) -> float:
    """Least seconds until the first token of a prompt of which `kept` rows leave the last layer; None: all do."""
    done = costs.operations(tokens, 1, tokens * (tokens + 1) / 2)
    if kept is not None:
        done -= costs.spared(tokens, kept)
    moved = costs.num_bytes(min(costs.num_experts, tokens * costs.top_k), tokens, stored)
    return max(moved / ceilings["bytes"], done / ceilings["operations"])
