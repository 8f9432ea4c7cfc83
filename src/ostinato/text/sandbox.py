"""Chat templates run: jinja2 in its immutable sandbox, with what checkpoints' templates expect to find there.

Templates come with checkpoints, so they are untrusted programs. Knows nothing of messages or files. Invariant: whatever
a template does wrong becomes a RequestError or ModelError of one line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ostinato.errors import ModelError, RequestError


class Template:
    """A compiled template."""

    __slots__ = ("_compiled",)

    def __init__(self, compiled: jinja2.Template) -> None:
        self._compiled = compiled

    def render(self, context: Mapping[str, Any]) -> str:
        """The text for these variables. Raises RequestError when the template refuses them or fails on them."""
        try:
            return self._compiled.render(context)
        except jinja2.UndefinedError as error:
            raise RequestError(f"the chat template cannot read these messages: {one_line(error)}") from None
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template refuses these messages: {one_line(error)}") from None
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            kind = type(error).__name__
            raise RequestError(
                f"the chat template fails on these messages ({kind}: {one_line(error)}); "
                "check their roles and content"
            ) from None


def compile_template(name: str, source: str) -> Template:
    """Compile a template. Raises ModelError, with the line, when it is broken."""
    try:
        return Template(_environment().from_string(source))
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(
            f"chat template {name!r} is broken at line {error.lineno} ({one_line(error)}); "
            "correct it in the checkpoint"
        ) from None


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant wrote; for a prompt it is its body, whose
    variables end with it.
    """

    tags = {"generation"}  # noqa: RUF012  (jinja2 reads it off the class)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def one_line(error: Exception) -> str:
    """An error's message on one line, cut to a readable length."""
    return " ".join(str(error).split())[:300]
