"""Text to token ids and back, over the `tokenizers` library and the files of a Hugging Face checkpoint.

Reads `tokenizer.json` and the files that describe special and added tokens in a local directory; must not
reach for the network, for pickles or for remote code, and knows nothing of the engine. Invariant: the same
ids as transformers' fast tokenizer for the same files. The stop set of a model is the UNION of all that name
an end-of-sequence token (tokenizer, config, generation config), never the last one read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer as Backend

from ostinato.errors import ModelError
from ostinato.text.added_tokens import NAMED, add_described_tokens, mark_special
from ostinato.text.chat import ChatTemplate
from ostinato.text.pieces import PieceTable

_LONG = 1 << 12  # tokens from which on decoding lets other threads run, by a call that costs more


class Tokenizer:
    """A tokenizer with its special tokens and chat template.

    `special_tokens` maps names (`bos_token`, ...) to token strings. What `encode` adds by itself is for the
    post-processor of `tokenizer.json` alone to say (as in transformers 5: `add_bos_token` is not read).
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template or ChatTemplate({}, special_tokens=self.special_tokens)
        backend.no_truncation()
        backend.no_padding()
        mark_special(backend, set(self.special_tokens.values()))

    @classmethod
    def from_dir(cls, path: str | Path) -> Self:
        """Load from a checkpoint's directory. Raises ModelError naming the file and the remedy."""
        root = Path(path)
        file = root / "tokenizer.json"
        if not file.is_file():
            raise ModelError(
                f"there is no tokenizer.json in {str(root)!r}; save one with transformers: "
                "AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIRECTORY)"
            )
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{str(file)!r} is damaged ({_one_line(error)}); download it again") from None
        config = read_json(root / "tokenizer_config.json")
        special_map = read_json(root / "special_tokens_map.json")
        special = read_special_tokens(config, special_map)
        add_described_tokens(backend, config, special_map, read_json(root / "added_tokens.json"))
        backend.encode_special_tokens = _splits_special_tokens(config)
        return cls(
            backend,
            special_tokens=special,
            chat_template=ChatTemplate.from_dir(root, config=config, special_tokens=special),
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included (a model's embedding may be larger)."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        return self.token_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self.token_id("eos_token")

    @cached_property
    def pieces(self) -> PieceTable | None:
        """Per-token text, or None when the decoder does not factor into tokens."""
        return PieceTable.of(self.backend)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special)

    def token_id(self, name: str) -> int | None:
        """Id of a named special token (`"eos_token"`), or None when the checkpoint names none."""
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    def token(self, token_id: int) -> str | None:
        """The token string of an id as it stands in the vocabulary, or None outside of it."""
        return self.backend.id_to_token(token_id)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the checkpoint's BOS (and EOS) when `add_special_tokens`.

        Other threads run meanwhile: of the library's calls only those for several texts let them.
        """
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The whole text of a sequence; ids outside the vocabulary stand for nothing.

        Other threads run while a long one is decoded, as with `encode`.
        """
        if len(token_ids) < _LONG:
            return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        (text,) = self.backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return text


def stop_token_ids(path: str | Path, tokenizer: Tokenizer | None = None) -> frozenset[int]:
    """The stop set of a checkpoint: union of its config's, generation config's and tokenizer's EOS ids."""
    root = Path(path)
    config = read_json(root / "config.json")
    sources = [config.get("eos_token_id"), read_json(root / "generation_config.json").get("eos_token_id")]
    if isinstance(config.get("text_config"), dict):
        sources.append(config["text_config"].get("eos_token_id"))
    if tokenizer is not None:
        sources.append(tokenizer.eos_token_id)
    return union_token_ids(*sources)


def union_token_ids(*sources: int | Iterable[int] | None) -> frozenset[int]:
    """Union of EOS sources, each an id, a list of ids, or None. Raises ModelError on anything else."""
    ids: set[int] = set()
    for source in sources:
        values = [] if source is None else [source] if isinstance(source, int) else list(source)
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ModelError(
                    f"eos_token_id {value!r} is not a token id; correct it in the checkpoint's config"
                )
            ids.add(value)
    return frozenset(ids)


def read_special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens, each a string or an AddedToken written as a dict; earlier sources win."""
    found: dict[str, str] = {}
    for source in sources:
        for name in NAMED:
            value = source.get(name)
            if isinstance(value, Mapping):
                value = value.get("content")
            if isinstance(value, str) and value:
                found.setdefault(name, value)
    return found


def _splits_special_tokens(config: Mapping[str, Any]) -> bool:
    """Whether special tokens that stand in a text are split like any other text."""
    value = config.get("split_special_tokens") or False
    if not isinstance(value, bool):
        raise ModelError(
            f"split_special_tokens of the tokenizer must be true or false, got {value!r}; correct it in the checkpoint"
        )
    return value


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty when there is no such file. Raises ModelError when it is damaged."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{str(path)!r} is not JSON ({_one_line(error)}); download it again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{str(path)!r} holds a {type(value).__name__}, not an object; download it again")
    return value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
