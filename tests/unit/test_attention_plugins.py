"""Attention of other packages: declarations, what is refused at load, and the example package, installed and run."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato import LLM, SamplingParams
from ostinato.attention import plugins
from ostinato.attention.capabilities import AttentionCapabilities, AttentionNeeds, check_fit
from ostinato.attention.plugins import DeclaredAttention, find_plugin
from ostinato.errors import ConfigError
from ostinato.padding import StepMode

EXAMPLE = Path(__file__).parents[2] / "examples" / "mate_attention"
CAN = AttentionCapabilities(
    name="some",
    devices=("cpu",),
    dtypes=(torch.float32,),
    head_dims=(64,),
    page_multiple=16,
    max_context=100,
    sliding_window=True,
    attention_chunks=True,
    honours_count=True,
    writes_zeros=True,
    plan_advances=True,
)
NEEDS = AttentionNeeds(torch.device("cpu"), torch.float32, 64, 32, 100, 4, True, True)


def test_what_is_not_declared_is_refused_by_name() -> None:
    check_fit(CAN, NEEDS)
    lacks: dict[str, dict[str, Any]] = {
        "not on cpu": {"devices": ("cuda", "musa")},
        "the dtype is torch.float32": {"dtypes": (torch.float16,)},
        "the model's are 64": {"head_dims": (128,)},
        "page_size is 32": {"page_multiple": 64},
        "context_length is 100": {"max_context": 99},
        "no sliding windows": {"sliding_window": False},
        "no chunked attention": {"attention_chunks": False},
        "honours_count": {"honours_count": False},
        "writes_zeros": {"writes_zeros": False},
    }
    for says, change in lacks.items():
        with pytest.raises(ConfigError, match=f"attention backend 'some' .*{says}"):
            check_fit(replace(CAN, **change), NEEDS)


def test_pads_of_length_0_need_a_kernel_that_takes_empty_rows() -> None:
    with pytest.raises(ConfigError, match="seq_len_fill_value 0"):
        replace(CAN, seq_len_fill_value=0)
    assert replace(CAN, seq_len_fill_value=0, empty_row_gives_zeros=True).seq_len_fill_value == 0


def test_a_step_follows_from_the_last_by_launches_only_where_that_is_declared() -> None:
    class Kernels:
        planned_lens = torch.zeros(3)

    def advances(device: str, **change: Any) -> bool:
        kernels: Any = Kernels()
        declared = DeclaredAttention(replace(CAN, **change), kernels, torch.device(device))
        assert not declared.can_capture(StepMode.EXTEND)
        return declared.planned_lens is not None

    assert advances("cpu")
    assert advances("cuda")
    assert not advances("cpu", plan_advances=False)
    assert advances("cpu", needs_cpu_seq_lens=True)
    assert not advances("cuda", needs_cpu_seq_lens=True)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The example package, as pip installs it, on the path."""
    target = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source") / "mate_attention"
    shutil.copytree(
        EXAMPLE, source, ignore=shutil.ignore_patterns("build", "*.egg-info")
    )  # pip builds in place
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
    ]
    subprocess.run([*command, "--target", str(target), str(source)], check=True)
    sys.path.insert(0, str(target))
    importlib.invalidate_caches()
    yield
    sys.path.remove(str(target))
    for name in [name for name in sys.modules if name.startswith("mate_attention")]:
        del sys.modules[name]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("kernels", ["numba", "reference"])
def test_the_example_runs_a_model_end_to_end(kernels: str) -> None:
    """The tokens of the built-in attention, in batches, with prefixes; decode captured, prefill broken around it."""
    prompts = ["Alice was", "The White Rabbit put on his spectacles. Alice was"]
    params = SamplingParams(max_tokens=12)
    options: dict[str, Any] = {"dtype": "float32", "threads": 1, "progress": False, "context_length": 128}
    with LLM(**options, kernels=kernels) as llm:
        want = [r.outputs[0].token_ids for r in llm.generate(prompts, params)]
    with LLM(**options, kernels=kernels, attention_backend="mate") as llm:
        assert [r.outputs[0].token_ids for r in llm.generate(prompts, params)] == want
        assert llm.generate(prompts[0], params)[0].outputs[0].token_ids == want[0]
        stats = llm.stats()
    assert stats["prefill_graph"] == "breakable"
    assert stats["graph"]["decode"]["replays"] > 0


@pytest.mark.usefixtures("installed")
def test_a_plug_in_that_does_not_fit_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="'mate' needs pages of a multiple of 16 tokens, page_size is 8"):
        LLM(attention_backend="mate", page_size=8, progress=False, threads=1)


def test_unknown_broken_and_ambiguous_plug_ins_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match="'mat' is unknown; choose one of auto, cpu, triton, flash, reference"
    ):
        find_plugin("mat")

    def entries(**values: str) -> None:
        found = [plugins.EntryPoint(name, value, plugins.GROUP) for name, value in values.items()]
        monkeypatch.setattr(plugins, "entry_points", lambda group: found)

    entries(gone="no_such_module:PLUGIN", empty="math:pi")
    with pytest.raises(ConfigError, match=r"'gone' .* cannot be loaded: No module named"):
        find_plugin("gone")
    with pytest.raises(ConfigError, match=r"'empty' .* has no AttentionCapabilities"):
        find_plugin("empty")
    two = [plugins.EntryPoint("twice", value, plugins.GROUP) for value in ("a:X", "b:X")]
    monkeypatch.setattr(plugins, "entry_points", lambda group: two)
    with pytest.raises(ConfigError, match="several packages"):
        find_plugin("twice")


def test_built_in_backends_go_with_their_kernels() -> None:
    for name, says in (("triton", "goes with kernels 'triton'"), ("flash", "runs on cuda, not on cpu")):
        with pytest.raises(ConfigError, match=says):
            LLM(attention_backend=name, progress=False, threads=1)
