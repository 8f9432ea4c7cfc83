"""ostinato: an LLM inference engine whose answers repeat exactly, whatever is played around them.

Public names only, each imported when first used: `import ostinato` stays fast and does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ostinato.config import EngineConfig
    from ostinato.engine.llm import LLM
    from ostinato.engine.request import CompletionOutput, RequestOutput, SamplingParams
    from ostinato.errors import (
        CaptureError,
        ConfigError,
        ModelError,
        OstinatoError,
        PadContractError,
        RequestError,
    )
    from ostinato.text.grammar import StructuredOutputs

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CaptureError",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "ModelError",
    "OstinatoError",
    "PadContractError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
]


def __getattr__(name: str) -> Any:
    match name:
        case "LLM":
            home = "ostinato.engine.llm"
        case "SamplingParams" | "RequestOutput" | "CompletionOutput":
            home = "ostinato.engine.request"
        case "StructuredOutputs":
            home = "ostinato.text.grammar"
        case "EngineConfig":
            home = "ostinato.config"
        case _ if name in __all__:
            home = "ostinato.errors"
        case _:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
