"""CUDA graphs behind the same runner. Skips without a GPU, except for the refusal."""

from __future__ import annotations

import gc

import pytest
import torch

from ostinato.engine.batch import ForwardBatch, capture_batch, capture_shapes, decode_batch
from ostinato.engine.registries import build_decode_registry
from ostinato.errors import CaptureError, ConfigError
from ostinato.graphs import BreakableBackend, CudaGraphBackend, GraphRunner, LiveStep, Stream
from ostinato.padding import Buckets, ShapeRules, StepMode, decide_shape

RULES = ShapeRules(Buckets((2, 4, 8)), Buckets(()))

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_a_device_the_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="tape"):
        CudaGraphBackend()


def square(ids: torch.Tensor, lens: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(ids * ids + lens)


def make(**options: object) -> tuple[GraphRunner[ForwardBatch, torch.Tensor], list[bool]]:
    calls: list[bool] = []

    def fn(view: ForwardBatch, stream: Stream) -> torch.Tensor:
        calls.append(stream.capturing)
        assert view.input_ids is not None
        scratch = torch.empty_like(view.input_ids)
        stream.launch(square, view.input_ids, view.seq_lens, scratch)
        return scratch + 1

    registry = build_decode_registry(8, 8, device="cuda")
    return GraphRunner(fn, registry, backend=CudaGraphBackend(), **options), calls  # type: ignore[arg-type]


def run(runner: GraphRunner[ForwardBatch, torch.Tensor], *ids: int) -> list[int]:
    n = len(ids)
    made = decode_batch(ids, [10] * n, [1] * n, [16] * n)
    out = runner.run(decide_shape(StepMode.DECODE, [n], n, RULES), made)
    return out[:n].tolist()


@needs_cuda
def test_captured_buckets_replay_on_new_inputs_in_any_order() -> None:
    runner, calls = make()
    runner.capture(capture_shapes(StepMode.DECODE, RULES, context_len=64), capture_batch)
    assert calls == [False, False, True] * 3
    for _ in range(2):
        for ids in ((1, 2, 3, 4, 5), (7,), (3, 2, 1), (9, 9, 9, 9, 9, 9, 9, 9), (4, 5)):
            gc.collect()
            torch.full((1024,), -1, device="cuda")
            assert run(runner, *ids) == [i * i + 11 for i in ids]
    assert (runner.stats.replays, runner.stats.eager_steps) == (10, 0)
    assert runner.stats.captured_never_replayed == []


@needs_cuda
def test_first_use_captures_and_replays_at_once() -> None:
    runner, calls = make(capture_on_first_use=True)
    assert run(runner, 5, 6) == [36, 47]
    assert run(runner, 7, 8) == [60, 75]
    assert calls == [False, False, True]


@needs_cuda
def test_eager_at_the_bucket_equals_replay() -> None:
    runner, _ = make(capture_on_first_use=True)
    made = decode_batch([1, 2, 3], [4, 5, 6], [1] * 3, [16] * 3)
    shape = decide_shape(StepMode.DECODE, [3], 3, RULES)
    runner.run(shape, made)
    replayed = runner.run(shape, made).clone()
    assert torch.equal(replayed, runner.run(shape, made, reject="compare"))


@needs_cuda
def test_a_host_read_is_a_capture_error() -> None:
    x = torch.ones(2, device="cuda")
    with pytest.raises(CaptureError):
        CudaGraphBackend().capture(lambda stream: x.sum().item(), warmup=0)
    assert gc.isenabled()


@needs_cuda
def test_hooks_meet_before_each_forward() -> None:
    events: list[str] = []
    backend = CudaGraphBackend(
        barrier=lambda: events.append("meet"), after_warmup=lambda: events.append("warm")
    )
    x = torch.ones(2, device="cuda")
    graph = backend.capture(lambda stream: events.append("run") or x + 1)
    assert events == ["meet", "run", "meet", "run", "warm", "meet", "run"]
    x.fill_(5)
    assert graph.replay().tolist() == [6, 6]


@needs_cuda
def test_segments_of_a_breakable_graph_and_what_runs_between_them() -> None:
    """Temporaries of segments share one pool; an op works on the real rows, a host launch may read the device."""
    live, reads = LiveStep(), []
    x, out = torch.zeros(8, 3, device="cuda"), torch.zeros(8, 3, device="cuda")

    def add(rows: torch.Tensor, mixed: torch.Tensor) -> None:
        torch.add(rows, rows.sum(0), out=mixed)

    def eager(stream: Stream, view: None, rows: torch.Tensor, mixed: torch.Tensor) -> None:
        stream.launch(add, rows, mixed)

    def step(stream: Stream) -> torch.Tensor:
        twice, mixed = x * 2, torch.full_like(x, torch.nan)
        stream.eager(eager, None, (twice,), (mixed,))
        between = mixed + 1
        stream.outside(lambda: reads.append(float(between.sum())))
        torch.add(between, twice, out=out)
        return out

    live.begin(None, 8, 8)
    graph = BreakableBackend(CudaGraphBackend(), live).capture(step, 2)
    assert graph.num_segments == 3
    for rows in (8, 3, 1, 5):
        gc.collect()
        torch.full((4096,), torch.nan, device="cuda")
        x.zero_()[:rows] = torch.randn(rows, 3, device="cuda")
        live.begin(None, rows, 8)
        twice = x * 2
        mixed = torch.zeros_like(x)
        mixed[:rows] = twice[:rows] + twice[:rows].sum(0)
        assert torch.equal(graph.replay(), mixed + 1 + twice)
        assert reads[-1] == float((mixed + 1).sum())
