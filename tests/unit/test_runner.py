"""The graph runner: one way for every step. F7, F13-F16, I5, I7 of the reference, and the accounting."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pytest
import torch

from ostinato.engine.batch import ForwardBatch, capture_batch, capture_shapes, decode_batch, extend_batch
from ostinato.engine.registries import RegistryOptions, build_decode_registry, build_prefill_registry
from ostinato.errors import CaptureError
from ostinato.graphs import (
    Backend,
    EagerBackend,
    EagerStream,
    GraphRunner,
    Stream,
    TapeBackend,
    Workspace,
)
from ostinato.graphs.breakable import BreakableBackend, LiveStep
from ostinato.moe.load import ExpertLoad
from ostinato.padding import Buckets, GraphKey, ShapeRules, StepMode, StepShape, decide_shape

T = TypeVar("T")
BS = 8
RULES = ShapeRules(Buckets((2, 4, 8)), Buckets((4, 8)), max_extend_bs=4)
UNPADDED = ShapeRules(Buckets(()), Buckets(()))


class WarmingBackend(EagerBackend):
    """As CUDA graphs: warms up, and computes nothing while it captures."""

    name = "warming"
    captures = True
    runs_while_capturing = False
    warmup = 2


def attend(ids: torch.Tensor, lens: torch.Tensor, count: torch.Tensor, out: torch.Tensor) -> None:
    """A stand-in for a decoder: each row depends on its id and its length; rows past the count are zero."""
    out.copy_(ids.double() * 1000 + lens.double().sqrt())
    out[int(count) :] = 0


def make(
    backend: Backend,
    *,
    read: Callable[[ForwardBatch], Any] = lambda view: None,
    rules_options: RegistryOptions | None = None,
    **options: Any,
) -> tuple[GraphRunner[ForwardBatch, torch.Tensor], list[bool]]:
    """A decode runner, and the list of its calls (True where they were captured)."""
    workspace = Workspace()
    workspace.reserve("out", (BS,), torch.float64)
    calls: list[bool] = []

    def fn(view: ForwardBatch, stream: Stream) -> torch.Tensor:
        calls.append(stream.capturing)
        read(view)
        assert view.input_ids is not None
        out = workspace.take("out", view.input_ids.shape[0])
        stream.launch(attend, view.input_ids, view.seq_lens, view.num_token_non_padded, out)
        return out

    registry = build_decode_registry(BS, BS, rules_options)
    return GraphRunner(fn, registry, backend=backend, **options), calls


def batch(*ids: int, lens: int = 10, **more: Any) -> ForwardBatch:
    n = len(ids)
    return decode_batch(ids, [lens + i for i in range(n)], [1] * n, [16] * n, **more)


def shape_of(made: ForwardBatch, rules: ShapeRules = RULES) -> StepShape:
    return decide_shape(made.mode, [made.global_num_token_non_padded_cpu], made.batch_size, rules)


def run(runner: GraphRunner[ForwardBatch, T], made: ForwardBatch, **more: Any) -> T:
    return runner.run(shape_of(made), made, **more)


def expected(made: ForwardBatch) -> list[float]:
    assert made.input_ids is not None
    return (made.input_ids.double() * 1000 + made.seq_lens.double().sqrt()).tolist()


def test_the_first_step_of_a_key_is_captured_while_it_serves() -> None:
    runner, calls = make(TapeBackend(), capture_on_first_use=True)
    first, second, third = batch(1, 2, 3), batch(4, 5, 6, 7), batch(8)
    for made in (first, second, third, first):
        assert run(runner, made)[: made.batch_size].tolist() == expected(made)
    assert calls == [True, True], "one call for each key, and none for a replay"
    assert runner.captured == (GraphKey("decode", 4, 0, ""), GraphKey("decode", 2, 0, ""))
    assert (runner.stats.captures, runner.stats.replays, runner.stats.eager_steps) == (2, 2, 0)


def test_f7_f13_capture_short_replay_long() -> None:
    """F7 and F13: nothing of the first context is frozen: another length, other ids, another count."""
    runner, _ = make(TapeBackend(), capture_on_first_use=True)
    for made in (batch(1, 2, 3, lens=100), batch(4, 5, 6, lens=3000), batch(7, 8, 9, 10, lens=7)):
        out = run(runner, made)
        assert out.tolist() == expected(made) + [0.0] * (4 - made.batch_size)
    assert runner.stats.replays == 2


def test_f13_a_host_value_that_changed_is_refused() -> None:
    """F13: the forward read a host number that is in no key, so a replay would be silently wrong."""
    runner, _ = make(TapeBackend(), read=lambda view: view.seq_lens_sum, capture_on_first_use=True)
    run(runner, batch(1, 2, 3, lens=100))
    run(runner, batch(4, 5, 6, lens=100))
    with pytest.raises(CaptureError, match="seq_lens_sum"):
        run(runner, batch(1, 2, 3, lens=3000))
    assert (
        run(runner, batch(1, 2, 3, lens=3000), reject="other length")[0].item()
        == expected(batch(1, lens=3000))[0]
    )


def test_f14_a_field_that_is_missing_now_is_refused() -> None:
    """F14: what the graph was captured with is part of its topology."""

    def read(view: ForwardBatch) -> object:
        return view.mrope_positions if view.mrope_positions is None else view.mrope_positions.shape

    options = RegistryOptions(multimodal=True)
    with_field = batch(1, 2, mrope_positions=torch.zeros(3, 2, dtype=torch.int64))
    for first, second in ((batch(1, 2), with_field), (with_field, batch(1, 2))):
        runner, _ = make(TapeBackend(), read=read, rules_options=options, capture_on_first_use=True)
        run(runner, first)
        run(runner, first)
        with pytest.raises(CaptureError, match="mrope_positions"):
            run(runner, second)


def test_a_tensor_outside_the_static_buffers_is_refused() -> None:
    """F7: its address belongs to the captured step alone. Eager may read it."""
    runner, _ = make(TapeBackend(), read=lambda view: view.input_embeds, capture_on_first_use=True)
    made = batch(1, 2, input_embeds=torch.ones(2, 4))
    with pytest.raises(CaptureError, match="input_embeds"):
        run(runner, made)
    assert runner.captured == ()
    assert run(runner, made, reject="embeddings").shape == (2,)


def test_the_view_is_watched_only_while_capturing() -> None:
    kept: list[ForwardBatch] = []
    runner, _ = make(TapeBackend(), read=kept.append, capture_on_first_use=True)
    run(runner, batch(1, 2))
    assert isinstance(kept[0], ForwardBatch)
    assert kept[0].seq_lens_sum == 21, "a read after the capture is free"
    run(runner, batch(1, 2, lens=3000))


def test_modes_that_share_a_key_share_a_graph() -> None:
    """P10: a MIXED step replays the EXTEND graph, though the forward asked for the mode."""
    workspace = Workspace()
    workspace.reserve("out", (BS,), torch.float64)

    def fn(view: ForwardBatch, stream: Stream) -> torch.Tensor:
        assert view.mode.is_extend
        assert view.input_ids is not None
        out = workspace.take("out", view.input_ids.shape[0])
        stream.launch(attend, view.input_ids, view.positions, view.num_token_non_padded, out)
        return out

    registry = build_prefill_registry(4, BS, RegistryOptions(request_slots=True))
    runner = GraphRunner(fn, registry, backend=TapeBackend(), capture_on_first_use=True)
    for made in (
        extend_batch([1, 2, 3], [3], [0], [1], [16, 17, 18]),
        extend_batch([4, 5, 6, 7], [3, 1], [0, 9], [1, 2], [16, 17, 18, 40], mode=StepMode.MIXED),
    ):
        assert made.input_ids is not None
        want = made.input_ids.double() * 1000 + made.positions.double().sqrt()
        assert run(runner, made)[: len(want)].tolist() == want.tolist()
    assert (runner.stats.captures, runner.stats.replays) == (1, 1)


def test_numbers_in_a_list_are_frozen_with_the_capture() -> None:
    """F13: also where whoever holds the list changes it."""
    counts = [3]
    runner, _ = make(TapeBackend(), read=lambda view: view.global_num_tokens_cpu, capture_on_first_use=True)
    made = replace(batch(1, 2, 3), global_num_tokens_cpu=counts)
    run(runner, made)
    run(runner, made)
    counts[0] = 4
    with pytest.raises(CaptureError, match=r"global_num_tokens_cpu' was \(3,\)"):
        run(runner, made)


def test_tensors_in_a_list_are_refused() -> None:
    runner, _ = make(TapeBackend(), read=lambda view: view.global_num_tokens_cpu, capture_on_first_use=True)
    with pytest.raises(CaptureError, match="holds tensors of this one step"):
        run(runner, replace(batch(1, 2, 3), global_num_tokens_cpu=[torch.ones(1)]))


def test_verdicts_are_frozen_with_the_capture() -> None:
    """The predicate that decided "sharded" at capture must still say so."""
    sharded = [False]
    options = RegistryOptions(attn_tp_size=2, sharded=lambda width: sharded[0])
    runner, _ = make(TapeBackend(), rules_options=options, capture_on_first_use=True)
    run(runner, batch(1, 2, 3))
    run(runner, batch(1, 2, 3))
    sharded[0] = True
    with pytest.raises(CaptureError, match="verdict False, this step has True"):
        run(runner, batch(1, 2, 3))
    sharded[0] = False
    assert run(runner, batch(1, 2, 3))[:3].tolist() == expected(batch(1, 2, 3))


# --- capture ahead of time ----------------------------------------------------------------------------------


def test_capture_goes_from_the_largest_to_the_smallest() -> None:
    runner, calls = make(TapeBackend())
    seen: list[tuple[int, int, int]] = []
    shapes = capture_shapes(StepMode.DECODE, RULES, context_len=64)
    runner.capture(
        shapes, capture_batch, progress=lambda s, done, total: seen.append((s.padded_bs, done, total))
    )
    assert seen == [(8, 1, 3), (4, 2, 3), (2, 3, 3)]
    assert calls == [False, True] * 3, "one warm-up before each"
    assert runner.stats.eager_steps == runner.stats.real_rows == 0, (
        "warm-ups and captures are no served steps"
    )


@pytest.mark.parametrize("padding", [True, False])
def test_f15_f16_each_captured_bucket_is_replayed(padding: bool) -> None:
    """F15 and F16: capture, admission and replay build one key, also with padding off; the counter shows it."""
    rules = replace(
        RULES, decode=Buckets(tuple(range(1, BS + 1))) if not padding else RULES.decode, padding=padding
    )
    runner, _ = make(TapeBackend())
    runner.capture(capture_shapes(StepMode.DECODE, rules, context_len=64), capture_batch)
    assert len(runner.stats.captured_never_replayed) == len(rules.decode.sizes)
    for n in range(1, BS + 1):
        made = batch(*range(1, n + 1))
        out = runner.run(shape_of(made, rules), made)
        assert out[:n].tolist() == expected(made)
    assert runner.stats.captured_never_replayed == []
    assert (runner.stats.replays, runner.stats.eager_steps) == (BS, 0)


def test_f16_a_graph_that_never_matches_shows() -> None:
    runner, _ = make(TapeBackend())
    lora = [
        replace(shape, variant="lora") for shape in capture_shapes(StepMode.DECODE, RULES, context_len=64)
    ]
    runner.capture(lora, capture_batch)
    run(runner, batch(1, 2, 3))
    assert runner.stats.as_dict()["captured_never_replayed"] == [
        "decode/8/lora",
        "decode/4/lora",
        "decode/2/lora",
    ]
    assert runner.stats.eager_reasons == {"not captured": 1}


def test_shapes_without_a_graph_cannot_be_captured() -> None:
    runner, _ = make(TapeBackend())
    too_large = decide_shape(StepMode.DECODE, [9], 9, RULES)
    with pytest.raises(CaptureError, match="above the largest bucket"):
        runner.capture([too_large], capture_batch)
    eager, _ = make(EagerBackend())
    with pytest.raises(CaptureError, match="backend eager"):
        eager.capture(capture_shapes(StepMode.DECODE, RULES, context_len=64), capture_batch)


def test_a_key_can_be_captured_anew() -> None:
    runner, calls = make(TapeBackend(), warmup=0)
    shapes = capture_shapes(StepMode.DECODE, RULES, context_len=64)
    runner.capture(shapes, capture_batch)
    runner.registry.buffer("out_cache_loc").fill_(4000)
    runner.capture(shapes[:1], capture_batch)
    assert len(calls) == 4
    assert runner.registry.buffer("out_cache_loc").tolist() == [0] * BS, "nothing stale while recapturing"
    assert run(runner, batch(1, 2))[:2].tolist() == expected(batch(1, 2))


# --- eager --------------------------------------------------------------------------------------------------


def test_eager_and_replay_at_one_bucket_see_the_same_buffers() -> None:
    """Rule 2: an eager step fills and reads the same padded buffers, so outputs compare bit for bit."""
    tape, _ = make(TapeBackend(), capture_on_first_use=True)
    eager, calls = make(EagerBackend())
    for made in (batch(1, 2, 3), batch(4, 5, 6, lens=99)):
        for _ in range(2):
            assert torch.equal(run(tape, made), run(eager, made))
    assert calls == [False] * 4
    assert eager.stats.eager_reasons == {"backend eager": 4}


def test_i7_the_bucket_does_not_matter() -> None:
    made = batch(1, 2, lens=33)
    runner, _ = make(TapeBackend(), capture_on_first_use=True)
    answers = []
    for rules in (RULES, replace(RULES, decode=Buckets((8,))), UNPADDED):
        answers.append(runner.run(shape_of(made, rules), made)[:2].tolist())
    assert answers == [expected(made)] * 3
    assert runner.stats.eager_reasons == {"no buckets": 1}


def test_dummy_and_idle_steps_take_the_same_way() -> None:
    runner, _ = make(TapeBackend(), capture_on_first_use=True)
    from ostinato.engine.batch import idle_batch

    run(runner, batch(1, 2))
    idle = idle_batch()
    shape = decide_shape(StepMode.IDLE, [0], 0, RULES)
    assert runner.run(shape, idle).tolist() == [0.0, 0.0], "all of its rows are pads"
    assert (runner.stats.replays, runner.stats.real_rows, runner.stats.pad_rows) == (1, 2, 2)


@dataclass
class DelayedBackend:
    """Like CUDA: a capture computes nothing, so a replay must follow."""

    name = "delayed"
    captures = True
    runs_while_capturing = False
    warmup = 2

    def capture(self, fn: Callable[[Stream], T], warmup: int) -> Any:
        for _ in range(warmup):
            fn(EagerStream())
        tape = TapeBackend().capture(fn, warmup=0)
        outputs: Any = tape.outputs
        outputs.fill_(-1)
        return tape


def test_backends_that_compute_nothing_while_capturing_replay_at_once() -> None:
    runner, calls = make(DelayedBackend(), capture_on_first_use=True)
    made = batch(1, 2, 3)
    assert run(runner, made)[:3].tolist() == expected(made)
    assert calls == [False, False, True], "warm-ups come first where the capture does not serve the step"
    assert (runner.stats.captures, runner.stats.replays) == (1, 0)


def test_prepare_runs_before_every_step_on_the_padded_view() -> None:
    seen: list[tuple[int, int, list[int]]] = []

    def prepare(view: ForwardBatch, shape: StepShape) -> None:
        seen.append((shape.bs, view.batch_size, view.req_pool_indices.tolist()))

    runner, _ = make(TapeBackend(), prepare=prepare, capture_on_first_use=True)
    for reject in ("", "", "by hand"):
        run(runner, batch(1, 2, 3), reject=reject)
    assert seen == [(3, 4, [1, 1, 1, 0])] * 3


# --- accounting ---------------------------------------------------------------------------------------------


def test_accounting() -> None:
    runner, _ = make(TapeBackend(), capture_on_first_use=True)
    for n in (3, 4, 1, 3):
        run(runner, batch(*range(n)))
    run(runner, batch(1, 2, 3), reject="logprobs")
    made = runner.stats.as_dict()
    zero = {"replays": 0, "advanced": 0, "eager": 0, "checked": 0, "mismatches": 0, "quarantined": False}
    assert made.pop("replay_s") > 0
    assert json.loads(json.dumps(made)) == {
        "captures": 2,
        "replays": 2,
        "advanced": 0,
        "eager_steps": 1,
        "eager_reasons": {"logprobs": 1},
        "real_rows": 14,
        "pad_rows": 4,
        "checked": 0,
        "mismatches": 0,
        "captured_never_replayed": ["decode/2"],
        "quarantined": [],
        "sizes": {"1": 1, "3": 3, "4": 1},
        "keys": {
            "decode/2": zero | {"captures": 1, "real_rows": 1, "pad_rows": 1},
            "decode/4": zero | {"captures": 1, "replays": 2, "eager": 1, "real_rows": 13, "pad_rows": 3},
        },
    }
    runner.stats.reset()
    assert runner.stats.as_dict()["keys"] == {}


def test_keys_are_spelled_with_stream_and_variant() -> None:
    runner, _ = make(TapeBackend(), capture_on_first_use=True)
    made = batch(1, 2)
    runner.run(replace(shape_of(made), stream_index=1, variant="lora"), made)
    assert list(runner.stats.as_dict()["keys"]) == ["decode/2/stream1/lora"]


def test_warm_ups_of_a_capture_amid_serving_are_announced() -> None:
    """The step counts once, when it is replayed: warm-ups run its kernels before."""
    events: list[object] = []
    runner, _ = make(
        WarmingBackend(),
        read=lambda view: events.append("run"),
        capture_on_first_use=True,
        rehearse=events.append,
    )
    shape = decide_shape(StepMode.DECODE, [2], 2, RULES)
    for _ in range(2):
        runner.run(shape, decode_batch([1, 2], [4, 5], [1, 2], [16, 17]))
    assert events == [True, "run", "run", "run", False, "run", "run"]
    events.clear()
    runner.run(shape, decode_batch([1, 2], [4, 5], [1, 2], [16, 17]), reject="eager")
    assert events == ["run"]


def test_warm_ups_within_a_first_capture_in_segments_are_announced_too() -> None:
    """A breakable backend computes the step while it captures; not so what the device's backend needs before."""
    events: list[object] = []

    class Device(TapeBackend):
        runs_while_capturing = False
        warmup = 2

    live = LiveStep()
    runner, _ = make(
        BreakableBackend(Device(), live),
        read=lambda view: events.append("run"),
        capture_on_first_use=True,
        rehearse=events.append,
        live=live,
    )
    runner.run(shape_of(batch(1, 2)), batch(1, 2))
    assert events == [True, "run", "run", False, "run"]


def test_a_rehearsal_leaves_the_switch_of_the_load_as_it_was() -> None:
    load = ExpertLoad(1, 4)
    for wanted in (True, False):
        load.set_live(wanted)
        load.rehearse(True)
        assert not int(load.live)
        assert not load.rows.live
        load.rehearse(False)
        assert bool(load.live) == load.rows.live == wanted
