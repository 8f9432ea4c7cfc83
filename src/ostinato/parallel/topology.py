"""Who is who among the ranks: one frozen value, made once and passed explicitly to whatever needs it.

    tp ranks = dp groups x cp x attn_tp, attention TP innermost      rank 5 of tp 8, dp 2, cp 2: dp 1, cp 0, attn_tp 1
    tp ranks = ep groups x moe_tp, MoE TP innermost                  rank 5 of tp 8, ep 4: ep 2, moe_tp 1

`tp` is the number of all ranks; data, expert and context parallelism divide it. Knows nothing of processes or
messages. Invariant: a `Topology` that exists is consistent; what cannot be divided was refused with the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes of the parallel groups, and the place of `rank` in them. Raises ConfigError for sizes that do not divide.

    With dp 1 all ranks share one set of requests; else each of the dp groups has its own.
    """

    tp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        for name in ("tp", "dp", "ep", "cp"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.tp % (self.dp * self.cp):
            parts = f"dp {self.dp}" if self.cp == 1 else f"dp {self.dp} x cp {self.cp}"
            raise ConfigError(
                f"tp {self.tp} ranks cannot be shared out over {parts}: {self.tp} / {self.dp * self.cp} = "
                f"{self.tp / (self.dp * self.cp):g} attention-TP ranks; make tp a multiple of {self.dp * self.cp}"
            )
        if self.tp % self.ep:
            raise ConfigError(
                f"tp {self.tp} ranks cannot be shared out over ep {self.ep}: {self.tp} / {self.ep} = "
                f"{self.tp / self.ep:g} ranks for each; make tp a multiple of ep"
            )
        if not 0 <= self.rank < self.tp:
            raise ConfigError(f"rank {self.rank} is outside 0..{self.tp - 1}, tp is {self.tp}")

    @classmethod
    def of(cls, *, tp: int | None, dp: int = 1, ep: int | None = None, rank: int = 0) -> Topology:
        """Sizes as users give them: tp follows from dp and ep when left out, ep is all ranks when left out."""
        size = max(dp, ep or 1) if tp is None else tp
        return cls(tp=size, dp=dp, ep=size if ep is None else ep, rank=rank)

    def at(self, rank: int) -> Topology:
        """The same layout, seen from `rank`."""
        return Topology(self.tp, self.dp, self.ep, self.cp, rank)

    @property
    def attn_tp(self) -> int:
        """Ranks that share one request set and split its attention heads."""
        return self.tp // (self.dp * self.cp)

    @property
    def attn_tp_rank(self) -> int:
        return self.rank % self.attn_tp

    @property
    def cp_rank(self) -> int:
        return self.rank // self.attn_tp % self.cp

    @property
    def attn_dp_rank(self) -> int:
        """The data-parallel group, a request set of its own."""
        return self.rank // (self.attn_tp * self.cp)

    @property
    def moe_tp(self) -> int:
        """Ranks that split each expert's width."""
        return self.tp // self.ep

    @property
    def moe_tp_rank(self) -> int:
        return self.rank % self.moe_tp

    @property
    def ep_rank(self) -> int:
        return self.rank // self.moe_tp

    @property
    def is_leader(self) -> bool:
        """Whether this rank speaks for its data-parallel group."""
        return self.attn_tp_rank == 0 and self.cp_rank == 0

    def ranks_of_dp(self, dp_rank: int) -> tuple[int, ...]:
        """Ranks of one data-parallel group, its leader first."""
        size = self.attn_tp * self.cp
        return tuple(range(dp_rank * size, (dp_rank + 1) * size))

    @property
    def attn_tp_ranks(self) -> tuple[int, ...]:
        """Ranks that split the attention heads with this one, itself included."""
        first = self.rank - self.attn_tp_rank
        return tuple(range(first, first + self.attn_tp))

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of every data-parallel group."""
        return tuple(self.ranks_of_dp(d)[0] for d in range(self.dp))

    def ranks_of_ep(self, ep_rank: int) -> tuple[int, ...]:
        """Ranks that hold (slices of) the same experts."""
        return tuple(range(ep_rank * self.moe_tp, (ep_rank + 1) * self.moe_tp))

    def ep_rank_of_each(self) -> tuple[int, ...]:
        """Expert-parallel rank of every rank."""
        return tuple(rank // self.moe_tp for rank in range(self.tp))

    def leader_of_each(self) -> tuple[int, ...]:
        """First rank of the data-parallel group of every rank."""
        size = self.attn_tp * self.cp
        return tuple(rank // size * size for rank in range(self.tp))

    def as_dict(self) -> dict[str, int]:
        """Plain numbers for `stats()`."""
        return {"tp": self.tp, "dp": self.dp, "ep": self.ep, "attn_tp": self.attn_tp, "moe_tp": self.moe_tp}


@dataclass(frozen=True, slots=True)
class Gathering:
    """Which feed-forward inputs are gathered over ranks: the predicates of docs/behaviour.md, section 1.7.

    `dp` is 0 without data-parallel attention. `moe_dense_tp`: TP size of dense layers, None for the default.
    `all_to_all`: an all-to-all dispatcher moves rows to experts. Raises ConfigError for sizes that make no sense.
    """

    tp: int
    dp: int = 0
    moe_dense_tp: int | None = None
    dp_lm_head: bool = False
    all_to_all: bool = False

    def __post_init__(self) -> None:
        if self.dp == 1:
            raise ConfigError("data-parallel attention needs dp over 1, got 1; leave it off instead")

    @property
    def require_mlp_tp_gather(self) -> bool:
        """Rows are gathered over data-parallel groups before the feed-forward."""
        if not self.dp:
            return False
        if self.moe_dense_tp is None or not self.dp_lm_head or not self.all_to_all:
            return True
        return self.moe_dense_tp > self.tp // self.dp

    @property
    def require_attn_tp_gather(self) -> bool:
        """Rows are split over attention TP and gathered within it."""
        if self.moe_dense_tp not in (1, None):
            raise ConfigError(f"moe_dense_tp {self.moe_dense_tp} must be 1 or left out")
        if self.all_to_all or self.moe_dense_tp == 1:
            return self.dp < self.tp if self.dp else True
        return False

    @property
    def require_gathered_buffer(self) -> bool:
        return self.require_mlp_tp_gather or self.require_attn_tp_gather

    @property
    def require_mlp_sync(self) -> bool:
        """Ranks must agree on every step before it runs."""
        return bool(self.dp) or self.require_gathered_buffer
