"""Options of the engine and the server: frozen dataclasses, validated when made, from which the command line's flags
derive.

The only module that reads the environment, and only when one of its functions is called. It must not import
torch (a dtype is a string here) or know how an option is carried out. Invariant: an `EngineConfig` that
exists is consistent; whatever cannot work, alone or in a pair, was refused with its name, its value and the
remedy.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from ostinato.errors import ConfigError
from ostinato.options import check_field as _check
from ostinato.options import option as _option
from ostinato.options import parse_bytes, whole_number
from ostinato.options import refuse_unknown as _refuse_unknown

DTYPES = ("auto", "float32", "bfloat16", "float16")
GRAPHS = ("auto", "eager", "tape", "cuda")
PREFILL_GRAPHS = ("auto", "full", "breakable", "eager")
CAPTURES = ("lazy", "startup")
BUCKETS = ("fixed", "auto")
DEVICES = ("auto", "cpu", "cuda")
KERNELS = ("auto", "numba", "triton", "reference")
PRODUCTS = ("exact", "library")
ISAS = ("auto", "avx512_bf16", "avx2", "portable")
QUANTIZATIONS = ("int8",)
WEIGHT_CODINGS = ("auto", "plain")
DISPATCHES = ("gathered", "sharded", "all_to_all", "all_to_all_fixed")
TRANSPORTS = ("auto", "shm", "gloo")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")
MOST_THREADS = 2048
"""Far more than any machine has cores: some thousands more, and OpenMP's own start fails with the process."""
DEMO_NAME = "demo"
"""What the bundled model may be called, where no directory of that name is meant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of one engine. Raises ConfigError naming the field, the value and the remedy.

    `EngineConfig.of(...)` is the usual way in: it refuses unknown names kindly and fills what was left out
    from the environment. Sizes count tokens unless they say otherwise.
    """

    model: str | None = _option(
        None, "Checkpoint directory, hub id, or fetched model; the bundled demo when left out", flag=False
    )
    dtype: str = _option("auto", "Weights and activations; auto takes the checkpoint's", choices=DTYPES)
    quantization: str | None = _option(
        None, "Keep and multiply weights as int8, all but routers and head", choices=QUANTIZATIONS
    )
    weight_coding: str = _option(
        "auto",
        "How bf16 weights are kept on CPU: lossless at 12 bits where kernels can decode them (auto), or plain",
        choices=WEIGHT_CODINGS,
    )
    device: str = _option("auto", "Where to run; auto is the CPU", choices=DEVICES)
    kernels: str = _option("auto", "Compiled kernels, or plain torch as the reference", choices=KERNELS)
    gpu_products: str = _option(
        "exact", "Dense products on a GPU: fixed tiles, or cuBLAS, which follows the batch", choices=PRODUCTS
    )
    attention_backend: str = _option(
        "auto", "Attention: that of the kernels (auto), reference, flash, or the name of an installed plug-in"
    )
    isa: str = _option("auto", "Instructions the kernels use; auto takes the best there are", choices=ISAS)
    threads: int | None = _option(
        None, "CPU threads; all cores when left out", minimum=1, maximum=MOST_THREADS
    )
    pin_threads: bool = _option(
        False, "Keep each CPU thread on a core of its own: steadier beside other work"
    )
    seed: int = _option(
        0, "Seed of requests that have none of their own", minimum=0, maximum=2**63 - 1, flag=False
    )

    context_length: int | None = _option(
        None, "Longest prompt and answer together; the model's own when left out", minimum=2
    )
    max_running_requests: int = _option(32, "Requests decoded together at most", minimum=1)
    max_prefill_tokens: int = _option(4096, "Prompt tokens of one step at most", minimum=1)
    chunked_prefill_size: int | None = _option(
        1024, "Prompts longer than this are prefilled in chunks of it; 0 for never", minimum=0
    )
    mixed_prefill: bool = _option(False, "Prefill chunks and decode rows share a step")
    fair_prefill: bool = _option(True, "Let answers go on between prefill steps, on all ranks alike")

    page_size: int = _option(16, "Tokens of one KV page", minimum=1)
    num_pages: int | None = _option(None, "KV pages, instead of --kv-memory", minimum=2)
    kv_memory: str | int | None = _option(
        None, "Memory of the KV cache, bytes or like 512MiB; sized for the running requests when left out"
    )
    enable_prefix_caching: bool = _option(True, "Reuse the KV of prefixes seen before")

    graph: str = _option("auto", "How steps run: eager, captured tape (CPU), CUDA graphs", choices=GRAPHS)
    prefill_graph: str = _option(
        "auto", "What is captured of prefill steps: all, or segments around attention", choices=PREFILL_GRAPHS
    )
    prefill_request_slots: int | None = _option(
        None, "Requests that a full prefill graph holds; by the attention when left out", minimum=1
    )
    capture: str = _option("lazy", "Capture buckets when first met, or all at startup", choices=CAPTURES)
    decode_buckets: tuple[int, ...] | None = _option(None, "Decode batch sizes to capture, like 1,2,4,8")
    prefill_buckets: tuple[int, ...] | None = _option(None, "Prefill token counts to capture, like 64,256")
    buckets: str = _option(
        "fixed", "Keep these lists, or plan them anew from the steps seen", choices=BUCKETS
    )
    disable_padding: bool = _option(False, "Capture every decode batch size instead of padding to buckets")

    shadow_rate: float = _option(
        0.0, "Share of the steps that are run again eagerly and compared, like 0.001"
    )
    trace_steps: int = _option(0, "Record this many replayed steps as replay traces", minimum=0)
    trace_dir: str | None = _option(None, "Where replay traces go; traces/ in the cache when left out")

    tp_size: int | None = _option(
        None, "Processes that share the model; what dp and ep need when left out", minimum=1, flag="tp"
    )
    dp_size: int = _option(
        1, "Groups of them with requests and KV cache of their own; divides tp", minimum=1, flag="dp"
    )
    ep_size: int | None = _option(
        None, "Groups of them that share out whole experts; all when left out", minimum=1, flag="ep"
    )
    cp_size: int = _option(
        1, "Ranks that share out a prompt's tokens: not there yet, so 1", minimum=1, flag="cp"
    )
    prefill_delay: int = _option(
        0, "With dp: steps that a prompt waits at most for prompts on other groups; 0 for never", minimum=0
    )
    redundant_experts: int = _option(0, "Expert slots beyond one for each, for busy experts", minimum=0)
    expert_placement: str | None = _option(None, "JSON file that says which expert lies in which slot")
    rebalance_steps: int = _option(
        0, "Steps after which experts are placed anew by their load; 0 for never", minimum=0
    )
    dispatch: str = _option("gathered", "How rows travel to experts of other ranks", choices=DISPATCHES)
    dispatch_capacity: int | None = _option(
        None,
        "With all_to_all_fixed: slots (rows by experts) from rank to rank in a step; all there can be when left out",
        minimum=1,
    )
    transport: str = _option(
        "auto", "Between ranks: shared memory, or gloo over the network", choices=TRANSPORTS
    )
    rank_timeout: int = _option(
        120, "Seconds a rank waits for the others before it names one missing", minimum=1
    )

    progress: bool = _option(True, "Show progress on a terminal")

    def __post_init__(self) -> None:
        for spec in fields(self):
            _check(self, spec)
        if self.chunked_prefill_size == 0:
            object.__setattr__(self, "chunked_prefill_size", None)
        for refused, message in _COMBINATIONS:
            if refused(self):
                raise ConfigError(message(self))

    @classmethod
    def of(cls, *, environ: Mapping[str, str] | None = None, **options: Any) -> Self:
        """From options by name, then the environment (`OSTINATO_*`), then defaults. None means "left out".

        Raises ConfigError for a name that is no option, with the closest one that is.
        """
        _refuse_unknown(cls, options)
        given = {name: value for name, value in options.items() if value is not None}
        return cls(**(environment_options(environ) | given))

    def replace(self, **options: Any) -> Self:
        """A copy with some options changed; unknown names are refused as in `of`."""
        _refuse_unknown(type(self), options)
        return dataclasses.replace(self, **options)

    @property
    def kv_memory_bytes(self) -> int | None:
        """`kv_memory` in bytes."""
        return None if self.kv_memory is None else parse_bytes(self.kv_memory, name="kv_memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Options of the HTTP server in front of an engine. Raises ConfigError naming field, value and remedy.

    Times are seconds, sizes bytes. `api_keys`: any of them opens the API; without one it is open to all who reach it.
    """

    host: str = _option("127.0.0.1", "Address to listen on; 0.0.0.0 for every interface")
    port: int = _option(8000, "Port to listen on; 0 for any free one", minimum=0)
    api_keys: tuple[str, ...] = _option(
        (), "Key that clients must send (repeatable); also OSTINATO_API_KEY", flag=False
    )
    served_model_name: str | None = _option(None, "Name of the model in the API; the model option by default")
    cors_origins: tuple[str, ...] = _option(
        (), "Origin whose pages may call the API (repeatable); none by default", flag=False
    )
    max_queued_requests: int = _option(
        256, "Completions that may wait beyond those running; more are answered 429", minimum=0
    )
    max_body_bytes: str | int = _option(
        "8MiB", "Largest request body, bytes or like 8MiB; larger ones get 413"
    )
    request_timeout: int = _option(600, "Longest time a request may take, in seconds", minimum=1)
    body_timeout: int = _option(30, "Longest time for a request's body to arrive, in seconds", minimum=1)
    shutdown_timeout: int = _option(
        30, "After SIGTERM, how long running requests may go on, in seconds", minimum=0
    )
    max_restarts: int = _option(3, "Restarts of a crashed engine in a row before giving up", minimum=0)
    access_log: bool = _option(True, "Write a JSON line for each request to stdout")
    tool_call_parser: str = _option(
        "auto",
        "Format of the model's tool calls; auto reads it off the chat template",
        choices=("auto", "hermes", "llama3_json", "mistral", "none"),
    )
    reasoning_parser: str = _option(
        "auto",
        "Tell <think> parts of answers apart; auto does when the chat template knows them",
        choices=("auto", "think", "none"),
    )

    def __post_init__(self) -> None:
        for spec in fields(self):
            _check(self, spec)
        parse_bytes(self.max_body_bytes, name="max_body_bytes")
        if self.port > 65535:
            raise ConfigError(f"port must be at most 65535, got {self.port}")
        for key in self.api_keys:
            if not key.isprintable() or key != key.strip():
                raise ConfigError(
                    "api_keys holds one that no client could send: a key is printable, without space around it; "
                    "mind the end of the line in a file that it came from"
                )
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origins holds {origin!r}, no origin; give it like https://example.org, without a path, or *"
                )

    @classmethod
    def of(cls, *, environ: Mapping[str, str] | None = None, **options: Any) -> Self:
        """From options by name, then the environment (OSTINATO_API_KEY), then defaults. None means "left out"."""
        _refuse_unknown(cls, options)
        env = os.environ if environ is None else environ
        given = {name: value for name, value in options.items() if value is not None}
        if env.get("OSTINATO_API_KEY"):
            given.setdefault("api_keys", (env["OSTINATO_API_KEY"],))
        return cls(**given)

    @property
    def body_limit(self) -> int:
        """`max_body_bytes` in bytes."""
        return parse_bytes(self.max_body_bytes, name="max_body_bytes")


_Refused = tuple[Callable[[EngineConfig], bool], Callable[[EngineConfig], str]]

# Pairs that cannot work together, one row each: what is refused, and what to say about it.
_COMBINATIONS: tuple[_Refused, ...] = (
    (
        lambda c: c.pin_threads and max(c.tp_size or 1, c.dp_size, c.ep_size or 1) > 1,
        lambda c: "pin_threads would put every rank on the same cores; leave it out, or run one rank",
    ),
    (
        lambda c: c.num_pages is not None and c.kv_memory is not None,
        lambda c: f"num_pages {c.num_pages} and kv_memory {c.kv_memory!r} both size the KV cache; give one",
    ),
    (
        lambda c: c.disable_padding and c.decode_buckets is not None,
        lambda c: (
            f"disable_padding captures every batch size, decode_buckets names {c.decode_buckets}; drop one"
        ),
    ),
    (
        lambda c: c.disable_padding and c.buckets == "auto",
        lambda c: "disable_padding captures every batch size, buckets 'auto' plans few; drop one",
    ),
    (
        lambda c: c.graph == "tape" and c.device == "cuda",
        lambda c: "graph 'tape' runs on the CPU, device is 'cuda'; use graph 'cuda' or device 'cpu'",
    ),
    (
        lambda c: c.graph == "cuda" and c.device == "cpu",
        lambda c: "graph 'cuda' needs a GPU, device is 'cpu'; use graph 'tape' or device 'cuda'",
    ),
    (
        lambda c: c.graph == "eager" and c.prefill_graph in ("full", "breakable"),
        lambda c: (
            f"graph 'eager' captures nothing, prefill_graph is {c.prefill_graph!r}; leave one of them out"
        ),
    ),
    (
        lambda c: c.gpu_products != "exact" and c.device != "cuda",
        lambda c: (
            f"gpu_products {c.gpu_products!r} needs device 'cuda', device is {c.device!r}; leave it out"
        ),
    ),
    (
        lambda c: c.quantization is not None and c.kernels == "reference",
        lambda c: (
            f"quantization {c.quantization!r} needs compiled kernels, kernels is 'reference'; use 'numba'"
        ),
    ),
    (
        lambda c: c.chunked_prefill_size is not None and c.chunked_prefill_size % c.page_size != 0,
        lambda c: (
            f"chunked_prefill_size {c.chunked_prefill_size} is no multiple of page_size {c.page_size}; "
            f"use {max(1, (c.chunked_prefill_size or 0) // c.page_size) * c.page_size}"
        ),
    ),
    (
        lambda c: c.expert_placement is not None and c.redundant_experts > 0,
        lambda c: (
            f"expert_placement {c.expert_placement!r} says how many slots there are, as redundant_experts "
            f"{c.redundant_experts} does; give one"
        ),
    ),
    (
        lambda c: c.cp_size != 1,
        lambda c: (
            f"cp_size {c.cp_size}: context parallelism is not there yet, attn_tp = tp / (dp x cp) has cp 1; "
            "leave it out, and split the work of long prompts by heads with tp_size"
        ),
    ),
    (
        lambda c: c.dispatch_capacity is not None and c.dispatch != "all_to_all_fixed",
        lambda c: (
            f"dispatch_capacity {c.dispatch_capacity} is for dispatch 'all_to_all_fixed', dispatch is {c.dispatch!r}; "
            "drop one or change the other"
        ),
    ),
    (
        lambda c: c.mixed_prefill and c.chunked_prefill_size is None,
        lambda c: "mixed_prefill needs chunks and chunked_prefill_size is off; give it a size",
    ),
)


def environment_options(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Engine options that the environment sets: OSTINATO_MODEL, OSTINATO_THREADS, NO_PROGRESS."""
    env = os.environ if environ is None else environ
    options: dict[str, Any] = {"model": env["OSTINATO_MODEL"]} if env.get("OSTINATO_MODEL") else {}
    if env.get("OSTINATO_THREADS"):
        options["threads"] = threads = whole_number(env["OSTINATO_THREADS"])
        if not threads:
            raise ConfigError(
                f"OSTINATO_THREADS must be a whole number of at least 1, got {env['OSTINATO_THREADS']!r}"
            )
    if env.get("NO_PROGRESS"):
        options["progress"] = False
    return options


@dataclass(frozen=True, slots=True)
class LaunchedRank:
    """This process among those that torchrun started: its rank, their number, the address they meet at, and how many of
    them are on this machine.
    """

    rank: int
    size: int
    address: str
    local_size: int = 1


def launched_rank(environ: Mapping[str, str] | None = None) -> LaunchedRank | None:
    """What torchrun says in RANK, WORLD_SIZE and MASTER_ADDR; None for a process that it did not start, or alone."""
    env = os.environ if environ is None else environ
    if not all(env.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return None
    rank, size = (whole_number(env[name]) for name in ("RANK", "WORLD_SIZE"))
    if rank is None or not size or rank >= size > 1:
        raise ConfigError(
            f"RANK {env['RANK']!r} and WORLD_SIZE {env['WORLD_SIZE']!r} are no rank among ranks as torchrun sets them; "
            "start the processes with it, or unset both"
        )
    local = whole_number(env.get("LOCAL_WORLD_SIZE", "1")) or 1
    return LaunchedRank(rank, size, env["MASTER_ADDR"], local) if size > 1 else None


def triton_is_interpreted(environ: Mapping[str, str] | None = None) -> bool:
    """Whether Triton will run kernels in its interpreter, on a CPU: TRITON_INTERPRET, as Triton itself reads it."""
    env = os.environ if environ is None else environ
    return env.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Where fetched models live: OSTINATO_CACHE_DIR, else `ostinato` in XDG_CACHE_HOME or `~/.cache`."""
    env = os.environ if environ is None else environ
    if env.get("OSTINATO_CACHE_DIR"):
        return Path(env["OSTINATO_CACHE_DIR"]).expanduser()
    root = Path(env["XDG_CACHE_HOME"]) if env.get("XDG_CACHE_HOME") else Path("~/.cache").expanduser()
    return root / "ostinato"
