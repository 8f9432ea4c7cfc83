"""Loading a tokenizer from a checkpoint's files: special tokens in every spelling, stop sets, bad files."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from ostinato.errors import ModelError
from ostinato.text.tokenizer import Tokenizer, read_special_tokens, stop_token_ids, union_token_ids

DEMO = Path(__file__).parents[2] / "src" / "ostinato" / "demo"


def make_dir(root: Path, *, config: dict[str, object] | None = None, **files: object) -> Path:
    """A checkpoint's directory with a small byte-level tokenizer; further files by stem, as JSON."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        ["the cat sat on the mat"] * 3,
        trainers.BpeTrainer(
            vocab_size=300,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<s>", "</s>", "<pad>"],
            show_progress=False,
        ),
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.enable_truncation(4)
    backend.enable_padding(length=32)
    backend.save(str(root / "tokenizer.json"))
    files["tokenizer_config"] = config or {}
    for stem, value in files.items():
        (root / f"{stem}.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return root


def test_round_trip_without_truncation_or_padding(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(make_dir(tmp_path))
    text = "the cat sat on the 世界 👍🏽 mat, the cat sat on the mat"
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.backend.token_to_id("<s>")
    assert tokenizer.encode(text, add_special_tokens=False) == ids[1:]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>" + text
    assert tokenizer.vocab_size == tokenizer.backend.get_vocab_size()
    assert tokenizer.token(0) == "<s>"
    assert tokenizer.token(10**6) is None


@pytest.mark.parametrize("way", ["encode", "decode"])
def test_other_threads_run_while_a_long_text_is_handled(tmp_path: Path, way: str) -> None:
    """A server's event loop is one of them: all its streams would stand still."""
    tokenizer = Tokenizer.from_dir(make_dir(tmp_path))
    text = "z" * 1_000_000
    encoded = [] if way == "encode" else tokenizer.encode(text)
    ticks, done = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.wait(0.001):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        while ticks == 0:
            time.sleep(0.001)
        before = ticks
        if way == "encode":
            encoded = tokenizer.encode(text)
        else:
            assert tokenizer.decode(encoded) == text
        during = ticks - before
    finally:
        done.set()
        thread.join()
    assert len(encoded) == 1_000_001
    assert during >= 5


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40), special=st.booleans())
def test_ids_are_the_librarys(text: str, special: bool) -> None:
    tokenizer = Tokenizer.from_dir(DEMO)
    assert tokenizer.encode(text, add_special_tokens=special) == (
        tokenizer.backend.encode(text, add_special_tokens=special).ids
    )


def test_special_tokens_as_strings_dicts_and_from_the_map(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True}}
    other = {"eos_token": "<s>", "pad_token": {"content": "<pad>"}, "unk_token": None}
    tokenizer = Tokenizer.from_dir(make_dir(tmp_path, config=config, special_tokens_map=other))
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.token_id("pad_token") == 2
    assert tokenizer.token_id("unk_token") is None
    assert tokenizer.special_ids == {0, 1, 2}


def test_earlier_source_of_a_special_token_wins() -> None:
    assert read_special_tokens({"eos_token": "a"}, {"eos_token": "b", "bos_token": "c"}) == {
        "eos_token": "a",
        "bos_token": "c",
    }


def test_same_ids_as_transformers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    for extra in ({}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}):
        root = make_dir(tmp_path, config=config | extra)
        theirs = PreTrainedTokenizerFast.from_pretrained(str(root), local_files_only=True)
        ours = Tokenizer.from_dir(root)
        for text in ("the cat", "", "世界 </s> mat", "  two  spaces "):
            assert ours.encode(text) == theirs(text, truncation=False, padding=False)["input_ids"], (
                extra,
                text,
            )
            assert ours.decode(ours.encode(text)) == theirs.decode(
                ours.encode(text), skip_special_tokens=True
            )


def flags(content: str, **changes: bool) -> dict[str, object]:
    """An added token as files write it."""
    return (
        {"content": content} | dict.fromkeys(("lstrip", "rstrip", "normalized", "special"), False) | changes
    )


# The vocabulary of `make_dir` has <s>, </s>, <pad> as special tokens, "the" and "cat" as plain ones: 271 in all.
DESCRIPTIONS: dict[str, dict[str, dict[str, object]]] = {
    "new tokens": {
        "config": {"added_tokens_decoder": {"272": flags("<b>"), "271": flags("<a>", special=True)}}
    },
    "other flags": {"config": {"added_tokens_decoder": {"1": flags("</s>", lstrip=True, rstrip=True)}}},
    "plain becomes added": {"config": {"added_tokens_decoder": {"261": flags("the", special=True)}}},
    "a list": {
        "config": {"extra_special_tokens": ["the", {"__type": "AddedToken", **flags("cat", rstrip=True)}]}
    },
    "the list's old name": {"config": {"additional_special_tokens": ["the"]}},
    "a list in the map": {"special_tokens_map": {"additional_special_tokens": ["the"]}},
    "a map beside a decoder": {
        "config": {"added_tokens_decoder": {}},
        "special_tokens_map": {"additional_special_tokens": ["the"]},
        "added_tokens": {"<x>": 271},
    },
    "names of their own": {"config": {"extra_special_tokens": {"tool_token": "the"}, "word_token": "cat"}},
    "added_tokens.json": {
        "added_tokens": {"<x>": 272, "</s>": 1, "<y>": 271},
        "config": {"pad_token": "<pad>"},
    },
    "special tokens in text are text": {
        "config": {"split_special_tokens": True, "extra_special_tokens": ["the"], "eos_token": "</s>"}
    },
    "and are none of it": {"config": {"split_special_tokens": False, "eos_token": "</s>"}},
    "a named one with flags": {
        "config": {"eos_token": {"__type": "AddedToken", **flags("the", rstrip=True)}}
    },
    "a named one that was not special": {
        "config": {"added_tokens_decoder": {"271": flags("<x>", rstrip=True)}, "eos_token": "<x>"}
    },
}


@pytest.mark.parametrize("description", DESCRIPTIONS.values(), ids=DESCRIPTIONS)
def test_tokens_described_beside_the_tokenizer(
    tmp_path: Path, description: dict[str, dict[str, object]]
) -> None:
    """The same ids and text as transformers makes of the same files."""
    from transformers import PreTrainedTokenizerFast

    root = make_dir(tmp_path, **description)  # type: ignore[arg-type]
    theirs = PreTrainedTokenizerFast.from_pretrained(str(root), local_files_only=True)
    ours = Tokenizer.from_dir(root)
    for text in ("the cat sat on the mat", "a <x> b <a><b> </s> c </s>", " the <y>the", "cat the cat"):
        ids = ours.encode(text)
        assert ids == theirs(text, truncation=False, padding=False)["input_ids"]
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config": {"added_tokens_decoder": ["<x>"]}}, r"added_tokens_decoder .* an object of tokens by id"),
        ({"config": {"added_tokens_decoder": {"x": flags("<x>")}}}, "an object of tokens by id"),
        (
            {"config": {"added_tokens_decoder": {"300": {"content": 1}}}},
            r"must be a token, got \{'content': 1",
        ),
        ({"config": {"additional_special_tokens": "<x>"}}, "must be a list of tokens, got '<x>'"),
        ({"config": {"extra_special_tokens": [flags("<x>") | {"rstrip": "no"}]}}, "must be a token"),
        ({"config": {"eos_token": ["</s>"]}}, "eos_token of the tokenizer must be a token"),
        ({"config": {"split_special_tokens": "yes"}}, "split_special_tokens .* true or false, got 'yes'"),
        ({"added_tokens": {"<x>": "300"}}, r"added_tokens.json .* an object of ids by token"),
    ],
)
def test_a_description_that_is_none_is_named(
    tmp_path: Path, files: dict[str, dict[str, object]], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_dir(make_dir(tmp_path, **files))  # type: ignore[arg-type]


def test_a_special_token_that_no_file_gives_an_id_stays_text(tmp_path: Path) -> None:
    """An id behind the vocabulary has no row in the embedding."""
    config: dict[str, object] = {"eos_token": "<end>", "additional_special_tokens": ["<x>"]}
    tokenizer = Tokenizer.from_dir(make_dir(tmp_path, config=config))
    assert tokenizer.eos_token_id is None
    assert tokenizer.decode(tokenizer.encode("<x> <end>")) == "<x> <end>"


def test_a_named_token_that_is_plain_vocabulary_becomes_special() -> None:
    backend = Backend(models.WordLevel({"a": 0, "<end>": 1}, unk_token="a"))
    tokenizer = Tokenizer(backend, special_tokens={"eos_token": "<end>"})
    assert tokenizer.special_ids == {1}
    assert tokenizer.decode([0, 1]) == "a"


def test_f57_the_stop_set_is_the_union_of_all_sources(tmp_path: Path) -> None:
    root = make_dir(
        tmp_path,
        config={"eos_token": "</s>"},
        generation_config={"eos_token_id": [7, 9]},
    )
    (root / "config.json").write_text(
        json.dumps({"eos_token_id": [5, 7], "text_config": {"eos_token_id": 11}})
    )
    tokenizer = Tokenizer.from_dir(root)
    assert stop_token_ids(root, tokenizer) == {1, 5, 7, 9, 11}
    assert stop_token_ids(root) == {5, 7, 9, 11}


def test_union_of_eos_spellings() -> None:
    assert union_token_ids(None, 3, [1, 2], (2,)) == {1, 2, 3}
    assert union_token_ids() == frozenset()


@pytest.mark.parametrize("value", ["2", [True], [-1], [1.5]])
def test_eos_that_is_no_id_is_named(value: object) -> None:
    with pytest.raises(ModelError, match="is not a token id"):
        union_token_ids(value)  # type: ignore[arg-type]


def test_no_tokenizer_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer.json in .*save_pretrained"):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize("text", ['{"a": ', "[" * 100_000], ids=["cut", "deep"])
@pytest.mark.parametrize("stem", ["tokenizer", "tokenizer_config", "special_tokens_map", "added_tokens"])
def test_damaged_file_is_named_in_one_line(tmp_path: Path, stem: str, text: str) -> None:
    root = make_dir(tmp_path)
    (root / f"{stem}.json").write_text(text)
    with pytest.raises(ModelError, match=rf"{stem}.json.*download it again") as info:
        Tokenizer.from_dir(root)
    assert "\n" not in str(info.value)


def test_special_flag_of_an_added_token_is_read() -> None:
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    backend.add_tokens([AddedToken("<tool>", special=False)])
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    assert Tokenizer(backend).special_ids == {2}
