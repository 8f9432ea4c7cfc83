"""The load generator's pure parts: what is sent and when, and the figures and the picture of what came back."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from ostinato.errors import ConfigError
from ostinato.loadgen.client import Outcome
from ostinato.loadgen.drive import poisson
from ostinato.loadgen.figures import Latencies, in_flight, parse_limits, spread, summarise
from ostinato.loadgen.plot import plot
from ostinato.loadgen.workload import Job, RandomJobs, Span, read_jobs

LENGTHS = (Span(3, 9), Span(2, 4))


def outcome(
    start: float, *pieces: float, end: float, tokens: int | None = None, error: str | None = None
) -> Outcome:
    return Outcome(start, end, list(pieces), 10, len(pieces) if tokens is None else tokens, error, "words")


# ---- workload ----


def test_random_jobs_are_the_same_for_the_same_seed() -> None:
    jobs = list(RandomJobs(20, *LENGTHS, seed=1))
    assert jobs == list(RandomJobs(20, *LENGTHS, seed=1))
    assert jobs != list(RandomJobs(20, *LENGTHS, seed=2))
    lengths = {len(job.body["prompt"].split()) for job in jobs}
    assert lengths <= set(range(3, 10))
    assert len(lengths) > 3
    assert {job.body["max_tokens"] for job in jobs} == {2, 3, 4}
    assert all(job.body["ignore_eos"] and job.body["temperature"] == 0.0 and not job.chat for job in jobs)


def test_token_ids_give_exact_lengths() -> None:
    (job,) = RandomJobs(1, Span(50, 50), Span(1, 1), token_ids=Span(3, 5))
    assert len(job.body["prompt"]) == 50
    assert set(job.body["prompt"]) == {3, 4, 5}


def test_shared_prefixes_are_shared() -> None:
    jobs = list(RandomJobs(40, *LENGTHS, prefixes=3, prefix_len=20, token_ids=Span(0, 99)))
    prefixes = {tuple(job.body["prompt"][:20]) for job in jobs}
    assert len(prefixes) == 3
    assert len({tuple(job.body["prompt"][20:]) for job in jobs}) > 20


def test_chats_and_extra_fields() -> None:
    (job,) = RandomJobs(1, *LENGTHS, chat=True, ignore_eos=False, extra={"top_k": 4, "temperature": 1.0})
    assert job.chat
    assert job.body["messages"][0]["role"] == "user"
    assert (job.body["top_k"], job.body["temperature"]) == (4, 1.0)
    assert "ignore_eos" not in job.body
    assert "prompt" not in job.body


def test_a_file_of_requests(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    chat = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0.5}
    file.write_text(json.dumps({"prompt": [1, 2]}) + "\n\n" + json.dumps(chat) + "\n")
    jobs = read_jobs(file, None, extra={"temperature": 0.0})
    assert jobs == [Job({"prompt": [1, 2], "temperature": 0.0}), Job(chat, chat=True)]
    assert read_jobs(file, 5) == [Job({"prompt": [1, 2]}), Job(chat, True)] * 2 + [Job({"prompt": [1, 2]})]


def test_a_line_ends_where_json_lines_say(tmp_path: Path) -> None:
    """Not at what else Unicode calls the end of a line, which a prompt may hold."""
    file = tmp_path / "requests.jsonl"
    prompt = "a\u2028b\u2029c\u0085d\x1ce"
    file.write_text(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\r\n", encoding="utf-8")
    assert read_jobs(file, None) == [Job({"prompt": prompt})]


def test_a_file_of_another_encoding_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_bytes('{"prompt": "\u00e9"}'.encode("latin-1"))
    with pytest.raises(ConfigError, match="is not UTF-8"):
        read_jobs(file, None)


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"prompt": "x", "messages": []}'])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text('{"prompt": "x"}\n' + line)
    with pytest.raises(ConfigError, match="line 2"):
        read_jobs(file, None)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text("\n")
    with pytest.raises(ConfigError, match="holds no requests"):
        read_jobs(file, None)


def test_spans() -> None:
    assert Span.parse("64", name="x") == Span(64, 64)
    assert Span.parse("16:256", name="x") == Span(16, 256)
    for text in ("", "x", "0", "5:4", "1:2:3", "-1", "1.5"):
        with pytest.raises(ConfigError, match="--input-len"):
            Span.parse(text, name="--input-len")


# ---- arrivals ----


def test_poisson_arrivals() -> None:
    moments = poisson(4000, 8.0, seed=3)
    assert moments == poisson(4000, 8.0, seed=3)
    assert moments != poisson(4000, 8.0, seed=4)
    gaps = [after - before for before, after in zip([0.0, *moments], moments, strict=False)]
    assert min(gaps) > 0
    mean = sum(gaps) / len(gaps)
    # Of an exponential distribution mean and deviation are equal; 4000 draws are within five standard errors.
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1 / 8, rel=0.08)
    assert deviation == pytest.approx(mean, rel=0.12)


# ---- figures ----


def test_latencies_of_a_request() -> None:
    found = Latencies.of(outcome(1.0, 1.5, 2.0, 4.0, end=5.0, tokens=6))
    assert found == Latencies(0.5, 2.5 / 5, (0.5, 2.0), 4.0)
    assert Latencies.of(outcome(1.0, 1.5, end=2.0)) == Latencies(0.5, None, (), 1.0)
    assert Latencies.of(outcome(1.0, end=2.0)) == Latencies(None, None, (), 1.0)


def test_percentiles_are_interpolated() -> None:
    found = spread([n / 1000 for n in range(101)])
    assert found == pytest.approx({"mean": 50.0, "p50": 50.0, "p90": 90.0, "p99": 99.0, "most": 100.0})
    assert spread([]) is None


def test_summary_counts() -> None:
    outcomes = [
        outcome(0.0, 0.5, 1.0, end=1.0),
        outcome(1.0, 3.0, 4.0, end=4.0, tokens=4),
        outcome(2.0, 2.5, end=3.0, error="timeout"),
        outcome(2.0, end=2.5, error="HTTP 429"),
        outcome(2.0, end=2.5, error="HTTP 429"),
    ]
    found = summarise(outcomes, {"ttft": 600.0, "e2e": 5000.0})
    assert (found["requests"], found["completed"], found["failed"]) == (5, 2, 3)
    assert list(found["errors"]) == ["HTTP 429", "timeout"]
    assert found["errors"]["HTTP 429"] == {"count": 2, "first": "words"}
    assert found["seconds"] == 4.0
    assert (found["prompt_tokens"], found["output_tokens"]) == (20, 6)
    assert (found["output_tokens_per_s"], found["total_tokens_per_s"]) == (1.5, 6.5)
    assert found["requests_per_s"] == 0.5
    assert (found["ttft_ms"]["p50"], found["ttft_ms"]["most"]) == (1250.0, 2000.0)
    assert found["itl_ms"]["most"] == 1000.0
    assert found["tpot_ms"]["most"] == 500.0
    assert found["goodput"] == {
        "limits_ms": {"ttft": 600.0, "e2e": 5000.0},
        "requests": 1,
        "share": 0.2,
        "requests_per_s": 0.25,
    }
    json.dumps(found)


def test_without_limits_or_answers_nothing_is_made_up() -> None:
    found = summarise([outcome(0.0, end=0.0, error="no connection")], {})
    assert (
        found["goodput"] is found["ttft_ms"] is found["tpot_ms"] is found["itl_ms"] is found["e2e_ms"] is None
    )
    assert found["output_tokens_per_s"] == 0.0
    assert summarise([], {})["requests"] == 0


def test_requests_in_flight() -> None:
    outcomes = [outcome(0.0, end=2.0), outcome(1.0, end=3.0), outcome(3.0, end=4.0)]
    assert in_flight(outcomes) == (5 / 4, 2)


def test_limits() -> None:
    assert parse_limits(["ttft:500", "tpot:50,e2e:9000"]) == {"ttft": 500.0, "tpot": 50.0, "e2e": 9000.0}
    for text in ("ttft", "ttft:", "ttft:0", "ttft:nan", "ttft:inf", "itl:5", "ttft:-1"):
        with pytest.raises(ConfigError, match="--slo"):
            parse_limits([text])


# ---- plot ----


def test_the_plot_is_svg_with_all_panels() -> None:
    outcomes = [outcome(n / 4, n / 4 + 0.3, n / 4 + 0.7, end=n / 4 + 1.0) for n in range(20)]
    root = ElementTree.fromstring(plot(outcomes, "a <model> & more"))
    words = "".join(root.itertext())
    assert "a <model> & more" in words
    curves = list(root.iter("{http://www.w3.org/2000/svg}polyline"))
    assert len(curves) == 6
    for curve in curves:
        places = [float(v) for place in curve.attrib["points"].split() for v in place.split(",")]
        assert all(0 <= v <= 320 for v in places)
    assert "p50 300 ms" in words


def test_the_plot_of_answers_that_took_no_time() -> None:
    words = plot([outcome(0.0, 0.0, 0.0, end=0.0)] * 2, "x")
    assert words.count("<polyline") == 6
    assert "nan" not in words


def test_the_plot_of_nothing() -> None:
    failed = [outcome(0.0, end=1.0, error="timeout")]
    words = "".join(ElementTree.fromstring(plot(failed, "x")).itertext())
    assert words.count("nothing to measure") == 5
