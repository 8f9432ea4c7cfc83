"""The padding contract: for every bucket and every number of real rows, pads change nothing (P1, P2; I4-I7, I10, I13).

Each step runs alone and then in its bucket, eager and replayed, after a larger step, with NaN, Inf, 1e30 or wild
indices in whatever a pad could reach. The last tests break the product on purpose: the contract must notice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ostinato.graphs.audit import POISONS, first_difference
from ostinato.graphs.slots import PaddingPolicy
from ostinato.moe import routing
from ostinato.moe.load import ExpertLoad
from ostinato.padding import StepMode, decide_shape

Rigs = Callable[..., Any]
MODELS = [
    ("qwen3_moe", "float32", "reference"),
    ("qwen2_moe", "bfloat16", "reference"),
    ("phimoe", "float32", "reference"),
    ("llama", "float32", "reference"),
    ("qwen3_moe", "bfloat16", "numba"),
    ("qwen2_moe", "float32", "numba"),
    ("phimoe", "float32", "numba"),
    ("llama4", "bfloat16", "numba"),
    ("llama", "float32", "numba"),
]
EACH_MODEL = pytest.mark.parametrize(
    ("family", "dtype", "kernels"), MODELS, ids=["-".join(model) for model in MODELS]
)


# --- P1: every bucket, every number of rows -----------------------------------------------------------------


@EACH_MODEL
def test_p1_decode_steps(family: str, dtype: str, kernels: str, rig: Rigs, rigs: ModuleType) -> None:
    """Every bucket, every n <= bucket, every poison. Real rows are equal in all buckets, hence also to each other."""
    it = rig(family, dtype, kernels)
    order = torch.randperm(len(it.lengths), generator=torch.Generator().manual_seed(1)).tolist()
    for n in range(1, max(rigs.DECODE_BUCKETS) + 1):
        batch = it.decode(order[:n])
        clean = it.clean(batch)
        for bucket in (b for b in rigs.DECODE_BUCKETS if b >= n):
            larger = it.decode([(r + 3) % len(it.lengths) for r in range(bucket)])
            for way in rigs.WAYS:
                for poison in (*POISONS, None):
                    before = None if poison else larger
                    found = it.broken(batch, clean, bucket, way=way, poison=poison, before=before)
                    assert not found, (n, bucket, way, poison)


def prefill_spans(it: Any, n: int, seed: int) -> list[tuple[int, int, int]]:
    """`n` rows of several requests: from the start of a prompt, behind a cached prefix, as a later chunk."""
    generator = torch.Generator().manual_seed(seed)
    spans: list[tuple[int, int, int]] = []
    for request in torch.randperm(len(it.lengths), generator=generator).tolist():
        left = n - sum(count for _, _, count in spans)
        if left == 0:
            break
        start = int(torch.randint(0, it.lengths[request] + 1, (1,), generator=generator))
        count = min(int(torch.randint(1, 11, (1,), generator=generator)), left)
        spans.append((request, start, count))
    assert sum(count for _, _, count in spans) == n
    return spans


@EACH_MODEL
def test_p1_prefill_steps(family: str, dtype: str, kernels: str, rig: Rigs, rigs: ModuleType) -> None:
    """Every number of rows in its own bucket and in the largest; poisons and kinds of steps take turns."""
    it = rig(family, dtype, kernels)
    largest = max(rigs.PREFILL_BUCKETS)
    for n in range(1, largest + 1):
        mode = StepMode.MIXED if n % 3 == 0 else StepMode.EXTEND
        batch = it.extend(prefill_spans(it, n, seed=n), mode)
        clean = it.clean(batch)
        for bucket in {min(b for b in rigs.PREFILL_BUCKETS if b >= n), largest}:
            larger = it.extend(prefill_spans(it, bucket, seed=n + 100))
            for turn, way in enumerate(rigs.WAYS):
                poison = (*POISONS, None)[(n + turn) % 5]
                before = None if poison else larger
                found = it.broken(batch, clean, bucket, way=way, poison=poison, before=before)
                assert not found, (n, bucket, way, poison)


@pytest.mark.parametrize("kernels", ["reference", "numba"])
def test_i7_mixed_decode_rows_have_the_bits_of_decode_steps(kernels: str, rig: Rigs) -> None:
    """The same tokens as a decode step and as rows of one in a prefill graph: one head on both gives equal logits."""
    it = rig("qwen2_moe", "float32", kernels)
    requests = [4, 0, 2]
    want = it.clean(it.decode(requests)).outputs
    it.restore()
    spans = [(r, it.lengths[r], 1) for r in requests]
    hidden = it.padded(it.extend(spans, StepMode.MIXED), 4)
    assert torch.equal(it.worker._head(hidden, [0, 1, 2]), want)


# --- P2: capture freezes no context -------------------------------------------------------------------------


@EACH_MODEL
def test_p2_f13_f14_graphs_captured_on_short_contexts(
    family: str, dtype: str, kernels: str, rig: Rigs
) -> None:
    """All graphs were captured with contexts of one token. Replayed: whole, behind a prefix hit, as chunks, decoded."""
    it = rig(family, dtype, kernels)
    it.restore()
    last = len(it.lengths) - 1
    whole = it.alone(it.extend([(last, 0, 49)]))  # through the pages that it shares, on identical tokens
    it.restore()
    hit = it.padded(it.extend([(last, 32, 16)]), 16)
    assert torch.equal(hit, whole[32:48]), "a suffix behind cached pages of another request"
    it.restore()
    for start, count, bucket in ((32, 5, 8), (37, 8, 8), (45, 4, 4)):
        chunk = it.padded(it.extend([(last, start, count)]), bucket)[:count]
        assert torch.equal(chunk, whole[start : start + count]), "a later chunk"
    logits = it.worker._head(whole, [48]).clone()
    it.lengths[last] = 48
    try:
        for bucket in (1, 2, 8):
            assert torch.equal(it.padded(it.decode([last]), bucket)[:1], logits), "a long context decoded"
    finally:
        it.lengths[last] = 32


def test_f7_one_capture_many_inputs(rig: Rigs) -> None:
    """F7: a replay depends on each of its inputs: other tokens, other contexts, other page tables."""
    it = rig("llama")
    seen = []
    for requests in ([0], [2], [5]):
        it.restore()
        out = it.padded(it.decode(requests), 1).clone()
        assert torch.equal(out, it.clean(it.decode(requests)).outputs)
        seen.append(out)
    it.restore()
    batch = it.decode([0])
    seen.append(it.padded(replace(batch, input_ids=batch.input_ids % 7 + 1), 1).clone())
    assert len({tuple(out.flatten().tolist()) for out in seen}) == 4


# --- counters and pages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "phimoe", "llama4"])
def test_f33_nothing_is_counted_before_the_first_request(
    family: str, rigs: ModuleType, checkpoint: Any
) -> None:
    """Warm-ups and captures of every bucket at start-up leave expert load and served rows at zero."""
    it = rigs.Rig(checkpoint(family))
    assert it.load_at_start is not None
    assert it.load_at_start.sum() == 0
    assert len(it.worker.decode.captured) == len(rigs.DECODE_BUCKETS)
    assert len(it.worker.prefill.captured) == len(rigs.PREFILL_BUCKETS)


def test_f19_pads_need_no_page(rigs: ModuleType, checkpoint: Any) -> None:
    """F19: with every page taken, a padded step runs as before: the trash page was set aside."""
    it = rigs.Rig(checkpoint("llama"))
    allocator = it.scheduler.kv.allocator
    taken = allocator.allocate(allocator.free_pages)
    assert allocator.free_pages == 0
    assert 0 not in taken
    batch = it.decode([1, 2, 3])
    assert it.broken(batch, it.clean(batch), 8, before=it.decode(range(8))) == set()


def test_f22_pages_are_reused_without_traces_of_pads(rig: Rigs, rigs: ModuleType) -> None:
    """F22: an exact bucket, then a padded one; pages that were free meanwhile hold nothing of the pads."""
    it = rig("qwen3_moe")
    it.restore()
    everything = [*it.pool.k, *it.pool.v]
    for cache in everything:
        cache[rigs.PAGE :].nan_to_num_(0.0)
    for requests, bucket in (([0], 1), ([0, 1], 4)):
        it.padded(it.decode(requests), bucket)
    assert all(cache[rigs.PAGE :].isfinite().all() for cache in everything)
    it.restore()


# --- accounting ---------------------------------------------------------------------------------------------


def test_f15_f16_each_bucket_is_replayed_and_rows_add_up(rigs: ModuleType, checkpoint: Any) -> None:
    it = rigs.Rig(checkpoint("qwen3_moe"), prefill_buckets=(4, 16))
    for runner in (it.worker.decode, it.worker.prefill):
        runner.stats.reset()
    rules = it.worker.rules

    def serve(batch: Any) -> None:
        rows = batch.global_num_token_non_padded_cpu
        it.runner(batch).run(decide_shape(batch.mode, (rows,), batch.batch_size, rules), batch)

    for n in range(1, 10):
        serve(it.decode(list(range(n))))
    decode = it.worker.decode.stats.as_dict()
    assert decode["replays"] == 8
    assert decode["eager_reasons"] == {"above the largest bucket": 1}
    assert {key: counts["replays"] for key, counts in decode["keys"].items()} == {
        "decode/1": 1,
        "decode/2": 1,
        "decode/4": 2,
        "decode/8": 4,
        "decode/9": 0,
    }
    assert (decode["real_rows"], decode["pad_rows"]) == (45, 1 + 3 + 2 + 1)

    for n in (1, 2, 4, 5, 7, 8, 16, 17):
        serve(it.extend([(2, 0, n)]))
    prefill = it.worker.prefill.stats.as_dict()
    assert prefill["eager_reasons"] == {"too much padding": 3, "above the largest bucket": 1}
    assert prefill["keys"]["extend/4"]["replays"] == 2
    assert prefill["keys"]["extend/16"]["replays"] == 2
    assert (prefill["real_rows"], prefill["pad_rows"]) == (60, 2 + 0 + 8 + 0)
    it.restore()


@pytest.mark.parametrize("options", [{"graph": "eager"}, {"capture": "lazy"}], ids=["eager", "lazy"])
def test_reasons_of_steps_without_a_graph(options: dict[str, str], rigs: ModuleType, checkpoint: Any) -> None:
    it = rigs.Rig(checkpoint("llama"), **options)
    it.worker.decode.stats.reset()
    for _ in range(2):
        it.padded(it.decode([0, 1, 2]), 4)
    stats = it.worker.decode.stats.as_dict()
    if "graph" in options:
        assert (stats["captures"], stats["replays"]) == (0, 0)
        assert stats["eager_reasons"] == {"backend eager": 2}
    else:
        assert (stats["captures"], stats["replays"], stats["eager_steps"]) == (1, 1, 0)
    assert (stats["real_rows"], stats["pad_rows"]) == (6, 2)


def test_f15_without_padding_every_size_is_replayed_exactly(rigs: ModuleType, checkpoint: Any) -> None:
    it = rigs.Rig(checkpoint("llama"), decode_buckets=None, disable_padding=True)
    it.worker.decode.stats.reset()
    for n in range(1, len(it.lengths) + 1):
        batch = it.decode(list(range(n)))
        shape = decide_shape(StepMode.DECODE, (n,), n, it.worker.rules)
        it.worker.decode.run(shape, batch)
    stats = it.worker.decode.stats
    assert (stats.replays, stats.eager_steps, stats.pad_rows) == (len(it.lengths), 0, 0)


def test_f20_no_bucket_is_larger_than_any_legal_step(rigs: ModuleType, checkpoint: Any) -> None:
    """F20: nine requests of 128 tokens never make a step of 2048 rows, nor one of 64 requests."""
    it = rigs.Rig(
        checkpoint("llama"),
        context_length=128,
        max_running_requests=9,
        chunked_prefill_size=4096,
        prefill_buckets=(8, 512, 2048),
        decode_buckets=(4, 64),
    )
    assert it.worker.rules.extend.sizes == (8, 512, 1152)
    assert it.worker.rules.decode.sizes == (4, 9)
    sizes = [key.size for key in it.worker.prefill.captured]
    assert sizes == [1152, 512, 8], "every bucket on the list can be captured"


# --- the tests can fail -------------------------------------------------------------------------------------


def all_broken(it: Any, rigs: ModuleType) -> set[str]:
    """Everything that a few steps of both kinds break."""
    found: set[str] = set()
    decode, prefill = it.decode([2, 4, 1]), it.extend([(1, 3, 4), (6, 8, 3)])
    for batch, bucket, before in (
        (decode, 8, it.decode(range(8))),
        (prefill, 16, it.extend([(0, 4, 9), (2, 30, 7)])),
    ):
        clean = it.clean(batch)
        for way in rigs.WAYS:
            for poison in (POISONS[0], None):
                found |= it.broken(batch, clean, bucket, way=way, poison=poison, before=before)
    return found


@pytest.fixture
def own(rigs: ModuleType, checkpoint: Callable[[str], Path]) -> Callable[[str], Any]:
    """own(family) -> a rig that a test may break."""
    return lambda family: rigs.Rig(checkpoint(family))


Patch = pytest.MonkeyPatch


def plan_counts_pads(it: Any, patch: Patch) -> None:
    """Attention that takes every padded row for a real one."""
    attention = it.model.attention
    right = attention.plan

    def plan(view: Any, shape: Any) -> None:
        right(view, replace(shape, num_tokens=(shape.padded_num_tokens,), bs=shape.padded_bs))

    for runner in (it.worker.decode, it.worker.prefill):
        patch.setattr(runner, "_prepare", plan)


def keep_tails(it: Any, name: str) -> None:
    """A slot whose tail nobody resets."""
    for runner in (it.worker.decode, it.worker.prefill):
        registry = runner.registry
        registry._slots[name] = replace(registry._slots[name], padding_policy=PaddingPolicy.KEEP_PAD)
        registry._plans.clear()


def test_an_attention_that_ignores_the_count_is_caught(
    own: Any, rigs: ModuleType, monkeypatch: Patch
) -> None:
    it = own("llama")
    assert all_broken(it, rigs) == set()
    plan_counts_pads(it, monkeypatch)
    assert "attention of pads is not zero" in all_broken(it, rigs)


def test_stale_kv_slots_of_pads_are_caught(own: Any, rigs: ModuleType, monkeypatch: Patch) -> None:
    """One guard is enough: a kept tail of KV slots shows only where attention writes pads, too."""
    it = own("llama")
    keep_tails(it, "out_cache_loc")
    batch, before = it.decode([2, 4, 1]), it.decode(range(8))
    clean = it.clean(batch)
    assert it.broken(batch, clean, 8, poison=None, before=before) == set()
    plan_counts_pads(it, monkeypatch)
    assert "live KV differs" in it.broken(batch, clean, 8, poison=None, before=before)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "phimoe", "llama4"])
def test_a_router_mask_that_is_skipped_is_caught(
    family: str, own: Any, rigs: ModuleType, monkeypatch: Patch
) -> None:
    it = own(family)
    monkeypatch.setattr(routing, "fill_pad_rows_", lambda rows, pads, fill: None)
    assert {"pads are routed", "load is not rows * K"} <= all_broken(it, rigs)


def test_a_count_frozen_at_capture_is_caught(own: Any, rigs: ModuleType) -> None:
    it = own("qwen3_moe")
    for runner in (it.worker.decode, it.worker.prefill):
        registry = runner.registry
        registry._hooks = [hook for hook in registry._hooks if hook[0].name != "num_token_non_padded"]
    assert {"count is wrong", "load is not rows * K"} <= all_broken(it, rigs)


def test_a_plan_frozen_at_capture_is_caught(own: Any, rigs: ModuleType, monkeypatch: Patch) -> None:
    it = own("llama")
    batch, other = it.decode([2, 4, 1]), it.decode([0, 1, 5])
    clean, clean_other = it.clean(batch), it.clean(other)
    assert it.broken(batch, clean, 4) == set()
    monkeypatch.setattr(it.worker.decode, "_prepare", lambda view, shape: None)
    assert "real rows differ" in it.broken(other, clean_other, 4)


def test_a_host_value_frozen_at_capture_is_caught(own: Any, monkeypatch: Patch) -> None:
    """F13: the longest context as a host number in a launch: eager it is right, in a graph that of the capture."""
    it = own("llama")
    attention = it.model.attention
    right, longest = type(attention).forward, [0]

    def forward(self: Any, stream: Any, layer: Any, *rest: Any) -> None:
        right(self, stream, replace(layer, sliding_window=longest[0]), *rest)

    def prepare(view: Any, shape: Any) -> None:
        attention.plan(view, shape)
        longest[0] = int(view.seq_lens_cpu.max())

    monkeypatch.setattr(type(attention), "forward", forward)
    for runner in (it.worker.decode, it.worker.prefill):
        monkeypatch.setattr(runner, "_prepare", prepare)
    it.worker.capture(lambda *args: None)
    batch = it.decode([2, 4, 1])
    clean = it.clean(batch)
    assert it.broken(batch, clean, 4, way="eager") == set()
    assert "real rows differ" in it.broken(batch, clean, 4, way="replay")


def test_rows_that_mix_in_a_kernel_are_caught(own: Any, rigs: ModuleType, monkeypatch: Patch) -> None:
    """F5: a kernel with one scale over all rows: clean pads are harmless, NaN ones are not."""
    it = own("qwen3_moe")
    ops = type(it.model.ops)
    right = ops.rms_norm

    def rms_norm(self: Any, x: torch.Tensor, weight: Any, eps: float, out: torch.Tensor, *live: Any) -> None:
        scale = x.abs().amax()
        right(self, x, weight, eps, out, *live)
        out.mul_(scale / scale)

    monkeypatch.setattr(ops, "rms_norm", rms_norm)
    it.worker.capture(lambda *args: None)
    assert {"real rows differ", "real rows are not finite"} <= all_broken(it, rigs)


def test_experts_that_take_pads_for_data_are_caught(own: Any, rigs: ModuleType, monkeypatch: Patch) -> None:
    """F23: a kernel that reads -1 as an expert, behind a norm that knows no count (which would hide it)."""
    it = own("phimoe")
    ops = type(it.model.ops)
    right, norm = ops.moe_experts, ops.add_layer_norm

    def uncounted(
        self: Any, x: Any, residual: Any, weight: Any, bias: Any, eps: float, out: Any, live: Any
    ) -> None:
        norm(self, x, residual, weight, bias, eps, out)

    def experts(self: Any, x: Any, weights: Any, ids: torch.Tensor, *rest: Any) -> None:
        right(self, x, weights, ids.clamp_min(0), *rest)

    monkeypatch.setattr(ops, "add_layer_norm", uncounted)
    it.worker.capture(lambda *args: None)
    assert all_broken(it, rigs) == set()
    monkeypatch.setattr(ops, "moe_experts", experts)
    it = own("phimoe")  # layers take their kernel when they are built
    assert "MoE of pads is not zero" in all_broken(it, rigs)


def test_captures_that_count_as_load_are_caught(
    rigs: ModuleType, checkpoint: Any, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(ExpertLoad, "_switch", lambda self, live: self.live.fill_(1))
    assert rigs.Rig(checkpoint("qwen3_moe")).load_at_start.sum() > 0


def test_a_bucket_that_matters_is_caught(own: Any, rigs: ModuleType, monkeypatch: Patch) -> None:
    """I7: a kernel whose arithmetic depends on how many rows there are."""
    it = own("llama")
    ops = type(it.model.ops)
    right = ops.linear

    def linear(self: Any, x: torch.Tensor, weight: Any, out: torch.Tensor, *live: Any) -> None:
        right(self, x, weight, out, *live)
        out.mul_(1 + x.shape[0] * 1e-6)

    monkeypatch.setattr(ops, "linear", linear)
    it.worker.capture(lambda *args: None)
    batch = it.decode([3, 0])
    clean = it.clean(batch)
    assert it.broken(batch, clean, 2) == set()
    assert it.broken(batch, clean, 4) == {"real rows differ", "live KV differs"}
    assert first_difference(it.padded(batch, 4)[:2], clean.outputs) is not None
