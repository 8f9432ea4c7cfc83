"""Chat templates: from messages to the prompt text a model was trained on.

Templates come with checkpoints, so they are untrusted programs: they run in jinja2's immutable sandbox, see
only what is handed to them, and their failures become one-line errors. The environment is that of
transformers (block trimming, loop controls, `raise_exception`, `strftime_now`, a `tojson` that does not
escape HTML), so the text is the same. Must not know of token ids or of the engine. Invariant: nothing a
template does changes the messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ostinato.errors import ModelError, RequestError

if TYPE_CHECKING:
    from ostinato.text.sandbox import Template

Message = Mapping[str, Any]


class ChatTemplate:
    """The named chat templates of a checkpoint (usually one, "default"); compiled when first used."""

    def __init__(
        self, sources: Mapping[str, str], *, special_tokens: Mapping[str, str] | None = None
    ) -> None:
        self.sources = dict(sources)
        self._special = dict(special_tokens or {})
        self._compiled: dict[str, Template] = {}

    @classmethod
    def from_dir(
        cls, path: str | Path, *, config: Mapping[str, Any], special_tokens: Mapping[str, str] | None = None
    ) -> Self:
        """Templates of a checkpoint's directory; `config` is its tokenizer_config.json.

        `chat_template.jinja` (with `additional_chat_templates/NAME.jinja`) wins over tokenizer_config.json,
        and that over `chat_template.json`. No template at all is no error until one is needed.
        """
        root = Path(path)
        sources: dict[str, str] = {}
        legacy = root / "chat_template.json"
        if legacy.is_file():
            sources |= _read_legacy(legacy)
        sources |= named_sources(config.get("chat_template"), where="tokenizer_config.json")
        if (root / "chat_template.jinja").is_file():
            sources["default"] = _read_text(root / "chat_template.jinja")
        for file in sorted((root / "additional_chat_templates").glob("*.jinja")):
            sources[file.stem] = _read_text(file)
        return cls(sources, special_tokens=special_tokens)

    def __bool__(self) -> bool:
        """Whether the checkpoint has a template."""
        return bool(self.sources)

    def render(
        self,
        messages: Sequence[Message],
        /,  # so that a variable may have any name
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation; encode it without adding special tokens, it has its own.

        `template` chooses one by name (default: "tool_use" when there are tools and the checkpoint has it,
        else "default"). `variables` are handed to the template (for example `enable_thinking=False`).
        Raises RequestError for messages the template refuses, ModelError when the template itself is missing
        or broken.
        """
        _check_tools(tools)
        name = self._choose(template, bool(tools))
        compiled = self._compile(name)
        # Without what a message leaves empty: most templates print a missing key as nothing, and None as "None".
        turns = [
            {key: value for key, value in m.items() if value is not None} for m in check_messages(messages)
        ]
        context = {
            **self._special,
            "documents": None,
            **variables,
            "messages": turns,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        return compiled.render(context)

    def _choose(self, name: str | None, has_tools: bool) -> str:
        if not self.sources:
            raise ModelError(
                "this model has no chat template; use generate() with a plain prompt, or put a "
                "chat_template.jinja beside its tokenizer.json"
            )
        if name is None:
            name = "tool_use" if has_tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise RequestError(f"no chat template is named {name!r}; the model has {sorted(self.sources)}")
        return name

    def _compile(self, name: str) -> Template:
        if name not in self._compiled:
            # Imported here: most starts render no template, and jinja2 takes its time.
            from ostinato.text.sandbox import compile_template

            self._compiled[name] = compile_template(name, self.sources[name])
        return self._compiled[name]


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copies of well-formed messages, list contents of text parts joined by newlines.

    Raises RequestError naming the index of the message that is wrong.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(
            f"messages must be a list of {{'role': ..., 'content': ...}}, got {type(messages).__name__}"
        )
    if not messages:
        raise RequestError("messages is empty; give at least one {'role': 'user', 'content': ...}")
    return [_check_message(index, message) for index, message in enumerate(messages)]


def _check_tools(tools: object) -> None:
    """Raises RequestError unless `tools` is None or a list of mappings."""
    if tools is None:
        return
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError(f"tools must be a list of {{'type': 'function', 'function': ...}}, got {tools!r}")


def _check_message(index: int, message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(
            f"messages[{index}] is a {type(message).__name__}; give a dict with role and content"
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(
            f"messages[{index}] has role {role!r}; give 'system', 'user', 'assistant' or 'tool'"
        )
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise RequestError(f"messages[{index}] ({role}) has no content; give a string")
    if isinstance(content, list | tuple):
        content = "\n".join(_text_part(index, part) for part in content)
    elif not isinstance(content, str | None):
        raise RequestError(
            f"messages[{index}] ({role}) has content of type {type(content).__name__}; give a string"
        )
    return {**message, "content": content}


def _text_part(index: int, part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(text, str):
        raise RequestError(f"messages[{index}] has a part of type {kind!r}; only text parts are supported")
    return text


def named_sources(value: object, *, where: str) -> dict[str, str]:
    """Templates from a config's `chat_template`: a string, or a list of `{"name": ..., "template": ...}`."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, Mapping) and all(isinstance(v, str) for v in value.values()):
        return {str(k): v for k, v in value.items()}
    try:
        assert isinstance(value, list)
        return {str(entry["name"]): str(entry["template"]) for entry in value}
    except (AssertionError, TypeError, KeyError):
        raise ModelError(
            f"chat_template in {where} is neither a string nor a list of named templates; correct it there"
        ) from None


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except ValueError:
        raise ModelError(f"{str(file)!r} is not UTF-8 text; download it again") from None


def _read_legacy(file: Path) -> dict[str, str]:
    """`chat_template.json`: `{"chat_template": ...}`."""
    try:
        value = json.loads(_read_text(file))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{str(file)!r} is not JSON ({_one_line(error)}); download it again") from None
    return named_sources(value.get("chat_template") if isinstance(value, Mapping) else None, where=file.name)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
