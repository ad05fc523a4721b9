"""Speculative decoding, one page: draft, let the target verify, accept what the target would have written.

Written here instead of plugging a candidate generator into transformers' loop because that loop runs past stop
strings inside a block, feeds the prompt again when it continues from a filled cache, and cannot split V4's
four-dimensional hidden states. For loops that are not ours there is one all the same ([`~decoding.candidates`]).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any, cast

import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..auto.policies import MOST_NODES, ChainPolicy, DraftingStats, FixedPolicy, TreePolicy
from ..drafters.sampling import DraftSampler, DraftsWanted, check_proposed
from ..targets.caches.name import CACHE, cache_of
from ..trees.acceptance import Step, greedy_walk, sampled_walk, traversal_walk
from ..trees.tree import ANCHOR, DraftTree
from .continuation import OPEN_FORWARDS, context_of, is_between_writes, leave_context, padding_of, stop_recording
from .inference_mode import leaves_nothing, mode_of_rounds
from .outputs import Shown
from .request import AUTO, check_cache, tree_budget_asked
from .rounds import ChainRound, round_over, verification_of
from .sequence import Row, Stopping
from .stats import SpeculationStats, clock

logger = logging.getLogger(__name__)

_LATER = 64  # tokens that a drafter takes in at once, or at least, after it was not asked for drafts for so long


def speculative_decoding(decoding: Decoding) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Generate as `target.generate` would without a drafter, several tokens per forward.

    Greedy text is the target's own; sampled text has the target's distribution (Leviathan et al., algorithm 1).

    Args:
        decoding: That has its prompt.

    Returns:
        What `generate` returns.
    """
    try:
        decoding.begin(decoding.prefill())
        with mode_of_rounds(decoding.leaves_nothing):
            while not decoding.row.finished:
                round_ = decoding.next_round()
                decoding.end_round(round_, decoding.verify(round_))
    finally:
        stop_recording(decoding.cache)
    decoding.stats.loop_seconds = decoding.now() - decoding.began
    return decoding.end()


class Decoding:
    """One sequence of a request: its models, settings and cache; what changes from round to round is in its row.

    Args:
        model: A bound target.
        drafter: A [`~drafters.base.Drafter`], on any device.
        num_drafts: Most drafted tokens per round. The cache can take back one more.
        logits_processor: As prepared by `generate`, like the rest.
        drafting_stats: Of this drafter with this target, to draft by as many tokens as pay for themselves; `None` for
            `num_drafts`, or a tree of the size asked for, every round; there is no tree where its size is not settled.
        is_row: Whether it is one of a batch. Its target sees none of the prompt's padding.

    Attributes:
        row: The sequence, once [`start`] has been called.
        leaves_nothing: Whether nobody gets hold of what its rounds compute.
        began: When its rounds did, by `now()`.
    """

    row: Row
    began: float

    def __init__(
        self,
        model: Any,
        drafter: Any,
        num_drafts: int,
        *,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        streamer: Any = None,
        drafting_stats: DraftingStats | None = None,
        is_row: bool = False,
    ) -> None:
        self.model, self.drafter, self.num_drafts = model, drafter, num_drafts
        self.binding, self.config, self.streamer = model.hyperdflash_binding, generation_config, streamer
        self.target = self.binding.target
        self.learner = drafter.learner
        asked = [*logits_processor, *stopping_criteria]
        self.leaves_nothing = leaves_nothing(model, drafter, generation_config, asked)
        self.lesson = None if self.learner is None else self.learner.begin(model, generation_config.do_sample)
        self.layer_ids = drafter.target_layer_ids if self.lesson is None else self.lesson.layer_ids
        self.own_streams = len(drafter.target_layer_ids) * self.target.streams  # the drafter's, which come first
        self.capture = self.binding.residual.new_capture(self.layer_ids)
        self.processor, self.stopping = logits_processor, Stopping(stopping_criteria, is_row)
        self.sampler = DraftSampler(logits_processor, generation_config.do_sample)
        budget = tree_budget_asked(generation_config)
        self.is_joint = is_row and self.target.can_join_sequences  # with others in one forward
        self.tree_budget = None if budget == AUTO and (drafting_stats is None or self.is_joint) else budget
        self.schedule = FixedPolicy()
        self.drafting_stats = drafting_stats
        self.skips_padding = is_row or self.target.skips_padding
        self.waited = 0.0  # less than nothing: seconds in the caller's streamer, which no draft can save
        self.shown = Shown(generation_config, self.target)
        self.stats, self.now = SpeculationStats(), clock(model.device)

    # From the prompt to the end of the text

    def start(self, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> None:
        """Take in the prompt, which the target has yet to run.

        Args:
            input_ids: `[1, seq]`, tokens that are already in the cache included.
            model_kwargs: As prepared by `generate`.
        """
        self.drafter.remember(self.stats)
        self.kwargs, self.cache = dict(model_kwargs), model_kwargs[CACHE]
        self.nothing = DraftTree.chain(input_ids.new_empty(0))
        mask, positions = self.kwargs.pop("attention_mask", None), self.kwargs.pop("position_ids", None)
        padding = padding_of(self.cache, mask) if self.skips_padding else 0
        mask = None if mask is None or bool(mask[:, padding:].all()) else mask[:, padding:]
        positions = None if positions is None else positions[..., -(input_ids.shape[1] - padding) :]
        self.row = Row(input_ids, padding, mask, positions)
        self.row.context = context_of(self.cache, self.drafter)

    def begin(self, outputs: Any) -> None:
        """Write the first token, by the target's forward over the prompt."""
        self._settle_on_trees()
        self._settle_on_schedule()
        self.accept(self.round_over(self.nothing), outputs)
        self.stats.tokens, self.stats.draft_seconds = 1, 0.0  # the prompt's do not count
        self.began = self.now()

    def next_round(self) -> ChainRound:
        """Draft."""
        wanted, began = self.begin_round(), self.now()
        if wanted is None:
            return self.drafted(self.nothing)
        tree = self.drafter.propose(self.target, *wanted)
        round_ = self.drafted(tree)
        self.stats.draft_seconds += self.now() - began if len(tree) else 0.0
        return round_

    def begin_round(self) -> DraftsWanted | None:
        """What the drafter is asked for in the next round; `None` for no drafts."""
        self._round_began = self.now() + self.waited
        self._room = self.room()
        count = self.schedule.begin(self.row.length, self._room)
        end = self.row.end
        if count and self.row.context.end < end - 1:
            self.extend(end - 1)
        self._wanted = count
        if not count:
            return None
        return DraftsWanted(self.row.context, self.row.text, self.row.text_positions(0, end), count, self.sampler)

    def drafted(self, tree: DraftTree) -> ChainRound:
        """The round that verifies what was drafted."""
        check_proposed(self.drafter, tree, self.target.config.vocab_size)
        if max(tree.depths, default=0) > self._wanted:
            raise ValueError(
                f"The drafter made {max(tree.depths)} drafts, one after the other, expected at most {self._wanted}, "
                "as it was asked for."
            )
        return self.round_over(self.schedule.cut(tree))

    def end_round(self, round_: ChainRound, outputs: Any) -> int:
        """Accept what the target agrees with, by its forward over the round.

        Returns:
            The number of accepted drafts.
        """
        before = self.row.length
        accepted = self.accept(round_, outputs)
        if self._room:
            self.stats.keep_tree(round_.tree, accepted, self.row.ids[0, before - 1 :])
        self.stats.add_round(self.row.length - before, len(accepted), round_.tree if self._room else None)
        seconds = self.now() + self.waited - self._round_began
        self.schedule.learn(round_.tree, accepted, self.row.finished)
        self.schedule.end(len(round_.tree), len(accepted), seconds, self.row.finished)
        return len(accepted)

    def end(self) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """What `generate` returns."""
        if self.streamer is not None:
            self.streamer.end()
        result = self.result()
        if self.lesson is not None:
            self.learner.end(self.lesson, self.stats)
        return result

    def prefill(self) -> Any:
        """Run the part of the prompt that is not in the cache yet. In chunks, where the caller asks for them, of which
        each reaches the drafter before the next is run, so that a long prompt's residual is never held whole."""
        cached, length = self.cache.get_seq_length(), self.row.prompt_length
        chunk = self.config.prefill_chunk_size or length
        for end in [*range(cached + chunk, length, chunk), length]:
            config = copy.copy(self.config)
            # Not transformers' own chunks, which before 5.20 or so feed what is in the cache again.
            config.prefill_chunk_size, config._mask_length = None, end
            start = self.cache.get_seq_length()
            inputs = {**self.kwargs, **self.row.inputs(start, end)}
            if start:  # which earlier transformers tell by the mask
                inputs.setdefault("attention_mask", torch.ones_like(self.row.text[:, :end]))
            try:
                with self.binding.capturing_forward(self.capture):
                    outputs = self.model._prefill(self.row.text[:, :end], config, inputs)
            except BaseException:  # as of Ctrl-C: a prompt is not recorded, so that nothing could take it back
                setattr(self.cache, OPEN_FORWARDS, 1)
                raise
            self.row.residuals += self.capture.pop()
            if cache_of(outputs) is not self.cache:  # remote code may make a cache of its own
                self.cache = self.kwargs[CACHE] = check_cache(cache_of(outputs))
            if end < length and self.row.residuals:
                self.extend(end)
        self.cache.activate_past_recording()  # after the prompt: there is nothing in it to take back
        leave_context(self.cache, self.drafter, self.row.context)  # which belongs to it whenever they end alike
        return outputs

    def _settle_on_trees(self) -> None:
        """Ask for trees if the target's can be verified: its family knows, and the cache that the prompt made."""
        if self.tree_budget is None:
            return
        if verification_of(self.target, self.cache) != "chain":
            self.sampler.tree_budget = self.tree_budget if self.tree_budget != AUTO else MOST_NODES
        else:
            logger.warning(
                "`tree_budget` is %s, but draft trees of a %s target are not verified: drafting chains.",
                self.tree_budget,
                self.target.config.model_type,
            )

    def _settle_on_schedule(self) -> None:
        """Let what pays be drafted, if that is asked for: of trees where they can be verified, else of chains."""
        known, has_trees = None if self.is_joint else self.drafting_stats, self.sampler.tree_budget is not None
        if known is not None and has_trees and self.tree_budget == AUTO:
            self.schedule = TreePolicy(known, self.sampler)
        elif known is not None and not has_trees:
            self.schedule = self.sampler.schedule = ChainPolicy(known)

    # Draft

    def room(self) -> int:
        """How many tokens to draft one after the other: what was asked for, or what fits.

        The target adds one of its own, and a tree is no deeper than it has nodes.
        """
        most = min(self.num_drafts, self.sampler.tree_budget or self.num_drafts)
        if self.target.rope_switch is not None:
            seen = 1 + int(self.row.text_positions(self.row.end - 1, self.row.end))
            most = int(min(most, self.target.rope_switch.most_drafts(seen)))
        return max(0, min(most, self.config.max_length - self.row.length - 1))

    # Verify

    def round_over(self, tree: DraftTree) -> ChainRound:
        """The round that verifies a tree."""
        return round_over(self.target, self.cache, tree, self.row.end - 1)

    def verify(self, round_: ChainRound) -> Any:
        """One forward of the target over the anchor and the drafts."""
        try:
            inputs, began = round_.inputs(self.row, self.kwargs), self.now()
            with self.binding.capturing_forward(self.capture, is_round=True):
                outputs = self.model(**inputs, return_dict=True)
        except BaseException as error:  # as of Ctrl-C, after which a caller may go on with the cache
            setattr(self.cache, OPEN_FORWARDS, 1)
            if is_between_writes(self.cache, error):
                round_.take_back(self.cache)
                setattr(self.cache, OPEN_FORWARDS, 0)
            raise
        self.row.residuals += self.capture.pop()
        self.stats.verify_seconds += self.now() - began
        return outputs

    # Accept

    def accept(self, round_: ChainRound, outputs: Any) -> list[int]:
        """Accept what the target agrees with and leave the rest behind, also where a streamer or a criterion raises: a
        caller who goes on with this cache and the tokens so far gets the same text.

        Returns:
            The accepted nodes.
        """
        logits = round_.logits(outputs).to(dtype=torch.float32, device=self.row.ids.device)
        path: list[int] = []
        try:
            for token, node in self.walk(round_, logits, outputs):
                self.row.append(token)
                path += [] if node is None else [node]
                self.stats.add_token(round_.tree, node)
                if self.streamer is not None:
                    began = self.now()
                    with torch.inference_mode(False), torch.no_grad():  # what is the caller's to keep
                        self.streamer.put(torch.tensor([token]))
                    self.waited -= self.now() - began
                self.row.finished = self.stopping(token, self.row.ids, self.shown.seen["scores"])
                if self.row.finished:
                    break
        finally:
            self.keep(round_, path)
        self.drafter.observe(self.row.context, round_.tree, logits[0], path)
        return path

    def walk(self, round_: ChainRound, logits: torch.Tensor, outputs: Any) -> Iterator[Step]:
        """What the target writes after the anchor."""
        tree = round_.tree
        if self.config.do_sample and self.sampler.has_all_processors:
            return self.traversal(round_, logits, outputs)

        def scores_after(node: int) -> torch.Tensor:  # a processor with a state sees accepted prefixes, once, in order
            raw = logits[:, node + 1]
            scores = self.processor(self.row.ids, raw.clone())
            self.shown.add(outputs, round_, node + 1, scores, raw, self.cache)
            return scores[0]

        if self.config.do_sample:
            return sampled_walk(tree, tree.tokens.cpu().tolist(), lambda node: scores_after(node).softmax(-1))
        if len(self.processor) or self.config.return_dict_in_generate:
            return greedy_walk(tree, tree.tokens.cpu().tolist(), lambda node: int(scores_after(node).argmax()))
        choices = logits[0].argmax(-1)
        told = torch.cat([tree.tokens.to(choices.device), choices]).cpu().tolist()  # the one wait for the device
        return greedy_walk(tree, told, lambda node: told[len(tree.parents) + 1 + node])

    def traversal(self, round_: ChainRound, logits: torch.Tensor, outputs: Any) -> Iterator[Step]:
        """As [`walk`], by all that the target says of the tree."""
        tree, at = round_.tree, ANCHOR
        scores = self.sampler.scored_tree(self.row.ids, tree, logits[0])
        for token, node in traversal_walk(tree, scores.softmax(-1)):
            self.shown.add(outputs, round_, at + 1, scores[None, at + 1], logits[:, at + 1], self.cache)
            yield token, node
            at = at if node is None else node

    def keep(self, round_: ChainRound, path: list[int]) -> None:
        """Rewind the target's cache to all but the last token, and give the drafter what stays."""
        kept = self.row.end - 1
        if kept < self.row.prompt_length:
            return  # interrupted before the first token: the cache holds the prompt
        rows = [0, *(node + 1 for node in path)][: kept - round_.start]
        try:
            round_.keep(self.cache, rows)
        except BaseException:  # as of Ctrl-C: some layers are cropped, and others are not
            setattr(self.cache, OPEN_FORWARDS, 1)
            raise
        if self.cache.get_seq_length() != kept:
            raise RuntimeError(
                f"The cache, a {type(self.cache).__name__}, holds {self.cache.get_seq_length()} tokens after it was "
                f"cropped, expected {kept}: its `crop(-n)` must take back the last n tokens."
            )
        if self.row.residuals:
            self.row.residuals[-1] = round_.kept_residual(self.row.residuals[-1], rows)
        is_behind = self.lesson is not None and kept - self.row.context.end >= _LATER
        if self.row.finished or self.schedule.is_asked or is_behind:
            self.extend(kept)
        elif len(self.row.residuals) >= 2 * _LATER:  # drafting does not pay: a look needs but what is near
            del self.row.residuals[:_LATER]

    def extend(self, end: int) -> None:
        """Give the drafter the tokens before `end` that are new to it."""
        residual, new = None, end - self.row.context.end
        if self.layer_ids:
            if not self.row.residuals:
                raise ValueError(
                    "The target was unbound while it was generating, expected that only afterwards: bind it again and "
                    "start anew."
                )
            residual = self.row.residuals[0] if len(self.row.residuals) == 1 else torch.cat(self.row.residuals, dim=1)
            self.row.residuals.clear()
            new = residual.shape[1]  # less than what is new to the drafter after another's turn on the same cache
        start = end - new
        positions, following = self.row.text_positions(start, end), self.row.text[:, start + 1 : end + 1]
        # Padding is no context. After the prompt there is none, and to look for it would be to wait for the device.
        mask = self.row.mask(end) if start < self.row.prompt_length else None
        if mask is not None:
            real = mask[0, start:].bool()
            positions, following = positions[:, real], following[:, real]
            residual = None if residual is None else residual[:, real.to(residual.device)]
        if following.shape[1]:
            if self.lesson is not None and residual is not None:
                self.lesson.add(residual, positions, following, start >= self.row.prompt_length)
                residual = residual[:, :, : self.own_streams]
            began = self.now()
            self.drafter.extend(self.target, self.row.context, residual, positions, following)
            self.stats.draft_seconds += self.now() - began
        self.row.context.end = end

    def result(self) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """What `generate` returns."""
        ids = self.row.ids.clone()
        if not self.config.return_dict_in_generate:
            return ids
        shown: dict[str, Any] = {CACHE: self.cache, **self.shown.all()}
        return GenerateDecoderOnlyOutput(sequences=cast(Any, ids), **shown)
