"""Structured output: every form is kept, whatever the model would rather say, and beside any other requests."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato import LLM, RequestError, SamplingParams, StructuredOutputs
from ostinato.engine.rounds import params_as_dict
from ostinato.text.grammar import MAX_CHOICES, MAX_GRAMMAR_CHARS, Grammars

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["king", "fool"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
PROMPT = "And the king said unto"


def check_person(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "age", "kind"]
    assert len(value["name"]) <= 12
    assert 0 <= value["age"] <= 150
    assert value["kind"] in ("king", "fool")


def matches(pattern: str) -> Callable[[str], None]:
    def check(text: str) -> None:
        assert re.fullmatch(pattern, text), text

    return check


CHOICES = ["yes, my lord", "nay\n", 'a "third" way', "\x00\x1f\x7f\x80"]


def check_choice(text: str) -> None:
    assert text in CHOICES


FORMS: dict[str, tuple[dict[str, Any], Callable[[str], None]]] = {
    "schema": ({"json": SCHEMA}, check_person),
    "schema as text": ({"json": json.dumps(SCHEMA)}, check_person),
    "regex": ({"regex": r"[A-F]{2}-[0-9]{3,4}"}, matches(r"[A-F]{2}-[0-9]{3,4}")),
    "choice": ({"choice": CHOICES}, check_choice),
    "grammar": ({"grammar": 'start: "a"? end\nend: /[0-9]/ "b"\n'}, matches("a?[0-9]b")),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_each_form_is_kept(form: str, temperature: float, llm: LLM) -> None:
    spec, check = FORMS[form]
    params = SamplingParams(temperature=temperature, seed=5, n=3, max_tokens=200, structured_outputs=spec)
    outputs = llm.generate(PROMPT, params)[0].outputs
    assert {output.finish_reason for output in outputs} == {"stop"}
    for output in outputs:
        check(output.text)


def test_an_object_of_any_kind(llm: LLM) -> None:
    """`json_object` starts an object, and every token of it can still become one."""
    params = SamplingParams(temperature=0, max_tokens=20, structured_outputs={"json_object": True})
    assert llm.generate(PROMPT, params)[0].outputs[0].text.startswith("{")


def test_the_same_beside_any_others_in_chunks_and_on_a_hit(llm: LLM, make_llm: Any) -> None:
    params = SamplingParams(temperature=1, seed=11, max_tokens=60, structured_outputs={"json": SCHEMA})
    alone = llm.generate(PROMPT, params)[0].outputs[0].token_ids
    free = SamplingParams(temperature=1, seed=2, max_tokens=25)
    other = replace(params, seed=4)
    prompts = [PROMPT, PROMPT, "He", PROMPT, "To be"]
    together = llm.generate(prompts, [free, params, other, params, free])
    assert together[1].outputs[0].token_ids == alone
    assert together[3].outputs[0].token_ids == alone
    tight = make_llm(num_pages=12, context_length=96, chunked_prefill_size=16, max_running_requests=4)
    crowd = tight.generate([PROMPT] * 6, [replace(params, seed=seed) for seed in (11, 1, 2, 3, 4, 11)])
    assert crowd[0].outputs[0].token_ids == crowd[5].outputs[0].token_ids == alone


def test_tokens_of_a_bound_completion_are_the_best_of_those_allowed(llm: LLM) -> None:
    """Greedy choice among allowed tokens, by the model's own log-probabilities, which no mask touches."""
    params = SamplingParams(temperature=0, logprobs=0, structured_outputs={"choice": ["yes", "no"]})
    output = llm.generate(PROMPT, params)[0].outputs[0]
    assert output.text in ("yes", "no")
    ids = llm.tokenizer.encode(PROMPT)
    scores = {}
    for word in ("yes", "no"):
        tail = llm.tokenizer.encode(word, add_special_tokens=False)
        scored = llm.generate([ids + tail], SamplingParams(max_tokens=0, prompt_logprobs=0))[
            0
        ].prompt_logprobs
        first = scored[len(ids)]
        assert first is not None
        scores[word] = first[tail[0]].logprob
    assert output.text == max(scores, key=lambda word: scores[word])


def test_a_complete_form_ends_whatever_min_tokens_says(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0, min_tokens=40, max_tokens=60, structured_outputs={"regex": "[0-9]{3}"}
    )
    output = llm.generate(PROMPT, params)[0].outputs[0]
    assert re.fullmatch("[0-9]{3}", output.text)
    assert output.finish_reason == "stop"


def test_stop_strings_end_a_form_early(llm: LLM) -> None:
    params = SamplingParams(temperature=0, stop=["-"], structured_outputs={"regex": "[A-F]{2}-[0-9]{3}"})
    output = llm.generate(PROMPT, params)[0].outputs[0]
    assert re.fullmatch("[A-F]{2}", output.text)
    assert output.stop_reason == "-"


BAD = [
    ({}, "exactly one"),
    ({"regex": "a", "choice": ["b"]}, "regex and choice"),
    ({"regex": "(a"}, "unclosed group"),
    ({"regex": ""}, "not empty"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"json": {"type": "objekt"}}, "objekt"),
    ({"json": "{"}, "not JSON"),
    ({"json": "[1]"}, "an object"),
    ({"json": {"$ref": "#/$defs/nobody"}}, "nobody"),
    ({"grammar": "start: nobody"}, "nobody"),
    ({"choice": []}, "list of texts"),
    ({"choice": "abc"}, "list of texts"),
    ({"choice": ["a", ""]}, "not empty"),
    ({"choice": ["a"] * (MAX_CHOICES + 1)}, str(MAX_CHOICES)),
    ({"regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, str(MAX_GRAMMAR_CHARS)),
    ({"gramar": "start: x"}, "gramar"),
    ({"regex": r"[^\s\S]"}, "regex cannot be compiled: no text has this form"),
    ({"grammar": "start: start"}, "grammar cannot be compiled: no text has this form"),
    ({"json": {"$ref": "#"}}, "json cannot be compiled: no text has this form"),
    ({"regex": r"a[^\s\S]"}, "regex cannot be compiled: no text has this form"),
]


@pytest.mark.parametrize(("spec", "named"), BAD, ids=[f"{list(s)}-{n}"[:40] for s, n in BAD])
def test_f51_bad_forms_are_refused_and_the_engine_goes_on(spec: Any, named: str, llm: LLM) -> None:
    with pytest.raises(RequestError, match=re.escape(named)):
        llm.generate(PROMPT, SamplingParams(max_tokens=4, structured_outputs=spec))
    assert not llm.engine.has_work
    params = SamplingParams(temperature=0, structured_outputs={"choice": ["still here"]})
    assert llm.generate(PROMPT, params)[0].outputs[0].text == "still here"


def test_a_matcher_that_gives_up_ends_its_request_only(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from ostinato.text.grammar import Matcher

    right = Matcher.accept

    def accept(self: Matcher, token_id: int) -> None:
        right(self, token_id)
        right(self, 0)  # a token that this form does not hold

    monkeypatch.setattr(Matcher, "accept", accept)
    bound = SamplingParams(temperature=0, max_tokens=9, structured_outputs={"regex": "[0-9]{9}"})
    free = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    first, second = llm.generate([PROMPT, PROMPT], [bound, free])
    assert first.outputs[0].finish_reason == "error"
    assert first.outputs[0].stop_reason
    assert second.outputs[0].finish_reason == "length"


def test_a_matcher_that_gives_up_before_a_token_is_no_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It allows an end then, and a completion that ends so would look like one that has kept its form."""
    from ostinato.text.grammar import Matcher

    right = Matcher.allowed

    def allowed(self: Matcher) -> Any:
        self.accept(0)  # a token that this form does not hold
        return right(self)

    monkeypatch.setattr(Matcher, "allowed", allowed)
    bound = SamplingParams(temperature=0, max_tokens=9, structured_outputs={"regex": "[0-9]{9}"})
    (output,) = llm.generate(PROMPT, bound)[0].outputs
    assert output.finish_reason == "error"
    assert str(output.stop_reason).startswith("structured_outputs could not be kept")
    assert not llm.engine.has_work


@pytest.mark.parametrize("end", ["b", "/[^\\s\\S]/"])
@pytest.mark.parametrize("more", [{}, {"min_tokens": 9}, {"ignore_eos": True}, {"max_tokens": 2}], ids=str)
def test_a_dead_end_is_an_error_and_no_stop(end: str, more: dict[str, Any], llm: LLM) -> None:
    """A form that goes on to where no text can: what has been said does not have it, whatever ends the completion."""
    form = {"grammar": f'start: "a" {end} | "a" "c" {end}\nb: b'}
    params = SamplingParams(**{"temperature": 0, "max_tokens": 9, "structured_outputs": form} | more)
    output = llm.generate(PROMPT, params)[0].outputs[0]
    assert output.finish_reason == "error"
    assert output.stop_reason == (
        "structured_outputs could not be kept: no text that goes on from here has this form"
    )


@settings(max_examples=40, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6))
def test_a_choice_may_hold_any_character(text: str, shared_llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, structured_outputs={"choice": [text + "\x7f", text + "\x7f"]})
    output = shared_llm.generate(PROMPT, params)[0].outputs[0]
    assert (output.text, output.finish_reason) == (text + "\x7f", "stop")


@pytest.mark.parametrize("form", FORMS)
def test_a_form_crosses_processes(form: str) -> None:
    params = SamplingParams(structured_outputs=FORMS[form][0])
    assert SamplingParams(**params_as_dict(params)) == params
    assert params.form is not None
    assert StructuredOutputs(**params.form.as_dict()) == params.form
    assert {spec.name for spec in fields(StructuredOutputs)} >= set(params.form.as_dict())


@settings(max_examples=25, deadline=None)
@given(
    word=st.text("abcxyz ", min_size=1, max_size=12), others=st.lists(st.text("abc", min_size=1), max_size=3)
)
def test_the_mask_allows_a_choice_token_by_token(word: str, others: list[str], shared_llm: LLM) -> None:
    """Whatever way the tokenizer spells a choice, its tokens are allowed one by one, then the end."""
    engine = shared_llm.engine
    grammars = Grammars(shared_llm.tokenizer, engine.model_config.vocab_size, engine.stop_token_ids)
    matcher = grammars.compile(StructuredOutputs(choice=[word, *others])).matcher()
    for token in shared_llm.tokenizer.encode(word, add_special_tokens=False):
        assert matcher.allowed()[token]
        matcher.accept(token)
    assert matcher.problem is None
    assert matcher.allowed()[list(engine.stop_token_ids)].any()
    assert matcher.allowed().dtype == np.bool_


def test_a_form_that_cannot_be_is_found_out_once(shared_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server compiles beside the steps, and then submits, which must not do it again."""
    engine = shared_llm.engine
    grammars = Grammars(shared_llm.tokenizer, engine.model_config.vocab_size, engine.stop_token_ids)
    form, built, build = StructuredOutputs(regex=r"[^\s\S]"), [], grammars._build
    monkeypatch.setattr(grammars, "_build", lambda *args: built.append(args) or build(*args))
    for _ in range(2):
        with pytest.raises(RequestError, match="no text has this form"):
            grammars.compile(form)
    assert len(built) == 1
    assert grammars.known(form)
