"""The command line, over a fake engine: what goes where, exit codes, and one line for every user's error."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import ostinato
from ostinato.cli import app, kernels
from ostinato.cli.flags import SAMPLING_FLAGS
from ostinato.cli.measure import summary
from ostinato.config import EngineConfig
from ostinato.engine import progress
from ostinato.engine.request import SamplingParams
from ostinato.errors import RequestError


class FakeLLM:
    """Answers with the words of the prompt, upper case, one per step."""

    made: list[FakeLLM]

    def __init__(self, model: str | None = None, *, config: EngineConfig | None = None) -> None:
        assert config is not None
        self.config = config
        self.asked: list[Any] = []
        self.params: list[SamplingParams] = []
        self.closed = False
        self.tokenizer = SimpleNamespace(vocab_size=50, special_ids=frozenset({0, 1}))
        self.engine = FakeEngine()
        self.made.append(self)

    def sampling_params(self, **given: Any) -> SamplingParams:
        return SamplingParams(**given)

    def generate_stream(self, prompt: Any, params: SamplingParams) -> Iterator[SimpleNamespace]:
        self.asked.append(prompt)
        self.params.append(params)
        if "poison" in prompt:
            raise RequestError("the prompt has 9 tokens, the context 8; shorten the prompt")
        words = prompt.upper().split()[: params.max_tokens]
        for count in range(1, len(words) + 1):
            if words[count - 1] == "^C":
                raise KeyboardInterrupt
            finish = "stop" if count == len(words) else None
            yield output(prompt.split(), " ".join(words[:count]), count, finish, params.n)

    def chat_stream(self, messages: Any, params: SamplingParams) -> Iterator[SimpleNamespace]:
        yield from self.generate_stream(messages[-1]["content"], params)
        self.asked[-1] = messages

    def generate(
        self, prompts: Any, params: SamplingParams, *, progress: bool = True
    ) -> list[SimpleNamespace]:
        self.asked.append(prompts)
        self.params.append(params)
        return [output(prompt, "x", params.max_tokens, "length", 1) for prompt in prompts]

    def stats(self) -> dict[str, Any]:
        return {"replays": 3}

    def close(self) -> None:
        self.closed = True


class FakeEngine:
    """Requests that take a token per step, all together."""

    replay_seconds = 0.0

    def __init__(self) -> None:
        self.live: dict[str, int] = {}
        self.prompts: list[Any] = []

    def submit(self, prompt: Any, params: SamplingParams) -> str:
        self.prompts.append(prompt)
        name = f"request-{len(self.prompts)}"
        assert params.max_tokens is not None
        self.live[name] = params.max_tokens
        return name

    @property
    def has_work(self) -> bool:
        return bool(self.live)

    def step(self) -> list[SimpleNamespace]:
        names = list(self.live)
        self.live = {name: left - 1 for name, left in self.live.items() if left > 1}
        return [SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[1])]) for name in names]


def output(prompt: list[Any], text: str, count: int, finish: str | None, n: int) -> SimpleNamespace:
    choices = [
        SimpleNamespace(
            index=index, text=text, token_ids=list(range(count)), finish_reason=finish, logprobs=None
        )
        for index in range(n)
    ]
    return SimpleNamespace(prompt_token_ids=prompt, outputs=choices)


@pytest.fixture
def llms(monkeypatch: pytest.MonkeyPatch) -> list[FakeLLM]:
    """Engines made by commands; the real one is not imported."""
    module = ModuleType("ostinato.engine.llm")
    module.LLM = FakeLLM  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ostinato.engine.llm", module)
    monkeypatch.delitem(sys.modules, "ostinato.cli.measure", raising=False)
    monkeypatch.setattr(FakeLLM, "made", [], raising=False)
    for name in ("OSTINATO_MODEL", "OSTINATO_THREADS", "NO_PROGRESS"):
        monkeypatch.delenv(name, raising=False)
    return FakeLLM.made


def run(*args: str, stdin: str | bytes | None = None) -> Any:
    return CliRunner().invoke(app, list(args), input=stdin, prog_name="ostinato")


def error_of(result: Any, code: int = 2) -> str:
    """The one line of a user's error."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("ostinato: error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_generate_prints_the_text_and_nothing_else(llms: list[FakeLLM]) -> None:
    result = run("generate", "it is a truth")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "IT IS A TRUTH\n", "")
    assert llms[0].closed
    assert llms[0].config == EngineConfig()


def test_generate_reads_stdin(llms: list[FakeLLM]) -> None:
    assert run("generate", "-", stdin="one two").stdout == "ONE TWO\n"


def test_flags_reach_the_engine_and_the_sampler(llms: list[FakeLLM]) -> None:
    args = "--graph tape --threads 2 --decode-buckets 1,2 --no-prefix-caching --mixed-prefill "
    args += "--kv-memory 1MiB -m here"
    sampling = "--max-tokens 2 -t 0.5 --seed 7 --top-p 0.9 --top-k 3 --stop a --stop b "
    sampling += "--stop-token-id 4 --ignore-eos"
    result = run("generate", "a b c", *args.split(), *sampling.split())
    assert result.stdout == "A B\n"
    assert llms[0].config == EngineConfig(
        model="here",
        graph="tape",
        threads=2,
        decode_buckets=(1, 2),
        enable_prefix_caching=False,
        mixed_prefill=True,
        kv_memory="1MiB",
    )
    params = llms[0].params[0]
    assert (params.max_tokens, params.temperature, params.seed) == (2, 0.5, 7)
    assert (params.top_p, params.top_k, params.ignore_eos) == (0.9, 3, True)
    assert list(params.stop) == ["a", "b"]
    assert list(params.stop_token_ids) == [4]


def test_json_is_one_object_and_all_of_stdout(llms: list[FakeLLM]) -> None:
    result = run("generate", "a b c", "--json")
    assert result.stdout.count("\n") == 1
    value = json.loads(result.stdout)
    assert (value["text"], value["token_ids"], value["finish_reason"]) == ("A B C", [0, 1, 2], "stop")
    assert value["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    assert value["stats"] == {"replays": 3}
    assert set(value["timings"]) >= {"load_s", "first_token_s", "generate_s", "decode_tokens_per_s"}


def test_several_answers_are_printed_at_the_end(llms: list[FakeLLM]) -> None:
    assert run("generate", "a b", "--n", "2").stdout == "[0] A B\n\n[1] A B\n"
    value = json.loads(run("generate", "a b", "--n", "2", "--json").stdout)
    assert [choice["text"] for choice in value["choices"]] == ["A B", "A B"]
    assert value["usage"]["completion_tokens"] == 4


def test_generate_through_the_chat_template(llms: list[FakeLLM]) -> None:
    run("generate", "hello", "--chat", "--system", "Be brief.")
    assert llms[0].asked == [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    ]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["generate"], "Missing argument"),
        (["generate", ""], "the prompt is empty"),
        (["generate", "x", "--system", "y"], "--system needs --chat"),
        (["generate", "x", "--logprobs", "2"], "--logprobs needs --json"),
        (["generate", "caf\udce9"], "not UTF-8: byte 3 is 0xe9"),
        (["generate", "x", "--model", ""], "model is empty"),
        (["sreve"], "Did you mean 'serve'? See `ostinato --help`"),
        (["serve", "--cors-origin", "chat.example"], "'chat.example', no origin"),
        (["serve", "--served-model-name", ""], "served_model_name is empty"),
        (["generate", "x", "--zzzz"], "No such option: --zzzz; see `ostinato generate --help`"),
        (["generate", "x", "--max-tokens", "many"], "--max-tokens"),
        (["generate", "x", "--max-tokens", "0"], "max_tokens"),
        (["generate", "x", "--max-tokens", "-3"], "max_tokens"),
        (["generate", "x", "--temperature", "-1"], "temperature"),
        (["generate", "x", "--dtype", "float8"], "dtype 'float8' is unknown"),
        (["generate", "x", "--graph", "cuda", "--device", "cpu"], "use graph 'tape' or device 'cuda'"),
        (["generate", "poison"], "shorten the prompt"),
        (["chat", "--page-size", "0"], "page_size must be"),
        (["bench", "everything"], "there is no benchmark 'everything'"),
        (["bench", "--batch", "0"], "--batch"),
        (["bench", "replay", "--graph", "eager"], "nothing to replay"),
        (["bench", "padding", "--prefill-buckets", "8,64"], "wider than a prompt of 64 tokens"),
        (["bench", "kernels", "--kernels", "reference"], "no CPU kernels to measure"),
        (["fetch", "gpt5"], "smollm2"),
        (["frobnicate"], "No such command 'frobnicate'"),
    ],
)
def test_a_users_error_is_one_line_and_exit_code_2(llms: list[FakeLLM], args: list[str], says: str) -> None:
    assert says in error_of(run(*args))
    assert all(llm.closed for llm in llms)


@pytest.mark.parametrize("command", [["generate", "-"], ["chat"]])
def test_piped_bytes_that_are_no_text_are_named(llms: list[FakeLLM], command: list[str]) -> None:
    """Whatever the locale makes of them."""
    assert "not UTF-8: byte 3 is 0xe9" in error_of(run(*command, stdin=b"caf\xe9\n"))


def test_no_progress_holds_for_every_command(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(progress, "is_interactive", lambda: told.append("asked") or True)
    monkeypatch.setenv("NO_PROGRESS", "1")
    with progress.bars() as report:
        report("work", 0, 1)
    assert not told
    with progress.bars(shown=True):
        assert told, "an option goes first"


def test_ctrl_c_ends_the_line_closes_the_engine_and_exits_130(llms: list[FakeLLM]) -> None:
    result = run("generate", "a b ^C d")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "A B\n", "")
    assert llms[0].closed


def test_a_bug_keeps_its_traceback(llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLLM, "stats", lambda self: 1 // 0)
    assert isinstance(run("generate", "a", "--json").exception, ZeroDivisionError)


def test_piped_chat_keeps_history_and_obeys_commands(llms: list[FakeLLM]) -> None:
    lines = "hello there\n\nand you\n/reset\nagain\n/system Be kind.\nlast\n/frob\n/quit\nnever\n"
    result = run("chat", "--system", "Be brief.", stdin=lines)
    assert result.exit_code == 0
    assert result.stdout == "HELLO THERE\nAND YOU\nAGAIN\nLAST\n"
    assert "/reset forgets" in result.stderr
    brief, kind = ({"role": "system", "content": text} for text in ("Be brief.", "Be kind."))
    turns = [
        {"role": "user", "content": "hello there"},
        {"role": "assistant", "content": "HELLO THERE"},
        {"role": "user", "content": "and you"},
    ]
    again, last = ({"role": "user", "content": text} for text in ("again", "last"))
    assert llms[0].asked == [[brief, turns[0]], [brief, *turns], [brief, again], [kind, last]]


def test_piped_chat_stops_at_an_error(llms: list[FakeLLM]) -> None:
    result = run("chat", stdin="poison\nmore\n")
    assert "shorten the prompt" in error_of(result)
    assert len(llms[0].asked) == 1


def test_typed_chat_goes_on_after_errors_and_interrupts(
    llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ostinato.cli import chat

    lines = iter(["/hello", "hello", "poison", "wait ^C", "bye"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines, None) or _end_of_file())
    conversation = chat.Conversation(FakeLLM(config=EngineConfig()), SamplingParams(max_tokens=8), None)
    chat._converse(conversation, typed=True)
    captured = capsys.readouterr()
    assert captured.out == "HELLO\nWAIT\nBYE\n\n"
    assert "/hello is unknown: /quit ends" in captured.err
    assert "shorten the prompt (/reset forgets the turns so far)" in captured.err
    assert [message["content"] for message in conversation.messages] == ["hello", "HELLO", "bye", "BYE"]


def _end_of_file() -> str:
    raise EOFError


def test_bench_ends_with_json(llms: list[FakeLLM]) -> None:
    args = [
        "bench",
        "--batch",
        "3",
        "--input-len",
        "5",
        "--output-len",
        "4",
        "--rounds",
        "2",
        "--num-prompts",
        "7",
    ]
    result = run(*args)
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout.splitlines()[-1])
    assert set(value) == {"version", "workload", "latency", "replay", "throughput", "machine"}
    assert "latency: decode step, ms" in result.stdout
    assert "throughput: output tokens a second" in result.stdout
    assert len(value["replay"]["ratio"]["rounds"]) == 2
    assert value["throughput"]["output_tokens_per_s"] > 0
    assert [llm.config.graph for llm in llms] == ["auto", "eager", "auto", "auto"]
    assert all(not llm.config.enable_prefix_caching and llm.closed for llm in llms)
    assert len(llms[0].engine.prompts) == 3 * (1 + 2), "one batch to warm up, one for each round"
    assert llms[1].engine.prompts == llms[2].engine.prompts
    assert all(len(prompt) == 5 for prompt in llms[0].engine.prompts)
    assert all(1 < token_id < 50 for prompt in llms[0].engine.prompts for token_id in prompt)
    assert len(llms[-1].asked[-1]) == 7


def test_bench_padding_compares_a_wider_bucket_with_a_bucket_of_its_own(llms: list[FakeLLM]) -> None:
    result = run("bench", "padding", "--input-len", "5", "--rounds", "2")
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout.splitlines()[-1])
    assert set(value) == {"version", "workload", "padding", "machine"}
    found = value["padding"]
    assert (found["tokens"], found["bucket"], len(found["ratio"]["rounds"])) == (5, 8, 2)
    assert "padding: ratio" in result.stdout
    plain, padded = (found[name]["rounds"] for name in ("exact_s", "padded_s"))
    assert found["ratio"]["rounds"] == [b / 6 / (a / 5) for a, b in zip(plain, padded, strict=True)]
    assert [len(prompt) for prompt in llms[0].engine.prompts] == [5, 6] * 4, "two rounds warm up"
    assert llms[0].config.prefill_buckets == (5, 8)
    assert not llms[0].config.enable_prefix_caching

    run("bench", "padding", "--input-len", "5", "--rounds", "1", "--prefill-buckets", "4,16,32")
    assert llms[1].config.prefill_buckets == (5, 16)


def test_bench_kernels_shows_shares_and_needs_no_model(
    llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake(config: EngineConfig, rounds: int) -> dict[str, Any]:
        half = summary([0.5] * rounds)
        kernel = {"seconds": summary([1e-6] * rounds), "share": half, "bytes": 3e3, "operations": 4e3}
        speeds = {"bytes_per_s": summary([5e9]), "operations_per_s": {"bf16": summary([6e11])}}
        how = {"isa": config.isa, "threads": config.threads, "weight_coding": "plain"}
        return {**how, **speeds, "kernels": {"linear": kernel}}

    monkeypatch.setattr(kernels, "measure_kernels", fake)
    result = run("bench", "kernels", "--rounds", "2", "--threads", "3", "--isa", "portable")
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout.splitlines()[-1])
    assert set(value) == {"version", "kernels", "machine"}
    assert value["kernels"]["kernels"]["linear"]["share"]["rounds"] == [0.5, 0.5]
    assert "CPU kernels: portable, 3 threads" in result.stdout
    row = next(line for line in result.stdout.splitlines() if "linear" in line)
    assert [cell.strip() for cell in row.strip("│ ").split("│")] == [
        "linear",
        "1.0",
        "3.0",
        "4.0",
        *["50 %"] * 3,
    ]
    assert not llms


def test_fetch_prints_the_directory(
    llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import ostinato.models.fetch as models

    def fake(name: str, *, cache_dir: Path, progress: Any) -> Path:
        progress("download", 1, 2)
        return cache_dir / name

    monkeypatch.setattr(models, "fetch", fake)
    monkeypatch.setenv("OSTINATO_CACHE_DIR", str(tmp_path))
    result = run("fetch", "smollm2")
    assert (result.stdout, result.stderr) == (f"{tmp_path / 'smollm2'}\n", "")


def test_version_and_help() -> None:
    assert run("--version").stdout == f"ostinato {ostinato.__version__}\n"
    assert "generate" in run().stdout
    assert run("generate", "--help").exit_code == 0


def test_every_engine_option_is_a_flag_or_given_otherwise() -> None:
    text = CliRunner().invoke(app, ["generate", "--help"], env={"COLUMNS": "200"}).stdout
    for spec in dataclasses.fields(EngineConfig):
        flag = spec.metadata["flag"]
        name = flag if isinstance(flag, str) else spec.name.removeprefix("enable_").replace("_", "-")
        assert f"--{name} " in text or f"--no-{name} " in text, spec.name


def test_every_sampling_flag_is_a_sampling_parameter() -> None:
    names = {spec.name for spec in dataclasses.fields(SamplingParams)}
    assert {flag.name for flag in SAMPLING_FLAGS} <= names


def test_help_tells_the_defaults_that_hold() -> None:
    defaults = {spec.name: spec.default for spec in dataclasses.fields(SamplingParams)}
    told = {flag.name: flag.default for flag in SAMPLING_FLAGS if flag.default is not None}
    assert told == {name: defaults[name] for name in told}
    text = CliRunner().invoke(app, ["generate", "--help"], env={"COLUMNS": "80"}).stdout
    assert "(default 128)" in text
    assert "…" not in text, "an option's choices are cut off"


def test_public_names_are_lazy_and_exact() -> None:
    assert set(dir(ostinato)) == set(ostinato.__all__)
    assert ostinato.EngineConfig is EngineConfig
    assert ostinato.SamplingParams is SamplingParams
    assert ostinato.RequestError is RequestError
    with pytest.raises(AttributeError, match="has no attribute 'nope'"):
        ostinato.nope  # noqa: B018


def test_compared_engines_take_turns_step_by_step(
    llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ostinato.cli import measure

    pair = [FakeLLM(config=EngineConfig()) for _ in range(2)]
    order: list[int] = []
    for number, llm in enumerate(pair):
        step = llm.engine.step
        monkeypatch.setattr(llm.engine, "step", lambda n=number, step=step: (order.append(n), step())[1])
    load = measure.Workload(batch=2, input_len=3, output_len=4, num_prompts=1, rounds=1, seed=0)
    times = measure.run_batches(pair, [[5], [6]], load)  # type: ignore[arg-type]
    assert order == [0, 1, 0, 1, 1, 0, 0, 1], "two prefills, then three decode steps, each led by the other"
    assert [len(batch.decode_steps_s) for batch in times] == [3, 3]


def test_the_time_outside_the_kernels_is_that_of_replayed_steps(
    llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that no replay served (a capture among them) do not count; without any replay there is no figure."""
    from ostinato.cli import measure

    clock = [0.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])
    llm = FakeLLM(config=EngineConfig())
    kernels = iter([0.0, 0.0, 3.0, 6.0, 9.0])  # the prefill, a capture, three replays

    def step() -> list[SimpleNamespace]:
        clock[0] += 10.0
        llm.engine.replay_seconds += next(kernels)
        return FakeEngine.step(llm.engine)

    monkeypatch.setattr(llm.engine, "step", step)
    load = measure.Workload(batch=1, input_len=3, output_len=5, num_prompts=1, rounds=1, seed=0)
    times = measure.run_batches([llm], [[5]], load)  # type: ignore[list-item]
    assert times[0].outside_s == (10.0, 7.0, 4.0, 1.0)
    found = measure._outside(times)
    assert found["outside_kernels_s"]["median"] == 4.0
    assert found["outside_kernels_share"]["median"] == 0.4
    assert measure._outside([measure.BatchTimes(1.0, (2.0,), (2.0,))]) == {}


@pytest.mark.parametrize(
    ("args", "code", "out", "err"),
    [
        (["--version"], 0, f"ostinato {ostinato.__version__}\n", ""),
        (["generate", "x", "--graph", "none"], 2, "", "ostinato: error: graph 'none' is unknown"),
    ],
)
def test_the_process_itself_answers_without_torch(args: list[str], code: int, out: str, err: str) -> None:
    script = (
        "import sys, atexit\n"
        "atexit.register(lambda: sys.stderr.write('torch!' if 'torch' in sys.modules else ''))\n"
        "from ostinato.cli import main\n"
        "main()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, *args], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (code, out)
    assert result.stderr.startswith(err)
    assert "torch!" not in result.stderr
    assert result.stderr.count("\n") <= 1
