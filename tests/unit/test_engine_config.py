"""EngineConfig: every refusal names the field, the value and the remedy; the environment is read here
alone.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ostinato.config import (
    EngineConfig,
    LaunchedRank,
    ServerConfig,
    cache_dir,
    environment_options,
    launched_rank,
    parse_bytes,
)
from ostinato.errors import ConfigError


def test_defaults_are_valid_and_frozen() -> None:
    config = EngineConfig()
    assert (config.dtype, config.graph, config.page_size, config.model) == ("auto", "auto", 16, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "float64"}, r"dtype 'float64' is unknown.*choose one of auto, float32"),
        ({"dtype": "bfloat"}, r"did you mean 'bfloat16'"),
        ({"graph": "cudagraph"}, r"graph 'cudagraph' is unknown"),
        ({"capture": "never"}, r"capture 'never'"),
        ({"device": "tpu"}, r"device 'tpu'"),
        (
            {"quantization": "int4"},
            r"quantization 'int4' is unknown.*did you mean 'int8'.*choose one of int8",
        ),
        ({"threads": 0}, r"threads must be a whole number of at least 1, got 0"),
        ({"threads": True}, r"threads must be"),
        ({"seed": -1}, r"seed must be"),
        ({"context_length": 1}, r"context_length must be a whole number of at least 2, got 1"),
        ({"max_running_requests": 0}, r"max_running_requests"),
        ({"max_running_requests": 2.5}, r"max_running_requests.*2.5"),
        ({"max_running_requests": None}, r"max_running_requests.*None"),
        ({"max_prefill_tokens": -4}, r"max_prefill_tokens"),
        ({"page_size": 0}, r"page_size"),
        ({"num_pages": 1}, r"num_pages must be a whole number of at least 2"),
        ({"kv_memory": "much"}, r"kv_memory 'much' is no size"),
        ({"kv_memory": 0}, r"kv_memory 0 is no size"),
        ({"decode_buckets": []}, r"decode_buckets must hold whole numbers of at least 1, got none"),
        ({"decode_buckets": "1,x"}, r"got \['x'\]"),
        ({"prefill_buckets": 64}, r"prefill_buckets must be a list of sizes, got 64"),
        ({"prefill_buckets": [64, 0]}, r"got \[0\]"),
        ({"mixed_prefill": "yes"}, r"mixed_prefill must be True or False, got 'yes'"),
        ({"model": 3}, r"model must be a string, got 3"),
    ],
)
def test_a_bad_value_is_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineConfig(**options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_pages": 64, "kv_memory": "1GiB"}, r"num_pages 64 and kv_memory '1GiB'.*give one"),
        ({"disable_padding": True, "decode_buckets": [1, 2]}, r"disable_padding.*drop one"),
        ({"graph": "tape", "device": "cuda"}, r"use graph 'cuda' or device 'cpu'"),
        ({"graph": "cuda", "device": "cpu"}, r"use graph 'tape' or device 'cuda'"),
        ({"quantization": "int8", "kernels": "reference"}, r"needs compiled kernels.*use 'numba'"),
        ({"chunked_prefill_size": 100}, r"100 is no multiple of page_size 16; use 96"),
        ({"chunked_prefill_size": 8}, r"use 16"),
        ({"chunked_prefill_size": 0, "mixed_prefill": True}, r"mixed_prefill needs chunks"),
    ],
)
def test_a_bad_pair_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineConfig(**options)


def test_values_are_normalised() -> None:
    config = EngineConfig(decode_buckets=[1, 2], prefill_buckets="64, 128", chunked_prefill_size=0)  # type: ignore[arg-type]
    assert config.decode_buckets == (1, 2)
    assert config.prefill_buckets == (64, 128)
    assert config.chunked_prefill_size is None
    assert config.kv_memory_bytes is None
    assert EngineConfig(kv_memory="1.5GiB").kv_memory_bytes == 3 << 29


def test_of_takes_options_over_the_environment_over_defaults() -> None:
    environ = {"OSTINATO_MODEL": "here", "OSTINATO_THREADS": "3", "NO_PROGRESS": "1"}
    config = EngineConfig.of(environ=environ, threads=2, seed=None)
    assert (config.model, config.threads, config.progress, config.seed) == ("here", 2, False, 0)
    assert EngineConfig.of(environ={}) == EngineConfig()


def test_unknown_options_are_refused_with_the_closest_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'page_sise'; did you mean 'page_size'"):
        EngineConfig.of(environ={}, page_sise=1)
    with pytest.raises(ConfigError, match=r"unknown option 'zzz'; the options are model, dtype"):
        EngineConfig().replace(zzz=1)


def test_replace_keeps_the_rest() -> None:
    config = EngineConfig(chunked_prefill_size=0, seed=3)
    assert config.replace(seed=4) == EngineConfig(chunked_prefill_size=0, seed=4)
    with pytest.raises(ConfigError, match="page_size"):
        config.replace(page_size=0)


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (7, 7),
        ("7", 7),
        ("2k", 2000),
        ("1 KiB", 1024),
        ("512MiB", 512 << 20),
        ("2GB", 2 * 10**9),
        ("0.5gi", 1 << 29),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes(value: str | int, size: int) -> None:
    assert parse_bytes(value) == size


@pytest.mark.parametrize(
    "value", ["", "MiB", "-1", "1TBs", "1 2", True, 0.0, "9" * 400, "1048576TiB", 10**30]
)
def test_bad_sizes(value: Any) -> None:
    with pytest.raises(ConfigError, match="is no size; give bytes or a string like '512MiB'"):
        parse_bytes(value)


@pytest.mark.parametrize("threads", ["0", "many", "-2", "\u00b2", "9" * 5000])
def test_bad_environment_is_named(threads: str) -> None:
    with pytest.raises(ConfigError, match=f"OSTINATO_THREADS must be .* got '{threads}'"):
        environment_options({"OSTINATO_THREADS": threads})


@pytest.mark.parametrize("name", [spec.name for spec in dataclasses.fields(EngineConfig)])
@pytest.mark.parametrize("number", [2**63, 10**30])
def test_numbers_beyond_all_bounds_are_refused(name: str, number: int) -> None:
    """No option takes a number that does not fit where the engine keeps it, in 64 bits at the most."""
    with pytest.raises(ConfigError, match=name):
        EngineConfig(**{name: number})


@pytest.mark.parametrize("name", ["decode_buckets", "prefill_buckets"])
@pytest.mark.parametrize("sizes", ["1,\u00b2", "1,-2", "1,1_0", "1," + "9" * 5000, "1,2.0"])
def test_lists_of_what_is_no_number(name: str, sizes: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must hold whole numbers of at least 1, got"):
        EngineConfig(**{name: sizes})


def test_cache_dir_follows_the_environment() -> None:
    assert cache_dir({"OSTINATO_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_dir({"XDG_CACHE_HOME": "/b"}) == Path("/b/ostinato")
    assert cache_dir({}) == Path("~/.cache/ostinato").expanduser()


def test_every_option_has_help_and_a_check() -> None:
    for spec in dataclasses.fields(EngineConfig):
        assert spec.metadata["help"], spec.name


def test_config_does_not_import_torch() -> None:
    code = "import sys, ostinato.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_ranks_that_torchrun_starts() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}
    assert launched_rank(env) == LaunchedRank(1, 4, "10.0.0.7")
    assert launched_rank(env | {"LOCAL_WORLD_SIZE": "2"}) == LaunchedRank(1, 4, "10.0.0.7", 2)
    assert launched_rank(env | {"WORLD_SIZE": "1"}) is None
    assert launched_rank({}) is None
    assert launched_rank({name: value for name, value in env.items() if name != "MASTER_PORT"}) is None
    for wrong in ({"RANK": "x"}, {"RANK": "-1"}, {"RANK": "4"}, {"WORLD_SIZE": "0"}, {"WORLD_SIZE": "four"}):
        with pytest.raises(ConfigError, match=r"RANK '.*' and WORLD_SIZE '.*' are no rank among ranks"):
            launched_rank(env | wrong)


@pytest.mark.parametrize("key", ["secret\n", " secret", "sec\0ret"])
def test_a_key_that_no_client_could_send_is_refused_and_not_told(key: str) -> None:
    """As a file gives it whose line's end came along."""
    with pytest.raises(ConfigError, match="api_keys holds one that no client could send") as refused:
        ServerConfig.of(environ={"OSTINATO_API_KEY": key})
    assert "secret" not in str(refused.value)
    for keys in (("secret", ""), "secret"):
        with pytest.raises(ConfigError, match="api_keys must be a list") as refused:
            ServerConfig.of(api_keys=keys)
        assert "secret" not in str(refused.value)
    assert ServerConfig.of(environ={"OSTINATO_API_KEY": "sésame"}).api_keys == ("sésame",)
