"""A recorded step once more: from a replay trace to its outputs, eager and captured, beside those that were recorded.

    trace ─▶ engine of the same options ─▶ pages and page table restored ─▶ eager; captured on a dummy step, replayed

Knows nothing of requests. Invariant: nothing is compared unless model, kernels and layout are those of the recording,
since otherwise other bits would prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ostinato.config import EngineConfig
from ostinato.engine.batch import ForwardBatch, capture_batch, decode_batch, extend_batch
from ostinato.engine.engine import Engine
from ostinato.engine.progress import Report
from ostinato.engine.shadow import Named, real_outputs, told, written_pages
from ostinato.engine.trace import EXTEND_FIELDS, Trace, checkpoint_identity
from ostinato.engine.worker import Worker
from ostinato.errors import TraceError
from ostinato.graphs.audit import Difference, first_difference
from ostinato.kv.pool import KVPool
from ostinato.padding import StepShape


@dataclass(frozen=True, slots=True)
class Rerun:
    """How the step's outputs compare: of a run now ("eager", "replayed") with a recorded one ("seen", "expected").

    seen: what the graph gave while serving; expected: what an eager run gave then. None where all bits are equal.
    """

    header: dict[str, Any]
    differences: dict[tuple[str, str], Difference | None]

    @property
    def agrees(self) -> bool:
        """Whether all four outputs are the same."""
        return not any(self.differences.values())

    def same(self, now: str, recorded: str) -> bool:
        return self.differences[now, recorded] is None

    def cell(self, now: str, recorded: str) -> str:
        """For people."""
        found = self.differences[now, recorded]
        return "same bits" if found is None else told(found, self.header["outputs"])

    @property
    def verdict(self) -> str:
        """What follows, for people."""
        if self.agrees:
            return "eager and graph agree, now as when it was recorded"
        if self.same("eager", "expected"):
            if self.same("replayed", "seen"):
                return "the fault repeats: a replayed graph gives what was recorded as wrong, eager does not"
            if self.same("replayed", "expected"):
                return (
                    "a graph captured now is right, so the one that served was not what a capture gives: its memory or "
                    "its inputs had been changed"
                )
            return "eager repeats, a graph captured now gives a third result: the step cannot be captured as it is"
        if self.same("eager", "seen"):
            return "the recorded graph's result repeats, the recorded eager one does not: that one was wrong"
        return "neither recorded result repeats: this machine computes differently, or the step is not deterministic"


def rerun(
    trace: Trace, model: str | None, report: Report, opened: Callable[[Engine], None] | None = None
) -> Rerun:
    """Load the trace's model (or `model`, which must be the same checkpoint) and run its step in both ways.

    opened: called with the engine before the step.

    Raises TraceError where the step cannot be restored here, ConfigError or ModelError where no engine can be loaded.
    """
    _check_layout(trace)
    engine = Engine(_config(trace, model), report)
    try:
        _check_engine(trace, engine)
        if opened is not None:
            opened(engine)
        now = _run(engine.worker, trace.shape, _restore(trace, engine.worker))
    finally:
        engine.close()
    recorded = {name: trace.group(name) for name in ("seen", "expected")}
    order = trace.header["outputs"]
    differences = {
        (a, b): first_difference([one[name].cpu() for name in order], [other[name] for name in order])
        for a, one in now.items()
        for b, other in recorded.items()
    }
    return Rerun(trace.header, differences)


def _run(worker: Worker, shape: StepShape, batch: ForwardBatch) -> dict[str, Named]:
    extends, rows = shape.mode.is_extend, shape.raw_num_tokens
    runner, tokens = (worker.prefill, None) if extends else (worker.decode, worker.chosen)

    def given(outputs: torch.Tensor) -> Named:
        return real_outputs(outputs, tokens, rows) | written_pages(worker.pool, batch)

    eager = given(runner.again(shape, batch))
    # On a step of dummies, as a server captures ahead of time: what a capture freezes of its inputs must not matter.
    runner.capture([shape], capture_batch)
    return {"eager": eager, "replayed": given(runner.run(shape, batch))}


def _check_layout(trace: Trace) -> None:
    header, parallel = trace.header, trace.header["parallel"]
    if parallel["tp"] > 1:
        raise TraceError(
            f"the step ran on {parallel['tp']} ranks (tp {parallel['tp']}, dp {parallel['dp']}, ep {parallel['ep']}), "
            "and the trace holds one rank's part; only steps of one process can be run again: record one with tp 1"
        )
    if header["left_out"]:
        raise TraceError(
            f"the trace lacks {header['left_out']}; record a step of fewer or shorter requests "
            "(--max-running-requests, --context-length)"
        )


def _config(trace: Trace, model: str | None) -> EngineConfig:
    config, pages = trace.config, trace.tensors["k.0"].shape[0]
    return config.replace(
        model=config.model if model is None else model,
        num_pages=pages + 1,
        kv_memory=None,
        capture="lazy",
        shadow_rate=0.0,
        trace_steps=0,
    )


def _check_engine(trace: Trace, engine: Engine) -> None:
    here, recorded = checkpoint_identity(engine.directory), trace.header["model"]["identity"]
    if here != recorded:
        raise TraceError(
            f"{engine.directory} is another checkpoint (identity {here[:12]}) than the trace's {recorded[:12]}, "
            f"{trace.header['model']['name'] or 'the bundled demo'}; give that one with --model"
        )
    worker, kernels = engine.worker, trace.header["kernels"]
    for what, name in (("ops", worker.model.ops.name), ("attention", worker.attention_name)):
        if name != kernels[what]:
            raise TraceError(
                f"the trace was recorded with {what} {kernels[what]!r}, this machine takes {name!r}, which lays out KV "
                "pages and rounds differently; run it on such a machine"
            )


def _restore(trace: Trace, worker: Worker) -> ForwardBatch:
    """Fill pages 1, 2, … and page-table rows 1, 2, … of the pool; the step's batch over them."""
    pool, tensors = worker.pool, trace.tensors
    rows, table = trace.group("batch"), tensors["page_table"]
    _check_ranges(rows, table, pool, worker.model.config.vocab_size)
    for layer, (k, v) in enumerate(zip(pool.k, pool.v, strict=True)):
        for name, memory in (("k", k), ("v", v)):
            saved = tensors[f"{name}.{layer}"]
            memory.view(pool.num_pages, pool.page_size, *memory.shape[1:])[1 : saved.shape[0] + 1] = saved
    pool.page_table[1 : table.shape[0] + 1, : table.shape[1]] = table
    where = rows["req_pool_indices"], rows["out_cache_loc"]
    if not trace.shape.mode.is_extend:
        return decode_batch(rows["input_ids"], rows["seq_lens"], *where)
    lacking = [name for name in EXTEND_FIELDS if name not in rows]
    if lacking:
        raise TraceError(f"the trace lacks {', '.join(lacking)} of a prefill; it is damaged")
    lens, prefix = rows["extend_seq_lens"], rows["extend_prefix_lens"]
    wanted = rows["logit_rows"][: int(rows["num_logit_rows"])].tolist()
    return extend_batch(rows["input_ids"], lens, prefix, *where, mode=trace.shape.mode, logit_rows=wanted)


def _check_ranges(rows: Named, table: torch.Tensor, pool: KVPool, vocab_size: int) -> None:
    """Raise TraceError for what would make a kernel leave its memory: a file may come from anywhere."""
    requests, width = table.shape
    wanted = {"logit_rows": len(rows["input_ids"]), "num_logit_rows": len(rows["input_ids"]) + 1}
    limits = {
        "page_table": (table, pool.num_pages),
        "input_ids": (rows["input_ids"], vocab_size),
        "out_cache_loc": (rows["out_cache_loc"], pool.num_pages * pool.page_size),
        "req_pool_indices": (rows["req_pool_indices"], requests + 1),
        "seq_lens": (rows["seq_lens"], width * pool.page_size + 1),
        **{name: (rows[name], count) for name, count in wanted.items() if name in rows},
    }
    for name, (values, limit) in limits.items():
        if values.numel() and not 0 <= int(values.min()) <= int(values.max()) < limit:
            raise TraceError(
                f"the trace's {name} hold {values.tolist()[:8]}, outside 0 to {limit - 1}; it is damaged"
            )
    if requests > pool.max_requests or width > pool.page_table.shape[1]:
        raise TraceError(
            f"the trace's page table is {requests} x {width}, its engine's smaller; it is damaged"
        )


def default_trace(directory: Path) -> Path:
    """The newest trace in a directory. Raises TraceError when there is none."""
    found = sorted(directory.glob("*.trace"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise TraceError(f"{directory} holds no .trace file; record one with --trace-steps, or give its path")
    return found[-1]
