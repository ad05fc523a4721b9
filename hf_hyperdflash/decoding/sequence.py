"""One sequence: its tokens with their positions and mask, when it ends, and what its request says of drawing them."""

from __future__ import annotations

import copy
import logging
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast
from weakref import WeakSet

import torch
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteriaList,
)
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from ..auto.copies import KnownPath
from ..drafters.base import Drafter, EmptyContext
from ..drafters.sampling import Context, DraftRequest, DraftSampler
from ..drafters.without_weights.lookup import Lookup
from ..targets.caches.name import CACHE
from ..targets.caches.seen_keys import CachedText
from ..targets.target import RewindableCache, TargetOutput, check_restart
from ..trees.acceptance import Step, greedy_walk, sampled_walk, traversal_walk
from ..trees.tree import ANCHOR, DraftTree
from .outputs import OutputRecorder
from .request import CONTEXT, Pair, Request
from .rounds import ChainRound, Choices, TokenBuffer
from .rows import Row
from .sources import CopySource, DraftSource, GrammarSource
from .stats import SpeculationStats, clock

logger = logging.getLogger(__name__)

_FRUITLESS = 4  # rounds at a text's end, at most, without an accepted draft: then the drafter's scores are looked at
_told: WeakSet[Drafter] = WeakSet()  # drafters whose scores were found not to be finite
_PADDING = "_hyperdflash_padding"  # an attribute of a cache, for the next turn
_CATCH_UP = 64  # tokens that a drafter takes in at once, or at least, after it was not asked for drafts for so long


class Sequence:
    """One sequence of a request: its tokens, its settings, and what the drafter knows of it.

    Args:
        request: The call's.
        row: The prompt, tokens that are already in the cache included, and what `generate` prepared for it.
        config: The generation configuration, prepared, too.
        adapter: The drafter's for this text, as in [`~decoding.request.Pair`].

    Attributes:
        pair: A bound target, and the drafter on any device, with the text's adapter.
        num_drafts: The most drafts of a round. The cache can take back one token more.
        layer_ids: Layers whose residual streams are read: the drafter's, then those that its observer wants.
        is_greedy: Whether the target's most probable tokens are written, and nobody asks for more of them.
        context: The drafter's.
        residuals: Residual streams of what is in the target's cache and not yet in the context.
        sources: Who knows how the text may go on, beside the drafter.
        finished: Whether the text has ended.
        can_use_inference_mode: Whether nobody gets hold of what its rounds compute.
        streamer_seconds: Seconds in the caller's streamer, which no draft can save.

    Raises:
        ValueError: If the target starts its cache anew while the text grows.
    """

    def __init__(self, request: Request, row: Row, config: GenerationConfig, adapter: str | None = None) -> None:
        self.request, self.config, self.num_drafts = request, config, request.num_drafts
        self.pair = replace(request.pair, adapter=adapter)
        target, drafter = self.target, self.drafter = request.pair.target, request.pair.drafter
        self.streamer: BaseStreamer | None = request.arguments.get("streamer")
        self.processor, self.stopping = row.processors, Stopping(row.criteria)
        observer, do_sample = drafter.observer, bool(config.do_sample)
        with self.pair.adapted():
            self.observer = None if observer is None else observer.begin(target.model, do_sample)
        wanted = None if self.observer is None else self.observer.target_layer_ids
        self.layer_ids = list(request.pair.facts.layer_ids if wanted is None else wanted)
        self.is_greedy = not (do_sample or len(row.processors) or config.return_dict_in_generate)
        called = [*row.processors, *row.criteria]
        self.can_use_inference_mode = request.can_use_inference_mode(self.observer, called)
        self.recorder, self.stats = OutputRecorder(config, target), SpeculationStats()
        drafter._remember(self.stats)
        self.kwargs, self.cache = dict(row.arguments), row.arguments[CACHE]
        mask, positions = self.kwargs.pop("attention_mask", None), self.kwargs.pop("position_ids", None)
        padding = 0
        if request.rows > 1 or target.skips_padding:  # then the target sees none of it
            # The cache remembers the columns that it never saw. Rows may share one, and set it one after the other.
            if int(self.cache.get_seq_length()) == 0:
                setattr(self.cache, _PADDING, 0 if mask is None else int(mask[0].long().argmax()))
            padding = getattr(self.cache, _PADDING, 0)
        mask = None if mask is None or bool(mask[:, padding:].all()) else mask[:, padding:]
        positions = None if positions is None else positions[..., -(row.ids.shape[1] - padding) :]
        self.tokens = TokenBuffer(row.ids, padding, mask, positions)
        self.sampler = DraftSampler(row.processors, do_sample, padding=row.ids[:, :padding] if padding else None)
        check_restart(target.config, self.tokens.length, config.max_length, padding)
        self.context = load_context(self.cache, self.pair)
        self.residuals: list[torch.Tensor] = []
        self.finished, self.streamer_seconds, self.now = False, 0.0, clock(target.model.device)
        self.sources: list[DraftSource] = [GrammarSource(each, self.stopping.ends) for each in self.sampler.grammars]
        if request.known_stats is not None:
            ids = self.tokens.unpadded if self.real is None else self.tokens.unpadded[self.real.bool()]
            documents = request.lookup if isinstance(request.lookup, Lookup) else None
            self.sources.append(CopySource(ids.flatten().tolist(), request.known_stats.chances, documents))

    # Draft

    def draft_limit(self) -> int:
        """Return how many tokens to draft one after the other: what was asked for, or what fits.

        The target adds one of its own, and a tree is no deeper than it has nodes.
        """
        return self._fitting(min(self.num_drafts, self.sampler.tree_budget or self.num_drafts))

    def known_path(self, free_columns: int) -> KnownPath | None:
        """Return how the text may go on, as far as that fits and is known without the drafter."""
        limit = self._fitting(min(self.request.max_known, free_columns, self.sampler.tree_budget or sys.maxsize))
        paths = [path for source in self.sources if (path := source.path(limit))] if limit else []
        for grammar in self.sampler.grammars:
            counts = [grammar.count_allowed(path.tokens) for path in paths]
            paths = [path.first(count) for path, count in zip(paths, counts) if count]
        return max(paths, key=lambda path: sum(path.reach), default=None)

    def _fitting(self, limit: int) -> int:
        """Return how many of `limit` drafts, one after the other, fit into the text."""
        if self.target.rope_switch is not None:
            seen = 1 + int(self.tokens.text_positions(self.tokens.end - 1, self.tokens.end))
            limit = int(min(limit, self.target.rope_switch.max_drafts(seen)))
        return max(0, min(limit, self.config.max_length - self.tokens.length - 1))

    @property
    def real(self) -> torch.Tensor | None:
        """Which tokens of the prompt are no padding, `[1, tokens]`; `None` if all are."""
        return self.tokens.mask(self.tokens.prompt_length)

    @property
    def tokens_read(self) -> int | None:
        """As the function of that name, but all where an observer hears of every token, or where some are padding."""
        needs_all = self.observer is not None or self.real is not None
        return None if needs_all else tokens_read(self.drafter, self.context)

    def draft_request(self, count: int, sampler: DraftSampler, cached: CachedText | None) -> DraftRequest:
        """Return what the drafter is asked for: at most `count` drafts, one after the other."""
        tokens = self.tokens
        if self.context.end < tokens.end - 1:
            self.extend(tokens.end - 1)
        positions = tokens.text_positions(0, tokens.end)
        return DraftRequest(self.context, tokens.unpadded, positions, count, sampler, cached)

    def extend(self, end: int) -> None:
        """Give the drafter the tokens before `end` that are new to it."""
        residual, new, tokens = None, end - self.context.end, self.tokens
        if self.layer_ids:
            if not self.residuals:
                raise ValueError(
                    "The target was unbound while it was generating, expected that only afterwards: bind it again and "
                    "start anew."
                )
            residual = self.residuals[0] if len(self.residuals) == 1 else torch.cat(self.residuals, dim=1)
            self.residuals.clear()
            new = residual.shape[1]  # less than what is new to the drafter after another's turn on the same cache
        start = end - new
        note_gap(self.context, start, end)
        positions, following = tokens.text_positions(start, end), tokens.unpadded[:, start + 1 : end + 1]
        # Padding is no context. After the prompt there is none, and to look for it would be to wait for the device.
        mask = tokens.mask(end) if start < tokens.prompt_length else None
        if mask is not None:
            real = mask[0, start:].bool()
            positions, following = positions[:, real], following[:, real]
            residual = None if residual is None else residual[:, real.to(residual.device)]
        if following.shape[1]:
            if residual is not None and self.observer is not None:
                self.observer.add_tokens(residual, positions, following, start >= tokens.prompt_length)
            began = self.now()
            self.pair.extend(self.context, residual, positions, following)
            self.stats.draft_seconds += self.now() - began
        self.context.end = end

    def catch_up(self, asks_drafter: bool, has_drafts: bool = True) -> None:
        """Give the drafter what stays of a round, if it is asked for drafts or if that is much. Of what a drafter that
        is not asked would read, keep what is near.

        Args:
            asks_drafter: Whether it is asked in rounds like this one.
            has_drafts: Whether this text's drafts are its own; else it can wait for what stays.
        """
        end = self.tokens.end - 1
        asks_drafter = asks_drafter and (has_drafts or len(self.residuals) >= _CATCH_UP)
        is_behind = self.observer is not None and end - self.context.end >= _CATCH_UP
        if self.finished or asks_drafter or is_behind:
            self.extend(end)
        elif len(self.residuals) >= 2 * _CATCH_UP:
            del self.residuals[:_CATCH_UP]

    def complete_context(self) -> None:
        """Give the drafter what it was not in need of so far, of a text that has not ended: its context is no good for
        the next turn unless it is as long as the cache."""
        end = self.tokens.end - 1
        if self.residuals and self.context.end + sum(part.shape[1] for part in self.residuals) == end:
            self.extend(end)

    # Accept

    def accept(
        self,
        tree: DraftTree,
        logits: torch.Tensor,
        choices: Choices | None,
        round_: ChainRound,
        outputs: TargetOutput,
        path: list[int],
    ) -> None:
        """Write what the target agrees with, and its own token, until the text ends.

        Args:
            tree: The drafts.
            logits: The target's, `[1, nodes + 1, config.vocab_size]`, float32.
            choices: By which alone a text is written that [`is_greedy`].
            round_: The tree's, for what the caller asked to see.
            outputs: The target's forward.
            path: Grows by the accepted nodes: it is right also where a streamer or a criterion raises.
        """
        if choices is not None:
            steps = greedy_walk(tree, choices.drafts, lambda node: choices.after[node + 1])
        else:
            steps = self._walk(tree, logits, round_, outputs)
        for token, node in steps:
            self.tokens.append(token)
            for source in self.sources:
                source.append(token)
            path += [] if node is None else [node]
            self.stats.add_token(tree, node)
            if self.streamer is not None:
                began = self.now()
                with torch.inference_mode(False), torch.no_grad():  # what is the caller's to keep
                    self.streamer.put(torch.tensor([token]))
                self.streamer_seconds += self.now() - began
            self.finished = self.stopping(token, self.tokens, self.recorder.steps["scores"])
            if self.finished:
                break

    def _walk(
        self, tree: DraftTree, logits: torch.Tensor, round_: ChainRound, outputs: TargetOutput
    ) -> Iterator[Step]:
        """Return what the target writes after the anchor, by its logits."""

        def scores_after(node: int) -> torch.Tensor:  # a processor with a state sees accepted prefixes, once, in order
            raw = logits[:, node + 1]
            scores = self.processor(cast(Any, self.tokens.ids), raw.clone())
            self.recorder.add(outputs, round_, node + 1, scores, raw, self.cache)
            return scores[0]

        if self.config.do_sample and self.sampler.has_all_processors:
            return self._traversal(tree, logits, round_, outputs)
        if self.config.do_sample:
            return sampled_walk(tree, tree.tokens.cpu().tolist(), lambda node: scores_after(node).softmax(-1))
        return greedy_walk(tree, tree.tokens.cpu().tolist(), lambda node: int(scores_after(node).argmax()))

    def _traversal(
        self, tree: DraftTree, logits: torch.Tensor, round_: ChainRound, outputs: TargetOutput
    ) -> Iterator[Step]:
        """Do the same as [`_walk`], by all that the target says of the tree."""
        scores, position = self.sampler.scored_tree(self.tokens.ids, tree, logits[0]), ANCHOR + 1
        for token, node in traversal_walk(tree, scores.softmax(-1)):
            self.recorder.add(outputs, round_, position, scores[None, position], logits[:, position], self.cache)
            yield token, node
            position = position if node is None else node + 1

    # End

    def end(self) -> None:
        """Tell those who follow the sequence that it has ended."""
        if self.streamer is not None:
            self.streamer.end()
        if self.observer is not None:
            self.observer.end(self.stats)
        for source in self.sources:
            source.end()

    def check_drafts(self) -> None:
        """Warn once of a drafter whose states overflow in float16: none of its drafts is accepted. It is asked for its
        scores after a text whose last drafts were all rejected, so that no round waits for the device."""
        drafter, dtypes = cast(Any, self.drafter), (getattr(self.drafter, "dtype", None), self.target.dtype)
        last = self.stats.accepted[-_FRUITLESS:]
        if torch.float16 not in dtypes or None in dtypes or not last or any(last) or drafter in _told:
            return
        # Its own cache holds the text again, if it is alone.
        cached = CachedText(cast(Any, self.cache), real=self.real) if self.request.rows == 1 else None
        if not self.pair.scores_are_finite(self.draft_request(1, self.sampler, cached)):
            _told.add(drafter)
            logger.warning(
                "The drafter's scores are not finite, so no draft is accepted: it is in %s and its target in %s, and "
                "float16 ends at 65504. Load both in bfloat16, or in float32.",
                *dtypes,
            )

    def release(self) -> None:
        """Give up all but the text, its statistics and what the caller asked to see of it."""
        self.cache, self.context, self.kwargs, self.residuals = None, EmptyContext(), {}, []


class Stopping:
    """A request's stopping criteria, asked after every token.

    Args:
        criteria: The request's.
    """

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        self.ends: set[int] = set()
        self._max_length = float("inf")
        self._others = StoppingCriteriaList()
        for criterion in criteria:
            is_known = False
            if type(criterion) is EosTokenCriteria:
                self.ends |= set(criterion.eos_token_id.flatten().tolist())
                is_known = True
            elif type(criterion) is MaxLengthCriteria:
                self._max_length = min(self._max_length, criterion.max_length)
                # Else it has something to say about texts that are longer than the target was made for.
                longest = criterion.max_position_embeddings
                is_known = longest is None or criterion.max_length <= longest
            if not is_known:
                self._others.append(criterion)

    def __call__(self, token: int, text: TokenBuffer, scores: list[torch.Tensor]) -> bool:
        """Return whether a text, which ends in `token`, is finished."""
        is_over = bool(self._others(text.ids, tuple(scores) or None).all()) if self._others else False
        return is_over or token in self.ends or text.length >= self._max_length


class StoredContext:
    """A drafter's context, which stays with the target's cache between turns. Copies of the cache get a copy of it.

    Args:
        pair: Whose context it is. Another drafter's would be read as if it were one's own, so it is told apart by the
            object itself: an `id` comes back once its owner is gone. Another adapter's keys are others, too.
        context: The context.
    """

    def __init__(self, pair: Pair, context: Context) -> None:
        self.drafter, self.adapter, self.context = weakref.ref(pair.drafter), pair.adapter, context

    def fits(self, pair: Pair) -> bool:
        """Return whether it is the context of a pair's drafter."""
        return self.drafter() is pair.drafter and self.adapter == pair.adapter

    def __deepcopy__(self, memo: dict[int, object]) -> StoredContext:
        again = object.__new__(StoredContext)
        again.drafter, again.adapter = self.drafter, self.adapter
        again.context = copy.deepcopy(self.context, memo)
        return again

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # pickled with a cache it is no context: elsewhere there is no such drafter


def load_context(cache: RewindableCache, pair: Pair) -> Context:
    """Return the context that an earlier turn stored with this cache, if the cache is still as it was; else an empty
    one."""
    stored: StoredContext | None = getattr(cache, CONTEXT, None)
    if stored is None or not stored.fits(pair) or stored.context.end != cache.get_seq_length():
        return pair.drafter.new_context()
    return stored.context


def tokens_read(drafter: Drafter, context: Context) -> int | None:
    """Return how many of a prompt's last tokens a drafter reads the residual of; `None` for all."""
    return getattr(context, "window", None) if drafter.reads_each_token else 1


def note_gap(context: Any, start: int, end: int) -> None:
    """Let a context, which gets the tokens from `start` to `end`, know that those before are left out. Of more tokens
    than its window sees, the first ones are, too."""
    if hasattr(context, "first"):
        start = max(start, end - (context.window or end))
        context.first = start if start > context.end else context.first


def store_context(cache: RewindableCache, pair: Pair, context: Context) -> None:
    """Store a context with the target's cache, for the next turn."""
    setattr(cache, CONTEXT, StoredContext(pair, context))
