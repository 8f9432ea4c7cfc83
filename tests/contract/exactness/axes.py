"""The axes of the contract. Each check plays one, compares with what the requests are given alone, and makes sure
that the axis was really played (a bucket had pads, a prefix was hit, a request was sent back).

Raises `NotExactError` where bits differ.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from .score import SEED, Part
from .stage import Setting, Stage


def together(stage: Stage, setting: Setting, parts: Sequence[Part]) -> None:
    """All at once: decode steps of every size from all of them down to one."""
    player = stage.player(setting)
    before = player.on_graph("decode")
    stage.check("all together", setting, parts, player.play(parts))
    if setting.graph == "tape":
        assert player.on_graph("decode") > before, setting


def prefilled_in_bucket(stage: Stage, setting: Setting, parts: Sequence[Part]) -> None:
    """One after the other, each prefilled whole, in the bucket that it fills or nearly fills."""
    player = stage.player(setting)
    for part in parts:
        before = player.on_graph("prefill")
        stage.check("filling a prefill bucket", setting, [part], player.play([part]))
        assert player.on_graph("prefill") == before + 1, (
            f"{part.name} was not prefilled on a graph, {setting}"
        )


def any_order(stage: Stage, setting: Setting, parts: Sequence[Part]) -> None:
    """One by one in reverse, then shuffled three at a time on the prefixes that the first ones left."""
    player = stage.player(setting)
    name = f"order {player.performances}"
    stage.check("arriving one by one", setting, parts, player.play(parts[::-1], arrivals=(1,), warm=name))
    shuffled = list(parts)
    random.Random(SEED).shuffle(shuffled)
    answers = player.play(shuffled, arrivals=(3,), warm=name)
    stage.check("arriving shuffled on cached prefixes", setting, parts, answers)
    if setting.caching:
        assert sum(answer.cached for answer in answers.values()) > 0, "no prefix was hit"


def prefilled_again(stage: Stage, setting: Setting, parts: Sequence[Part]) -> None:
    """Prompt and answer as one prompt: its logits at the answer's positions are those of decoding."""
    alone = stage.alone(parts)
    scored = [part.scored(alone[part.name].tokens) for part in parts]
    answers = stage.player(setting).play(scored)
    for part in parts:
        first, tokens = len(part.prompt), alone[part.name].tokens
        assert set(answers[part.name].logits) >= set(range(first, first + len(tokens)))
    stage.check("decoded tokens prefilled", setting, parts, answers)


def continued(stage: Stage, setting: Setting, parts: Sequence[Part]) -> None:
    """Half of each answer as part of a longer prompt, which goes on as the answer did: cold, then on a hit."""
    alone = stage.alone(parts)
    halves = {part.name: alone[part.name].tokens[: len(alone[part.name].tokens) // 2] for part in parts}
    longer = [part.after(halves[part.name]) for part in parts]
    player = stage.player(setting)
    stage.check("continued from a longer prompt", setting, parts, player.play(longer))
    if setting.caching:
        name = f"turns {player.performances}"
        player.play(parts, warm=name)
        answers = player.play(longer, warm=name)
        stage.check("continued on what was generated", setting, parts, answers)
        able = any(
            (len(p.prompt) - 1) // player.page * player.page > len(q.prompt)
            for p, q in zip(longer, parts, strict=True)
        )
        hit = any(answers[p.name].cached > len(p.prompt) for p in parts)
        assert hit or (setting.shared and not able), "no generated page was hit"


def hits(stage: Stage, setting: Setting, part: Part, lengths: Iterable[int] | None = None) -> None:
    """One request behind cached prefixes of every number of whole pages."""
    player = stage.player(setting)
    whole = (len(part.prompt) - 1) // player.page
    for pages in range(whole + 1) if lengths is None else lengths:
        name = f"hit {player.performances}"
        if pages:
            player.play([Part("prefix", part.prompt[: pages * player.page], part.params)], warm=name)
        answers = player.play([part], warm=name)
        assert answers[part.name].cached == pages * player.page
        stage.check(f"on a hit of {pages} pages", setting, [part], answers)


def mates(stage: Stage, setting: Setting, parts: Sequence[Part], counts: Iterable[int]) -> None:
    """So many others beside the longest answer, which stands first, last or amid them; then mates that leave."""
    soloist = max(parts, key=lambda part: part.length)
    others = [part for part in parts if part is not soloist]
    player = stage.player(setting)
    for count in counts:
        chosen = random.Random(count).sample(others, count)
        chosen.insert((0, count, count // 2)[count % 3], soloist)
        stage.check(f"beside {count} mates", setting, chosen, player.play(chosen))


def retracted(stage: Stage, setting: Setting, parts: Sequence[Part]) -> None:
    """Requests that outgrow a cache of `kv_tokens`: some are sent back, and prefill what they had generated."""
    player = stage.player(setting)
    before = player.count("retractions")
    answers = player.play(parts)
    assert player.count("retractions") > before, "no request was sent back"
    if setting.graph == "tape":
        assert player.graph("decode", "advanced") > 0, "no step went on from the inputs on the device"
    stage.check("sent back and prefilled again", setting, parts, answers)
