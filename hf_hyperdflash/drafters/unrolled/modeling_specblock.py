"""SpecBlock: blocks of dependent draft positions, a tree of them in a few passes (SpecBlock, arXiv 2605.07243).

Trees grow breadth first: a few passes of many blocks, of all texts. In greedy decoding a rank head sets how many
children each slot has. The first child at a slot continues at the next slot of the same block. At every other child,
and at the first child of the last slot, a later block starts. So all children of a node come from one slot.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from ...targets.target import Target
from ...trees.draws import sample_siblings
from ...trees.growth import ACCEPTED, Admission, hits_of, level_sizes
from ...trees.tree import ANCHOR, DraftTree
from ..parts.heads import RankHead, rank_features
from ..parts.layers import DrafterRMSNorm, HyperDFlashLayer
from ..sampling import DraftRequest
from .configuration import SpecBlockConfig
from .drafter import UnrolledDrafter, Unrolling

_LOGITS_AT_ONCE = 256


class SpecBlockNetwork(nn.Module):
    """The layers of SpecBlock, before a base of drafters: the package's, or that of `portable/`."""

    config: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.condition_norm, self.token_norm, self.slot_norm = (DrafterRMSNorm(width, eps=eps) for _ in range(3))
        self.slot_embeddings = nn.Embedding(config.block_size, width)
        self.fuse = nn.Linear(3 * width, width, bias=False)
        self.layers = nn.ModuleList(HyperDFlashLayer(config) for _ in range(config.num_hidden_layers))
        shifts = config.num_hidden_layers - 1 if config.shift else 0
        self.shift_proj = nn.ModuleList(nn.Linear(2 * width, width, bias=False) for _ in range(shifts))
        self.rank_head = RankHead(config) if config.rank_head else None
        cast(Any, self).post_init()

    def _begin(self, condition: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
        size = self.config.block_size
        inputs = torch.cat([self.condition_norm(condition), self.token_norm(embeds)], dim=-1).unsqueeze(2)
        if self.config.broadcast:
            inputs = inputs.expand(-1, -1, size, -1)
        else:
            inputs = nn.functional.pad(inputs, (0, 0, 0, size - 1))
        slots = self.slot_norm(self.slot_embeddings.weight).expand(*inputs.shape[:3], -1)
        return self.fuse(torch.cat([inputs, slots], dim=-1)).flatten(1, 2)

    def _between(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        if not index or not self.config.shift:
            return hidden
        slots = hidden.unflatten(1, (-1, self.config.block_size))
        before = torch.cat([slots[:, :, :1], slots[:, :, :-1]], dim=2)
        return self.shift_proj[index - 1](torch.cat([slots, before], dim=-1)).flatten(1, 2)


class SpecBlockDrafter(SpecBlockNetwork, UnrolledDrafter):
    """Drafts blocks whose slots depend on each other, and later blocks from any slot of an earlier one.

    Use [`from_target`] or `load_drafter`, `drafter.bind(target)` once, then
    `target.generate(**inputs, assistant_model=drafter, tree_budget=60)`.
    """

    config: SpecBlockConfig
    config_class = SpecBlockConfig
    _no_split_modules = ["HyperDFlashLayer"]
    moves_positions = False  # the authors' checkpoints are trained and used so

    def _ranks(self, normed: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
        if self.rank_head is None:
            return None
        states = normed.flatten(0, -2)
        with torch.no_grad():
            features = torch.cat([rank_features(head(chunk)) for chunk in states.detach().split(_LOGITS_AT_ONCE)])
        return self.rank_head(states, features.to(states.device)).unflatten(0, normed.shape[:-1])

    def _draft(self, target: Target, unrolling: Unrolling, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        if requests[0].sampler.tree_budget is None:
            return super()._draft(target, unrolling, requests)
        return grow_blocks(requests, self._blocks(target, unrolling), self.config)

    def _blocks(self, target: Target, unrolling: Unrolling) -> Blocks:
        def blocks(earlier: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor) -> BlockStep:
            states = unrolling.states
            if len(earlier):
                earlier, slots, tokens = (each.to(self.device) for each in (earlier, slots, tokens))
                states = unrolling.branch(earlier, slots, tokens)
            normed = self.norm(states)
            drafted = self.drafted_logits(target, normed)
            ranks = None
            if self.rank_head is not None:
                ranks = self.rank_head(normed, rank_features(drafted).to(normed.device)).float().softmax(-1)
            return BlockStep(self.to_full_vocabulary(target, drafted), ranks)

        return blocks


class BlockStep(NamedTuple):
    """A drafter's output of one pass over several blocks.

    Attributes:
        logits: `[blocks, slots, config.vocab_size]`.
        ranks: The probabilities that the target's token has rank 1, 2 to 4, 5 to 10, or a later one among them,
            `[blocks, slots, 4]`; `None` without a rank head.
    """

    logits: torch.Tensor
    ranks: torch.Tensor | None


Blocks = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], BlockStep]
"""Runs blocks that continue earlier ones, from the numbers of those, slots of theirs, and the tokens that were chosen
there, `[new]` each; all are empty for the first block of each text. Blocks are numbered in the order in which they are
run; those of a text stand together, and texts in their order."""


class _Start(NamedTuple):
    """Where a block starts: the node before it, the block and slot that it continues, and the path so far."""

    node: int
    block: int
    slot: int
    depth: int
    value: float
    path: tuple[int, ...]  # of drafted tokens


def grow_blocks(requests: Sequence[DraftRequest], blocks: Blocks, config: SpecBlockConfig) -> list[DraftTree]:
    """Grow a tree of at most `sampler.tree_budget` nodes for each text, in at most `config.max_blocks` passes.

    In greedy decoding its nodes are the most probable ones of those that `config.branching` allows (the paper's
    pruning, by the product of probabilities along the path). Where the request samples, children are drawn without
    replacement, and the number of a node's children is decided before any of them is drawn. The rank head has no part
    in it: whether a draw is accepted depends on how well drafter and target agree, also where all tokens are equally
    probable. So sampling works as in [`~trees.growth.drawn`], with as many levels in a pass as a block has slots.

    Args:
        requests: One for each text.
        blocks: The drafter.
        config: With `branching` and `max_blocks`.
    """
    trees, made = [_GrowingTree(each, config) for each in requests], 0
    for level in range(config.max_blocks):
        starts = [start for tree in trees for start in tree.starts]
        if not starts:
            break
        going_on = starts if level else []
        step = blocks(
            torch.tensor([start.block for start in going_on], dtype=torch.long),
            torch.tensor([start.slot for start in going_on], dtype=torch.long),
            torch.tensor([start.path[-1] for start in going_on], dtype=torch.long),
        )
        done = 0
        for tree in trees:
            own = slice(done, done + len(tree.starts))
            tree.add(level, made + done, BlockStep(step.logits[own], None if step.ranks is None else step.ranks[own]))
            done = own.stop
        made += done
    return [tree.tree() for tree in trees]


class _GrowingTree:
    """The nodes of one text's tree so far.

    Args:
        request: The text's, with the greatest depth and the most nodes.
        config: The drafter's.

    Attributes:
        starts: Where the blocks of the next pass start.
    """

    def __init__(self, request: DraftRequest, config: SpecBlockConfig) -> None:
        self.ids, self.count, self.sampler, self.config = request.ids, request.num_drafts, request.sampler, config
        self.branching, self.budget = torch.tensor(config.branching or []), self.sampler.tree_budget or self.count
        self.sizes = level_sizes(self.count, self.budget)
        self.starts = [_Start(ANCHOR, 0, 0, 0, 0.0 if not self.sampler.do_sample else 1.0, ())]
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.values: list[float] = []
        self.q: list[torch.Tensor] = []
        self.signals: list[float] = []  # the drafter's probability of each
        self.admission: Admission | None = self.sampler.node_admission
        self.passes: list[int] = []

    def add(self, level: int, made: int, step: BlockStep) -> None:
        """Add the nodes of one pass.

        Args:
            level: The number of the pass, from 0.
            made: The number of its first block.
            step: The pass over the blocks that begin at `starts`.
        """
        if not self.starts:
            return
        if self.sampler.do_sample:
            is_last = level + 1 == self.config.max_blocks
            free = self.budget if is_last else sum(self.sizes[: (level + 1) * step.logits.shape[1]])
            starts = self.add_drawn(self.starts, made, step, max(1, free - len(self.tokens)))
            starts = heapq.nlargest(self.budget - len(self.tokens), starts, key=lambda start: start.value)
        else:
            starts = self.add_most_probable(self.starts, made, step)
            min_value = min(heapq.nlargest(self.budget, self.values), default=math.inf)
            starts = [each for each in starts if each.value >= min_value]
            starts = heapq.nlargest(self.budget, starts, key=lambda start: start.value)
        self.starts = starts
        self.passes += [level + 1] * (len(self.tokens) - len(self.passes))

    def add_most_probable(self, starts: list[_Start], made: int, step: BlockStep) -> list[_Start]:
        """Add the most probable children at every slot, and return where later blocks can start."""
        widths, found = self._widths(step, starts), []
        min_value = -math.inf if self.admission is None else self.admission.log_min_probability
        slots, shared = step.logits.shape[1], None
        if not len(self.sampler.processors):
            shared = _most_probable(step.logits, max(map(max, widths)))
        for row, start in enumerate(starts):
            node, value, path = start.node, start.value, start.path
            for slot in range(min(slots, self.count - start.depth)):
                width = widths[row][slot]
                if shared is None:
                    tokens, gains = _most_probable(self._scores(path, step.logits[row, slot]), width)
                else:
                    tokens, gains = shared[0][row][slot], shared[1][row][slot]
                children = [(token, gain, value + self._chance(gain)) for token, gain in zip(tokens[:width], gains)]
                children = [child for child in children if child[2] > min_value]
                for rank, (token, gain, child_value) in enumerate(children):
                    self._add(token, node, child_value, math.exp(gain))
                    if rank or slot == slots - 1:
                        found.append(self._start(made + row, slot, start.depth, path))
                if not children:
                    break
                node = len(self.tokens) - len(children)
                value, path = self.values[node], (*path, self.tokens[node])
        return [each for each in found if each.depth < self.count]

    def add_drawn(self, starts: list[_Start], made: int, step: BlockStep, share: int) -> list[_Start]:
        """Add randomly drawn children at every slot, `share` in all, and return where later blocks can start."""
        signals = self._signals(step, len(starts))
        slots, found = step.logits.shape[1], []
        counts = self._counts(starts, slots, share, signals)
        for row, start in enumerate(starts):
            node, path = start.node, start.path
            for slot, hits in enumerate(counts[row]):
                distribution = self._scores(path, step.logits[row, slot]).softmax(-1)
                draws = sample_siblings(distribution, min(len(hits), len(distribution)))
                tokens = draws.indices[draws.are_there].tolist()
                if not tokens:  # nothing is drawn from what is no number
                    break
                for rank, (token, rest) in enumerate(zip(tokens, draws.weights)):
                    self.q.append(rest / rest.sum())
                    self._add(token, node, hits[rank], signals[row][slot])
                    if rank or slot == slots - 1:
                        found.append(self._start(made + row, slot, start.depth, path))
                node = len(self.tokens) - len(tokens)
                path = (*path, self.tokens[node])
        return [each for each in found if each.depth < self.count]

    def tree(self) -> DraftTree:
        """Return the tree of the best nodes, `budget` at most."""
        budget = self.budget
        if len(self.tokens) <= budget:
            kept = list(range(len(self.tokens)))
        else:  # of equals the earlier one: no child without its parent
            kept = sorted(sorted(range(len(self.tokens)), key=lambda node: (-self.values[node], node))[:budget])
        number = {ANCHOR: ANCHOR, **{node: place for place, node in enumerate(kept)}}
        tokens = self.ids.new_tensor([self.tokens[node] for node in kept])
        parents = tuple(number[self.parents[node]] for node in kept)
        q = tuple(self.q[node] for node in kept) if self.q else None
        confidence = (
            None
            if self.admission is None
            else tokens.new_tensor([self.signals[node] for node in kept], dtype=torch.float32)
        )
        return DraftTree(tokens, parents, q, confidence, passes=tuple(self.passes[node] for node in kept))

    def _widths(self, step: BlockStep, starts: list[_Start]) -> list[list[int]]:
        if step.ranks is None:
            return [[int(self.branching[0])] * step.logits.shape[1]] * len(starts)
        widths = self.branching[step.ranks.argmax(-1).cpu()].tolist()
        if starts[0].node == ANCHOR and not widths[0][0]:
            widths[0][0] = 1  # a round drafts something
        return widths

    def _chance(self, gain: float) -> float:
        """Return the logarithm of a node's probability of acceptance, from the drafter's log-probability."""
        if self.admission is None or gain == -math.inf:
            return gain
        return math.log(self.admission.survival(math.exp(gain)))

    def _signals(self, step: BlockStep, blocks: int) -> list[list[float]]:
        """Return the rank head's probability that the target's token is the best one, by block and slot."""
        if step.ranks is None:
            return [[ACCEPTED[0]] * step.logits.shape[1]] * blocks
        return step.ranks[..., 0].tolist()

    def _counts(
        self, starts: list[_Start], slots: int, share: int, signals: list[list[float]]
    ) -> list[list[list[float]]]:
        """Return the values of each slot's children, by block and slot: those of the `share` children in all that are
        accepted most often."""
        survival, min_value = self.admission or (None, -1.0)
        waiting: list[tuple[float, int, int, int, float, list[float]]] = []  # the highest value first

        def push(row: int, slot: int, rank: int, parent: float, chances: list[float]) -> None:
            heapq.heappush(waiting, (-parent * chances[rank], row, slot, rank, parent, chances))

        def open_slot(row: int, slot: int, parent: float) -> None:
            first = ACCEPTED[0] if survival is None else survival(signals[row][slot])
            push(row, slot, 0, parent, hits_of(first, share))

        counts: list[list[list[float]]] = [[] for _ in starts]
        for row, start in enumerate(starts):
            open_slot(row, 0, start.value)
        for _ in range(share):
            if not waiting or -waiting[0][0] <= min_value:
                break
            value, row, slot, rank, parent, chances = heapq.heappop(waiting)
            if not rank:
                counts[row].append([])
                if slot + 1 < min(slots, self.count - starts[row].depth):
                    open_slot(row, slot + 1, -value)
            counts[row][slot].append(-value)
            if rank + 1 < share:
                push(row, slot, rank + 1, parent, chances)
        return counts

    def _scores(self, path: tuple[int, ...], logits: torch.Tensor) -> torch.Tensor:
        if not len(self.sampler.processors):
            return logits.float().to(self.ids.device)
        drafts = self.ids.new_tensor(path, dtype=torch.long)[None]
        return self.sampler.scored_after(self.ids, drafts, logits[None])[0]

    def _add(self, token: int, parent: int, value: float, signal: float) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self.values.append(value)
        self.signals.append(signal)

    def _start(self, block: int, slot: int, depth: int, path: tuple[int, ...]) -> _Start:
        node = len(self.tokens) - 1
        return _Start(node, block, slot, depth + slot + 1, self.values[node], (*path, self.tokens[node]))


def _most_probable(logits: torch.Tensor, width: int) -> tuple[list, list]:
    """Return the best tokens and their log-probabilities, from logits `[..., vocabulary]`."""
    best = logits.float().log_softmax(-1).topk(min(width, logits.shape[-1]))
    return best.indices.tolist(), best.values.tolist()
