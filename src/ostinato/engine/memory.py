"""What is said when the machine has not the memory that the options ask for.

Knows nothing of what is reserved. Invariant: a user reads which sizes were too large and what to lower, wherever the
memory was asked for: Python, the system and torch each say it in their own way.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from ostinato.errors import ConfigError

_TORCH = ("allocate memory", "out of memory", "size calculation overflowed")
"""What torch says; it raises RuntimeError, or a class of it, for all of them."""


@contextmanager
def memory_for(what: str, remedy: str) -> Iterator[None]:
    """Raises ConfigError with both where the block finds too little memory."""
    try:
        yield
    except (MemoryError, OverflowError, OSError, RuntimeError) as error:
        if not _is_of_memory(error):
            raise
        raise ConfigError(f"there is too little memory for {what}; {remedy}") from error


def _is_of_memory(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):
        return any(words in str(error) for words in _TORCH)
    return True
