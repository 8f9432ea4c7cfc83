"""The machine a comparison runs on: what it is, and who else uses it. Linux only: it reads /proc.

Invariant: CPU time that the hypervisor took from this machine counts as used by others.
"""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HERTZ = os.sysconf("SC_CLK_TCK")
_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "i8mm",
    "sve",
)


def describe() -> dict[str, Any]:
    """Processor, memory and system, as plain values."""
    info: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        info.setdefault(key.strip(), value.strip())
    flags = set((info.get("flags") or info.get("Features") or "").split())
    memory = next(
        line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal")
    )
    return {
        "processor": info.get("model name", platform.machine()),
        "family_model_stepping": [info.get(key) for key in ("cpu family", "model", "stepping")],
        "instructions": [flag for flag in _FLAGS if flag in flags],
        "cpus": os.cpu_count(),
        "memory_gib": round(int(memory.split()[1]) / 2**20, 1),
        "system": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
    }


def busy_seconds() -> float:
    """CPU seconds used on the whole machine since it started."""
    fields = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _idle, _wait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / _HERTZ


def session_seconds(session: int) -> float:
    """CPU seconds of all living processes of a session."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended since
            continue
        if int(fields[3]) == session:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / _HERTZ


@dataclass(frozen=True, slots=True)
class Meter:
    """Who uses the CPUs from `start` on."""

    sessions: tuple[int, ...]
    wall: float
    busy: float
    own: float

    @classmethod
    def start(cls, *sessions: int) -> Meter:
        """A meter that leaves out the processes of some sessions, and this one."""
        return cls(sessions, time.perf_counter(), busy_seconds(), cls._own(sessions))

    def others(self) -> float:
        """Cores that everybody else has used since the start, on average.

        Both sums are of ticks; up to two of them, a fifth of a core over 0.1 s, are no more than rounding.
        """
        wall = time.perf_counter() - self.wall
        used = busy_seconds() - self.busy - (self._own(self.sessions) - self.own) - 2 / _HERTZ
        return max(0.0, used / wall) if wall > 0 else 0.0

    @staticmethod
    def _own(sessions: tuple[int, ...]) -> float:
        times = os.times()
        return times.user + times.system + sum(session_seconds(session) for session in sessions)


def wait_until_quiet(limit: float, patience: float, window: float = 0.3) -> bool:
    """Wait until others use less than `limit` cores over a window, `patience` seconds at most; whether they do."""
    end = time.monotonic() + patience
    while True:
        meter = Meter.start()
        time.sleep(window)
        if meter.others() < limit:
            return True
        if time.monotonic() > end:
            return False
