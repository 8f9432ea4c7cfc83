"""Facts for a report: the model, the deployment, the machine and the versions, in words that a person reads.

Knows nothing of checks. Invariant: whatever decides a result's bits is named here.
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from ostinato import __version__
from ostinato.engine.engine import Engine
from ostinato.verify.checks import Facts

LIBRARIES = ("torch", "numba", "llvmlite", "transformers")


def model_facts(engine: Engine) -> dict[str, str]:
    """What the checkpoint is."""
    config = engine.model_config
    facts = {
        "family": config.family.name,
        "layers": str(config.num_layers),
        "hidden size": str(config.hidden_size),
        "heads": f"{config.num_heads} of {config.head_dim}, {config.num_kv_heads} for keys and values",
        "vocabulary": str(config.vocab_size),
        "dtype": str(config.dtype).removeprefix("torch."),
    }
    if config.moe is not None:
        sparse = sum(layer.sparse for layer in config.layers)
        facts["experts"] = (
            f"{config.moe.num_experts}, {config.moe.top_k} of them for each token, in {sparse} layers"
        )
    if engine.config.quantization:
        facts["quantization"] = engine.config.quantization
    return facts


def deployment_facts(engine: Engine, facts: Facts) -> dict[str, str]:
    """How it runs."""
    topology, worker = engine.world.topology, engine.worker
    layout = f"tp {topology.tp}, dp {topology.dp}, ep {topology.ep}" if topology.tp > 1 else "one rank"
    found = {
        "layout": layout,
        "kernels": f"{worker.model.ops.name}, attention {worker.model.attention.name}",
        "threads of a rank": str(torch.get_num_threads()),
        "graphs": worker.decode.backend.name,
    }
    if topology.tp > 1:
        found["transport"] = engine.world.transport
        if engine.model_config.moe is not None:
            found["dispatch"] = engine.config.dispatch
    found["prefill graphs"] = worker.coordinator.prefill.mode.value
    for mode, buckets in facts.modes.items():
        found[f"{mode.split('-')[0]} buckets"] = shortened(buckets)
    return found


def shortened(sizes: tuple[int, ...], most: int = 10) -> str:
    """A list of sizes on one line."""
    if len(sizes) <= most:
        return ", ".join(map(str, sizes)) or "none"
    head = ", ".join(map(str, sizes[: most - 2]))
    return f"{head}, … {sizes[-1]} ({len(sizes)} in all)"


def machine_facts() -> dict[str, str]:
    """Where it ran."""
    return {
        "processor": _processor(),
        "cores": str(os.cpu_count() or 1),
        "system": f"{platform.system()} {platform.release()}",
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def versions() -> dict[str, str]:
    """Of everything that computes."""
    found = {"ostinato": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
