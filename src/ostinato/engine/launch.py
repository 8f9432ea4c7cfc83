"""From an `EngineConfig` to a ready worker and scheduler: the one place where parts are chosen and sized.

Everything is reserved here, before the first request. Knows nothing of requests. Invariant: what does not fit together
is refused here, with the field's name, not in the middle of a step.
"""

from __future__ import annotations

import os
import time
import weakref
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ostinato.attention.backend import AttentionBackend
from ostinato.config import DEMO_NAME, EngineConfig, cache_dir
from ostinato.engine.coordinator import Coordinator
from ostinato.engine.device import choose_device, graph_backend
from ostinato.engine.kernels import Kernels, choose_kernels
from ostinato.engine.layout import place_experts, row_shares
from ostinato.engine.memory import memory_for
from ostinato.engine.plan import StepPlan
from ostinato.engine.prefill_delayer import (
    STATE_WORDS,
    DelayerOptions,
    LocalLoad,
    PassExecutor,
    PrefillDelayer,
)
from ostinato.engine.prefill_graph import PrefillAbility, choose_prefill_graph, prefill_slots
from ostinato.engine.progress import Report
from ostinato.engine.replan import SERVING_COSTS, Replanner
from ostinato.engine.residency import Residency
from ostinato.engine.scheduler import PrefillNegotiation, Scheduler, SchedulerOptions
from ostinato.engine.shadow import CheckOptions
from ostinato.engine.trace import TraceWriter
from ostinato.engine.worker import Worker, WorkerOptions
from ostinato.errors import ConfigError
from ostinato.graphs import (
    Backend,
    decode_buckets,
    prefill_buckets,
)
from ostinato.kv.ahead import give_memory_ahead
from ostinato.kv.pages import PageAllocator
from ostinato.kv.pool import KVLayout, KVPool
from ostinato.kv.radix import RadixCache
from ostinato.models.build import load_model
from ostinato.models.config import ModelConfig, read_config
from ostinato.models.fetch import FETCHABLE, fetched
from ostinato.models.hub import resolve_model
from ostinato.models.sharding import ParallelPlan, Sharding, placed_layers
from ostinato.moe.load import ExpertLoad
from ostinato.moe.rebalance import Rebalancer
from ostinato.moe.routing import Consumers
from ostinato.ops.cpu.threads import pin_threads
from ostinato.padding import ShapeRules, align_up
from ostinato.parallel.rendezvous import World, single_world

DEFAULT_KV_BYTES = 1 << 30
"""KV memory at most when neither kv_memory nor num_pages is given."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Everything that is reserved, in tokens, rows, requests and pages."""

    context_length: int
    max_bs: int
    max_num_tokens: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class Parts:
    """A launched engine's parts."""

    directory: Path
    model_config: ModelConfig
    worker: Worker
    scheduler: Scheduler
    passes: PassExecutor | None = None

    def schedule(self) -> StepPlan | None:
        """The next step. Where prefills wait for other ranks, this is one pass, which all ranks take together.

        There is no pass in a turn of decode rows: all ranks know that none prefills, and no wait is cut short by it.
        """
        scheduler, passes = self.scheduler, self.passes
        if self.worker.coordinator.turn.decode:
            return scheduler.decode_turn()
        if passes is None:
            return scheduler.schedule()
        usage = 1.0 - scheduler.kv.available_tokens / scheduler.kv.total_tokens
        passes.begin(LocalLoad(len(scheduler.running), len(scheduler.waiting), usage))
        plan = scheduler.schedule()
        passes.end(0 if plan is None else sum(row.prefill for row in plan.rows))
        return plan

    def prefill_delays(self) -> dict[str, int]:
        """Verdicts of those passes by reason; empty where there are none."""
        return {} if self.passes is None else dict(self.passes.delayer.counts)


def launch(config: EngineConfig, report: Report, world: World | None = None) -> Parts:
    """Load the model, reserve all memory, and capture if the config says at startup. `world`: this rank among others.

    Raises ConfigError or ModelError with the value and the remedy.
    """
    device = choose_device(config)
    threads = config.threads or os.cpu_count() or 1
    if threads != torch.get_num_threads():  # the call makes one more pool, which nobody uses
        torch.set_num_threads(threads)
    directory = locate_model(config.model)
    model_config = read_config(directory, dtype=_dtype(config))
    world = world or single_world()
    layers = place_experts(config, model_config, world.topology.ep)
    plan = ParallelPlan(world, dispatch=config.dispatch, capacity=config.dispatch_capacity, layers=layers)
    layout = KVLayout(
        model_config.num_layers,
        _width(plan, "kv_heads", model_config.num_kv_heads),
        model_config.head_dim,
        model_config.dtype,
        config.page_size,
    )
    sizes = plan_sizes(config, model_config, layout)
    sizes = replace(sizes, max_num_tokens=align_up(sizes.max_num_tokens, plan.topology.attn_tp))
    with memory_for(
        f"a KV cache of {sizes.num_pages} pages of {layout.bytes_per_page} bytes, and a page table for {sizes.max_bs} "
        "requests",
        "lower kv_memory or num_pages, context_length or max_running_requests",
    ):
        pool = KVPool(
            layout,
            num_pages=sizes.num_pages,
            max_requests=sizes.max_bs,
            max_pages_per_request=-(-sizes.context_length // config.page_size) + 1,
            device=device,
        )
    with memory_for(
        f"the model and steps of {sizes.max_num_tokens} tokens and {sizes.max_bs} requests",
        "lower context_length, max_prefill_tokens, chunked_prefill_size or max_running_requests, or give the model "
        "more memory",
    ):
        worker = _worker(config, directory, model_config, sizes, pool, report, plan)
    if config.capture == "startup" and worker.decode.backend.captures:
        world.control.barrier()  # who loads long is waited for here; captures do not wait as patiently
        worker.capture(report)
    passes = _passes(config, sizes, worker.coordinator)
    together = worker.coordinator.rules.extend_gather
    scheduler = _scheduler(config, sizes, pool, None if passes is None else passes.ask, together)
    dropped = weakref.ref(scheduler)  # the thread is to keep nothing alive
    give_memory_ahead(pool, busy=lambda: (here := dropped()) is not None and here.has_work)
    if config.pin_threads:
        pin_threads()
    return Parts(directory, model_config, worker, scheduler, passes)


def _passes(config: EngineConfig, sizes: Sizes, coordinator: Coordinator) -> PassExecutor | None:
    """What makes prefills of data-parallel groups wait for each other, where they have to run together."""
    if not (config.prefill_delay and coordinator.rules.extend_gather):
        return None
    delayer = PrefillDelayer(DelayerOptions(config.prefill_delay, max_running=sizes.max_bs))
    return PassExecutor(delayer, coordinator.exchange(STATE_WORDS), time.monotonic)


def _worker(
    config: EngineConfig,
    directory: Path,
    model_config: ModelConfig,
    sizes: Sizes,
    pool: KVPool,
    report: Report,
    plan: ParallelPlan,
) -> Worker:
    """The loaded model over its attention and kernels, with buffers for the largest step."""
    moe = model_config.moe
    heads = _width(plan, "heads", model_config.num_heads)
    kernels = choose_kernels(
        config, pool, report, model_config, context_length=sizes.context_length, num_heads=heads
    )
    ops, attention = kernels.ops, kernels.attention
    load, backend = _expert_load(model_config, plan, pool.device), graph_backend(config, pool.device)
    model = load_model(
        directory,
        ops=ops,
        attention=attention,
        max_num_tokens=sizes.max_num_tokens,
        max_bs=sizes.max_bs,
        config=model_config,
        max_positions=sizes.context_length,
        consumers=lambda layer: Consumers(layer, load),
        progress=lambda done, total: report("Loading weights", done, total),
        parallel=plan if load is None else replace(plan, computed=load.rows),
        device=pool.device,
    )
    kernels.finish()
    options = WorkerOptions(
        max_bs=sizes.max_bs,
        max_num_tokens=sizes.max_num_tokens,
        context_length=sizes.context_length,
        capture_on_first_use=config.capture == "lazy" or config.buckets == "auto",
        replanner=_replanner(config, backend),
        checks=_checks(config, directory, pool, plan, kernels, backend.name),
    )
    depends = moe is not None and plan.topology.dp > 1
    shares = row_shares(config, plan.topology) if moe else 1
    ability, slots = _prefill_graphs(config, attention, backend, sizes, plan, pool.device)
    rules = shape_rules(config, sizes, shares)
    rules = replace(rules, max_extend_bs=slots, decode_gather=depends, extend_gather=depends)
    rebalancer = None
    if load is not None and moe is not None and plan.layers:
        placed = placed_layers(model, plan)
        rebalancer = Rebalancer(plan.world, load, placed, moe.num_experts, config.rebalance_steps)
    coordinator = Coordinator.of(
        plan.world,
        rules,
        plan.widths,
        # One rank alone asks nobody; only its steps are counted, where experts are placed by them.
        depends=moe is not None and (plan.topology.tp > 1 or rebalancer is not None),
        before_step=None if rebalancer is None else rebalancer.tick,
        prefill=ability,
    )
    return Worker(model, attention, pool, backend, rules, options, load, coordinator, rebalancer)


def _width(plan: ParallelPlan, what: str, size: int) -> int:
    """How many of `size` heads this rank has."""
    first, last = Sharding(plan.topology).span(what, size)
    return last - first


def _expert_load(model: ModelConfig, plan: ParallelPlan, device: torch.device) -> ExpertLoad | None:
    """Counters of a model that has experts."""
    if model.moe is None:
        return None
    slots, leads = plan.num_physical(model.moe.num_experts), plan.topology.is_leader
    return ExpertLoad(model.num_layers, slots, device, leads=leads)


def _prefill_graphs(
    config: EngineConfig,
    attention: AttentionBackend,
    backend: Backend,
    sizes: Sizes,
    plan: ParallelPlan,
    device: torch.device,
) -> tuple[PrefillAbility, int]:
    """What prefill graphs can do, and the requests that one holds at most."""
    mode = choose_prefill_graph(
        config.prefill_graph, attention, backend, device.type, dp_attention=plan.topology.dp > 1
    )
    slots = prefill_slots(
        config.prefill_request_slots, mode, attention.capture_limits, sizes.max_bs, config.max_prefill_tokens
    )
    return PrefillAbility.of(mode, attention, sizes.max_num_tokens, slots), slots


def _checks(
    config: EngineConfig, directory: Path, pool: KVPool, plan: ParallelPlan, kernels: Kernels, graph: str
) -> CheckOptions:
    """Which steps are checked while serving, and where those are written that differ."""
    traces = cache_dir() / "traces" if config.trace_dir is None else Path(config.trace_dir)
    names = {"ops": kernels.ops.name, "attention": kernels.attention.name, "graph": graph}
    writer = TraceWriter(traces, directory, config, plan.topology, pool, names)
    if config.trace_steps > 0 or (config.shadow_rate > 0 and config.trace_dir is not None):
        writer.check(wanted=config.trace_steps > 0)
    return CheckOptions(config.shadow_rate, config.trace_steps, writer)


def _replanner(config: EngineConfig, backend: Backend) -> Replanner | None:
    return Replanner(SERVING_COSTS[backend.name]) if config.buckets == "auto" and backend.captures else None


def _scheduler(
    config: EngineConfig, sizes: Sizes, pool: KVPool, negotiate: PrefillNegotiation | None, together: bool
) -> Scheduler:
    """Scheduling over all pages of the pool; `together` with other data-parallel groups where steps depend on them."""
    allocator = PageAllocator(sizes.num_pages, config.page_size)
    radix = RadixCache(allocator, enabled=config.enable_prefix_caching)
    options = SchedulerOptions(
        max_running_requests=sizes.max_bs,
        max_prefill_tokens=config.max_prefill_tokens,
        context_length=sizes.context_length,
        chunked_prefill_size=config.chunked_prefill_size,
        mixed_prefill=config.mixed_prefill,
        fair=config.fair_prefill,
        together=together,
    )
    return Scheduler(options, Residency(allocator, radix, pool), negotiate)


def locate_model(model: str | None) -> Path:
    """The checkpoint directory of a model option: the bundled demo (None, or its name), a fetched model, a local path
    or a hub id. A directory comes before names.
    """
    if model is None or (model == DEMO_NAME and not Path(model).is_dir()):
        return Path(__file__).parents[1] / "demo"
    if model in FETCHABLE and not Path(model).is_dir():
        return fetched(model, cache_dir=cache_dir())
    return resolve_model(model)


def plan_sizes(config: EngineConfig, model: ModelConfig, layout: KVLayout) -> Sizes:
    """All sizes from the options and the model. Raises ConfigError for a context the model does not have."""
    context = config.context_length or model.max_position_embeddings
    if context > model.max_position_embeddings:
        raise ConfigError(
            f"context_length {context} is over the model's {model.max_position_embeddings}; lower it"
        )
    max_bs = config.max_running_requests
    if config.chunked_prefill_size is not None:
        rows = min(config.chunked_prefill_size, align_up(config.max_prefill_tokens, config.page_size))
    else:
        # Without chunks one prompt runs whole, however long the context lets it be.
        rows = max(align_up(config.max_prefill_tokens, config.page_size), context)
    return Sizes(context, max_bs, max(rows, max_bs), _num_pages(config, layout, context, max_bs))


def _num_pages(config: EngineConfig, layout: KVLayout, context: int, max_bs: int) -> int:
    if config.num_pages is not None:
        return config.num_pages
    if config.kv_memory_bytes is not None:
        return layout.pages_in(config.kv_memory_bytes)
    per_request = align_up(context, layout.page_size) // layout.page_size + 2
    # One whole context always fits, whatever it takes; more requests share up to the default budget.
    affordable = max(DEFAULT_KV_BYTES // layout.bytes_per_page, per_request)
    return min(per_request * max_bs, affordable) + 1


def shape_rules(config: EngineConfig, sizes: Sizes, attn_tp_size: int = 1) -> ShapeRules:
    """Bucket lists from the options, filtered against what a legal step can reach.

    attn_tp_size: ranks that share out a step's rows evenly, so that its width must divide.
    """
    decode = decode_buckets(
        sizes.max_bs,
        sizes=config.decode_buckets,
        padding=not config.disable_padding,
        attn_tp_size=attn_tp_size,
    )
    reachable = sizes.max_bs * sizes.context_length
    prefill = prefill_buckets(
        sizes.max_num_tokens,
        sizes=config.prefill_buckets,
        max_rows=reachable,
        attn_tp_size=attn_tp_size,
    )
    return ShapeRules(decode, prefill, max_extend_bs=sizes.max_bs, attn_tp_size=attn_tp_size)


def _dtype(config: EngineConfig) -> torch.dtype | None:
    if config.dtype == "auto":
        return None
    dtype = getattr(torch, config.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype
