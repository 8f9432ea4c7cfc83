"""What can go wrong, as clients see it: a status, OpenAI's error object, the parameter at fault.

Knows nothing of routes. Invariant: a client never sees a stack trace, and every 4xx about a field names it in `param`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ostinato.errors import OstinatoError, RequestError

_KINDS: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_FIELD = re.compile(r"[a-z][a-z0-9_]*")
_SOURCES = ("body", "query", "path", "header")
_TYPE_WORDS = frozenset({"str", "int", "float", "bool", "dict", "list", "none", "constrained", "function"})


class ApiError(OstinatoError):
    """An answer other than success. `retry_after` is in seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> bytes:
        """OpenAI's error object as JSON."""
        error = {
            "message": self.message,
            "type": _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error"),
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Raw headers of the answer, content type and length included."""
        found = [(b"content-type", b"application/json"), (b"content-length", str(len(self.body())).encode())]
        if self.retry_after is not None:
            found.append((b"retry-after", str(self.retry_after).encode()))
        if self.status == 401:
            found.append((b"www-authenticate", b"Bearer"))
        return found


class ClientGoneError(Exception):
    """The client has closed the connection; nobody is there to read an answer."""


def bad_field(param: str | None, message: str) -> ApiError:
    return ApiError(400, message, param=param)


def engine_down(why: str) -> ApiError:
    """The engine cannot take or go on with requests now."""
    return ApiError(503, why, code="engine_unavailable", retry_after=1)


def from_request_error(error: RequestError, fields: Sequence[str], default: str | None = None) -> ApiError:
    """A 400 that names the field which the message is about: the first known field name in it."""
    words = _FIELD.findall(str(error))
    param = next((word for word in words if word in fields), default)
    return bad_field(param, str(error))


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """A 400 from pydantic's errors: of a union's complaints, the one that got furthest into the value."""
    error = max(errors, key=lambda e: len(_path(e["loc"])))
    param = spell(error["loc"], unknown=error["type"] == "extra_forbidden")
    message = str(error["msg"])
    if error["type"] == "extra_forbidden":
        message = f"{param} is not supported here; remove it"
    elif error["type"] == "missing":
        message = f"{param} is missing; give it" if param else "the body is missing; send a JSON object"
    elif param:
        message = f"{param}: {message[0].lower()}{message[1:]}"
    elif error["type"] in ("model_attributes_type", "model_type", "dict_type"):
        message = "the body must be a JSON object, sent with the header content-type: application/json"
    return bad_field(param, message)


def spell(location: Sequence[str | int], *, unknown: bool = False) -> str | None:
    """A pydantic location as `messages[0].content`, without the names of union branches; None for the body itself.

    `unknown`: it ends with a field that does not exist, so may be called anything.
    """
    text = ""
    for part in _path(location, unknown):
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or None


def _path(location: Sequence[str | int], unknown: bool = False) -> list[str | int]:
    """The parts of a location that lie in the value."""
    parts = list(location[1:] if location and location[0] in _SOURCES else location)
    last = [parts.pop()] if unknown and parts else []
    inner = [part for part in parts[1:] if isinstance(part, int) or _is_field(part)]
    return parts[:1] + inner + last


def _is_field(part: str) -> bool:
    return _FIELD.fullmatch(part) is not None and part not in _TYPE_WORDS
