"""Bad input: a clear one-line error from the exception tree, an engine that stays usable, no page lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ostinato import LLM, ConfigError, ModelError, OstinatoError, RequestError, SamplingParams
from ostinato.cli import app
from ostinato.engine.launch import locate_model

GREEDY = SamplingParams(temperature=0, max_tokens=2)


@pytest.fixture
def refuses(llm: LLM) -> Any:
    """Asserts that a call is refused in one line, and that the engine answers as before."""
    expected = llm.generate("And the", GREEDY)[0].outputs

    def check(message: str, call: Any) -> None:
        with pytest.raises(OstinatoError, match=message) as caught:
            call()
        assert isinstance(caught.value, RequestError)
        assert "\n" not in str(caught.value)
        llm.engine.scheduler.check_leaks()
        assert not llm.engine.has_work
        assert llm.generate("And the", GREEDY)[0].outputs == expected

    return check


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "the prompt is empty; give some text"),
        ([], "there is no prompt; give at least one"),
        ([[]], "the prompt has no tokens; give at least one"),
        (["fine", ""], "the prompt is empty"),
        (None, "prompts must be text or token ids, or a list of such, got None"),
        (5, "prompts must be text or token ids"),
        (b"abc", "prompts must be text or token ids"),
        (torch.tensor([3, 4]), r"a prompt must be text or a list of token ids, got tensor\(3\)"),
        ("half \ud800", r"the prompt has half a surrogate pair, '\\ud800', at character 5; remove it"),
        (["fine", None], "a prompt must be text or a list of token ids, got None"),
        ([b"abc"], "a prompt must be text or a list of token ids"),
        ([3, -1], "the prompt holds -1, token ids of this model are whole numbers from 0 to 2047"),
        ([3, 2048], "the prompt holds 2048, token ids"),
        ([[3, 1.5]], "the prompt holds 1.5, token ids"),
        ([[3, True]], "the prompt holds True, token ids"),
        ([[3, "x"]], "the prompt holds 'x', token ids"),
        (
            [5] * 1024,
            "the prompt has 1024 tokens, the context holds 1024 with at least 1 to generate; shorten",
        ),
        ([5] * 1025, "the prompt has 1025 tokens, the context holds 1024"),
        (["fine", "x" * 50_000], "the prompt has 50001 tokens, the context holds 1024"),
    ],
    ids=range(19),
)
def test_bad_prompts(llm: LLM, refuses: Any, prompts: Any, message: str) -> None:
    refuses(message, lambda: llm.generate(prompts, GREEDY))


@pytest.mark.parametrize("length", [1016, 1022, 1023, 1024, 1025])
def test_prompts_about_as_long_as_the_context(llm: LLM, length: int) -> None:
    """ctx-8 to ctx+1 (F54): an answer up to the context's end, or both numbers; nothing is cut silently."""
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    if length >= 1024:
        with pytest.raises(RequestError, match=f"the prompt has {length} tokens, the context holds 1024"):
            llm.generate([9] * length, params)
        return
    (output,) = llm.generate([9] * length, params)
    assert len(output.prompt_token_ids) == length
    assert len(output.outputs[0].token_ids) == 1024 - length


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": -1}, "max_tokens must be between 0"),
        (
            {"logit_bias": {2048: 1.0}},
            "logit_bias holds 2048, token ids of this model are whole numbers from 0 to",
        ),
        ({"stop_token_ids": [5, 9000]}, "stop_token_ids holds 9000, token ids of this model"),
        ({"stop": [""]}, "stop must hold non-empty strings"),
        ({"stop": "a\ud800"}, "stop has half a surrogate pair, '\\\\ud800', at character 1"),
    ],
    ids=str,
)
def test_bad_parameters(llm: LLM, refuses: Any, params: dict[str, Any], message: str) -> None:
    refuses(message, lambda: llm.generate("fine", SamplingParams(**params)))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([GREEDY] * 2, "2 sampling_params for 1 prompts; give one, or one for each"),
        ([], "0 sampling_params for 1 prompts"),
        (
            {"temperature": 0},
            "sampling_params must be SamplingParams, or one for each prompt, got {'temperature'",
        ),
        (5, "sampling_params must be SamplingParams"),
        ([{"temperature": 0}], "sampling parameters must be SamplingParams, got {'temperature': 0}"),
    ],
    ids=range(5),
)
def test_parameters_of_the_wrong_kind(llm: LLM, refuses: Any, params: Any, message: str) -> None:
    refuses(message, lambda: llm.generate("fine", params))


@pytest.mark.parametrize("params", [{}, [], 0, "", {"temperature": 0}, [GREEDY]], ids=str)
def test_parameters_of_the_wrong_kind_for_a_stream(llm: LLM, refuses: Any, params: Any) -> None:
    """Also those that are false: nothing but None stands for the defaults."""
    message = "sampling parameters must be SamplingParams, got"
    refuses(message, lambda: list(llm.generate_stream("fine", params)))
    refuses(message, lambda: list(llm.chat_stream([{"role": "user", "content": "fine"}], params)))


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "the conversation is empty; give at least one message"),
        ([[]], "the conversation is empty"),
        ("hello", "messages must be a list of .*, got str"),
        ({"role": "user", "content": "x"}, "messages must be a list of .*, got dict"),
        (["hello"], "messages must be a list of .*, got str"),
        (5, "messages must be a list of .*, got int"),
        ([{"role": "user"}], r"messages\[0\] \(user\) has no content"),
    ],
    ids=range(7),
)
def test_bad_conversations(llm: LLM, refuses: Any, messages: Any, message: str) -> None:
    refuses(message, lambda: llm.chat(messages, GREEDY))


def test_an_answer_cannot_go_on_with_the_last_message(llm: LLM, refuses: Any) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It is"}]
    refuses(
        "continue_final_message is not supported",
        lambda: llm.chat(messages, GREEDY, continue_final_message=True),
    )


def test_that_no_kernel_is_compiled_is_told(capfd: pytest.CaptureFixture[str], make_llm: Any) -> None:
    """A checkpoint in float16 is served, by torch's own operations; whoever asked for them knows."""
    make_llm(dtype="float16", kernels="auto")
    assert "no compiled kernels for dtype float16; use bfloat16 or float32" in capfd.readouterr().err
    make_llm(dtype="float16", kernels="reference")
    assert "compiled" not in capfd.readouterr().err


@pytest.mark.parametrize("tools", [5, "weather", ["weather"], {"name": "weather"}, [None]], ids=str)
def test_tools_of_the_wrong_kind(llm: LLM, refuses: Any, tools: Any) -> None:
    messages = [{"role": "user", "content": "fine"}]
    refuses("tools must be a list of", lambda: llm.chat(messages, GREEDY, tools=tools))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"request_id": 5}, "request_id must be a string, got 5"),
        ({"extra_key": None}, "extra_key must be a string, got None"),
        ({"request_id": "\ud800"}, "request_id has half a surrogate pair"),
        ({"extra_key": "\ud800"}, "extra_key has half a surrogate pair"),
        ({"priority": "high"}, "priority must be a whole number, got 'high'"),
        ({"priority": None}, "priority must be a whole number, got None"),
    ],
    ids=str,
)
def test_bad_submissions(llm: LLM, refuses: Any, options: dict[str, Any], message: str) -> None:
    refuses(message, lambda: llm.engine.submit("fine", GREEDY, **options))


def test_streams_refuse_when_first_read(llm: LLM, refuses: Any) -> None:
    refuses("the prompt is empty", lambda: next(llm.generate_stream("", GREEDY)))
    refuses("messages must be a list", lambda: llm.chat_stream("hello", GREEDY))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"modell": "x"}, ConfigError, "unknown option 'modell'; did you mean 'model'"),
        ({"model": "/no/such/model"}, ModelError, "/no/such/model is neither a directory nor a hub id"),
        ({"context_length": 2000}, ConfigError, "context_length 2000 is over the model's 1024; lower it"),
        ({"kv_memory": "1KiB"}, ConfigError, "kv_memory of 1024 bytes holds 0 pages"),
        (
            {"trace_steps": 1, "trace_dir": "/dev/null/x"},
            ConfigError,
            "replay traces cannot be written to /dev/null/x",
        ),
        ({"expert_placement": "/no/file"}, ConfigError, "/no/file cannot be read .No such file or directory"),
        (
            {"expert_placement": "/dev/null"},
            ConfigError,
            "/dev/null is no expert placement; .*a list for each",
        ),
        ({"num_pages": 1}, ConfigError, "num_pages must be a whole number of at least 2, got 1"),
        ({"graph": "cuda"}, ConfigError, "'cuda'"),
        (
            {"quantization": "int8", "dtype": "float16"},
            ConfigError,
            "quantization 'int8' cannot run with dtype float16; use bfloat16 or float32",
        ),
        (
            {"quantization": "int8", "page_size": 8, "chunked_prefill_size": 64},
            ConfigError,
            "quantization 'int8' cannot run with page_size 8; use a multiple of 16",
        ),
    ],
    ids=range(11),
)
def test_options_that_cannot_work(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        LLM(**{"threads": 1, "progress": False} | options)
    assert "\n" not in str(caught.value)


def test_config_or_options() -> None:
    from ostinato import EngineConfig

    with pytest.raises(ConfigError, match="give either config or model and options, not both"):
        LLM(config=EngineConfig(), threads=1)


def copied(directory: Path, name: str) -> Path:
    """The demo checkpoint, as links to its files but for the one that is to be another."""
    source = locate_model(None)
    for file in source.iterdir():
        if file.name != name:
            (directory / file.name).symlink_to(file)
    return source


def test_what_a_checkpoint_recommends(tmp_path: Path, make_llm: Any) -> None:
    """It holds for what is not given, unless the checkpoint does not sample; what cannot work names the file."""
    copied(tmp_path, "generation_config.json")
    advice = tmp_path / "generation_config.json"
    advice.write_text('{"temperature": 0.6, "top_k": 20, "eos_token_id": 1}')
    llm = make_llm(model=tmp_path)
    assert llm.sampling_params(top_k=5, n=2) == SamplingParams(temperature=0.6, top_k=5, n=2)
    advice.write_text('{"do_sample": false, "temperature": 0.6}')
    assert llm.sampling_params() == SamplingParams()
    advice.write_text('{"top_k": -5}')
    with pytest.raises(ModelError, match=r"generation_config\.json: top_k must be between 0 and"):
        llm.sampling_params()


def test_a_tokenizer_with_more_tokens_than_the_model(tmp_path: Path, make_llm: Any) -> None:
    """A row past the embedding's end is foreign memory: its token is refused also where text names it."""
    source = copied(tmp_path, "tokenizer.json")
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    tokenizer["added_tokens"].append({"id": 2048, "content": "<past>", **flags})
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    llm = make_llm(model=tmp_path)
    message = "has the token '<past>', whose id 2048 is past the model's vocabulary of 2048; leave it out, or"
    for prompts in ("<past>", ["And the", "And <past> the"]):
        with pytest.raises(RequestError, match=message):
            llm.generate(prompts, GREEDY)
    with pytest.raises(RequestError, match=message):
        next(llm.generate_stream("<past>", GREEDY))
    with pytest.raises(RequestError, match=message):
        llm.chat([{"role": "user", "content": "<past>"}], GREEDY)
    assert len(llm.generate("And the", GREEDY)[0].outputs[0].token_ids) == 2


def test_ends_that_the_model_cannot_choose(tmp_path: Path, make_llm: Any) -> None:
    """Ids past the vocabulary among the eos ids end nothing and are in no one's way: neither of `min_tokens`, which
    keeps ends back, nor of a form, which ends with one."""
    source = copied(tmp_path, "generation_config.json")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2048, 1000000000]}')
    llm, plain = make_llm(model=tmp_path), make_llm(model=source)
    assert llm.engine.stop_token_ids == plain.engine.stop_token_ids
    for way in (
        {"min_tokens": 3},
        {"min_tokens": 3, "temperature": 0},
        {"structured_outputs": {"regex": "[0-9]{2}"}},
    ):
        params = SamplingParams(**{"max_tokens": 4, "seed": 1} | way)
        assert llm.generate("And the", params)[0].outputs == plain.generate("And the", params)[0].outputs


def test_a_model_that_gives_no_numbers_answers_nothing(
    tmp_path: Path, make_llm: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """NaN weights: however tokens are chosen and however short the answer, it ends in error and says why."""
    source = copied(tmp_path, "model.safetensors")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, tmp_path / "model.safetensors")
    llm = make_llm(model=tmp_path)
    ways: list[dict[str, Any]] = [
        {"temperature": 0},
        {"max_tokens": 1},
        {"logprobs": 2, "n": 2},
        {"repetition_penalty": 1.2},
        {"structured_outputs": {"regex": "[0-9]+"}},
    ]
    ways += [{"stop_token_ids": list(range(2048))}]
    # The token that such a greedy choice takes.
    ways += [{"temperature": 0, "stop": "<|begin|>", "skip_special_tokens": False}]
    for way in ways:
        for choice in llm.generate("And the", SamplingParams(**{"max_tokens": 3} | way))[0].outputs:
            assert choice.finish_reason == "error", way
            assert "the model's logits are no finite numbers" in str(choice.stop_reason), way
    ends = {name: n for name, n in llm.stats()["scheduler"].items() if name.startswith("finished_")}
    assert ends == {"finished_error": len(ways) + 1}, "whatever else would have ended it with that token"
    with pytest.raises(SystemExit) as ended:
        app(["generate", "And the", "--model", str(tmp_path), "--threads", "1", "--dtype", "float32"])
    assert ended.value.code == 2
    assert "could not be finished: the model's logits are no finite" in capsys.readouterr().err


def test_a_context_that_no_machine_holds(tmp_path: Path) -> None:
    """All of it is served unless another length is asked for; then nothing is made in the model's size."""
    source = copied(tmp_path, "config.json")
    values = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"max_position_embeddings": 10**9}))
    options: dict[str, Any] = {"threads": 1, "progress": False}
    with pytest.raises(ConfigError, match=r"too little memory for a KV cache of .* lower .*context_length"):
        LLM(model=tmp_path, **options)
    with LLM(model=tmp_path, context_length=512, **options) as llm:
        assert llm.generate("And the", GREEDY)[0].finished


@pytest.mark.parametrize("size", [{"kv_memory": "512TiB"}, {"num_pages": 2**31 - 1, "page_size": 2**20}])
def test_a_cache_that_no_machine_holds(size: dict[str, Any]) -> None:
    options = {"chunked_prefill_size": 0, "threads": 1, "progress": False} | size
    with pytest.raises(
        ConfigError, match=r"too little memory for a KV cache of \d+ pages .* lower kv_memory"
    ):
        LLM(**options)
