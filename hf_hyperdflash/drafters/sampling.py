"""How drafts are drawn for a request: greedily or at random, after those logits processors that may run on drafts.

A draft that the target rejects was never part of the text, so a processor that remembers what it was called with must
not see it. Drafting without one costs acceptance, never correctness: what is drafted is verified with all of them. A
grammar knows its state after each path of drafts ([`~grammars.processor.TextGrammar`]).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as stock

from ..grammars.processor import TextGrammar
from ..trees.draws import sample_index
from ..trees.growth import (
    Admission,
    ChainAdmission,
    DraftStep,
    GraphPlan,
    GrownChains,
    GrownNodes,
    Scored,
    Steps,
    best_chances,
    drawn,
    grow_chains,
    most_probable,
    width_for,
)
from ..trees.tree import ANCHOR, DraftTree, are_trees_kept

if TYPE_CHECKING:
    from ..targets.caches.seen_keys import CachedText

# What they return depends on the prefix and the scores that they are given, and on nothing that came before.
_STATELESS = {
    "EncoderNoRepeatNGramLogitsProcessor", "EncoderRepetitionPenaltyLogitsProcessor", "EpsilonLogitsWarper",
    "EtaLogitsWarper", "ExponentialDecayLengthPenalty", "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "InfNanRemoveLogitsProcessor", "LogitNormalization", "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor", "MinPLogitsWarper", "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor", "SequenceBiasLogitsProcessor", "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor", "TemperatureLogitsWarper", "TopHLogitsWarper", "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper", "WatermarkLogitsProcessor",
}  # fmt: skip

# Of these, what never looks at the prefix.
_WITHOUT_TEXT = {
    "EpsilonLogitsWarper", "EtaLogitsWarper", "InfNanRemoveLogitsProcessor", "LogitNormalization", "MinPLogitsWarper",
    "SuppressTokensLogitsProcessor", "TemperatureLogitsWarper", "TopHLogitsWarper", "TopKLogitsWarper",
    "TopPLogitsWarper", "TypicalLogitsWarper", "TextGrammar",
}  # fmt: skip

# And of these, what makes the same of some tokens' scores, whether all others have minus infinity or are not there.
_OF_SOME_TOKENS = {"MinPLogitsWarper", "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper"}


def without_state(processors: LogitsProcessorList) -> LogitsProcessorList:
    """Return those of `processors`, in their order, that may run on drafts: grammars, which have a state for each
    path, and transformers' own that are known to keep none."""
    known = {*stateless_types(), TextGrammar}
    return LogitsProcessorList(_for_paths(each) for each in processors if type(each) in known)


@cache
def stateless_types() -> set[type]:
    """Return transformers' own processors that are known to keep no state."""
    return {getattr(stock, name) for name in _STATELESS if hasattr(stock, name)}  # not every version has each


def _for_paths(processor: LogitsProcessor) -> LogitsProcessor:
    """Return the same for any number of paths of one text: a repetition penalty counts the padding of each row of a
    batch, and refuses another number of rows."""
    padding = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(padding, torch.Tensor) or len(padding) != 1:
        return processor
    of_paths: Any = copy.copy(processor)
    of_paths.prompt_ignore_length = int(padding)
    return of_paths


@dataclass(frozen=True)
class DraftSampler:
    """How a request's drafts are drawn in a round: as it draws text, a chain of them or a tree.

    Args:
        processors: The request's; those stay that may run on drafts.
        do_sample: Whether it samples.
        tree_budget: The most nodes of a draft tree; `None` for chains.
        chain_admission: Who admits the drafts of a chain one by one; `None` for as many as are asked for.
        node_admission: Who admits the nodes of a tree; `None` for as many as are asked for.
        has_all_processors: Whether all of the request's may run on drafts.
        padding: `[1, padding]`, what the caller has before the text and a drafter's request has not: processors count
            it, and know where it ends. `None` for nothing.
    """

    processors: LogitsProcessorList
    do_sample: bool
    tree_budget: int | None = None
    chain_admission: ChainAdmission | None = None
    node_admission: Admission | None = None
    has_all_processors: bool = True
    padding: torch.Tensor | None = None

    def __post_init__(self) -> None:
        may_run = without_state(self.processors)
        object.__setattr__(
            self, "has_all_processors", self.has_all_processors and len(may_run) == len(self.processors)
        )
        object.__setattr__(self, "processors", may_run)

    def scored_after(self, ids: torch.Tensor, drafts: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return the scores by which drafts are drawn after paths of a text.

        Args:
            ids: `[1, seq]`, the text.
            drafts: What follows it on each path, `[paths, drafts]`.
            logits: The drafter's, `[paths, config.vocab_size]`.
        """
        text = drafts
        if self._reads_text:  # else without a copy of the text for every path
            before = [ids] if self.padding is None else [self.padding, ids]
            text = torch.cat([*(part.expand(len(drafts), -1) for part in before), drafts], dim=1)
        return self.scored(text, drafts.tolist() if self.grammars else (), logits, are_drafted=True)

    def scored(
        self, text: torch.Tensor, paths: Sequence[Sequence[int]], logits: torch.Tensor, are_drafted: bool = False
    ) -> torch.Tensor:
        """Do the same from the text of each path, `[paths, seq]`, and its drafts: grammars read the latter."""
        scores = logits.to(text.device, torch.float32)
        for each in self.processors if len(scores) else ():  # of no paths some make an error
            if isinstance(each, TextGrammar):
                scores = each.masked(paths, scores, are_drafted)
            else:
                scores = each(cast(Any, text), cast(Any, scores))
        return scores

    def scored_step(self, ids: torch.Tensor, drafts: torch.Tensor, step: DraftStep) -> DraftStep:
        """Do the same as [`scored_after`] with a drafter's step: over the tokens that it can draft alone, where no
        processor wants all of them."""
        if any(type(processor).__name__ not in _OF_SOME_TOKENS for processor in self.processors):
            step = step.whole()
        return step._replace(logits=self.scored_after(ids, drafts, step.logits))

    @property
    def grammars(self) -> list[TextGrammar]:
        """The text's grammars."""
        return [each for each in self.processors if isinstance(each, TextGrammar)]

    @property
    def _reads_text(self) -> bool:
        return any(type(processor).__name__ not in _WITHOUT_TEXT for processor in self.processors)

    def scores_as(self, other: DraftSampler) -> bool:
        """Return whether another's paths can be scored with its own: their processors do the same, whatever the text
        is."""
        both = list(zip(self.processors, other.processors))
        are_as_many = len(self.processors) == len(other.processors)
        depend_on_text = self._reads_text or self.grammars
        return are_as_many and not depend_on_text and all(_is_same(*pair) for pair in both)

    def scored_tree(self, ids: torch.Tensor, tree: DraftTree, logits: torch.Tensor) -> torch.Tensor:
        """Return the scores by which the target writes after the anchor and after each node of a tree, as
        [`scored_after`] does: all at once where no processor reads the text. Those that do get one path at a time, as
        before 5.20 or so some know but one.

        Args:
            ids: `[1, seq]`, the text.
            tree: The drafts.
            logits: The target's, `[nodes + 1, config.vocab_size]`.
        """
        if not len(self.processors):
            return logits
        if not self._reads_text:
            paths: Sequence[Sequence[int]] = ()
            if self.grammars:
                tokens = tree.tokens.tolist()
                paths = [[tokens[each] for each in tree.path(node)] for node in range(ANCHOR, len(tree))]
            return self.scored(ids.expand(len(logits), -1), paths, logits)
        scores = []
        for node in range(ANCHOR, len(tree)):
            path = torch.tensor(tree.path(node), dtype=torch.long, device=tree.tokens.device)
            text = torch.cat([ids, tree.tokens[path].to(ids.device)[None]], dim=1)
            drafts = text[:, ids.shape[1] :].tolist() if self.grammars else ()
            scores.append(self.scored(text, drafts, logits[node + 1 : node + 2].clone()))
        return torch.cat(scores)

    def draft_independent(self, ids: torch.Tensor, logits: torch.Tensor) -> DraftTree:
        """Draft from logits that do not depend on the drafts: all at once, where the request does not ask for more.

        Args:
            ids: `[1, seq]`, the text.
            logits: The drafter's, `[1, drafts, config.vocab_size]`.
        """
        depend_on_drafts = self._reads_text or self.grammars
        if self.tree_budget is not None or depend_on_drafts or not logits.shape[1]:
            return self.grow(
                ids, logits.shape[1], lambda k, tokens, _: DraftStep(logits[:, k].expand(len(tokens), -1))
            )
        if not (self.do_sample or len(self.processors) or self.chain_admission):
            return DraftTree.chain(logits.argmax(-1)[0])
        scores = self.scored(ids.expand(logits.shape[1], -1), (), logits[0])
        scores = scores if self.chain_admission is None else scores[: self.admitted(top1_probabilities(scores))]
        if not self.do_sample:
            return DraftTree.chain(scores.argmax(-1))
        q = scores.softmax(-1)
        return DraftTree.chain(sample_index(q).squeeze(1), q.unbind())

    def admitted(self, signals: list[float]) -> int:
        """Return how many drafts of a chain with these signals ([`top1_probabilities`]) are admitted."""
        admission = cast(ChainAdmission, self.chain_admission)
        ends = (k for k, signal in enumerate(signals) if not (admission.is_open() and admission.admits(signal)))
        return next(ends, len(signals))

    def grow(self, ids: torch.Tensor, count: int, steps: Steps, width: int | None = None) -> DraftTree:
        """Draft from logits that know the drafts before: one after the other, or a tree where the request has a
        budget for one.

        Args:
            ids: `[1, seq]`, the text.
            count: How many, one after the other.
            steps: The drafter.
            width: Of a tree of most probable nodes, how many of a level go on at most, and how many children each
                has; `None` for as many as are worth it.
        """
        return draft_batch([DraftRequest(None, ids, ids, count, self)], steps, width)[0]


class Context(Protocol):
    """What a drafter keeps of a sequence.

    Attributes:
        end: The number of tokens of the sequence that were added.
    """

    end: int


class DraftRequest(NamedTuple):
    """What a drafter's [`~drafters.base.Drafter.draft`] is asked for after one text.

    Attributes:
        context: The text's, with all of `ids` but the anchor.
        ids: `[1, seq]`, the accepted tokens, the anchor last. They have padding on the left where the target got it:
            not with DeepSeek-V4, and not in a batch.
        position_ids: `[1, seq]`, their true positions.
        num_drafts: The most drafts, one after the other.
        sampler: Draws tokens as the caller asked for, a chain of them or a tree.
        cached: Where the text is in the target's cache, for drafters that attend over its keys
            ([`~targets.caches.seen_keys.seen_keys`]); `None` where nobody says.
    """

    context: Any
    ids: torch.Tensor
    position_ids: torch.Tensor
    num_drafts: int
    sampler: DraftSampler
    cached: CachedText | None = None


def draft_batch(requests: Sequence[DraftRequest], steps: Steps, width: int | None = None) -> list[DraftTree]:
    """Draft chains or trees of several texts, as they ask for, from logits that know the drafts before: each pass of
    the drafter serves all texts.

    Args:
        requests: One for each text.
        steps: The drafter.
        width: As for [`DraftSampler.grow`].
    """
    sampler, scored = requests[0].sampler, score_batch(requests)
    anchors, counts = torch.cat([each.ids[:, -1] for each in requests]), [each.num_drafts for each in requests]
    budget, depth = sampler.tree_budget, max(counts)
    if budget is None or not depth:
        grown = grow_chains(anchors, depth, steps, scored, sampler.do_sample, sampler.chain_admission)
        return drafts_of(grown, requests, range(len(requests)))
    if sampler.do_sample:
        return drawn(anchors, counts, budget, steps, scored, sampler.node_admission)
    going_on = width or width_for(budget)
    return most_probable(anchors, counts, budget, steps, scored, going_on, width, sampler.node_admission)


def draft_known(
    requests: Sequence[DraftRequest],
    are_known: Sequence[bool],
    draft: Callable[[list[DraftRequest]], list[DraftTree]],
) -> list[DraftTree]:
    """Draft for the texts of whose contexts something is known; for the others, of one token, there are no drafts."""
    known = [each for each, is_known in zip(requests, are_known) if is_known]
    drafts = iter(draft(known) if known else ())
    empty = DraftTree.chain(requests[0].ids.new_empty(0))
    return [next(drafts) if is_known else empty for is_known in are_known]


def graph_plan(requests: Sequence[DraftRequest], device: torch.device, on_accelerator: bool) -> GraphPlan | None:
    """Return what a graph is to draft for several texts: the most probable chains or trees. `None` for drafts that it
    cannot make, or that would outlast its next run.

    Args:
        requests: One for each text.
        device: The drafter's.
        on_accelerator: Whether it costs little to draft more than is admitted.
    """
    first = requests[0].sampler
    admits_all = first.chain_admission is None and first.node_admission is None
    is_greedy = not first.do_sample and not any(len(each.sampler.processors) for each in requests)
    if not (is_greedy and (admits_all or on_accelerator)) or are_trees_kept():
        return None
    numbers = None if first.node_admission is None else first.node_admission.numbers(device)
    return GraphPlan(first.tree_budget, numbers, first.chain_admission is not None)


def drafts_of(
    grown: GrownChains | GrownNodes, requests: Sequence[DraftRequest], rows: Sequence[int]
) -> list[DraftTree]:
    """Return the trees, or as many drafts of each chain as a text asked for and admits, with one wait for the device
    where that depends on what was drafted.

    Args:
        grown: What was drafted.
        requests: Of those texts that asked.
        rows: Which texts these are.
    """
    if isinstance(grown, GrownNodes):
        trees = grown.trees()
        return [trees[row] for row in rows]
    signals, chains = [] if grown.signals is None else grown.signals.tolist(), []
    for row, each in zip(rows, requests):
        count = each.num_drafts
        count = each.sampler.admitted(signals[row][:count]) if signals else count
        sure = None if grown.confidence is None else grown.confidence[row, :count]
        chain = DraftTree.chain(grown.tokens[row, :count], [of_all[row] for of_all in grown.q[:count]])
        chains.append(replace(chain, confidence=sure))
    return chains


def score_batch(requests: Sequence[DraftRequest]) -> Scored:
    """Return what scores the drafts of several texts, as [`DraftSampler.scored_after`] does: at once where the texts'
    processors do the same to all of them."""
    first = requests[0].sampler
    is_shared = all(first.scores_as(each.sampler) for each in requests[1:])

    def scored(drafts: torch.Tensor, step: DraftStep, counts: Sequence[int]) -> DraftStep:
        if is_shared:
            return first.scored_step(requests[0].ids, drafts, step)
        step, sizes = step.whole(), list(counts)
        of_each = zip(requests, drafts.split(sizes), step.logits.split(sizes))
        return step._replace(
            logits=torch.cat([each.sampler.scored_after(each.ids, own, logits) for each, own, logits in of_each])
        )

    return scored


def _is_same(one: LogitsProcessor, other: LogitsProcessor) -> bool:
    """Return whether two processors do the same."""
    if type(one) is not type(other) or vars(one).keys() != vars(other).keys():
        return False
    return all(
        torch.equal(value, vars(other)[name]) if isinstance(value, torch.Tensor) else value == vars(other)[name]
        for name, value in vars(one).items()
    )


def top1_probabilities(scores: torch.Tensor) -> list[float]:
    """Return what tells most of whether the target accepts what is drawn by `scores`, `[drafts, config.vocab_size]`:
    how probable the best token is (`experiments/compare_survival.py`; more than a confidence head, above all of greedy
    text)."""
    return best_chances(scores).tolist()
