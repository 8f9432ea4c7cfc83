"""A compact mixture-of-experts model for training on one CPU core, and its optimiser.

The model is Qwen3-MoE's arithmetic (RMSNorm, q/k norm, rotary embedding, softmax router with renormalised
top-k, SwiGLU experts, tied head) with the experts of a layer stacked. Tokens are sorted by expert, so only
chosen experts are computed; matrix products run in bf16, all else in fp32. It knows nothing of files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Shape:
    """The demo architecture; about 3.35 million parameters."""

    vocab: int = 2048
    hidden: int = 192
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    experts: int = 8
    top_k: int = 2
    expert_width: int = 128
    theta: float = 10000.0
    eps: float = 1e-6
    context: int = 1024


class _Permute(torch.autograd.Function):
    """Rows repeated `repeat` times, then permuted; the gradient is a gather too, where autograd scatters."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor, repeat: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.repeat = repeat
        return rows.index_select(0, index // repeat if repeat > 1 else index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        grad = grad.index_select(0, ctx.saved_tensors[0])
        if ctx.repeat > 1:
            grad = grad.view(-1, ctx.repeat, grad.shape[-1]).sum(1)
        return grad, None, None, None


def _matmul(x: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(x.bfloat16(), weight.bfloat16())


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x.float(), (x.shape[-1],), weight, eps)


class Layer(nn.Module):
    """One decoder layer. forward: [B, S, H] fp32 -> ([B, S, H], balance loss, tokens of each expert [E])."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = s = shape
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim

        def matrix(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(size) * 0.02)

        self.q, self.k, self.v = matrix(q, s.hidden), matrix(kv, s.hidden), matrix(kv, s.hidden)
        self.o = matrix(s.hidden, q)
        self.router = matrix(s.experts, s.hidden)
        self.gate = matrix(s.experts, s.expert_width, s.hidden)
        self.up = matrix(s.experts, s.expert_width, s.hidden)
        self.down = matrix(s.experts, s.hidden, s.expert_width)
        self.attention_norm = nn.Parameter(torch.ones(s.hidden))
        self.moe_norm = nn.Parameter(torch.ones(s.hidden))
        self.q_norm = nn.Parameter(torch.ones(s.head_dim))
        self.k_norm = nn.Parameter(torch.ones(s.head_dim))

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        s = self.shape
        batch, length, _ = x.shape
        q, k, v = (
            _matmul(x, torch.cat([self.q, self.k, self.v]))
            .view(batch, length, -1, s.head_dim)
            .split([s.heads, s.kv_heads, s.kv_heads], dim=2)
        )
        q = _rotate(_norm(q, self.q_norm, s.eps), cos, sin).bfloat16()
        k = _rotate(_norm(k, self.k_norm, s.eps), cos, sin).bfloat16()
        # Queries of one KV head are stacked along the sequence, so K and V are never repeated.
        group = s.heads // s.kv_heads
        q = q.view(batch, length, s.kv_heads, group, s.head_dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(batch * s.kv_heads, group * length, s.head_dim) * s.head_dim**-0.5
        k = k.transpose(1, 2).reshape(batch * s.kv_heads, length, s.head_dim)
        v = v.transpose(1, 2).reshape(batch * s.kv_heads, length, s.head_dim)
        future = torch.ones(length, length, dtype=torch.bool).triu(1).repeat(group, 1)
        scores = torch.bmm(q, k.transpose(1, 2)).masked_fill(future, -math.inf)
        out = torch.bmm(scores.softmax(-1), v).view(batch, s.kv_heads, group, length, s.head_dim)
        return _matmul(out.permute(0, 3, 1, 2, 4).reshape(batch, length, -1), self.o)

    def mix(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = self.shape
        rows = x.view(-1, s.hidden)
        probabilities = functional.linear(rows, self.router).softmax(-1)
        weights, ids = probabilities.topk(s.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        flat = ids.view(-1)
        order = flat.argsort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order))
        counts = torch.bincount(flat, minlength=s.experts)
        chosen = _Permute.apply(rows.bfloat16(), order, inverse, s.top_k)
        outs = []
        for expert, part in enumerate(chosen.split(counts.tolist())):
            inner = functional.silu(_matmul(part, self.gate[expert])) * _matmul(part, self.up[expert])
            outs.append(_matmul(inner, self.down[expert]))
        back = _Permute.apply(torch.cat(outs), inverse, order, 1).view(-1, s.top_k, s.hidden)
        mixed = (back * weights.unsqueeze(-1)).sum(1)
        # Switch Transformer (Fedus et al., 2021), eq. 4: smallest when experts are used equally.
        balance = s.experts * (probabilities.mean(0) * (counts / len(flat))).sum()
        return mixed.view_as(x), balance, counts

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x + self.attend(_norm(x, self.attention_norm, self.shape.eps), cos, sin)
        mixed, balance, counts = self.mix(_norm(x, self.moe_norm, self.shape.eps))
        return x + mixed, balance, counts


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Model(nn.Module):
    """forward: ids and targets [B, S] -> (summed loss in nats, mean balance loss, counts [layers, E])."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Parameter(torch.randn(shape.vocab, shape.hidden) * 0.02)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        frequency = shape.theta ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angle = torch.arange(shape.context)[:, None] * frequency
        angle = torch.cat([angle, angle], -1)[:, None]
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = functional.embedding(ids, self.embedding)
        length = ids.shape[1]
        balance, counts = torch.zeros(()), []
        for layer in self.layers:
            x, layer_balance, layer_counts = layer(x, self.cos[:length], self.sin[:length])
            balance = balance + layer_balance / len(self.layers)
            counts.append(layer_counts)
        logits = _matmul(_norm(x, self.norm, self.shape.eps), self.embedding)
        rows = logits.view(-1, self.shape.vocab).float()
        loss = functional.cross_entropy(rows, targets.reshape(-1), reduction="sum")
        return loss, balance, torch.stack(counts)


class Muon:
    """Muon for the matrices inside layers, AdamW for embedding, router and norms; one learning rate for both.

    Muon orthogonalises the momentum by a Newton-Schulz iteration (Jordan et al., 2024); the factor
    0.2 sqrt(max side) gives its step the size of an AdamW step (Liu et al., 2025, "Muon is scalable for LLM
    training").
    """

    def __init__(self, model: Model, weight_decay: float = 0.1) -> None:
        self.decay = weight_decay
        hidden = {n: p for n, p in model.named_parameters() if n.startswith("layers") and p.dim() >= 2}
        self.matrices = [p for n, p in hidden.items() if not n.endswith("router")]
        self.momentum = [torch.zeros_like(p) for p in self.matrices]
        known = {id(p) for p in self.matrices}
        rest = [p for p in model.parameters() if id(p) not in known]
        self.adam = torch.optim.AdamW(
            [
                {"params": [p for p in rest if p.dim() >= 2], "weight_decay": 0.01},
                {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
            ],
            betas=(0.9, 0.98),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"adam": self.adam.state_dict(), "momentum": self.momentum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adam.load_state_dict(state["adam"])
        self.momentum = state["momentum"]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        self.adam.zero_grad()
        for weight, momentum in zip(self.matrices, self.momentum, strict=True):
            assert weight.grad is not None
            momentum.lerp_(weight.grad, 0.05)
            update = _orthogonalise(weight.grad.lerp(momentum, 0.95))
            weight.mul_(1 - rate * self.decay)
            weight.add_(update, alpha=-rate * 0.2 * math.sqrt(max(weight.shape[-2:])))
            weight.grad = None


def _orthogonalise(gradient: Tensor, rounds: int = 5) -> Tensor:
    tall = gradient.shape[-2] > gradient.shape[-1]
    x = (gradient.mT if tall else gradient).bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if tall else x).float()
