"""Structured output: what a completion must look like, and which tokens keep it so.

    StructuredOutputs (a plain value) ─▶ Grammars.compile (once for each text) ─▶ Grammar.matcher (one a completion)

Parsing and masks are llguidance's; nothing of it shows outside of this module, and it is imported at the first use.
Knows nothing of logits or scheduling. Invariant: what cannot be compiled is refused before a token is generated, and a
matcher's state is a function of the tokens that it was given, so a completion is the same beside any others.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ostinato.errors import RequestError
from ostinato.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

MAX_GRAMMAR_CHARS = 1 << 18
MAX_CHOICES = 1024
_KEPT = 64  # compiled grammars


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """The form of a completion; exactly one field is given.

    json: a JSON schema, as a mapping or its text. json_object: any JSON object. regex: the whole text matches it
    (syntax of Rust's regex crate). choice: one of these texts. grammar: a Lark grammar in llguidance's dialect.
    Raises RequestError for none or several of them, and for values that cannot be such.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in _FIELDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            named = " and ".join(given) or "none of them"
            raise RequestError(f"structured_outputs takes exactly one of {', '.join(_FIELDS)}; got {named}")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise RequestError(
                    f"structured_outputs.{name} must be a text that is not empty, got {value!r}"
                )
        if len(self._source()) > MAX_GRAMMAR_CHARS:
            raise RequestError(
                f"structured_outputs.{given[0]} has {len(self._source())} characters, at most "
                f"{MAX_GRAMMAR_CHARS} are allowed; simplify it"
            )

    @property
    def kind(self) -> str:
        """Name of the field that is given."""
        return next(name for name in _FIELDS if getattr(self, name) not in (None, False))

    def as_dict(self) -> dict[str, Any]:
        """The one field that is given, as plain values: `StructuredOutputs(**x.as_dict()) == x`."""
        return {self.kind: getattr(self, self.kind)}

    def _source(self) -> str:
        value = getattr(self, self.kind)
        return value if isinstance(value, str) else repr(value)


_FIELDS = ("json", "json_object", "regex", "choice", "grammar")


def _schema_text(value: object) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"structured_outputs.json is not JSON: {_one_line(error)}") from None
    if not isinstance(value, Mapping):
        raise RequestError(f"structured_outputs.json must be a JSON schema (an object), got {value!r}")
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"structured_outputs.json is not JSON: {_one_line(error)}") from None


def _choices(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise RequestError(f"structured_outputs.choice must be a list of texts, got {value!r}")
    if len(value) > MAX_CHOICES:
        raise RequestError(
            f"structured_outputs.choice holds {len(value)} texts, at most {MAX_CHOICES} are allowed"
        )
    for text in value:
        if not isinstance(text, str) or not text:
            raise RequestError(f"structured_outputs.choice must hold texts that are not empty, got {text!r}")
    return tuple(value)


class Matcher:
    """One completion's place in its grammar. Not shared between threads."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._words = np.zeros(-(-vocab_size // 32), dtype=np.int32)

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Which tokens may come next: bool [vocab]; end-of-sequence tokens too, where the text may end."""
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        bits = np.unpackbits(self._words.view(np.uint8), bitorder="little")
        return bits[: self._vocab_size].view(np.bool_)

    def accept(self, token_id: int) -> None:
        """The token that was chosen."""
        self._matcher.consume_token(token_id)

    @property
    def finished(self) -> bool:
        """Whether nothing but an end may follow."""
        return bool(self._matcher.is_stopped())

    @property
    def problem(self) -> str | None:
        """Why the matcher can go on no further (a limit of its own, or a token that was not allowed), or None."""
        if not self._matcher.is_error():
            return None
        return f"structured_outputs could not be kept: {_reason(self._matcher)}"


class Grammar:
    """A compiled grammar."""

    def __init__(self, start: LLMatcher, vocab_size: int) -> None:
        self._start = start
        self._vocab_size = vocab_size

    def matcher(self) -> Matcher:
        """At the start of the grammar; each completion has one of its own."""
        return Matcher(self._start.deep_copy(), self._vocab_size)


class Grammars:
    """Compiles for one tokenizer. May be called from several threads; the last grammars are kept.

    vocab_size: width of the model's logits. end_token_ids: allowed where a text may end.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._ends = sorted(token for token in end_token_ids if token < vocab_size)
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._known: OrderedDict[StructuredOutputs, Grammar | str] = OrderedDict()  # str: why there is none

    def known(self, outputs: StructuredOutputs) -> bool:
        """Whether `compile` would return at once."""
        with self._lock:
            return outputs in self._known

    def compile(self, outputs: StructuredOutputs) -> Grammar:
        """The grammar of `outputs`. Raises RequestError, with llguidance's reason, when there can be none."""
        with self._lock:
            found = self._known.get(outputs)
            if found is not None:
                self._known.move_to_end(outputs)
                return _made(found)
            vocabulary = self._open()
        made: Grammar | str
        try:
            made = self._build(outputs, vocabulary)
        except RequestError as error:
            made = str(error)  # kept as well: to find out again may take as long
        with self._lock:
            self._known[outputs] = made
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return _made(made)

    def _open(self) -> LLTokenizer:
        """The vocabulary as llguidance reads it: made once, since that takes a while."""
        if self._vocabulary is None:
            import llguidance

            if not self._ends:
                raise RequestError("this model names no end-of-sequence token, so no text could end by form")
            try:
                self._vocabulary = llguidance.LLTokenizer(
                    self._tokenizer.backend.to_str(), n_vocab=self._vocab_size, eos_token=self._ends
                )
            except Exception as error:  # the library raises what it likes
                raise RequestError(
                    f"this model's tokenizer cannot be bound to a form: {_one_line(error)}"
                ) from None
        return self._vocabulary

    def _build(self, outputs: StructuredOutputs, vocabulary: LLTokenizer) -> Grammar:
        import llguidance

        try:
            source = _source(outputs)
            matcher = llguidance.LLMatcher(vocabulary, source, log_level=0)
            probe = matcher.deep_copy()
            probe.compute_ff_tokens()  # a form whose forced text never ends shows it here
            probe.compute_bitmask()  # and one that no text has, or that is too large to be followed, here
        except Exception as error:
            raise RequestError(f"structured_outputs.{outputs.kind}: {_one_line(error)}") from None
        for one in (matcher, probe):
            if one.is_error():
                reason = _reason(one, dead_end="no text has this form")
                raise RequestError(f"structured_outputs.{outputs.kind} cannot be compiled: {reason}")
        return Grammar(matcher, self._vocab_size)


def _made(found: Grammar | str) -> Grammar:
    if isinstance(found, str):
        raise RequestError(found)
    return found


def _source(outputs: StructuredOutputs) -> str:
    """The form in llguidance's own language."""
    from llguidance import LLMatcher

    # As json.dumps writes: free whitespace would let a model print spaces for ever.
    style: JsonCompileOptions = {
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",
    }
    if outputs.json_object:
        return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=style)
    if isinstance(outputs.json, str):
        return LLMatcher.grammar_from_json_schema(outputs.json, overrides=style)
    if outputs.regex is not None:
        return LLMatcher.grammar_from_regex(outputs.regex)
    if outputs.choice is not None:
        texts = " | ".join(_literal(text) for text in outputs.choice)
        return LLMatcher.grammar_from_lark(f"start: {texts}")
    assert outputs.grammar is not None
    return LLMatcher.grammar_from_lark(outputs.grammar)


def _literal(text: str) -> str:
    """A text in a Lark grammar: as JSON writes it, with the one control character escaped that JSON leaves as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _reason(matcher: LLMatcher, dead_end: str = "no text that goes on from here has this form") -> str:
    """Why a matcher has given up, without its counters; `dead_end` where nothing may follow."""
    why = _one_line(matcher.get_error().partition("<state>")[0])
    return dead_end if why.startswith("NoExtension") else why


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:300]
