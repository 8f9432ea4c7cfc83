"""A team that stays together from launch to launch of a chain: who helps with one, and when all are done.

One thread leads: it runs the chain and opens each launch that is worth sharing. Helpers spin on the team's word and
enter if they come in time; nobody waits for a helper that does not, so a thread whose core is taken holds up a chain
only if it holds a task. While they wait, threads ask memory for what the next launch reads. Knows nothing of what is
computed. Invariant: a thread runs a launch only between its `open_launch` and the end of its last `meet`.

    word:  launch number | barriers passed | threads that entered | threads that arrived    closed after a first barrier
"""

from __future__ import annotations

from ostinato.ops.cpu.intrinsics import call_address, call_barrier
from ostinato.ops.cpu.jit import njit
from ostinato.ops.cpu.memory import (
    compare_swap,
    load_i64,
    load_shared,
    pause,
    prefetch_once,
    store_i64,
    store_shared,
)

# A team is one cache line of int64: the word, what to call, and the address of sched_yield (0: there is none).
WORD, FUNCTION, ARGUMENT, YIELD, TEAM_WORDS = range(5)
SPINS = 512  # turns of waiting (some 10 us) before the core is offered to others
_ENTERED, _BARRIERS, _LAUNCH = 16, 32, 40  # where the word's parts begin
_STOP = -1
_LAUNCHES = (1 << 22) - 1
AHEAD_BYTES = (
    16 * 1024
)  # of the next launch's weights that a waiting thread asks for: well within a first-level cache
_LINES = 4  # asked for between two looks at the word


@njit(error_model="numpy")
def wait_a_turn(team: int, turn: int, ahead: int, end: int) -> int:
    """One turn of waiting: ask for the next lines before `end`, else pause; returns where to go on asking."""
    if ahead < end:
        for line in range(_LINES):
            prefetch_once(ahead + 64 * line)
        return ahead + 64 * _LINES
    pause()
    if turn > SPINS:
        call_barrier(load_i64(team + 8 * YIELD))
    return ahead


@njit(error_model="numpy")
def begin(team: int) -> None:
    """No launch is open."""
    store_i64(1 << _BARRIERS, team + 8 * WORD)


@njit(error_model="numpy")
def end(team: int) -> None:
    """Let the helpers go."""
    store_shared(_STOP, team + 8 * WORD)


@njit(error_model="numpy")
def open_launch(team: int, function: int, argument: int) -> None:
    """Let helpers enter `function(argument)`, which the caller is about to run too."""
    number = (load_i64(team + 8 * WORD) >> _LAUNCH) + 1
    store_i64(function, team + 8 * FUNCTION)
    store_i64(argument, team + 8 * ARGUMENT)
    store_shared(((number & _LAUNCHES) << _LAUNCH) | (1 << _ENTERED), team + 8 * WORD)


@njit(error_model="numpy")
def _arrive(team: int) -> int:
    """Count the caller in; returns the barriers passed so far (and the launch), or -1 if it was the last."""
    while True:
        word = load_shared(team + 8 * WORD)
        phase, entered = word >> _BARRIERS, (word >> _ENTERED) & 0xFFFF
        if (word & 0xFFFF) + 1 < entered:
            if compare_swap(team + 8 * WORD, word, word + 1) != 0:
                return phase
        elif compare_swap(team + 8 * WORD, word, ((phase + 1) << _BARRIERS) | (entered << _ENTERED)) != 0:
            return -1


@njit(error_model="numpy")
def meet(team: int, ahead: int, end: int) -> None:
    """Wait until all who entered have come here."""
    phase, turn = _arrive(team), 0
    while phase >= 0 and load_shared(team + 8 * WORD) >> _BARRIERS == phase:
        ahead = wait_a_turn(team, turn, ahead, end)
        turn += 1


@njit(error_model="numpy")
def help_out(team: int, member: int, follows: int, share: int) -> None:
    """A helper's life: enter what is opened, until the team ends.

    `follows` and `share` are the offsets, in a launch's block, of the address of what the next launch reads and of
    the bytes of each thread's share in it.
    """
    seen, turn, ahead, last = -1, 0, 0, 0
    while True:
        word = load_shared(team + 8 * WORD)
        if word == _STOP:
            return
        number = word >> _LAUNCH
        if (word >> _BARRIERS) & 0xFF == 0 and number != seen:
            function, argument = load_i64(team + 8 * FUNCTION), load_i64(team + 8 * ARGUMENT)
            if compare_swap(team + 8 * WORD, word, word + (1 << _ENTERED)) != 0:
                call_address(function, argument)
                ahead = load_i64(argument + follows)
                if ahead != 0:
                    ahead += load_i64(argument + share) * member
                last = ahead + min(load_i64(argument + share), AHEAD_BYTES) if ahead != 0 else 0
                _arrive(team)
                seen, turn = number, 0
        else:
            ahead = wait_a_turn(team, turn, ahead, last)
            turn += 1
