"""What can go wrong, as clients see it: a status, OpenAI's error object, the parameter at fault.

Knows nothing of routes. Invariant: a client never sees a stack trace, and every 4xx about a field names it in `param`.
"""

from __future__ import annotations

import json
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
_WORDS: Mapping[str, str] = {"None": "null", "True": "true", "False": "false"}
_SHOWN = 40
"""Characters of a bad value that its message repeats."""


class ApiError(OstinatoError):
    """An answer other than success. `retry_after` is in seconds; `allow` lists the methods that a path has."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.allow = allow

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
        if self.allow is not None:
            found.append((b"allow", self.allow.encode()))
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


def shutting_down() -> ApiError:
    """The server ends: it takes no more requests, and has no more time for those it has."""
    return engine_down("the server is shutting down")


def mistake() -> ApiError:
    """An exception that nobody has foreseen; whoever catches it writes it to the log."""
    return ApiError(500, "the server has made a mistake; its log tells more")


def from_request_error(error: RequestError, fields: Sequence[str], default: str | None = None) -> ApiError:
    """A 400 that names the field which the message is about: the first known field name in it."""
    words = _FIELD.findall(str(error))
    param = next((word for word in words if word in fields), default)
    return bad_field(param, str(error))


def from_validation(errors: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """A 400 from pydantic's errors about a body: of a union's complaints, the one that got furthest into it, and
    there one about a value of the right type.
    """

    def path(error: Mapping[str, Any]) -> list[str | int]:
        return _path(error["loc"], body, missing=error["type"] == "missing")

    error = max(errors, key=lambda e: (len(path(e)), not e["type"].endswith("_type")))
    return bad_field(spell(path(error)), _message(error, spell(path(error))))


def _message(error: Mapping[str, Any], param: str | None) -> str:
    """What is wrong, in JSON's words instead of Python's."""
    kind, context = error["type"], error.get("ctx", {})
    if param is None:
        if kind == "missing":
            return "the body is missing; send a JSON object"
        return "the body must be a JSON object, sent with the header content-type: application/json"
    if kind == "missing":
        return f"{param} is missing; give it"
    if kind in ("extra_forbidden", "none_required") or context.get("max_length") == 0:
        return f"{param} is not supported here; remove it"
    if kind in ("too_short", "too_long"):
        bound = (
            f"at least {context['min_length']}" if kind == "too_short" else f"at most {context['max_length']}"
        )
        count = context["actual_length"]
        return f"{param} must hold {bound}, got {'more' if count is None else count}"
    if kind == "value_error":
        return f"{param} {context['error']}"
    if kind == "literal_error":
        expected = _WORDS.get(context["expected"], context["expected"])
        return f"{param} must be {expected}, got {_shown(error['input'])}"
    if kind == "union_tag_invalid":
        return f"{param}.type must be one of {context['expected_tags']}, got {context['tag']!r}"
    message = str(error["msg"])
    return f"{param}: {message[0].lower()}{message[1:]}"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def spell(path: Sequence[str | int]) -> str | None:
    """The parts of a path as `messages[0].content`; None for the body itself. A name that is empty is shown as ""."""
    text = ""
    for part in path:
        name = part if part != "" else '""'
        text += f"[{name}]" if isinstance(name, int) else f".{name}" if text else name
    return text or None


def _path(location: Sequence[str | int], body: Any, *, missing: bool) -> list[str | int]:
    """The parts of a pydantic location that lie in the body: those of which it holds a value, without the names of
    union branches between them; and the last one, if it is the name of a field that is `missing`.
    """
    if not location or location[0] != "body":
        return list(location[1:])
    path: list[str | int] = []
    inside = body
    for place, part in enumerate(location[1:], start=2):
        held = (
            part in inside
            if isinstance(inside, Mapping)
            else isinstance(inside, list) and isinstance(part, int)
        )
        if held:
            inside = inside[part]
        if held or (missing and place == len(location)):
            path.append(part)
    return path
