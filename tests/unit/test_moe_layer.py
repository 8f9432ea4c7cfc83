"""`MoELayer`: pads are zero and never matter; placement and dispatch keep the bits; bad parts are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from ostinato.errors import ConfigError, PadContractError
from ostinato.graphs.stream import EagerStream, Kernel, Stream
from ostinato.graphs.tape import TapeBackend
from ostinato.graphs.workspace import Workspace
from ostinato.moe import (
    Consumers,
    Dispatched,
    ExpertLoad,
    ExpertPlacement,
    MoELayer,
    RoutedExpertsExport,
    SharedExpert,
    TopKConfig,
    llama4_routing,
    reserve_moe_buffers,
)
from ostinato.ops.reference import ReferenceOps
from ostinato.padding import PadContract

H, E, INTER, MAX = 16, 6, 8, 24
STREAM = EagerStream()
OPS = ReferenceOps()
SHARED = ("none", "plain", "gated")


def _weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "router": (E, H),
        "gate_up": (E, 2 * INTER, H),
        "down": (E, H, INTER),
        "shared_gate_up": (2 * INTER, H),
        "shared_down": (H, INTER),
        "shared_gate": (1, H),
    }
    return {name: (torch.randn(shape, generator=generator) * 0.5).to(dtype) for name, shape in shapes.items()}


def _workspace(top_k: int, dtype: torch.dtype = torch.float32, shared: bool = True) -> Workspace:
    workspace = Workspace()
    reserve_moe_buffers(
        workspace,
        MAX,
        hidden_size=H,
        num_experts=E,
        top_k=top_k,
        dtype=dtype,
        shared_intermediate_size=INTER if shared else 0,
    )
    return workspace


def _layer(
    shared: str = "none",
    *,
    topk: TopKConfig | None = None,
    dtype: torch.dtype = torch.float32,
    ops: Any = OPS,
    **options: Any,
) -> MoELayer:
    w = _weights(dtype)
    topk = topk or TopKConfig(top_k=2)
    expert = None
    if shared != "none":
        gate = ops.pack_linear(w["shared_gate"], out_dtype=torch.float32) if shared == "gated" else None
        expert = SharedExpert(ops.pack_gated(w["shared_gate_up"]), ops.pack_linear(w["shared_down"]), gate)
    options.setdefault("experts", ops.pack_experts(w["gate_up"], w["down"]))
    options.setdefault("router", ops.pack_linear(w["router"], out_dtype=torch.float32))
    return MoELayer(ops=ops, workspace=_workspace(topk.top_k, dtype), topk=topk, shared=expert, **options)


def _x(rows: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, H, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _run(layer: MoELayer, x: torch.Tensor, n: int | None = None, **counts: Any) -> torch.Tensor:
    layer.workspace.fill(float("nan"))
    out = torch.full_like(x, float("nan"))
    count = None if n is None else torch.tensor([n], dtype=torch.int32)
    layer.forward(STREAM, x, count, out, **counts)
    return out


def _by_hand(x: torch.Tensor, topk: TopKConfig, shared: str) -> torch.Tensor:
    """The layer in straight-line torch, one row at a time."""
    w = _weights()

    def mlp(row: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gate, up = (gate_up @ row).chunk(2)
        return down @ (torch.nn.functional.silu(gate) * up)

    rows = []
    for row in x:
        p = torch.softmax(w["router"] @ row, -1)
        best = p.topk(topk.top_k)
        out = torch.zeros(H)
        for weight, e in zip(best.values / best.values.sum(), best.indices, strict=True):
            out = out + weight * mlp(row, w["gate_up"][e], w["down"][e])
        if shared != "none":
            scale = torch.sigmoid(w["shared_gate"] @ row) if shared == "gated" else torch.ones(1)
            out = out + scale * mlp(row, w["shared_gate_up"], w["shared_down"])
        rows.append(out)
    return torch.stack(rows)


@pytest.mark.parametrize("shared", SHARED)
def test_values(shared: str) -> None:
    layer = _layer(shared)
    x = _x(7)
    torch.testing.assert_close(_run(layer, x), _by_hand(x, layer.topk, shared), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30, 0.5])
def test_f5_f8_pads_are_zero_and_never_matter(dtype: torch.dtype, shared: str, poison: float) -> None:
    """Any bucket, any pad contents: real rows have the bits they have alone, pads are zero at the end."""
    layer = _layer(shared, dtype=dtype)
    real = _x(5, dtype)
    expected = torch.cat([_run(layer, real[i : i + 1]) for i in range(5)])
    for n, bucket in ((3, 4), (5, 5), (5, 8), (0, 4), (5, MAX)):
        x = torch.full((bucket, H), poison, dtype=dtype)
        x[:n] = real[:n]
        out = _run(layer, x, n)
        assert torch.equal(out[:n], expected[:n]), (n, bucket)
        assert bool((out[n:] == 0).all()), (n, bucket)


@pytest.mark.parametrize("shared", SHARED)
def test_gathered_rows(shared: str) -> None:
    layer = _layer(shared)
    x = _x(10)
    x[3:5] = float("nan")
    out = _run(layer, x, gathered_counts=torch.tensor([3, 5]), rows_per_slot=5)
    assert bool((out[3:5] == 0).all())
    keep = torch.tensor([0, 1, 2, 5, 6, 7, 8, 9])
    assert torch.equal(out[keep], _run(layer, x[keep]))


@pytest.mark.parametrize("shared", SHARED)
def test_no_rows(shared: str) -> None:
    assert _run(_layer(shared), _x(0), 0).shape == (0, H)


@pytest.mark.parametrize("shared", SHARED)
def test_replay_follows_inputs_count_and_flag(shared: str) -> None:
    """All work is in launches on fixed buffers: recorded once, replayed over other rows and another count."""
    load, export = ExpertLoad(3, E), RoutedExpertsExport(3, MAX, 2)
    layer = _layer(shared, consumers=Consumers(2, load, export))
    x, out, count = torch.zeros(8, H), torch.empty(8, H), torch.tensor([8], dtype=torch.int32)
    graph = TapeBackend().capture(lambda stream: layer.forward(stream, x, count, out))
    assert graph.num_launches == len(graph.trace), "every op of the layer is a launch"
    load.set_live(True)
    for n, seed in ((8, 3), (2, 4), (0, 5)):
        x.copy_(_x(8, seed=seed))
        count.fill_(n)
        load.reset()
        graph.replay()
        replayed = out.clone()
        assert load.snapshot().sum(-1).tolist() == [0, 0, n * 2]
        assert bool((export.read(MAX)[2, n:] == -1).all())
        assert torch.equal(replayed, _run(layer, x, n))


@pytest.mark.parametrize("shared", SHARED)
def test_replicas_and_order_of_experts_do_not_change_bits(shared: str) -> None:
    w = _weights()
    x = _x(MAX)
    expected = _run(_layer(shared), x, 20)
    for replicas in ([[5], [3], [0], [1], [2], [4]], [[0, 6], [1], [2, 7, 8], [3], [4], [5]]):
        num_physical = sum(map(len, replicas))
        home = torch.zeros(num_physical, dtype=torch.int64)
        for e, physical in enumerate(replicas):
            home[physical] = e
        layer = _layer(
            shared,
            experts=OPS.pack_experts(w["gate_up"][home], w["down"][home]),
            placement=ExpertPlacement.dynamic(replicas, num_physical=num_physical),
        )
        assert torch.equal(_run(layer, x, 20), expected)


def test_fused_shared_expert_equals_a_shared_expert_beside() -> None:
    w = _weights()
    fused = _layer(
        topk=TopKConfig(top_k=3, num_fused_shared_experts=1),
        experts=OPS.pack_experts(
            torch.cat((w["gate_up"], w["shared_gate_up"].unsqueeze(0))),
            torch.cat((w["down"], w["shared_down"].unsqueeze(0))),
        ),
    )
    x = _x(9)
    out = _run(fused, x, 6)
    torch.testing.assert_close(out, _run(_layer("plain"), x, 6), rtol=1e-5, atol=1e-6)
    assert bool((out[6:] == 0).all())


def test_weights_on_input() -> None:
    """Llama 4: expert(w * x) instead of w * expert(x); SiLU makes the two differ."""
    topk = TopKConfig(top_k=1, renormalize=False, custom_routing_function=llama4_routing)
    x = _x(6)
    w = _weights()
    best = (x @ w["router"].t()).max(-1)
    source = torch.sigmoid(best.values).unsqueeze(1) * x
    rows = []
    for row, e in zip(source, best.indices, strict=True):
        gate, up = (w["gate_up"][e] @ row).chunk(2)
        rows.append(w["down"][e] @ (torch.nn.functional.silu(gate) * up))
    on_input = _run(_layer(topk=topk, weights_on_input=True), x)
    torch.testing.assert_close(on_input, torch.stack(rows), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(on_input, _run(_layer(topk=topk), x), rtol=1e-2)


def test_f4_duplicate_ids_of_a_custom_router_are_computed_as_given() -> None:
    def twice(
        hidden: Any, logits: torch.Tensor, topk: int, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = torch.softmax(logits, -1).max(-1, keepdim=True)
        return weights.expand(-1, topk) / topk, ids.expand(-1, topk)

    def once(
        hidden: Any, logits: torch.Tensor, topk: int, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.softmax(logits, -1).max(-1, keepdim=True)

    x = _x(6)
    both = _run(_layer(topk=TopKConfig(top_k=2, custom_routing_function=twice)), x)
    torch.testing.assert_close(both, _run(_layer(topk=TopKConfig(top_k=1, custom_routing_function=once)), x))


class _Detour:
    """A dispatcher that sends the rows away in reverse order and brings them home."""

    def __init__(self) -> None:
        self.buffers = (
            torch.empty(MAX, H),
            torch.empty(MAX, 2),
            torch.empty(MAX, 2).int(),
            torch.empty(MAX, H),
        )

    def dispatch(
        self,
        stream: Stream,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        out: torch.Tensor,
    ) -> Dispatched:
        rows = x.shape[0]
        sent = Dispatched(*(b[:rows] for b in self.buffers))
        for source, target in ((x, sent.x), (topk_weights, sent.topk_weights), (topk_ids, sent.topk_ids)):
            stream.launch(lambda s, t: t.copy_(s.flip(0)), source, target)
        return sent

    def kernel(self, experts: Kernel) -> Kernel:
        return experts

    def combine(self, stream: Stream, dispatched: Dispatched, out: torch.Tensor) -> None:
        stream.launch(lambda s, t: t.copy_(s.flip(0)), dispatched.out, out)


@pytest.mark.parametrize("shared", SHARED)
def test_dispatcher_seam(shared: str) -> None:
    x = _x(9)
    assert torch.equal(_run(_layer(shared, dispatcher=_Detour()), x, 7), _run(_layer(shared), x, 7))


class _UndeclaredOps(ReferenceOps):
    @property
    def pad_contracts(self) -> Mapping[str, PadContract]:
        return {}


class _CountingOps(ReferenceOps):
    @property
    def pad_contracts(self) -> Mapping[str, PadContract]:
        return {"moe_experts": PadContract("counting experts", honours_count=True, writes_zeros=True)}


@pytest.mark.parametrize(
    ("ops", "message"), [(_UndeclaredOps(), "reference.moe_experts"), (_CountingOps(), "counting experts")]
)
def test_f23_kernels_without_the_right_contract_are_refused(ops: ReferenceOps, message: str) -> None:
    with pytest.raises(PadContractError, match=message):
        _layer(ops=ops)


def test_parts_that_do_not_fit() -> None:
    w = _weights()
    with pytest.raises(ConfigError, match="5 experts are packed"):
        _layer(experts=OPS.pack_experts(w["gate_up"][1:], w["down"][1:]))
    with pytest.raises(ConfigError, match="7 routed experts"):
        _layer(topk=TopKConfig(top_k=7))
    with pytest.raises(ConfigError, match=r"2\.5 would be lost"):
        _layer(topk=TopKConfig(top_k=2, routed_scaling_factor=2.5))
    fused = TopKConfig(top_k=3, num_fused_shared_experts=1)
    experts = OPS.pack_experts(w["gate_up"][[0, 1, 2, 3, 4, 5, 0]], w["down"][[0, 1, 2, 3, 4, 5, 0]])
    with pytest.raises(ConfigError, match="not both"):
        _layer("plain", topk=fused, experts=experts)
    with pytest.raises(ConfigError, match="maps 4 experts"):
        _run(replace(_layer(), placement=ExpertPlacement.identity(4)), _x(2))


def test_scaling_factor_reaches_the_output_once() -> None:
    topk = TopKConfig(top_k=2, routed_scaling_factor=2.0, apply_routed_scaling_factor_on_output=True)
    x = _x(5)
    assert torch.equal(_run(_layer(topk=topk), x), _run(_layer(), x) * 2.0)
