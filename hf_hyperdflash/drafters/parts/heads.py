"""Sequential heads: how a draft knows the one before it, and how sure the drafter is of it.

A block gives a state h_k for each draft position, all at once and blind to each other. A head turns h_k and the token
x_{k-1} chosen before it (the anchor, for the first) into a state z_k and a vector v_k, and the draft's logits are
`LMHead(z_k) + table v_k`. One step is cheap beside the block; it is the same in training, over all blocks at once.

Torch alone, so that a serving engine can import them. Modules are called as in DeepSpec's and z-lab's checkpoints, but
for a GRU head's.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import nn

from ...targets.gate import unit_rms


class HeadConfig(Protocol):
    """The fields of a drafter's configuration that heads read."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def draft_vocab_size(self) -> int: ...
    @property
    def target_hidden_size(self) -> int: ...
    @property
    def head_rank(self) -> int: ...
    @property
    def head_state_size(self) -> int: ...
    @property
    def head_start(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...


class HeadStep(NamedTuple):
    """A head's output for one draft position.

    Attributes:
        states: z_k `[..., config.target_hidden_size]`, for the LM head.
        vectors: v_k `[..., config.head_rank]`, for the head's table; `None` if it has none.
        memory: Its representation of the token before, `[..., head.memory_size]`.
        carried: Its input of the next step; `None` if the next step needs none.
    """

    states: torch.Tensor
    vectors: torch.Tensor | None
    memory: torch.Tensor
    carried: torch.Tensor | None


class HeadOutput(NamedTuple):
    """The output of heads for whole blocks.

    Attributes:
        states: `[..., drafts, config.target_hidden_size]`, for the LM head.
        vectors: `[..., drafts, config.head_rank]`, for the head's table; `None` without one.
        confidence: `[..., drafts]`, the logit of each draft's acceptance; `None` without a confidence head.
        blind: `[..., drafts, config.target_hidden_size]`, the block's own states for the LM head, which no head has
            changed; `None` without a head.
        ranks: `[..., drafts, 4]`, a rank head's logits; `None` without one.
    """

    states: torch.Tensor
    vectors: torch.Tensor | None = None
    confidence: torch.Tensor | None = None
    blind: torch.Tensor | None = None
    ranks: torch.Tensor | None = None


class ZeroInitLinear(nn.Linear):
    """A linear layer whose weights are zero at first: with it a fresh drafter drafts as it would without."""

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


class SequentialHead(nn.Module):
    """A head that runs one draft position at a time: `head(state, token, embeds, carried)`.

    Attributes:
        key: Its module's name in a drafter.
        candidates: Among how many of the block's best tokens it chooses by default; 0 for all.
        reads_embeds: Whether it reads the target's embedding of the token before.
        memory_size: Width of [`HeadStep`]'s `memory`.
    """

    key: ClassVar[str]
    candidates: ClassVar[int] = 0
    reads_embeds: ClassVar[bool] = False
    memory_size: int

    def forward(
        self, hidden: torch.Tensor, ids: torch.Tensor, embeds: torch.Tensor | None, carried: torch.Tensor | None
    ) -> HeadStep:
        """Run one draft position.

        Args:
            hidden: The block's h_k, `[..., config.target_hidden_size]`.
            ids: The token before, `[...]`.
            embeds: The target's embedding of it, `[..., config.target_hidden_size]`, where the head reads it.
            carried: The output `carried` of the step before; `None` at the first.
        """
        raise NotImplementedError(f"A {type(self).__name__} has no `forward`.")

    @classmethod
    def candidates_of(cls, vocab_size: int, draft_vocab_size: int) -> int:
        """Return among how many tokens that can be drafted it chooses by default; 0 for all."""
        return min(cls.candidates, draft_vocab_size or vocab_size)

    @property
    def table(self) -> torch.Tensor | None:
        """The table that turns vectors into logits, `[config.draft_vocab_size or config.vocab_size,
        config.head_rank]`; `None` if the head has none."""
        return None


class MarkovHead(SequentialHead):
    """A bigram table of low rank: v_k = W1[x_{k-1}] (DSpark)."""

    key = "markov_head"

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        rank = self.memory_size = config.head_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = ZeroInitLinear(rank, config.draft_vocab_size or config.vocab_size, bias=False)

    def forward(
        self, hidden: torch.Tensor, ids: torch.Tensor, embeds: torch.Tensor | None, carried: torch.Tensor | None
    ) -> HeadStep:
        memory = self.markov_w1(ids)
        vectors, carried = self.vectors(hidden, memory, carried)
        return HeadStep(hidden, vectors, memory, carried)

    def vectors(
        self, hidden: torch.Tensor, memory: torch.Tensor, carried: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return v_k and the input of the next step."""
        return memory, None

    @property
    def table(self) -> torch.Tensor:
        return self.markov_w2.weight


class GatedMarkovHead(MarkovHead):
    """The same, with a gate that reads the state: v_k = sigmoid(W [h_k; e] + b) * e, e = W1[x_{k-1}] (DSpark)."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.gate_proj = nn.Linear(config.target_hidden_size + config.head_rank, config.head_rank)

    def vectors(
        self, hidden: torch.Tensor, memory: torch.Tensor, carried: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return torch.sigmoid(self.gate_proj(torch.cat([hidden, memory], dim=-1))) * memory, None


class RecurrentHead(MarkovHead):
    """A state of the whole path: [g; c; o] = W [s_{k-1}; W1[x_{k-1}]; h_k] + b, s_k = sigmoid(g) s_{k-1} +
    (1 - sigmoid(g)) tanh(c), v_k = tanh(o), s_0 = 0 (DSpark)."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        rank = config.head_rank
        self.joint_proj = nn.Linear(2 * rank + config.target_hidden_size, 3 * rank)

    def vectors(
        self, hidden: torch.Tensor, memory: torch.Tensor, carried: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        state = torch.zeros_like(memory) if carried is None else carried
        gate, candidate, out = self.joint_proj(torch.cat([state, memory, hidden], dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(out), gate * state + (1 - gate) * torch.tanh(candidate)


class GRUHead(SequentialHead):
    """A state of the path's tokens alone, s_k = GRU(e(x_{k-1}), s_{k-1}), s_0 = 0, where e is the target's embedding:
    v_k = silu(U [h_k; s_k]). The first `config.head_start` drafts stay the block's own, v_k = 0 (Domino)."""

    key = "gru_head"
    reads_embeds = True

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        size, rank = config.head_state_size, config.head_rank
        width = self.memory_size = config.target_hidden_size
        self.state_size, self.start, self.eps = size, config.head_start, config.rms_norm_eps
        self.input_proj = nn.Linear(width, 3 * size, bias=False)
        self.state_proj = nn.Linear(size, 3 * size, bias=False)
        self.hidden_proj = nn.Linear(width + size, rank, bias=False)
        self.out_proj = ZeroInitLinear(rank, config.draft_vocab_size or config.vocab_size, bias=False)

    def forward(
        self, hidden: torch.Tensor, ids: torch.Tensor, embeds: torch.Tensor | None, carried: torch.Tensor | None
    ) -> HeadStep:
        if embeds is None:
            raise ValueError("A GRU head reads the embedding of the token before, expected `embeds`.")
        # What is carried is the state, and behind it the number of drafts before.
        before = hidden.new_zeros(*hidden.shape[:-1], self.state_size + 1) if carried is None else carried
        state, count, embeds = before[..., :-1], before[..., -1:], embeds.to(hidden.dtype)
        reset, update, candidate = self.input_proj(embeds).chunk(3, dim=-1)
        own_reset, own_update, own_candidate = self.state_proj(state).chunk(3, dim=-1)
        update = torch.sigmoid(update + own_update)
        candidate = torch.tanh(candidate + torch.sigmoid(reset + own_reset) * own_candidate)
        state = (1 - update) * candidate + update * state
        vectors = nn.functional.silu(self.hidden_proj(torch.cat([hidden, state], dim=-1))) * (count >= self.start)
        return HeadStep(hidden, vectors, unit_rms(embeds, self.eps), torch.cat([state, count + 1], dim=-1))

    @property
    def table(self) -> torch.Tensor:
        return self.out_proj.weight


class SelectorHead(SequentialHead):
    """Two codebooks: v_k = A[x_{k-1}] * (P h_k), the table is B; it chooses among the block's 16 best (DFlash 2)."""

    key = "candidate_selector"
    candidates = 16

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        rank = self.memory_size = config.head_rank
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(config.draft_vocab_size or config.vocab_size, rank))
        self.hidden_projection = nn.Linear(config.target_hidden_size, rank, bias=False)

    def forward(
        self, hidden: torch.Tensor, ids: torch.Tensor, embeds: torch.Tensor | None, carried: torch.Tensor | None
    ) -> HeadStep:
        memory = nn.functional.embedding(ids, self.predecessor_codebook)
        return HeadStep(hidden, memory * self.hidden_projection(hidden), memory, None)

    @property
    def table(self) -> torch.Tensor:
        return self.successor_codebook

    def reset(self, std: float) -> None:
        """Reset the weights, so that the head changes nothing at first."""
        nn.init.normal_(self.predecessor_codebook, std=std)
        nn.init.zeros_(self.successor_codebook)


class StateHead(SequentialHead):
    """Ours: corrects the state itself, z_k = h_k + D(silu(g) * u), [g; u] = U [norm(h_k); norm(e(x_{k-1}));
    norm(z_{k-1})], z_0 = 0. It has no table of the vocabulary's size: e is the target's embedding, and the target's LM
    head reads z_k, of which only the rows of the block's best tokens are computed again."""

    key = "state_head"
    candidates = 1024
    reads_embeds = True

    @classmethod
    def candidates_of(cls, vocab_size: int, draft_vocab_size: int) -> int:
        # Candidates only save time here: to gather some rows of a small LM head takes longer than to compute all. And
        # training has no loss for a choice among those of a draft vocabulary.
        return cls.candidates if vocab_size > 8 * cls.candidates and not draft_vocab_size else 0

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        width = self.memory_size = config.target_hidden_size
        self.eps = config.rms_norm_eps
        self.up_proj = nn.Linear(3 * width, 2 * config.head_rank, bias=False)
        self.down_proj = ZeroInitLinear(config.head_rank, width, bias=False)

    def forward(
        self, hidden: torch.Tensor, ids: torch.Tensor, embeds: torch.Tensor | None, carried: torch.Tensor | None
    ) -> HeadStep:
        if embeds is None:
            raise ValueError("A state head reads the embedding of the token before, expected `embeds`.")
        before = torch.zeros_like(hidden) if carried is None else carried
        memory = unit_rms(embeds.to(hidden.dtype), self.eps)
        read = torch.cat([unit_rms(hidden, self.eps), memory, unit_rms(before, self.eps)], dim=-1)
        gate, up = self.up_proj(read).chunk(2, dim=-1)
        states = hidden + self.down_proj(nn.functional.silu(gate) * up)
        return HeadStep(states, None, memory, states)


class ConfidenceHead(nn.Module):
    """The logit of a draft's acceptance once the drafts before it are accepted: w^T [h_k; memory of x_{k-1}] + b
    (DSpark), 0 at first. Its inputs are detached: it judges drafts and does not shape them.

    Args:
        config: The drafter's.
        memory_size: Of its sequential head; 0 if the confidence reads the state alone.
        bias: Whether there is a b.
    """

    key = "confidence_head"

    def __init__(self, config: HeadConfig, memory_size: int, bias: bool = True) -> None:
        super().__init__()
        self.proj = ZeroInitLinear(config.target_hidden_size + memory_size, 1, bias=bias)
        self.memory_size = memory_size

    def forward(self, hidden: torch.Tensor, memory: torch.Tensor | None) -> torch.Tensor:
        read = torch.cat([hidden, memory], dim=-1) if self.memory_size and memory is not None else hidden
        return self.proj(read.detach()).squeeze(-1)


def run_heads(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    embeds: torch.Tensor | None,
    head: SequentialHead | None,
    confidence_head: ConfidenceHead | None,
) -> HeadOutput:
    """Run the heads over blocks whose tokens are known, as in training.

    Args:
        hidden: The blocks' states, `[..., drafts, config.target_hidden_size]`.
        ids: The token before each draft position, `[..., drafts]`.
        embeds: The target's embeddings of them, where the head reads them.
        head: The drafter's.
        confidence_head: The drafter's.
    """
    steps: list[HeadStep] = []
    if head is not None:
        carried = None
        for k in range(hidden.shape[-2]):
            step = head(hidden[..., k, :], ids[..., k], None if embeds is None else embeds[..., k, :], carried)
            steps, carried = [*steps, step], step.carried
    memory = torch.stack([step.memory for step in steps], dim=-2) if steps else None
    vectors = [step.vectors for step in steps if step.vectors is not None]
    return HeadOutput(
        torch.stack([step.states for step in steps], dim=-2) if steps else hidden,
        torch.stack(vectors, dim=-2) if vectors else None,
        None if confidence_head is None else confidence_head(hidden, memory),
    )


HEADS: dict[str, type[SequentialHead]] = {
    "markov": MarkovHead,
    "gated_markov": GatedMarkovHead,
    "recurrent": RecurrentHead,
    "gru": GRUHead,
    "selector": SelectorHead,
    "state": StateHead,
}


CONFIDENCE_HEADS = {"True": ConfidenceHead}  # a table, so that the code beside a drafter without one can leave it out


# SpecBlock's rank head predicts the rank of the target's token among the drafter's, and so how many tokens to try.

RANK_CLASSES = 4
"""Rank 1, 2 to 4, 5 to 10, and beyond."""

RANK_CONTEXT = 20
"""The number of best tokens that the features describe."""

_LAST_RANKS = (1, 4, 10)  # of each class but the last
_LISTED = 10
_GAPS = (1, 2, 4)


def rank_features(logits: torch.Tensor) -> torch.Tensor:
    """Return the rank head's features of logits `[..., vocabulary]`, `[..., 15]` in float32: the log-probabilities of
    the ten best tokens, normalized over the best twenty, the gaps from the first to ranks 2, 3 and 5, the first's
    probability, and the entropy over the twenty."""
    best = logits.detach().float().topk(RANK_CONTEXT, dim=-1).values
    likely = best.log_softmax(-1)
    gaps = best[..., :1] - best[..., list(_GAPS)]
    entropy = -(likely.exp() * likely).nan_to_num(0.0).sum(-1, keepdim=True)
    return torch.cat([likely[..., :_LISTED], gaps, likely[..., :1].exp(), entropy], dim=-1)


def rank_classes(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the class of each token's rank, `[...]`, in logits `[..., vocabulary]`."""
    own = logits.gather(-1, tokens.unsqueeze(-1))
    rank = (logits > own).sum(-1) + 1
    return sum((rank > last).long() for last in _LAST_RANKS)  # type: ignore[return-value]


class RankConfig(Protocol):
    """The fields of a drafter's configuration that a rank head reads."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def rank_width(self) -> int: ...


class RankHead(nn.Module):
    """Computes logits of the four classes from a slot's normed state and the features of its logits.

    Args:
        config: The drafter's.
    """

    def __init__(self, config: RankConfig) -> None:
        super().__init__()
        features = _LISTED + len(_GAPS) + 2
        self.up_proj = nn.Linear(config.hidden_size + features, config.rank_width, bias=False)
        self.down_proj = nn.Linear(config.rank_width, RANK_CLASSES, bias=False)

    def forward(self, states: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Return logits `[..., 4]` from states `[..., config.hidden_size]` and [`rank_features`], which get no
        gradient."""
        read = torch.cat([states.detach(), features.to(states.dtype)], dim=-1)
        return self.down_proj(nn.functional.silu(self.up_proj(read)))
