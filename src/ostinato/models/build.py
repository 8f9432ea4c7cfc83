"""From a config and a weight source to a `CausalLM`: names, shapes, fusion and packing of weights.

The only place that knows both tensor names and parts. It reads families as data (their names and flags) and
has no branch on a family's name. Invariant: every parameter of the model is filled from exactly one tensor
with the shape the config asks for, and every tensor of the checkpoint is used; anything else is a ModelError.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ostinato.attention.backend import AttentionBackend, AttentionLayer
from ostinato.graphs.workspace import Workspace
from ostinato.models.config import ModelConfig, MoEConfig, read_config
from ostinato.models.decoder import CausalLM, DecoderLayer
from ostinato.models.layers import LayerSpec
from ostinato.models.loader import Progress, WeightSource
from ostinato.models.parts import Attention, DenseFFN, FeedForward, Norm, QKNorm, Rope
from ostinato.models.rope import RopeConfig, rope_table
from ostinato.models.sharding import LayerExperts, ParallelPlan, Sharding
from ostinato.models.weights import Cut, Part, Span, StoredWeight
from ostinato.moe.custom import llama4_routing, phimoe_routing
from ostinato.moe.dispatch import Dispatcher
from ostinato.moe.layer import MoELayer, SharedExpert, reserve_moe_buffers
from ostinato.moe.routing import Consumers
from ostinato.moe.topk import TopKConfig
from ostinato.ops.opset import EmbeddingTable, OpSet, PackedExperts, PackedLinear
from ostinato.padding import PadContract, check_pad_contracts
from ostinato.parallel.columns import ColumnGather

ConsumersOf = Callable[[int], Consumers]
"""Who reads the routed ids of layer i."""


def load_model(
    path: str | Path,
    *,
    ops: OpSet,
    attention: AttentionBackend,
    max_num_tokens: int,
    max_bs: int,
    config: ModelConfig | None = None,
    max_positions: int | None = None,
    consumers: ConsumersOf | None = None,
    progress: Progress | None = None,
    parallel: ParallelPlan | None = None,
    device: torch.device | str = "cpu",
) -> CausalLM:
    """Load the checkpoint directory `path`.

    config: what `read_config(path)` gave, when it was read before (to size the KV pool); weights are kept in
    its dtype. max_num_tokens: the most (padded) rows of a step. max_bs: the most rows of logits.
    max_positions: the longest context served, the model's own by default. consumers: load statistics and
    export of each layer. parallel: how the model is spread over ranks; this one then reads its own part alone.
    device: where everything lies that `ops` does not pack.

    Raises ModelError for whatever is wrong with the checkpoint, PadContractError for parts that do not fit.
    """
    check_pad_contracts(PadContract("a padded batch", emits_count=True), attention.pad_contract)
    config = config or read_config(path)
    family = config.family
    source = WeightSource(path, renamed=family.renamed, ignored=family.ignored, progress=progress)
    workspace = Workspace(device)
    _reserve(workspace, config, max_num_tokens, max_bs)
    positions = min(max_positions or config.max_position_embeddings, config.max_position_embeddings)
    plan = parallel or ParallelPlan()
    builder = _Builder(
        config=config,
        source=source,
        ops=ops,
        workspace=workspace,
        attention=attention,
        positions=positions,
        consumers=consumers or _nobody,
        plan=plan,
        share=Sharding(plan.topology),
        columns=plan.columns(workspace, config, max_num_tokens, max_bs),
        dispatcher=plan.dispatcher(config, ops, max_num_tokens),
    )
    model = builder.model()
    source.finish()
    return model


def _nobody(layer_id: int) -> Consumers:
    return Consumers(layer_id)


def _reserve(workspace: Workspace, config: ModelConfig, rows: int, logit_rows: int) -> None:
    hidden, dtype = config.hidden_size, config.dtype
    heads = config.num_heads * config.head_dim
    for name in ("residual", "normed", "delta"):
        workspace.reserve(name, (rows, hidden), dtype)
    workspace.reserve("qkv", (rows, heads + 2 * config.num_kv_heads * config.head_dim), dtype)
    workspace.reserve("attention", (rows, heads), dtype)
    width = max(layer.intermediate_size for layer in config.layers)
    workspace.reserve("ffn_act", (rows, width), dtype)
    workspace.reserve("head_rows", (logit_rows, hidden), dtype)
    workspace.reserve("logits", (logit_rows, config.vocab_size), torch.float32)
    if config.moe is not None:
        reserve_moe_buffers(
            workspace,
            rows,
            hidden_size=hidden,
            num_experts=config.moe.num_experts,
            top_k=config.moe.top_k,
            dtype=dtype,
            shared_intermediate_size=config.moe.shared_intermediate_size or 0,
        )


@dataclass(slots=True)
class _Builder:
    """Takes tensors from the source and packs them; one use."""

    config: ModelConfig
    source: WeightSource
    ops: OpSet
    workspace: Workspace
    attention: AttentionBackend
    positions: int
    consumers: ConsumersOf
    plan: ParallelPlan
    share: Sharding
    columns: ColumnGather | None
    dispatcher: Dispatcher
    _tables: list[tuple[RopeConfig, Rope]] = field(default_factory=list)

    def model(self) -> CausalLM:
        config, names = self.config, self.config.family.names
        embedding, head = self._embedding_and_head()
        layers = tuple(self._layer(i, spec) for i, spec in enumerate(config.layers))
        return CausalLM(
            config=config,
            ops=self.ops,
            workspace=self.workspace,
            attention=self.attention,
            embedding=embedding,
            embedding_columns=self.columns if embedding is not head else None,
            layers=layers,
            final_norm=self._norm(names.final_norm),
            head=head,
            head_columns=self.columns if self._splits_head() else None,
        )

    def _splits_head(self) -> bool:
        return self.share.splits("vocab", self.config.vocab_size)

    def _take(self, name: str, *shape: int) -> torch.Tensor:
        return self.source.take(name, shape, self.config.dtype).to(self.workspace.device)

    def _stored(self, name: str, *shape: int) -> StoredWeight:
        """One tensor as a weight, read when it is packed."""
        return StoredWeight(self.source, shape, self.config.dtype, (Part(name, shape),))

    def _embedding_and_head(self) -> tuple[EmbeddingTable, PackedLinear]:
        """Tied when the config says so, unless the file has a head of its own; then held once where that can be."""
        config, names = self.config, self.config.family.names
        shape = config.vocab_size, config.hidden_size
        has_head = self.source.has(f"{names.head}.weight")
        # Of two names for one tensor safetensors' own `save_model` keeps the first of the alphabet.
        only_head = config.tie_word_embeddings and has_head and not self.source.has(names.embedding)
        own_head = not config.tie_word_embeddings or (has_head and not only_head)
        table = self._stored(f"{names.head}.weight" if only_head else names.embedding, *shape)
        if not own_head and self.ops.embeds_packed and not self._splits_head():
            head = self._head(table)
            return head, head
        if self.columns is not None:
            # Columns, not rows: what each rank looks up is put side by side, and no rank has to know whose an id is.
            embedding = table.cut(Cut(((0, shape[0]),), self.share.span("hidden", shape[1]))).read()
            embedding = embedding.to(self.workspace.device)
            return embedding, self._head(self._stored(f"{names.head}.weight", *shape) if own_head else table)
        embedding = table.read().to(self.workspace.device)
        return embedding, self._head(self._stored(f"{names.head}.weight", *shape) if own_head else embedding)

    def _head(self, weight: StoredWeight | torch.Tensor) -> PackedLinear:
        config = self.config
        name = config.family.names.head
        bias = self._take(f"{name}.bias", config.vocab_size) if config.head_bias else None
        if self._splits_head():
            rows = Cut((self.share.span("vocab", config.vocab_size),))
            weight = weight.cut(rows) if isinstance(weight, StoredWeight) else rows.of(weight)
            bias = None if bias is None else rows.of(bias)
        return self.ops.pack_linear(weight, bias, out_dtype=torch.float32)

    def _norm(self, prefix: str) -> Norm:
        config = self.config
        weight = self._take(f"{prefix}.weight", config.hidden_size)
        layer_norm = config.family.norm == "layer"
        bias = self._take(f"{prefix}.bias", config.hidden_size) if layer_norm else None
        return Norm(self.ops, weight, bias, config.norm_eps)

    def _linear(
        self, prefixes: tuple[str, ...], rows: tuple[int, ...], width: int, bias: bool, own: tuple[Span, ...]
    ) -> PackedLinear:
        """One packed linear of the stacked rows of several tensors, each [rows[i], width]; `own` as in `_cut`."""
        return self.ops.pack_linear(*self._cut(*self._stacked(prefixes, rows, width, bias), own))

    def _cut(
        self, weight: StoredWeight, bias: torch.Tensor | None, own: tuple[Span, ...]
    ) -> tuple[StoredWeight, torch.Tensor | None]:
        """The spans `own` of the rows of a weight and its bias; all of them without attention TP."""
        if self.columns is None:
            return weight, bias
        cut = Cut(own)
        return weight.cut(cut), None if bias is None else cut.of(bias)

    def _stacked(
        self, prefixes: tuple[str, ...], rows: tuple[int, ...], width: int, bias: bool
    ) -> tuple[StoredWeight, torch.Tensor | None]:
        """Weight and bias of several tensors, each [rows[i], width], one behind the other."""
        parts, biases, start = [], [], 0
        for prefix, count in zip(prefixes, rows, strict=True):
            parts.append(Part(f"{prefix}.weight", (count, width), first=start))
            if bias:
                biases.append(self._take(f"{prefix}.bias", count))
            start += count
        weight = StoredWeight(self.source, (start, width), self.config.dtype, tuple(parts))
        return weight, torch.cat(biases) if bias else None

    def _layer(self, index: int, spec: LayerSpec) -> DecoderLayer:
        prefix = self.config.family.names.layers.format(i=index)
        return DecoderLayer(
            input_norm=self._norm(f"{prefix}input_layernorm"),
            attention=self._attention(index, spec, f"{prefix}self_attn."),
            post_norm=self._norm(f"{prefix}post_attention_layernorm"),
            ffn=self._moe(index, prefix) if spec.sparse else self._dense(spec, prefix),
        )

    def _attention(self, index: int, spec: LayerSpec, prefix: str) -> Attention:
        config = self.config
        heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        projections = (f"{prefix}q_proj", f"{prefix}k_proj", f"{prefix}v_proj")
        hidden, dim = config.hidden_size, config.head_dim
        own = self.share.span("heads", config.num_heads), self.share.span("kv_heads", config.num_kv_heads)
        q, kv = own
        # A norm over all heads needs those of all ranks: they are gathered, and each rank goes on with its own.
        gathered = config.qk_norm == "full" and self.columns is not None
        spans = _shifted(((q, 0), (kv, heads), (kv, heads + kv_heads)), dim)
        return Attention(
            ops=self.ops,
            workspace=self.workspace,
            backend=self.attention,
            layer=AttentionLayer(
                index,
                config.attention_scale,
                spec.sliding_window,
                spec.attention_chunk_size,
                is_last=index == len(config.layers) - 1,
            ),
            num_heads=q[1] - q[0],
            num_kv_heads=kv[1] - kv[0],
            head_dim=dim,
            qkv=self._linear(projections, (heads, kv_heads, kv_heads), hidden, config.qkv_bias, spans),
            out=self._linear((f"{prefix}o_proj",), (hidden,), heads, config.out_bias, self._own_hidden()),
            qk_norm=self._qk_norm(spec, prefix, heads, kv_heads),
            rope=None if spec.rope is None else self._rope(spec.rope),
            clip=config.clip_qkv,
            temperature=config.temperature if spec.scale_by_position else None,
            columns=self.columns,
            own_heads=(slice(*q), slice(*kv)) if gathered else None,
        )

    def _own_hidden(self) -> tuple[Span, ...]:
        return (self.share.span("hidden", self.config.hidden_size),)

    def _qk_norm(self, spec: LayerSpec, prefix: str, heads: int, kv_heads: int) -> QKNorm | None:
        kind, eps = self.config.qk_norm, self.config.norm_eps
        if kind == "none":
            return None
        if kind == "l2":
            return None if spec.rope is None else QKNorm(None, eps, per_head=True, before_rope=False)
        sizes = (self.config.head_dim,) * 2 if kind == "head" else (heads, kv_heads)
        q_weight = self._take(f"{prefix}q_norm.weight", sizes[0])
        k_weight = self._take(f"{prefix}k_norm.weight", sizes[1])
        return QKNorm((q_weight, k_weight), eps, per_head=kind == "head", before_rope=True)

    def _rope(self, rope: RopeConfig) -> Rope:
        """One table per kind of rope, shared by its layers."""
        for known, made in self._tables:
            if known == rope:
                return made
        table = rope_table(rope, self.positions).to(self.workspace.device)
        made = Rope(table, self.config.family.rope_interleaved)
        self._tables.append((rope, made))
        return made

    def _dense(self, spec: LayerSpec, prefix: str) -> FeedForward:
        path, width = f"{prefix}{self.config.family.names.dense_ffn}", spec.intermediate_size
        gate_up, down = self._gated(path, width, self.config.ffn_bias)
        return DenseFFN(self.ops, self.workspace, gate_up, down, self.columns)

    def _gated(self, path: str, width: int, bias: bool) -> tuple[PackedLinear, PackedLinear]:
        hidden = self.config.hidden_size
        stacked = self._stacked((f"{path}.gate_proj", f"{path}.up_proj"), (width, width), hidden, bias)
        own = self.share.span("intermediate", width)
        gate_up = self.ops.pack_gated(*self._cut(*stacked, _shifted(((own, 0), (own, width)))))
        down = self._linear((f"{path}.down_proj",), (hidden,), width, bias, self._own_hidden())
        return gate_up, down

    def _moe(self, index: int, prefix: str) -> FeedForward:
        moe, names = self.config.moe, self.config.family.names
        assert moe is not None
        router_name = next(
            (prefix + name for name in names.router if self.source.has(prefix + name)),
            prefix + names.router[0],
        )
        router = self._stored(router_name, moe.num_experts, self.config.hidden_size)
        return MoELayer(
            ops=self.ops,
            workspace=self.workspace,
            topk=_topk(moe),
            router=self.ops.pack_linear(router, out_dtype=torch.float32),
            experts=self._experts(moe, prefix, self.plan.layers.get(index)),
            shared=self._shared(moe, prefix),
            weights_on_input=moe.weights_on_input,
            placement=self.plan.layers[index].placement if index in self.plan.layers else None,
            dispatcher=self.dispatcher,
            consumers=self.consumers(index),
        )

    def _experts(self, moe: MoEConfig, prefix: str, layer: LayerExperts | None) -> PackedExperts:
        names = self.config.family.names.experts
        assert names is not None
        count, width, hidden = moe.num_experts, moe.intermediate_size, self.config.hidden_size
        fused = not names.gate or (names.fused_gate_up and self.source.has(prefix + names.fused_gate_up))
        if fused:
            gate_up = [self._fused(prefix + names.fused_gate_up, (count, 2 * width, hidden))]
            down = [self._fused(prefix + names.fused_down, (count, hidden, width))]
        else:
            gate_up, down = [], []
            for e in range(count):
                gate_up.append(Part(prefix + names.gate.format(e=e), (width, hidden), matrix=e))
                gate_up.append(Part(prefix + names.up.format(e=e), (width, hidden), matrix=e, first=width))
                down.append(Part(prefix + names.down.format(e=e), (hidden, width), matrix=e))
        dtype = self.config.dtype
        gates = StoredWeight(self.source, (count, 2 * width, hidden), dtype, tuple(gate_up))
        downs = StoredWeight(self.source, (count, hidden, width), dtype, tuple(down))
        if self.plan.topology.tp == 1 and layer is None:
            return self.ops.pack_experts(gates, downs)
        logical = (layer or LayerExperts.plain(count)).logical
        first, last = self.share.span("experts", len(logical))
        low, high = self.share.span("expert_intermediate", width)
        kept = logical[first:last]
        return self.ops.pack_experts(
            gates.cut(Cut(((low, high), (width + low, width + high)), matrices=kept)),
            downs.cut(Cut(((0, hidden),), (low, high), kept)),
        )

    def _fused(self, name: str, shape: tuple[int, int, int]) -> Part:
        """All experts' matrices [E, N, K] in one tensor, which some families store as [E, K, N]."""
        names = self.config.family.names.experts
        if names is None or not names.fused_transposed:
            return Part(name, shape)
        return Part(name, (shape[0], shape[2], shape[1]), transposed=True)

    def _shared(self, moe: MoEConfig, prefix: str) -> SharedExpert | None:
        if moe.shared_intermediate_size is None:
            return None
        names = self.config.family.names
        gate_up, down = self._gated(prefix + names.shared_expert, moe.shared_intermediate_size, bias=False)
        if not moe.shared_gated:
            return SharedExpert(gate_up, down, columns=self.columns)
        gate = self._stored(prefix + names.shared_expert_gate, 1, self.config.hidden_size)
        packed = self.ops.pack_linear(gate, out_dtype=torch.float32)
        return SharedExpert(gate_up, down, packed, self.columns)


def _shifted(spans: tuple[tuple[Span, int], ...], size: int = 1) -> tuple[Span, ...]:
    """Spans of things of `size` rows each, behind so many rows."""
    return tuple((first * size + by, last * size + by) for (first, last), by in spans)


def _topk(moe: MoEConfig) -> TopKConfig:
    custom = {None: None, "llama4": llama4_routing, "phimoe": phimoe_routing}[moe.custom]
    return TopKConfig(top_k=moe.top_k, renormalize=moe.renormalize, custom_routing_function=custom)
