"""Starting: what a second start must not do, because the first has done it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

SLOW_TO_IMPORT = (
    "numba",
    "transformers",
    "jinja2",
    "rich.progress",
    "safetensors",
    "huggingface_hub",
    "gguf",
)

START = """
import json, sys
from ostinato import LLM, SamplingParams
with LLM() as llm:
    text = llm.generate("Once upon", SamplingParams(max_tokens=8))[0].outputs[0].text
    compiler = llm.engine.worker.model.ops.runtime.compiler
    print(json.dumps({
        "text": text,
        "imported": sorted(sys.modules),
        "kernels": compiler.num_compiled,
        "from_disk": compiler.num_cache_hits,
    }))
"""


def start() -> dict[str, Any]:
    """A process that loads the demo and generates."""
    done = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def second_start() -> tuple[dict[str, Any], dict[str, Any]]:
    return start(), start()


def test_a_second_start_compiles_nothing(second_start: tuple[dict[str, Any], dict[str, Any]]) -> None:
    first, second = second_start
    assert second["kernels"] > 0
    assert second["from_disk"] == second["kernels"]
    assert second["text"] == first["text"]


def test_a_second_start_imports_nothing_slow(second_start: tuple[dict[str, Any], dict[str, Any]]) -> None:
    assert not set(SLOW_TO_IMPORT) & set(second_start[1]["imported"])
