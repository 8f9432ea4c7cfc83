"""Added tokens that a checkpoint describes beside `tokenizer.json`, which may lack them or have other flags for them.

`tokenizer_config.json` has the last word (`added_tokens_decoder`); checkpoints from before it have `added_tokens.json`.
Lists of further special tokens mark what is plain vocabulary. Knows the files' spellings and nothing of encoding.
Invariant: what comes out is what transformers adds to its fast tokenizer for the same files, in the same order, save
that a special token which no file gives an id stays text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from ostinato.errors import ModelError

NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
"""The special tokens that have names in every checkpoint."""

_FURTHER = ("extra_special_tokens", "additional_special_tokens")  # the second is the old name
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def add_described_tokens(
    backend: Backend, config: Mapping[str, Any], special_map: Mapping[str, Any], added: Mapping[str, Any]
) -> None:
    """Add to `backend` what tokenizer_config.json, special_tokens_map.json and added_tokens.json say.

    Raises ModelError naming the key whose value is no token.
    """
    special = _named(config) | _further(config)
    if "added_tokens_decoder" in config:
        backend.add_tokens(_decoder_tokens(config["added_tokens_decoder"]))
    else:
        # The older files count where this key is absent, as in transformers.
        special |= _named(special_map) | _further(special_map)
        backend.add_tokens(_missing_tokens(backend, added, special))
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens(
        [t for t in special.values() if t.content not in known and backend.token_to_id(t.content) is not None]
    )


def mark_special(backend: Backend, contents: set[str]) -> None:
    """Make special tokens of these, where they are in the vocabulary; other flags of added ones stay."""
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    unmarked = []
    for content in sorted(contents):
        token = added.get(content)
        if backend.token_to_id(content) is None or (token is not None and token.special):
            continue
        if token is None:
            token = AddedToken(content, normalized=False)
        token.special = True
        unmarked.append(token)
    backend.add_special_tokens(unmarked)


def _decoder_tokens(value: object) -> list[AddedToken]:
    """Tokens of `added_tokens_decoder`, {"id": {"content": ..., flags}}, by id."""
    key = "added_tokens_decoder"
    if not isinstance(value, Mapping) or not all(str(index).isdecimal() for index in value):
        raise _error(key, "an object of tokens by id", value)
    return [_token(key, value[index], special=False) for index in sorted(value, key=int)]


def _missing_tokens(
    backend: Backend, added: Mapping[str, Any], special: Mapping[str, AddedToken]
) -> list[AddedToken]:
    """Tokens of added_tokens.json, {content: id}, that the backend has not added, by id."""
    if not all(type(index) is int for index in added.values()):
        raise _error("added_tokens.json", "an object of ids by token", dict(added))
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    return [
        AddedToken(content, normalized=content not in special, special=content in special)
        for content in sorted(added, key=lambda content: added[content])
        if content not in known
    ]


def _further(source: Mapping[str, Any]) -> dict[str, AddedToken]:
    """Special tokens beside the named ones: in a list, by names of their own, or under keys `..._token`."""
    found: dict[str, AddedToken] = {}
    for name, value in source.items():
        if name.endswith("_token") and name not in NAMED and isinstance(value, str):
            found[value] = AddedToken(value, special=True)
    key = next((key for key in _FURTHER if source.get(key)), None)
    if key is None:
        return found
    tokens = source[key]
    if not isinstance(tokens, (list, Mapping)):
        raise _error(key, "a list of tokens", tokens)
    for described in tokens.values() if isinstance(tokens, Mapping) else tokens:
        token = _token(key, described, special=True)
        found[token.content] = token
    return found


def _named(source: Mapping[str, Any]) -> dict[str, AddedToken]:
    tokens = [_token(name, source[name], special=True) for name in NAMED if source.get(name)]
    return {token.content: token for token in tokens}


def _token(key: str, value: object, *, special: bool) -> AddedToken:
    """A token written as a string or as an object of its content and flags; `special` where that is not said."""
    if isinstance(value, str):
        return AddedToken(value, special=special, normalized=not special)
    if not isinstance(value, Mapping) or not isinstance(value.get("content"), str):
        raise _error(key, "a token", value)
    flags = {"special": special} | {flag: value[flag] for flag in _FLAGS if flag in value}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise _error(key, "a token", value)
    return AddedToken(value["content"], **flags)


def _error(key: str, wanted: str, value: object) -> ModelError:
    shown = " ".join(repr(value).split())[:100]
    return ModelError(f"{key} of the tokenizer must be {wanted}, got {shown}; correct it in the checkpoint")
