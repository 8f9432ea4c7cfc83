"""Where an engine runs: the device and the graph backend that an `EngineConfig` asks for, or why there is none.

Knows nothing of models or kernels' insides. Invariant: a device or kernels that cannot run here, or options that they
do not serve, are refused at start, with the option's name and the remedy.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from ostinato.config import EngineConfig, triton_is_interpreted
from ostinato.errors import ConfigError
from ostinato.graphs import CudaGraphBackend, EagerBackend, SegmentBackend, TapeBackend


def choose_device(config: EngineConfig) -> torch.device:
    """The device; "auto" is the CPU. Raises ConfigError for one that is not there, and for what it does not serve."""
    on_gpu = config.device == "cuda" or config.graph == "cuda"
    if on_gpu and not torch.cuda.is_available():
        asked = "device" if config.device == "cuda" else "graph"
        raise ConfigError(
            f"{asked} 'cuda' needs a GPU and torch sees none; use device 'cpu' and graph 'tape' or 'eager'"
        )
    if on_gpu or config.kernels == "triton":
        _check_triton(config, on_gpu)
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _check_triton(config: EngineConfig, on_gpu: bool) -> None:
    if find_spec("triton") is None:
        raise ConfigError(
            "device 'cuda' and kernels 'triton' need Triton, which is not installed; pip install 'ostinato[cuda]'"
        )
    if on_gpu and config.kernels not in ("auto", "triton"):
        raise ConfigError(f"kernels {config.kernels!r} run on the CPU, device is 'cuda'; use 'triton'")
    if on_gpu == triton_is_interpreted():
        raise ConfigError(
            "device 'cuda' cannot run kernels in Triton's interpreter; unset TRITON_INTERPRET"
            if on_gpu
            else "kernels 'triton' need a GPU (device 'cuda'), or on a CPU Triton's interpreter: set TRITON_INTERPRET=1"
        )
    if not on_gpu and config.dtype == "bfloat16":
        raise ConfigError("Triton's interpreter computes bfloat16 wrongly; use dtype 'float32' or 'float16'")
    for name, refused in (
        ("quantization", config.quantization is not None),
        ("tp", (config.tp_size or 1) > 1),
        ("dp", config.dp_size > 1),
        ("ep", (config.ep_size or 1) > 1),
        ("redundant_experts", config.redundant_experts > 0),
        ("expert_placement", config.expert_placement is not None),
        ("rebalance_steps", config.rebalance_steps > 0),
    ):
        if refused:
            raise ConfigError(
                f"{name} does not work with Triton kernels yet; leave it out, or use device 'cpu'"
            )


def graph_backend(config: EngineConfig, device: torch.device) -> SegmentBackend | EagerBackend:
    """How steps are captured: "auto" is CUDA graphs on a GPU, the tape elsewhere."""
    if config.graph == "eager":
        return EagerBackend()
    return CudaGraphBackend(device) if device.type == "cuda" else TapeBackend()
