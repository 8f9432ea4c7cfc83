"""Capture and replay on the CPU, with the semantics of a CUDA graph.

A tape is a flat list of calls: kernels launched through the stream, called again as they are, and torch ops
met between launches, re-run into the tensors they produced when recorded. Host values are frozen, addresses
fixed, every tensor a call touches is held. Knows nothing of buffers or batches. Invariant: what cannot repeat
(a host read of device data, a data-dependent shape, randomness) is refused while recording, never later.

    between launches: torch op  -> recorded, replayed into its recorded outputs
                      launch(k) -> recorded as one call; torch ops inside k are k's own affair
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ostinato.errors import CaptureError
from ostinato.graphs.backends import kernel_name
from ostinato.graphs.stream import EagerOp, EagerStream, Kernel, Stream, Tensors

T = TypeVar("T")
Call = Callable[[], object]

_KEEP_ON_DEVICE = "keep the value on the device, pass it in a slot, or make it part of the graph key"

_HOST_READS = frozenset(
    {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__}
)
"""Reads that bypass the dispatcher."""

_UNINITIALISED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_COPIES = frozenset({"clone", "_to_copy"})
_FACTORY_OPTIONS = frozenset({"dtype", "layout", "device", "pin_memory"})


class Tape(Generic[T]):
    """A recorded callable. Holds every tensor its calls touch, so none of their memory can be reused."""

    __slots__ = ("_calls", "_whole", "num_launches", "outputs", "trace")

    def __init__(self, outputs: T, calls: list[tuple[str, Call]], num_launches: int) -> None:
        self.outputs = outputs
        self.num_launches = num_launches
        self.trace = tuple(name for name, _ in calls)
        self._calls = tuple(_chained(call for _, call in calls))
        only = self._calls[0] if len(self._calls) == 1 else None
        self._whole = only if hasattr(only, "chain") else None

    def replay(self) -> T:
        """Repeat every call on what the memory holds now; `outputs` are overwritten and returned."""
        if self._whole is not None:
            self._whole()
            return self.outputs
        with torch.no_grad():
            for call in self._calls:
                call()
        return self.outputs


def _chained(calls: Iterable[Call]) -> Iterator[Call]:
    """A call may offer `chain(calls) -> call`, if it runs no torch op; neighbours that offer the same one become one
    call, which offers it again.
    """
    for chain, neighbours in groupby(calls, key=lambda call: getattr(call, "chain", None)):
        run = list(neighbours)
        if chain is None or len(run) == 1:
            yield from run
        else:
            yield chain(run)


class TapeBackend:
    """Records a callable while it runs, so a capture yields the outputs of the step as well."""

    name = "tape"
    captures = True
    runs_while_capturing = True
    warmup = 1

    def capture(self, fn: Callable[[Stream], T], warmup: int = 1) -> Tape[T]:
        """Call `fn` `warmup` times, then record it.

        Raises CaptureError, naming the operation and the remedy, for what a replay could not repeat. State
        that `fn` builds lazily must exist before: by a warm-up, or because it was built ahead.
        """
        self.warm_up(lambda: fn(EagerStream()), warmup)
        recording = TapeRecording()
        try:
            outputs = fn(recording.stream)
        except BaseException:
            recording.abort()
            raise
        return recording.close(outputs)

    def warm_up(self, fn: Callable[[], object], times: int) -> None:
        with torch.no_grad():
            for _ in range(times):
                fn()

    def record(self) -> TapeRecording:
        return TapeRecording()


class TapeRecording:
    """A tape while it grows."""

    __slots__ = ("_modes", "_recorder", "stream")

    def __init__(self) -> None:
        self._recorder = _Recorder()
        self.stream: Stream = _TapeStream(self._recorder)
        self._modes = ExitStack()
        for mode in (torch.no_grad(), _RefuseHostReads(self._recorder), _RecordOps(self._recorder)):
            self._modes.enter_context(mode)

    def close(self, outputs: T) -> Tape[T]:
        self._modes.close()
        return Tape(outputs, self._recorder.calls, self._recorder.num_launches)

    def end(self) -> Tape[None]:
        return self.close(None)

    def abort(self) -> None:
        self._modes.close()


class _Recorder:
    """The list of calls while it grows; paused inside a launch, whose body is replayed as a whole."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Call]] = []
        self.num_launches = 0
        self.paused = False
        self._out_forms: dict[OpOverload[Any, Any], OpOverload[Any, Any] | None] = {}

    def __enter__(self) -> None:
        self.paused = True

    def __exit__(self, kind: type[BaseException] | None, error: object, at: TracebackType | None) -> None:
        self.paused = False

    def add_launch(self, kernel: Kernel, args: tuple[Any, ...]) -> None:
        """A kernel may offer `bind(*args) -> callable()`: its cheapest form for the same arguments again."""
        bind = getattr(kernel, "bind", None)
        call = bind(*args) if callable(bind) else partial(kernel, *args)
        self.calls.append((kernel_name(kernel), call))
        self.num_launches += 1

    def add_op(
        self, op: OpOverload[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        name = str(op)
        if name == "aten.lift_fresh.default":
            # A tensor made of host values: each replay starts from the same ones, as each eager call does.
            self.calls.append((name, partial(out.copy_, out.clone())))
            return
        inputs = {t.untyped_storage().data_ptr() for t in tensors_of((args, kwargs)) if t.numel()}
        outs = list(tensors_of(out))
        fresh = [t.numel() > 0 and t.untyped_storage().data_ptr() not in inputs for t in outs]
        packet = op.overloadpacket.__name__
        if op._schema.is_mutable:
            call = partial(op, *args, **kwargs)
            self.calls.append((name, partial(_rerun, call, outs, fresh) if any(fresh) else call))
        elif packet in _UNINITIALISED or not any(fresh):
            return  # memory whose contents nobody may rely on; or a view, which follows its base by itself
        elif packet in _COPIES and len(outs) == 1:
            self.calls.append((name, partial(outs[0].copy_, args[0])))
        elif (form := self._out_form(op)) is not None and all(fresh):
            self.calls.append((name, partial(form, *args, **_out_arguments(form, kwargs, out))))
        else:
            self.calls.append((name, partial(_rerun, partial(op, *args, **kwargs), outs, fresh)))

    def _out_form(self, op: OpOverload[Any, Any]) -> OpOverload[Any, Any] | None:
        if op not in self._out_forms:
            self._out_forms[op] = _find_out_form(op)
        return self._out_forms[op]


class _TapeStream:
    __slots__ = ("_recorder",)

    def __init__(self, recorder: _Recorder) -> None:
        self._recorder = recorder

    @property
    def capturing(self) -> bool:
        return True

    def launch(self, kernel: Kernel, /, *args: Any) -> None:
        if self._recorder.paused:  # a launch inside a kernel is part of that kernel
            kernel(*args)
            return
        with self._recorder:
            kernel(*args)
            self._recorder.add_launch(kernel, args)

    def outside(self, kernel: Kernel, /, *args: Any) -> None:
        self.launch(kernel, *args)  # a replay calls it again, host work included

    def eager(self, op: EagerOp, view: Any, inputs: Tensors, outputs: Tensors) -> None:
        op(self, view, *inputs, *outputs)


class _RefuseHostReads(TorchFunctionMode):
    """Catches the ways to read a tensor on the host that never reach the dispatcher."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _HOST_READS and not self._recorder.paused:
            raise CaptureError(
                f"Tensor.{func.__name__} reads device data on the host between launches, which a replay "
                f"would not repeat; {_KEEP_ON_DEVICE}, or compute inside a launched kernel"
            )
        return func(*args, **(kwargs or {}))


class _RecordOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every torch op; records those between launches."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Left alone, torch imports its compiler at the first recorded op, which takes a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._recorder.paused:
            return func(*args, **kwargs)
        _refuse_unrepeatable(func, args, kwargs)
        out = func(*args, **kwargs)
        self._recorder.add_op(func, args, kwargs, out)
        return out


def _refuse_unrepeatable(op: OpOverload[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise CaptureError for an op whose replay would differ from running it again."""
    tags = op.tags
    if torch.Tag.data_dependent_output in tags:
        raise CaptureError(
            f"{op} reads device data on the host between launches, which a replay would not repeat; "
            f"{_KEEP_ON_DEVICE}"
        )
    if torch.Tag.dynamic_output_shape in tags and _shape_follows_data(op, args, kwargs):
        raise CaptureError(
            f"the shape of what {op} returns depends on device data; use a form of fixed shape (a mask with "
            "torch.where, an index of fixed length)"
        )
    if torch.Tag.nondeterministic_seeded in tags and _draws(op, args, kwargs):
        raise CaptureError(
            f"{op} draws random numbers, which would be new at each replay; fill a registered buffer "
            "with noise before the step, or derive it from a counter"
        )
    if torch.Tag.inplace_view in tags:
        raise CaptureError(
            f"{op} changes the shape or memory of a recorded tensor; use its out-of-place form"
        )


def _shape_follows_data(op: OpOverload[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    packet = op.overloadpacket.__name__
    if packet == "index":
        return any(t.dtype in (torch.bool, torch.uint8) for t in tensors_of(args[1]))
    if packet == "repeat_interleave":
        return kwargs.get("output_size") is None
    return True


def _draws(op: OpOverload[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """False for an op that could draw, but not with these arguments (attention without dropout)."""
    for i, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            value = args[i] if i < len(args) else kwargs.get("dropout_p", argument.default_value)
            return value != 0
    return True


def _find_out_form(op: OpOverload[Any, Any]) -> OpOverload[Any, Any] | None:
    """The overload of `op` that writes into given tensors and otherwise takes the same arguments."""
    packet = op.overloadpacket
    wanted = [
        (a.name, str(a.type))
        for a in op._schema.arguments
        if a.name not in _FACTORY_OPTIONS or not a.kwarg_only
    ]
    for overload in packet.overloads():
        form: OpOverload[Any, Any] = getattr(packet, overload)
        outs = [a for a in form._schema.arguments if a.is_out]
        takes = [
            (a.name, str(a.type))
            for a in form._schema.arguments
            if not a.is_out and (a.name not in _FACTORY_OPTIONS or not a.kwarg_only)
        ]
        if outs and takes == wanted and len(outs) == len(op._schema.returns):
            return form
    return None


def _out_arguments(form: OpOverload[Any, Any], kwargs: dict[str, Any], out: Any) -> dict[str, Any]:
    """`kwargs` without what `form` does not take, and with the recorded outputs."""
    arguments = form._schema.arguments
    kept = {a.name for a in arguments if not a.is_out}
    names = [a.name for a in arguments if a.is_out]
    outs = (out,) if len(names) == 1 else tuple(out)
    return {k: v for k, v in kwargs.items() if k in kept} | dict(zip(names, outs, strict=True))


def _rerun(call: Call, outs: list[torch.Tensor], fresh: list[bool]) -> None:
    """Run again and copy what is new memory into the recorded outputs."""
    for recorded, now, new in zip(outs, tensors_of(call()), fresh, strict=True):
        if new:
            recorded.copy_(now)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested tuples, lists and dicts, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)
