"""Static input buffers at fixed addresses, and the one writer that fills them.

A captured graph reads the buffers of a `GraphBufferRegistry`; before each step `fill_from` resets the tails,
copies the real rows and computes what depends on the step's widths, in that order. `advance` is its other form:
the same rows, one step further, from what is there. Only padded views leave. Knows nothing of what the buffers
mean. Invariant: after either no row below the padded width is stale, unless the slot's own policy keeps it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch

from ostinato.graphs.slots import FillContext, GraphSlot, PaddingPolicy
from ostinato.graphs.stream import Stream

B = TypeVar("B")

MAX_PLANS = 512
"""Fill plans remembered per registry; steady decoding needs a handful."""

_ALWAYS_WRITTEN = (PaddingPolicy.ZERO, PaddingPolicy.FILL_SENTINEL)


class BufferPool:
    """Buffers shared by several registries: equal name, size, dtype and device means one tensor.

    The first registrant is canonical, so build the registry with the largest buffers first. Pass the pool to
    each registry that shall share; there is no other way in.
    """

    def __init__(self) -> None:
        self._buffers: dict[
            tuple[str, int, torch.dtype, torch.device], tuple[torch.Tensor, float | None]
        ] = {}

    def take(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, pad: float | None
    ) -> tuple[torch.Tensor, bool]:
        """The shared tensor viewed as `shape` (zeros if new), and whether it is new.

        Raises ValueError when its sharers disagree on the pad value: each would undo the other's fill.
        """
        key = (name, math.prod(shape), dtype, device)
        if key not in self._buffers:
            self._buffers[key] = (torch.zeros(shape, dtype=dtype, device=device), pad)
            return self._buffers[key][0], True
        buffer, first_pad = self._buffers[key]
        if first_pad != pad:
            raise ValueError(
                f"slot {name!r} is shared with pad_value {first_pad} and asked for with {pad}; use one "
                "pad_value, or registries without a common pool"
            )
        return buffer.view(shape), False


@dataclasses.dataclass(frozen=True, slots=True)
class _Copy:
    """One copy of a fill plan: rows of a batch attribute into the head of a buffer."""

    name: str
    head: torch.Tensor
    shape: torch.Size
    dtype: torch.dtype
    grouped: bool


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    """Everything about a fill that depends on the widths alone, made once per width."""

    zero_tails: list[list[torch.Tensor]]
    fill_tails: list[tuple[torch.Tensor, float]]
    copies: list[_Copy]
    views: list[tuple[str, torch.Tensor, bool]]


class GraphBufferRegistry(Generic[B]):
    """Named static buffers for batches of up to `max_bs` requests and `max_tokens` rows.

    view_fields: (batch, ctx) -> further host fields of the view, for values that padding changes.
    verdict: (ctx) -> what the host decided about a step of these widths (for example "rows are sharded"). A
        captured graph keeps it; `GraphRunner` refuses to replay under another verdict.
    advance: (view, stream) -> None, launches what turns the inputs of a step into those of the next one for the same
        requests. It must leave tails, and fields that a step's widths decide, as they are.
    """

    def __init__(
        self,
        max_bs: int,
        max_tokens: int,
        *,
        device: torch.device | str = "cpu",
        pool: BufferPool | None = None,
        view_fields: Callable[[B, FillContext], Mapping[str, Any]] | None = None,
        verdict: Callable[[FillContext], Hashable] | None = None,
        advance: Callable[[B, Stream], None] | None = None,
    ) -> None:
        self.max_bs = max_bs
        self.max_tokens = max_tokens
        self.device = torch.empty(0, device=device).device  # with its index, as buffers report it
        self._pool = pool
        self._view_fields = view_fields
        self._verdict = verdict
        self._advance = advance
        self.can_advance = advance is not None
        self.writes = 0  # counts everything that may have changed the buffers, but `advance`
        self._slots: dict[str, GraphSlot] = {}
        self._disabled: dict[str, GraphSlot] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._plans: dict[tuple[int, int, int, int], _Plan] = {}
        self._fields: dict[type, tuple[str, ...]] = {}
        self._sourced: list[tuple[GraphSlot, torch.Tensor]] = []
        self._hooks: list[tuple[GraphSlot, torch.Tensor]] = []

    # --- building -------------------------------------------------------------------------------------------

    def register_slot(self, slot: GraphSlot, *, bind: torch.Tensor | None = None) -> None:
        """Add `slot`: allocated here (zeros, then its pad value), or adopted as it is with `bind`.

        Raises ValueError for a name that is registered already, and for a `bind` of another shape or dtype.
        A disabled slot is remembered and nothing else.
        """
        if slot.name in self._slots or slot.name in self._disabled:
            raise ValueError(f"slot {slot.name!r} is registered already; names are unique")
        if not slot.enabled:
            self._disabled[slot.name] = slot
            return
        shape = tuple(slot.shape_fn(self.max_bs, self.max_tokens))
        if bind is None:
            buffer = self._allocate(slot, shape)
        elif tuple(bind.shape) != shape or bind.dtype != slot.dtype:
            raise ValueError(
                f"slot {slot.name!r} needs {shape} {slot.dtype}, the bound tensor has {tuple(bind.shape)} "
                f"{bind.dtype}; bind one that matches exactly"
            )
        else:
            buffer = bind
        self._slots[slot.name] = slot
        self._buffers[slot.name] = buffer
        if slot.copy_from_fb and slot.source_fn is not None:
            self._sourced.append((slot, buffer))
        if slot.post_fill is not None:
            self._hooks.append((slot, buffer))
        self._plans.clear()

    def _allocate(self, slot: GraphSlot, shape: tuple[int, ...]) -> torch.Tensor:
        device = self.device if slot.device is None else torch.device(slot.device)
        if self._pool is None:
            buffer, new = torch.zeros(shape, dtype=slot.dtype, device=device), True
        else:
            buffer, new = self._pool.take(slot.name, shape, slot.dtype, device, slot.pad_value)
        filled = slot.padding_policy in (PaddingPolicy.FILL_SENTINEL, PaddingPolicy.FILL_ONCE)
        if new and filled and slot.pad_value is not None:
            buffer.fill_(slot.pad_value)
        return buffer

    # --- asking ---------------------------------------------------------------------------------------------

    @property
    def slot_names(self) -> tuple[str, ...]:
        """Names of the enabled slots, in order of registration."""
        return tuple(self._slots)

    def has_slot(self, name: str) -> bool:
        return name in self._slots

    def slots(self) -> Iterator[GraphSlot]:
        """The enabled slots, in order of registration."""
        return iter(self._slots.values())

    def buffer(self, name: str) -> torch.Tensor:
        """The whole buffer, for whoever owns the registry (tests, audit). What computes gets padded views."""
        self.writes += 1  # whoever has it may write
        return self._buffers[name]

    def verdict(self, ctx: FillContext) -> Hashable:
        """What a graph captured at these widths takes for granted; None when nothing was declared."""
        return None if self._verdict is None else self._verdict(ctx)

    # --- writing --------------------------------------------------------------------------------------------

    def fill_from(self, batch: B, ctx: FillContext) -> None:
        """Write one step: tails, then copies, then the `post_fill` hooks; all on the current stream.

        Rows past the padded width are never touched. A field that is None (or no tensor) is skipped.
        Raises ValueError for rows that do not match the context, or a context that the buffers cannot hold,
        and RuntimeError for a FILL_SENTINEL slot without a pad value.
        """
        self.writes += 1
        plan = self._plan(ctx)
        for tails in plan.zero_tails:
            torch._foreach_zero_(tails)
        for tail, value in plan.fill_tails:
            tail.fill_(value)
        groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for copy in plan.copies:
            source = getattr(batch, copy.name, None)
            if not isinstance(source, torch.Tensor):
                continue
            if source.shape != copy.shape:
                self._check_rows(copy, source)
            if copy.grouped and source.device == self.device:
                key = (copy.dtype, source.dtype)
                if key not in groups:
                    groups[key] = ([], [])
                groups[key][0].append(copy.head)
                groups[key][1].append(source)
            else:
                copy.head.copy_(source, non_blocking=True)
        for slot, buffer in self._sourced:
            rows = slot.source_fn(batch, ctx) if slot.source_fn is not None else None
            if rows is not None:
                self._copy_sourced(slot, buffer, rows)
        for heads, sources in groups.values():
            torch._foreach_copy_(heads, sources)
        for slot, buffer in self._hooks:
            if slot.post_fill is not None:
                slot.post_fill(buffer, batch, ctx)

    def advance(self, view: B, stream: Stream) -> None:
        """Write the next step of the requests that `view` shows, by launches alone: it may be captured."""
        assert self._advance is not None, "this registry was built without `advance`"
        self._advance(view, stream)

    def reset_for_capture(self) -> None:
        """Make every buffer that is written at each step benign, whole: zeros, or its pad value.

        Before a capture, so that one in the midst of serving indexes with nothing stale.
        """
        self.writes += 1
        for name, slot in self._slots.items():
            if slot.padding_policy is PaddingPolicy.ZERO:
                self._buffers[name].zero_()
            elif slot.padding_policy is PaddingPolicy.FILL_SENTINEL and slot.pad_value is not None:
                self._buffers[name].fill_(slot.pad_value)

    # --- reading --------------------------------------------------------------------------------------------

    def extract_buffer(self, template: B, ctx: FillContext) -> B:
        """A shallow copy of `template` whose slot fields are the buffers' leading padded rows.

        `batch_size` becomes the padded one. A plain slot whose field is None stays None, so that no stale
        buffer shows; computed slots are always there, dotted names never. With `ctx.real()` all row fields
        narrow together. `template` is a dataclass instance, which is left alone.
        """
        plan = self._plan(ctx)
        changes: dict[str, Any] = {"batch_size": ctx.padded_bs}
        for name, view, computed in plan.views:
            if computed or getattr(template, name, None) is not None:
                changes[name] = view
        if self._view_fields is not None:
            changes.update(self._view_fields(template, ctx))
        return self._replace(template, changes)

    def _replace(self, template: B, changes: dict[str, Any]) -> B:
        """`dataclasses.replace` without its overhead, which a decode step would feel."""
        cls = type(template)
        names = self._fields.get(cls)
        if names is None:
            if not dataclasses.is_dataclass(cls):
                raise TypeError(f"a batch must be a dataclass instance, got {cls.__name__}")
            names = tuple(field.name for field in dataclasses.fields(cls))
            missing = sorted(
                n for n, s in self._slots.items() if not s.dotted and s.computed and n not in names
            )
            if missing:
                raise ValueError(
                    f"{cls.__name__} has no field {missing[0]!r} to show the computed slot in; add it"
                )
            self._fields[cls] = names
        view = object.__new__(cls)
        for name in names:
            object.__setattr__(view, name, changes[name] if name in changes else getattr(template, name))
        return view

    # --- plans ----------------------------------------------------------------------------------------------

    def _plan(self, ctx: FillContext) -> _Plan:
        key = (ctx.raw_bs, ctx.padded_bs, ctx.raw_num_tokens, ctx.padded_num_tokens)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._make_plan(ctx)
        return plan

    def _make_plan(self, ctx: FillContext) -> _Plan:
        self._check_context(ctx)
        zero: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        fills: list[tuple[torch.Tensor, float]] = []
        copies: list[_Copy] = []
        views: list[tuple[str, torch.Tensor, bool]] = []
        for name, slot in self._slots.items():
            buffer = self._buffers[name]
            raw, padded = ctx.rows(slot.axis)
            if slot.axis != "none" and raw < padded and slot.padding_policy in _ALWAYS_WRITTEN:
                value = self._pad_value(slot)
                tail = slot.tail(buffer, raw, padded)
                if value == 0:
                    zero.setdefault((tail.dtype, tail.device), []).append(tail)
                else:
                    fills.append((tail, value))
            if slot.copy_from_fb and slot.source_fn is None:
                head = slot.head(buffer, raw)
                grouped = buffer.device == self.device
                copies.append(_Copy(name, head, head.shape, head.dtype, grouped))
            if not slot.dotted:
                views.append((name, slot.head(buffer, padded), slot.computed))
        return _Plan(list(zero.values()), fills, copies, views)

    @staticmethod
    def _pad_value(slot: GraphSlot) -> float:
        if slot.padding_policy is PaddingPolicy.ZERO:
            return 0
        if slot.pad_value is None:
            raise RuntimeError(f"slot {slot.name!r} is FILL_SENTINEL without a pad_value; give it one")
        return slot.pad_value

    def _check_context(self, ctx: FillContext) -> None:
        for axis, limit in (("bs", self.max_bs), ("tokens", self.max_tokens)):
            raw, padded = ctx.rows("bs" if axis == "bs" else "tokens")
            if not 0 <= raw <= padded <= limit:
                raise ValueError(
                    f"a step of {raw} real and {padded} padded rows ({axis}) does not fit the buffers, "
                    f"which hold {limit}; build the registry for the largest step"
                )

    @staticmethod
    def _check_rows(copy: _Copy, source: torch.Tensor) -> None:
        """One element for one is fine; any other mismatch might be broadcast in silence."""
        if source.numel() == copy.head.numel() == 1:
            return
        raise ValueError(
            f"batch field {copy.name!r} has shape {tuple(source.shape)}, the step's real rows need "
            f"{tuple(copy.shape)}"
        )

    @staticmethod
    def _copy_sourced(slot: GraphSlot, buffer: torch.Tensor, rows: torch.Tensor) -> None:
        length = rows.shape[-1] if slot.slice_fn is not None and rows.dim() == 2 else rows.shape[0]
        head = buffer[:length] if slot.axis == "none" else slot.head(buffer, length)
        if head.shape != rows.shape:
            raise ValueError(
                f"slot {slot.name!r} got rows of shape {tuple(rows.shape)}, its buffer holds "
                f"{tuple(buffer.shape)}"
            )
        head.copy_(rows, non_blocking=True)
