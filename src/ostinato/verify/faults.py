"""Faults that real engines shipped, to be put into a deployment on purpose: `verify` must name the place of each.

A table of docs/fault-cases.md, areas "graphs & padding" and "DP & idle ranks": what is wrong, which checks see it, and
how it is put into one rank through `seam.py`. Knows nothing of how runs are driven. Invariant: a fault changes one
thing; everything else of the rank stays right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ostinato.engine.batch import ForwardBatch
from ostinato.errors import ConfigError
from ostinato.graphs.slots import FillContext
from ostinato.graphs.stream import Stream
from ostinato.padding import StepMode
from ostinato.verify.graph_faults import early_return, frozen_input, stale_parcel, weak_reference
from ostinato.verify.seam import Seam


@dataclass(frozen=True, slots=True)
class Fault:
    """put: (seam, layer) -> None. cases: of docs/fault-cases.md. needs: "experts", "groups" (that step together)."""

    name: str
    cases: str
    what: str
    put: Callable[[Seam, int], None]
    needs: str = ""


# ---- static inputs ----


def _raw_count(seam: Seam, layer: int) -> None:
    """Sharded by the real rows where graphs are sharded by padded ones."""

    def count(view: ForwardBatch, before: object, ctx: FillContext) -> None:
        if ctx.raw_num_tokens < ctx.padded_num_tokens:
            _count_of(view).fill_(-(-ctx.raw_num_tokens // 2))

    seam.inputs(count)


def _frozen_count(seam: Seam, layer: int) -> None:
    """Written when a width is first met, never again."""
    first: dict[tuple[bool, int], int] = {}

    def count(view: ForwardBatch, before: object, ctx: FillContext) -> None:
        if (
            ctx.raw_num_tokens < ctx.padded_num_tokens
            or (view.mode.is_extend, ctx.padded_num_tokens) in first
        ):
            key = view.mode.is_extend, ctx.padded_num_tokens
            _count_of(view).fill_(first.setdefault(key, ctx.padded_num_tokens))

    seam.inputs(count)


def _frozen_wanted(seam: Seam, layer: int) -> None:
    """As many rows leave the last layer as in the first prefill of that width."""
    first: dict[int, int] = {}

    def count(view: ForwardBatch, before: object, ctx: FillContext) -> None:
        if view.num_logit_rows is not None:
            count = int(view.num_logit_rows)
            view.num_logit_rows.fill_(first.setdefault(ctx.padded_num_tokens, count))

    seam.inputs(count)


def _idle_counted(seam: Seam, layer: int) -> None:
    """A rank without rows counts those that it runs beside the others."""

    def count(view: ForwardBatch, before: object, ctx: FillContext) -> None:
        if ctx.raw_num_tokens == 0:
            _count_of(view).fill_(ctx.padded_num_tokens)

    seam.inputs(count)


def _count_of(view: ForwardBatch) -> torch.Tensor:
    assert view.num_token_non_padded is not None
    return view.num_token_non_padded


def _stale(name: str) -> Callable[[Seam, int], None]:
    """The tail of a static input is what an earlier step left there."""

    def keep(view: ForwardBatch, before: ForwardBatch | None, ctx: FillContext) -> None:
        buffer, held = getattr(view, name), getattr(before, name)
        if buffer is not None and held is not None:
            raw = ctx.raw_num_tokens if len(buffer) == ctx.padded_num_tokens else ctx.raw_bs
            buffer[raw:] = held[raw:]

    return lambda seam, layer: seam.inputs(keep, remember=True)


def _narrow_fill(seam: Seam, layer: int) -> None:
    """A replay fills its inputs for the width of its real rows, not for that of the graph: no tail at all."""

    def keep(view: ForwardBatch, before: ForwardBatch | None, ctx: FillContext) -> None:
        for name in ("input_ids", "positions", "out_cache_loc"):
            getattr(view, name)[ctx.raw_num_tokens :] = getattr(before, name)[ctx.raw_num_tokens :]

    seam.inputs(keep, remember=True)


# ---- plans ----


def _pads_write(seam: Seam, layer: int) -> None:
    """Attention takes pads for real rows, and their KV slots are stale: they write into the page of a request."""
    page = seam.stage.others_page * seam.stage.worker.pool.page_size

    def plan(right: Callable[..., None], view: Any, shape: Any) -> None:
        right(view, replace(shape, num_tokens=(shape.padded_num_tokens,), bs=shape.padded_bs, dp_rank=0))

    def slots(view: ForwardBatch, before: object, ctx: FillContext) -> None:
        view.out_cache_loc[ctx.raw_num_tokens :] = page

    seam.inputs(slots)
    seam.plans(plan)


def _frozen_plan(seam: Seam, layer: int) -> None:
    """A graph's attention is planned when it is captured; replays go by that plan."""
    replays = [False]

    def plan(right: Callable[..., None], view: Any, shape: Any) -> None:
        if not replays[0]:
            right(view, shape)

    def run(right: Callable[..., Any], shape: Any, batch: Any, *, reject: str = "") -> Any:
        replays[0] = not (reject or shape.eager_reason)
        try:
            return right(shape, batch, reject=reject)
        finally:
            replays[0] = False

    seam.plans(plan)
    for runner in seam.stage.runners.values():
        seam.around(runner, "run", run)


def _idle_unplanned(seam: Seam, layer: int) -> None:
    """A rank without rows runs with the plan of its last step."""

    def plan(right: Callable[..., None], view: Any, shape: Any) -> None:
        if shape.bs:
            right(view, shape)

    seam.plans(plan)


def _no_prefix(seam: Seam, layer: int) -> None:
    """A prefill attends to its own rows, and not to the cached prefix before them."""

    def plan(right: Callable[..., None], view: Any, shape: Any) -> None:
        right(view, shape)
        if view.mode is StepMode.EXTEND and not shape.eager_reason:
            lens = seam.stage.worker.model.attention.planned_lens
            assert lens is not None, "a fault of attention that is planned by its lengths"
            lens[: shape.bs] = view.extend_seq_lens[: shape.bs]

    seam.plans(plan)


# ---- layers ----


def _unmasked(seam: Seam, layer: int) -> None:
    """One layer's router is not told which rows are pads."""
    seam.feed_forward(layer, count=False)


def _load_counts_pads(seam: Seam, layer: int) -> None:
    """Load statistics count rows before the mask."""
    load = seam.stage.worker.load
    assert load is not None
    counts = load.counts

    def count(live: torch.Tensor, rows: int) -> None:
        counts[layer, 0] += rows - live[0]

    def behind(stream: Stream, x: torch.Tensor, live: torch.Tensor | None, out: torch.Tensor) -> None:
        stream.launch(count, live, len(out))

    seam.feed_forward(layer, behind)


def _experts_take_pads(seam: Seam, layer: int) -> None:
    """The experts' kernel reads -1 as an expert: pads get results, which travel on."""

    def spread(out: torch.Tensor, live: torch.Tensor) -> None:
        out[int(live) :] = out[:1] + 1

    def behind(stream: Stream, x: torch.Tensor, live: torch.Tensor | None, out: torch.Tensor) -> None:
        stream.launch(spread, out, live)

    seam.feed_forward(layer, behind)


def _zero_length(seam: Seam, layer: int) -> None:
    """Attention over no key at all: NaN in pads."""

    def spoil(out: torch.Tensor, live: torch.Tensor) -> None:
        out[int(live) :] = torch.nan

    def behind(stream: Stream, x: torch.Tensor, live: torch.Tensor | None, out: torch.Tensor) -> None:
        stream.launch(spoil, out, live)

    seam.attention(layer, behind)


def _shared_scale(seam: Seam, layer: int) -> None:
    """A kernel takes one scale over a tile of rows, whoever they belong to."""
    model = seam.stage.worker.model
    tile = model.workspace.take("normed", seam.stage.worker.options.max_num_tokens, model.config.hidden_size)

    def scale(out: torch.Tensor) -> None:
        most = tile.abs().amax()
        out.mul_(most / most if float(most) else 1.0)

    def behind(stream: Stream, x: torch.Tensor, live: torch.Tensor | None, out: torch.Tensor) -> None:
        stream.launch(scale, out)

    seam.feed_forward(layer, behind)


def _width_matters(seam: Seam, layer: int) -> None:
    """A kernel chooses its order of summation by the number of rows."""

    def nudge(out: torch.Tensor) -> None:
        out[:1].mul_(1 + len(out) / 128)

    def behind(stream: Stream, x: torch.Tensor, live: torch.Tensor | None, out: torch.Tensor) -> None:
        stream.launch(nudge, out)

    seam.feed_forward(layer, behind)


def _mates_matter(seam: Seam, layer: int) -> None:
    """A row takes something over from the one before it."""

    def mix(out: torch.Tensor, live: torch.Tensor) -> None:
        n = int(live)
        if n > 1:
            out[1:n] += out[: n - 1].clone() / 64

    def behind(stream: Stream, x: torch.Tensor, live: torch.Tensor | None, out: torch.Tensor) -> None:
        stream.launch(mix, out, live)

    seam.feed_forward(layer, behind)


def _twice(seam: Seam, layer: int) -> None:
    """A layer's result is added up once more over ranks that have it already."""

    def double(out: torch.Tensor) -> None:
        out.mul_(2)

    def behind(stream: Stream, x: torch.Tensor, live: torch.Tensor | None, out: torch.Tensor) -> None:
        stream.launch(double, out)

    seam.feed_forward(layer, behind)


def _host_value(seam: Seam, layer: int) -> None:
    """The longest context as a number of the host in a launch: that of the captured step for ever."""
    longest = [1]

    def plan(right: Callable[..., None], view: Any, shape: Any) -> None:
        right(view, shape)
        longest[0] = int(view.seq_lens_cpu.max()) if len(view.seq_lens_cpu) else 1

    def scale(out: torch.Tensor, by: int) -> None:
        out.mul_(1 + by / 64)

    def behind(stream: Stream, x: torch.Tensor, live: torch.Tensor | None, out: torch.Tensor) -> None:
        stream.launch(scale, out, longest[0])

    seam.plans(plan)
    seam.attention(layer, behind)


FAULTS: tuple[Fault, ...] = (
    Fault("raw-count", "F2 F17", "the count of real rows is localised by the raw width", _raw_count),
    Fault("frozen-count", "F9 F15", "the count of real rows is the one of the first step", _frozen_count),
    Fault("frozen-wanted", "F9 F15", "the count of wanted rows is the one of the first step", _frozen_wanted),
    Fault("stale-ids", "F12", "input ids of pads are an earlier step's", _stale("input_ids")),
    Fault("stale-positions", "F10", "positions of pads are an earlier step's", _stale("positions")),
    Fault("stale-kv-slots", "F22", "KV slots of pads are an earlier step's", _stale("out_cache_loc")),
    Fault(
        "stale-page-rows", "F22", "page-table rows of pads are an earlier step's", _stale("req_pool_indices")
    ),
    Fault("narrow-fill", "F16 F28", "a replay fills its inputs as wide as its real rows", _narrow_fill),
    Fault("pads-write", "F22 F23", "pads write their KV into the page of a request", _pads_write),
    Fault("frozen-plan", "F7 F13", "attention is planned once for each width", _frozen_plan),
    Fault("no-prefix", "F14", "a captured prefill leaves out the cached prefix", _no_prefix),
    Fault("unmasked-router", "F1 F3", "one layer's router ignores the count", _unmasked, "experts"),
    Fault("load-counts-pads", "F32", "pads count as expert load", _load_counts_pads, "experts"),
    Fault("experts-take-pads", "F8 F23", "results of pads are not zero", _experts_take_pads, "experts"),
    Fault("zero-length", "F4 F6", "attention of pads is NaN", _zero_length),
    Fault("shared-scale", "F5", "one scale over a tile of rows, pads and stale ones included", _shared_scale),
    Fault("width-matters", "F40", "arithmetic depends on the bucket", _width_matters),
    Fault("mates-matter", "F40", "a row depends on the one before it", _mates_matter),
    Fault("summed-twice", "F30", "a layer's result is added up twice", _twice),
    Fault("host-value", "F13", "a host number in a launch is that of the capture", _host_value),
    Fault("frozen-input", "F7", "a replay reads rows of the capture", frozen_input),
    Fault("weak-reference", "F11", "what runs between segments holds no memory", weak_reference),
    Fault("idle-counted", "F25", "a rank without rows counts its pads as real", _idle_counted, "groups"),
    Fault("idle-unplanned", "F29", "a rank without rows runs with its last plan", _idle_unplanned, "groups"),
    Fault("stale-parcel", "F24", "a rank takes a row that no rank has sent it", stale_parcel, "groups"),
    Fault("early-return", "F26", "a rank without rows does not join the step", early_return, "groups"),
)


@dataclass(frozen=True, slots=True)
class Injection:
    """A fault in one rank, and in one of its layers where the fault is about one."""

    fault: Fault
    rank: int = 0
    layer: int = 0

    @classmethod
    def parse(cls, text: str) -> Injection:
        """From "name", "name:rank" or "name:rank:layer". Raises ConfigError for anything else."""
        name, *numbers = text.split(":")
        if len(numbers) > 2 or not all(number.isdigit() for number in numbers):
            raise ConfigError(f"fault {text!r} is none; give name:rank:layer, like unmasked-router:0:2")
        return cls(fault_named(name), *map(int, numbers))


def fault_named(name: str) -> Fault:
    """The fault of that name. Raises ConfigError when there is none."""
    for fault in FAULTS:
        if fault.name == name:
            return fault
    raise ConfigError(f"there is no fault {name!r}; choose among {', '.join(fault.name for fault in FAULTS)}")
