"""Incremental detokenization: the joined stream is the text, character by character, for every kind of
decoder.
"""

from __future__ import annotations

import functools
import random
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from ostinato.text.detokenizer import decode_utf8, open_detokenizer
from ostinato.text.pieces import PieceTable, read_rules
from ostinato.text.tokenizer import Tokenizer

CORPUS = [
    "It is a truth universally acknowledged, that a single man in possession of a good fortune",
    "世界はひとつ。你好，世界！ 안녕하세요",
    "naïve café — “quoted” … ½ ≤ ∞",
    "👨‍👩‍👧‍👦 👍🏽 🇫🇷 🏳️‍🌈 e\u0301 \u0928\u092e\u0938\u094d\u0924\u0947",
    "  two  spaces\n\ttab\r\n and   three",
    "def f(x):\n    return x ** 2  # ok",
]
TEXTS = st.lists(
    st.sampled_from([*" aé世界👍🏽\u200d👨\n\u0301ñ", "the ", "of", "  ", "possession", "世界"]), max_size=24
).map("".join)
SPECIAL = [AddedToken("<s>", special=True), AddedToken("<|end|>", special=True)]
PLAIN = [AddedToken("<tool call>", special=False), AddedToken("｜x｜", special=False)]


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(PLAIN)
    return backend


def llama_bpe(*, strip: int = 1) -> Backend:
    """Byte-fallback BPE in the manner of Llama 2: no CJK or emoji in the vocabulary, so these come as
    bytes.
    """
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", strip, 0)] if strip else steps)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", *SPECIAL, *(f"<0x{value:02X}>" for value in range(256))],
        show_progress=False,
    )
    backend.train_from_iterator([CORPUS[0], CORPUS[4], CORPUS[5]], trainer)
    # The bytes were given to the trainer as special tokens; in Llama they are plain vocabulary.
    vocab = backend.get_vocab(with_added_tokens=False)
    merges = [tuple(pair) for pair in _merges(backend)]
    backend.model = models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>")
    fresh = Backend(backend.model)
    fresh.normalizer, fresh.decoder = backend.normalizer, backend.decoder
    fresh.add_special_tokens(SPECIAL)
    fresh.add_tokens(PLAIN)
    return fresh


def _merges(backend: Backend) -> list[list[str]]:
    import json

    merges = json.loads(backend.to_str())["model"]["merges"]
    return [pair if isinstance(pair, list) else pair.split(" ") for pair in merges]


def metaspace_unigram(scheme: str = "always") -> Backend:
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=300, unk_token="<unk>", special_tokens=["<unk>", *SPECIAL], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(PLAIN)
    return backend


def word_level() -> Backend:
    words = {word: i for i, word in enumerate(["<unk>", "the", "cat", "世界", "👍🏽", "sat", ","])}
    backend = Backend(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(SPECIAL)
    return backend


def word_piece() -> Backend:
    """A decoder that does not factor: it looks at the neighbours of a token."""
    words = ["[UNK]", "the", "cat", "##s", "##世", "do", "n", "'", "t", "not", ",", ".", "界", "i"]
    backend = Backend(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(SPECIAL)
    return backend


def windowed_byte_level() -> Backend:
    """Byte level behind a step that `read_rules` does not know, so that the window has to serve."""
    backend = byte_level()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return backend


MAKERS = {
    "byte_level": byte_level,
    "llama": llama_bpe,
    "gemma": functools.partial(llama_bpe, strip=0),
    "metaspace": metaspace_unigram,
    "metaspace_never": functools.partial(metaspace_unigram, "never"),
    "word_level": word_level,
}
WINDOWED = {"word_piece": word_piece, "windowed_byte_level": windowed_byte_level}


@functools.cache
def tokenizer(name: str) -> Tokenizer:
    return Tokenizer((MAKERS | WINDOWED)[name]())


def stream(tok: Tokenizer, ids: list[int], *, skip: bool = True, prompt: tuple[int, ...] = ()) -> list[str]:
    detokenizer = open_detokenizer(tok, prompt_ids=prompt, skip_special_tokens=skip)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


def with_clean_bytes(tok: Tokenizer, ids: list[int], *, skip: bool) -> bool:
    """Whether every run of byte-fallback tokens is well formed, or has nothing well-formed in it."""
    assert tok.pieces is not None
    pieces = [tok.pieces.piece(i) for i in ids if not (skip and i in tok.special_ids)]
    runs = [b""]
    for piece in pieces:
        if piece is None:
            continue  # no token of the vocabulary: as if it were not there
        if piece.is_byte:
            runs[-1] += piece.data
        else:
            runs.append(b"")
    texts = [decode_utf8(run, final=True, per_byte=True)[0] for run in runs]
    return all("\ufffd" not in text or set(text) == {"\ufffd"} for text in texts)


@pytest.mark.parametrize("name", MAKERS)
def test_decoder_factors(name: str) -> None:
    assert tokenizer(name).pieces is not None


@pytest.mark.parametrize("name", WINDOWED)
def test_other_decoders_use_the_window(name: str) -> None:
    assert tokenizer(name).pieces is None


@pytest.mark.parametrize("name", [*MAKERS, *WINDOWED])
@pytest.mark.parametrize("text", CORPUS)
def test_corpus_streams_to_its_text_without_partial_characters(name: str, text: str) -> None:
    tok = tokenizer(name)
    ids = tok.encode(text)
    parts = stream(tok, ids)
    assert "".join(parts) == tok.decode(ids)
    if name in ("byte_level", "llama", "gemma", "windowed_byte_level"):
        assert "".join(parts).strip() == text.strip()
        assert not any("\ufffd" in part for part in parts)
        assert len([part for part in parts if part]) > len(text.split()) // 2, "it does stream"


@pytest.mark.parametrize("name", ["byte_level", "llama", "windowed_byte_level"])
@given(text=TEXTS, cut=st.integers(0, 40))
@settings(max_examples=40, deadline=None)
def test_text_survives_any_cut_into_prompt_and_output(name: str, text: str, cut: int) -> None:
    """The prompt's text and the output's text, joined, are the text, wherever the cut falls in a
    character.
    """
    tok = tokenizer(name)
    ids = tok.encode(text)
    cut = min(cut, len(ids))
    head = "".join(stream(tok, ids[:cut])[:-1])  # without its unfinished last character
    if name == "windowed_byte_level" and head != tok.decode(ids[:cut]):
        return  # the window cannot finish a character that the prompt began
    assert head + "".join(stream(tok, ids[cut:], prompt=tuple(ids[:cut]))) == tok.decode(ids)


@pytest.mark.parametrize("name", MAKERS)
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=60, deadline=None)
def test_random_ids_stream_to_decode(name: str, data: st.DataObject, skip: bool) -> None:
    tok = tokenizer(name)
    ids = data.draw(st.lists(st.integers(0, tok.vocab_size + 2), max_size=24))
    parts = stream(tok, ids, skip=skip)
    assert tok.pieces is not None
    if not tok.pieces.rules.byte_fallback or with_clean_bytes(tok, ids, skip=skip):
        assert "".join(parts) == tok.decode(ids, skip_special_tokens=skip)
    assert stream(tok, ids, skip=skip) == parts, "texts of single tokens, known by now, are the same"


@pytest.mark.parametrize("name", WINDOWED)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_window_neither_repeats_nor_loses(name: str, data: st.DataObject) -> None:
    tok = tokenizer(name)
    text = data.draw(
        st.lists(st.sampled_from(["cat", "the", "世界", "👍🏽", "do n't", ",", "."]), max_size=40)
    )
    ids = tok.encode(" ".join(text))
    assert "".join(stream(tok, ids)) == tok.decode(ids)


@given(st.lists(st.integers(0, 255), max_size=40))
@settings(max_examples=150, deadline=None)
def test_random_bytes_of_a_byte_fallback_tokenizer(values: list[int]) -> None:
    """Raw bytes: well-formed characters come out, each ill-formed byte is one U+FFFD, in order."""
    tok = tokenizer("gemma")
    ids = [tok.backend.token_to_id(f"<0x{value:02X}>") for value in values]
    text, held = "", bytes(values)
    while held:
        for size in (1, 2, 3, 4):
            try:
                text, held = text + held[:size].decode(), held[size:]
                break
            except UnicodeDecodeError:
                continue
        else:
            text, held = text + "\ufffd", held[1:]
    assert "".join(stream(tok, ids)) == text


@given(st.binary(max_size=40), st.integers(0, 40))
@settings(max_examples=150, deadline=None)
def test_utf8_in_two_cuts_is_the_codec(data: bytes, cut: int) -> None:
    head, rest = decode_utf8(data[:cut])
    tail, none = decode_utf8(rest + data[cut:], final=True)
    assert head + tail == data.decode("utf-8", "replace")
    assert none == b""
    assert len(rest) < 4


def test_unfinished_character_is_held_then_flushed() -> None:
    tok = tokenizer("byte_level")
    ids = [tok.backend.token_to_id(char) for char in "ðŁĳ"]  # three of the four bytes of an emoji
    assert stream(tok, ids) == ["", "", "", "\ufffd"]


def test_leading_space_goes_only_at_the_start_of_the_text() -> None:
    tok = tokenizer("llama")
    ids = tok.encode("of the")
    bos = tok.backend.token_to_id("<s>")
    assert "".join(stream(tok, ids)) == "of the"
    assert "".join(stream(tok, ids, prompt=(bos,))) == "of the", "nothing but special tokens stands before"
    prompt = tuple(tok.encode("fortune"))
    assert "".join(stream(tok, ids, prompt=prompt)) == " of the"
    assert "".join(stream(tok, ids, prompt=prompt + (bos,) * 20)) == " of the"


def test_work_per_token_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact path never calls decode; the window decodes a bounded number of tokens, in the worst case
    too.
    """
    lengths: list[int] = []

    def counted(self: Tokenizer, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        lengths.append(len(ids))
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", counted)
    rng = random.Random(0)
    exact = tokenizer("byte_level")
    stream(exact, [rng.randrange(exact.vocab_size) for _ in range(500)])
    assert lengths == []
    windowed = tokenizer("windowed_byte_level")
    half = windowed.backend.token_to_id("ð")
    stream(windowed, [half] * 200 + [rng.randrange(windowed.vocab_size) for _ in range(300)])
    assert 0 < max(lengths) <= 32


class ScriptedTokenizer:
    """Decodes a window to a given text for each length, whatever the ids are: ids index the script."""

    pieces: PieceTable | None = None

    def __init__(self, steps: list[str]) -> None:
        self.steps = steps

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return self.steps[ids[-1]] if ids else ""


def test_f47_text_that_is_rewritten_is_sent_once() -> None:
    """F47: `A 世�`, `A 世a�`, `A 世ab`: a printable length that shrinks would send 世 twice."""
    steps = ["A", "A 世", "A 世\ufffd", "A 世a\ufffd", "A 世ab"]
    detokenizer = open_detokenizer(cast(Tokenizer, ScriptedTokenizer(steps)))
    sent, lengths = "", []
    for index in range(len(steps)):
        sent += detokenizer.push(index)
        lengths.append(len(sent))
        assert steps[-1].startswith(sent)
    assert lengths == sorted(lengths)
    assert sent + detokenizer.finish() == "A 世ab"


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]},
        {"type": "Sequence", "decoders": [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        {
            "type": "Sequence",
            "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 0, "stop": 1}],
        },
        {"type": "Replace", "pattern": {"Regex": "a+"}, "content": " "},
    ],
)
def test_pipelines_that_do_not_factor_are_known(decoder: dict[str, object]) -> None:
    assert read_rules(decoder) is None
