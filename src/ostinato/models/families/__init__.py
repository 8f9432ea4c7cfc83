"""The model families, one table each, and the lookup by architecture.

Adding a family means adding a table. Knows nothing of torch, files or kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ostinato.errors import ModelError
from ostinato.models.families.dense import LLAMA, MISTRAL, QWEN2, QWEN3
from ostinato.models.families.sparse import LLAMA4, MIXTRAL, OLMOE, PHIMOE, QWEN2_MOE, QWEN3_MOE
from ostinato.models.families.table import ExpertNames, Family, RouterTable, WeightNames

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    QWEN2_MOE,
    QWEN3_MOE,
    MIXTRAL,
    OLMOE,
    PHIMOE,
    LLAMA4,
)


def find_family(raw: Mapping[str, Any], origin: str) -> Family:
    """The family named by `architectures`, or by `model_type` where that list is absent.

    Code that a checkpoint brings along (`auto_map`) is never run. Raises ModelError for an unknown
    architecture.
    """
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list):
        raise ModelError(
            f"{origin}: architectures must be a list of names, got {architectures!r}; correct it"
        )
    for family in FAMILIES:
        if any(name in family.architectures for name in architectures):
            return family
        if not architectures and raw.get("model_type") in family.model_types:
            return family
    named = ", ".join(map(str, architectures)) or f"model_type {raw.get('model_type')!r}"
    known = ", ".join(family.architectures[0] for family in FAMILIES)
    raise ModelError(f"{origin}: unknown architecture {named}; ostinato runs {known}")


__all__ = ["FAMILIES", "ExpertNames", "Family", "RouterTable", "WeightNames", "find_family"]
