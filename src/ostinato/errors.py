"""The exception tree: everything ostinato raises at users derives from `OstinatoError`.

Each message names the offending value and the remedy. Where the mistake is a bad value, the class is a
`ValueError` too, so callers that know nothing of ostinato still catch it.
"""

from __future__ import annotations


class OstinatoError(Exception):
    """Root of every error that ostinato raises on purpose."""


class ConfigError(OstinatoError, ValueError):
    """An engine option has a value that cannot work, alone or beside another."""


class RequestError(OstinatoError, ValueError):
    """A request cannot be served as asked (empty or too long prompt, a parameter out of range)."""


class ModelError(OstinatoError, ValueError):
    """A checkpoint cannot be loaded: unknown architecture, missing or unexpected tensor, damaged file."""


class PadContractError(OstinatoError, ValueError):
    """Two parts that meet over padded rows have incompatible pad contracts; raised at load."""


class CaptureError(OstinatoError, RuntimeError):
    """A callable did something that a captured graph cannot repeat (for example a host read of device data)."""


class ParallelError(OstinatoError, RuntimeError):
    """A rank is gone, too late, or out of step with the others; the whole group has to end."""


class TraceError(OstinatoError, ValueError):
    """A replay trace cannot be read, or cannot be run again here."""
