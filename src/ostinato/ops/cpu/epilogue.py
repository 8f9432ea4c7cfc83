"""What happens to a tile of sums before it is stored: bias, SiLU times up, rounding; and the MoE
combine.

Works on the scratch tile of `tiles` (fp32 [rows, 32]) and on whole vectors, with masks at the last columns.
Knows nothing of threads. Invariant: a stored value depends on its own row's sums alone, by the same
operations in every kind of tile and on every instruction set.

    plain panel     32 sums                 -> 32 outputs      out = sums + bias
    gated panel     16 gates | 16 ups       -> 16 outputs      out = silu(gate) * up, each with its bias
"""

from __future__ import annotations

from typing import Any

from ostinato.ops.cpu.jit import intrinsic, types
from ostinato.ops.cpu.vector_ir import F32, I64, VF, VH, Lanes, Value

# Kinds of stores, an enumeration that drivers pass as int64: bit 0 output is fp32, bit 1 gated panel.
FP32_OUT = 1
GATED = 2
_KINDS = (0, FP32_OUT, GATED, GATED | FP32_OUT)
_LOG2_E = 1.4426950408889634
_Signature = tuple[Any, Any]


class EpilogueEmitter:
    """Emits the stores of one tile; `width` outputs per row are real."""

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes

    def silu(self, x: Value) -> Value:
        """x / (1 + exp(-x)), NaN for NaN."""
        lanes, b = self.lanes, self.lanes.b
        power = b.fmul(x, lanes.floats(-_LOG2_E))
        power = b.select(b.fcmp_ordered(">", power, lanes.floats(127.0)), lanes.floats(127.0), power)
        return b.fdiv(x, b.fadd(lanes.floats(1.0), lanes.exp2(power)))

    def read(self, address: Value, fp32: bool, mask: Value | None) -> Value:
        lanes = self.lanes
        typ = VF if fp32 else VH
        found = lanes.load(address, typ) if mask is None else lanes.load_masked(address, mask, typ)
        return found if fp32 else lanes.widen(found)

    def write(self, values: Value, address: Value, fp32: bool, mask: Value | None) -> None:
        lanes = self.lanes
        stored = values if fp32 else lanes.narrow(values)
        if mask is None:
            lanes.store(stored, address)
        else:
            lanes.store_masked(stored, address, mask)

    def row(self, kind: int, sums: Value, bias: Value, out: Value, masks: list[Value | None]) -> None:
        """One row: sums and bias are addresses of 32 fp32, out of the first output."""
        lanes, b = self.lanes, self.lanes.b
        values = [
            b.fadd(lanes.load(lanes.at(sums, 64 * j), VF, 64), lanes.load(lanes.at(bias, 64 * j), VF, 64))
            for j in range(2)
        ]
        if kind & GATED:
            values = [b.fmul(self.silu(values[0]), values[1])]
        fp32 = bool(kind & FP32_OUT)
        for j, value in enumerate(values):
            place = lanes.at(out, (64 if fp32 else 32) * j)
            self.write(value, place, fp32, masks[j])

    def rows(self, kind: int, args: list[Value], masks: list[Value | None]) -> None:
        count, sums, bias, out, stride = args
        lanes = self.lanes
        lanes.each(
            count,
            lambda i: self.row(
                kind, lanes.at(sums, lanes.times(i, 128)), bias, lanes.at(out, lanes.b.mul(i, stride)), masks
            ),
        )

    def store(self, kind: Value, args: list[Value], width: Value) -> None:
        """All rows of a tile; whole panels without masks."""
        lanes, b = self.lanes, self.lanes.b

        def one_kind(k: int) -> None:
            whole = 16 if k & GATED else 32
            with b.if_else(b.icmp_signed(">=", width, lanes.i64(whole))) as (full, partial):
                with full:
                    self.rows(k, args, [None, None])
                with partial:
                    low = lanes.lanes_below(width)
                    self.rows(k, args, [low, lanes.lanes_below(b.sub(width, lanes.i64(16)))])

        self.lanes.cases(kind, _KINDS, one_kind)

    def combine(
        self, places: Value, weights: Value, slots: Value, results: Value, ahead: Value
    ) -> list[Value]:
        """Sum over the slots of a row, in slot order: weight times the 32 results at its place; -1 is nobody.

        What lies `ahead` bytes behind these results is asked for.
        """
        lanes, b = self.lanes, self.lanes.b

        def slot(k: Value, sums: list[Value]) -> list[Value]:
            place = lanes.load(lanes.at(places, lanes.times(k, 8)), I64, 8)
            before = b.block
            live, after = b.append_basic_block("live"), b.append_basic_block("next")
            b.cbranch(b.icmp_signed(">=", place, lanes.i64(0)), live, after)
            b.position_at_end(live)
            weight = lanes.splat(lanes.load(lanes.at(weights, lanes.times(k, 4)), F32, 4))
            at = lanes.at(results, lanes.times(place, 128))
            for j in range(2):
                lanes.prefetch(lanes.at(at, ahead, 64 * j))
            added = [
                lanes.fma(lanes.load(lanes.at(at, 64 * j), VF, 64), weight, total)
                for j, total in enumerate(sums)
            ]
            b.branch(after)
            b.position_at_end(after)
            merged = []
            for old, new in zip(sums, added, strict=True):
                phi = b.phi(VF)
                phi.add_incoming(old, before)
                phi.add_incoming(new, live)
                merged.append(phi)
            return merged

        return lanes.loop(slots, [lanes.floats(0.0)] * 2, slot)


@intrinsic
def store_tile(
    typing_context: Any, kind: Any, count: Any, sums: Any, bias: Any, out: Any, stride: Any, width: Any
) -> _Signature:
    """Store `count` rows of sums: `out` is the first output's address, `stride` bytes lie between rows.

    `bias` is the address of the panel's 32 fp32 (aligned to 64); `width` outputs are real, the rest
    untouched.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind, *middle, width = args
        EpilogueEmitter(Lanes(builder)).store(kind, middle, width)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), emit


@intrinsic
def combine_slots(
    typing_context: Any,
    kind: Any,
    places: Any,
    weights: Any,
    slots: Any,
    results: Any,
    ahead: Any,
    out: Any,
    width: Any,
) -> _Signature:
    """Write 32 columns of one row's MoE output: the weighted sum over its slots (zero where nobody works).

    `ahead`: bytes from the results to those that the caller comes for next.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind, places, weights, slots, results, ahead, out, width = args
        lanes = Lanes(builder)
        emitter = EpilogueEmitter(lanes)
        sums = emitter.combine(places, weights, slots, results, ahead)
        masks = [lanes.lanes_below(width), lanes.lanes_below(builder.sub(width, lanes.i64(16)))]

        def one_kind(k: int) -> None:
            fp32 = bool(k & FP32_OUT)
            for j, value in enumerate(sums):
                place = lanes.at(out, (64 if fp32 else 32) * j)
                emitter.write(value, place, fp32, masks[j])

        emitter.lanes.cases(kind, _KINDS[:2], one_kind)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), emit


@intrinsic
def scale_row(typing_context: Any, source: Any, weight: Any, out: Any, fp32: Any, columns: Any) -> _Signature:
    """out = source * weight over `columns` values, the weight first rounded to the values' type."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, weight, out, fp32, columns = args
        lanes = Lanes(builder)
        emitter = EpilogueEmitter(lanes)
        factor = lanes.splat(lanes.load(weight, F32, 4))
        blocks = builder.sdiv(builder.add(columns, lanes.i64(15)), lanes.i64(16))

        def one_kind(kind: int) -> None:
            wide = bool(kind)
            scale = factor if wide else lanes.widen(lanes.narrow(factor))

            def block(i: Value) -> None:
                offset = lanes.times(i, 64 if wide else 32)
                mask = lanes.lanes_below(builder.sub(columns, lanes.times(i, 16)))
                value = emitter.read(lanes.at(source, offset), wide, mask)
                emitter.write(builder.fmul(value, scale), lanes.at(out, offset), wide, mask)

            lanes.each(blocks, block)

        emitter.lanes.cases(fp32, (0, 1), one_kind)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), emit
