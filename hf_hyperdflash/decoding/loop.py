"""Speculative decoding, one page: draft, let the target verify, accept what the target would have written.

Written here instead of plugging a candidate generator into transformers' loop because that loop runs past stop
strings inside a block, feeds the prompt again when it continues from a filled cache, and cannot split V4's
four-dimensional hidden states. For loops that are not ours there is one all the same ([`~decoding.candidates`]).
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import Any

import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..auto.policies import MOST_NODES, BatchPolicy, ChainPolicy, FixedPolicy, Outcome, TreePolicy
from ..drafters.parts.context import DraftContext
from ..targets.attention_masks import CausalMasks
from ..targets.caches.name import CACHE, cache_of
from ..targets.caches.protocols import OPEN_FORWARDS
from ..targets.caches.ragged import RaggedCache
from ..targets.caches.slot_forward import SlotForward, compile_options
from ..targets.target import TargetOutput
from ..trees.tree import DraftTree
from .continuation import is_between_writes, leave_context, stop_recording
from .outputs import generate_output
from .request import AUTO, can_hold_rounds, check_cache, static_cache_length
from .rounds import (
    CausalRound,
    ChainRound,
    Choices,
    PromptRound,
    SlotRound,
    Verification,
    round_over,
    verification_of,
)
from .sequence import Sequence
from .stats import merged_stats
from .tokens import TokenBuffer, padded

logger = logging.getLogger(__name__)


@torch.no_grad()
def speculative_decoding(sequences: list[Sequence]) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Generate as `target.generate` would without a drafter, several tokens per forward.

    Greedy text is the target's own; sampled text has the target's distribution (Leviathan et al., algorithm 1).

    Args:
        sequences: One or several. They are written one after the other where one forward cannot serve them all.

    Returns:
        What `generate` returns.
    """
    is_one_batch = len(sequences) == 1 or sequences[0].target.can_join_sequences
    for batch in [sequences] if is_one_batch else [[sequence] for sequence in sequences]:
        write(batch)
        if len(sequences) > len(batch):
            batch[0].release()  # before the next one fills a cache of its own
    first = sequences[0]
    if len(sequences) > 1:
        first.drafter.remember(merged_stats([sequence.stats for sequence in sequences]))
    return generate_output(
        [sequence.tokens.ids for sequence in sequences], [sequence.recorder for sequence in sequences], first.cache
    )


def write(sequences: list[Sequence]) -> None:
    """Write sequences that share the forwards of their target, usually one, to their ends."""
    batch = Batch(sequences)
    try:
        batch.write_first_tokens(batch.prefill())
        can_infer = not batch.is_compiled and all(sequence.leaves_nothing for sequence in sequences)
        no_gradients = torch.inference_mode if can_infer else torch.no_grad
        with no_gradients():
            while batch.sequences:
                round_ = batch.draft()
                batch.accept(round_, batch.verify(round_))
    finally:
        batch.end()
    for sequence in sequences:
        sequence.end()
        with no_gradients():
            sequence.check_drafts()


class Batch:
    """Sequences on their way that share the forwards of their target; those that end leave it.

    Args:
        sequences: One at least, of one target and drafter; several if the target can mask what each is not to see.

    Attributes:
        sequences: Those that have not ended.
        cache: The target's.
        verification: How their drafts are verified, once the prompts have been run.
        policy: Who decides how much is drafted.
    """

    def __init__(self, sequences: list[Sequence]) -> None:
        first = sequences[0]
        self.sequences, self.pair, self.target, self.drafter = list(sequences), first.pair, first.target, first.drafter
        self.model: Any = first.target.model
        self.binding, self.cache = first.target.hyperdflash_binding, first.cache
        # What one of them reads, all of them do: an observer may want more layers than the drafter.
        self.layer_ids = max((sequence.layer_ids for sequence in sequences), key=len)
        self.capture = self.binding.residual.new_capture(self.layer_ids)
        self.verification: Verification = "chain"
        self.slots: SlotForward | None = None  # of a static cache
        self._masks: CausalMasks | None = None  # of one sequence's chains
        self._fixed_contexts: Many[DraftContext] = ()
        self.policy: FixedPolicy = FixedPolicy()
        self.now, self._no_drafts = first.now, DraftTree.chain(first.tokens.ids.new_empty(0))

    # The prompts

    def prefill(self) -> TargetOutput:
        """Run what of the prompts is not in the cache yet, several padded on the left. In chunks, where the caller
        asks for them, of which each reaches the drafter before the next is run, so that a long prompt's residual is
        never held whole.

        Returns:
            The target's outputs of the last tokens.
        """
        prompts = padded([sequence.tokens for sequence in self.sequences])
        width, cached = prompts.prompt_length, int(self.cache.get_seq_length())
        chunk = self.sequences[0].config.prefill_chunk_size or width
        for end in [*range(cached + chunk, width, chunk), width]:
            start = int(self.cache.get_seq_length())
            outputs = self._run_prompts(prompts, start, end)
            captured = self.capture.pop()
            for index, sequence in enumerate(self.sequences):
                padding = width - sequence.tokens.prompt_length
                sequence.residuals += [each[index : index + 1, max(padding - start, 0) :] for each in captured]
                if padding < end < width and sequence.residuals:
                    sequence.extend(end - padding)
        self._settle_on_cache()
        self._settle_on_policy()
        return outputs

    def _run_prompts(self, prompts: TokenBuffer, start: int, end: int) -> TargetOutput:
        config = copy.copy(self.sequences[0].config)
        # Not transformers' own chunks, which before 5.20 or so feed what is in the cache again.
        config.prefill_chunk_size, config._mask_length = None, end
        inputs = {**self._kwargs(), **prompts.inputs(start, end)}
        if start:  # which earlier transformers tell by the mask
            inputs.setdefault("attention_mask", torch.ones_like(prompts.unpadded[:, :end]))
        try:
            with self.binding.capturing_forward(self.capture):
                outputs = self.model._prefill(prompts.unpadded[:, :end], config, inputs)
        except BaseException:  # as of Ctrl-C: a prompt is not recorded, so that nothing could take it back
            setattr(self.cache, OPEN_FORWARDS, 1)
            raise
        if cache_of(outputs) is not self.cache:  # remote code may make a cache of its own
            self.cache = self.sequences[0].cache = check_cache(cache_of(outputs))
        return outputs

    def _settle_on_cache(self) -> None:
        """Make the cache ready for rounds, and find out how it verifies drafts."""
        if can_hold_rounds(self.cache):
            options = compile_options(self.model, {CACHE: self.cache}, self.sequences[0].config)
            self.slots = SlotForward(
                self.target,
                self.cache,
                [sequence.tokens.prompt_length for sequence in self.sequences],
                self.sequences[0].config.max_length - 1,
                [sequence.tokens.mask(sequence.tokens.prompt_length) for sequence in self.sequences],
                self._most_positions(),
                self.sequences[0].drafting_stats is None,
                None if options is None else self.binding.compiled(options),
                self.capture,
            )
            self.verification = "slots"
        elif len(self.sequences) > 1:
            self.cache = RaggedCache(self.cache, [sequence.tokens.prompt_length for sequence in self.sequences])
            self.verification = "ragged"
        else:
            self.cache.activate_past_recording()  # after the prompt: there is nothing in it to take back
            self.cache.crop(0)  # which trims stock layers to their window
            self.verification = verification_of(self.target, self.cache)
            text = self.sequences[0].tokens
            if CausalRound.fits(self.target, text, self._kwargs()):
                self._masks = CausalMasks(text.ids.device)
        if len(self.sequences) == 1:
            leave_context(self.cache, self.drafter, self.sequences[0].context)  # its own whenever they end alike

    def _fix_contexts(self) -> None:
        """Let the drafter's passes run compiled, too."""
        if self.slots is None or self.slots.compiled is None:
            return
        contexts = [sequence.context for sequence in self.sequences]
        config = self.sequences[0].config
        # Windows have room for any text. Its length in steps, as each other room would be compiled for.
        room = self.slots.cache.capacity or static_cache_length(config, config.max_length)
        most_new = 1 + max(sequence.num_drafts for sequence in self.sequences)
        sizes = room, most_new, self._most_positions() - 1
        self._fixed_contexts = self.drafter.fixed_contexts(self.target, contexts, *sizes, self.slots.compiled)
        for sequence, context in zip(self.sequences, self._fixed_contexts):
            sequence.context = context
            if len(contexts) == 1:
                leave_context(self.cache, self.drafter, context)

    def _most_positions(self) -> int:
        """Return the most verification positions that a round may have."""
        budget = self.sequences[0].tree_budget
        nodes = MOST_NODES if budget == AUTO else budget or 0
        return 1 + max(nodes, *(sequence.num_drafts for sequence in self.sequences))

    def _settle_on_policy(self) -> None:
        """Draft trees if that is asked for and the target can verify them; and what pays, if that is asked for."""
        budget, stats = self.sequences[0].tree_budget, self.sequences[0].drafting_stats
        is_batch = len(self.sequences) > 1
        if budget == AUTO and is_batch:
            budget = None
        if budget is not None and self.verification == "chain":
            logger.warning(
                "`tree_budget` is %s, but draft trees of a %s target are not verified: drafting chains.",
                budget,
                self.target.config.model_type,
            )
            budget = None
        for sequence in self.sequences:
            sequence.allow_nodes(MOST_NODES if budget == AUTO else budget)
        if stats is not None and is_batch:
            self.policy = BatchPolicy(stats)
        elif stats is not None and budget == AUTO:
            self.policy = TreePolicy(stats)
        elif stats is not None and budget is None:
            self.policy = ChainPolicy(stats)

    def write_first_tokens(self, outputs: TargetOutput) -> None:
        """Write the first token of each sequence, by the target's forward over the prompts."""
        texts = [sequence.tokens for sequence in self.sequences]
        round_ = PromptRound(self.target, texts, [self._no_drafts] * len(texts))
        self._write(round_, outputs)
        for sequence in self.sequences:
            sequence.stats.tokens, sequence.stats.draft_seconds = 1, 0.0  # the prompt's do not count
        self._fix_contexts()
        self._drop_finished()

    # A round

    def draft(self) -> ChainRound:
        """Let the drafter draft for each sequence what fits and pays."""
        self._slow_calls = self._count_slow_calls()
        self._began, self._lengths = self.now(), [sequence.tokens.length for sequence in self.sequences]
        free = self._free_slots()
        self._rooms = [min(sequence.room(), free) for sequence in self.sequences]
        most = self.policy.begin(max(self._lengths), self._rooms)
        counts = [min(room, most) for room in self._rooms]
        asked = [(sequence, count) for sequence, count in zip(self.sequences, counts) if count]
        requests = [sequence.request(count, self.policy.sampler(sequence.sampler)) for sequence, count in asked]
        began = self.now()
        drafted = self.pair.draft(requests)
        seconds = (self.now() - began) / max(len(asked), 1)
        for (sequence, _), tree in zip(asked, drafted):
            sequence.stats.draft_seconds += seconds if len(tree) else 0.0
        drafts = iter(drafted)
        trees = [self.policy.cut(next(drafts)) if count else self._no_drafts for count in counts]
        texts = [sequence.tokens for sequence in self.sequences]
        if self.slots is None:
            return round_over(self.target, self.verification, texts, trees, self._masks)
        return SlotRound(self.target, texts, [tree.first(min(len(tree), free)) for tree in trees], self.slots)

    def _free_slots(self) -> int:
        """Return how many drafts the cache has room for behind the longest sequence."""
        if self.slots is None:
            return sys.maxsize
        return min(self.slots.room - max(sequence.tokens.end for sequence in self.sequences), self.slots.most - 1)

    def verify(self, round_: ChainRound) -> TargetOutput:
        """Run the target once over the anchors and the drafts of all sequences."""
        try:
            began = self.now()
            with self.binding.capturing_forward(self.capture, is_round=True):
                outputs = round_.forward(self._kwargs())
        except BaseException as error:  # as of Ctrl-C, after which a caller may go on with the cache
            setattr(self.cache, OPEN_FORWARDS, 1)
            if is_between_writes(self.cache, error):
                round_.abort(self.cache)
                setattr(self.cache, OPEN_FORWARDS, 0)
            raise
        seconds = (self.now() - began) / len(self.sequences)
        for sequence in self.sequences:
            sequence.stats.verify_seconds += seconds
        return outputs

    def accept(self, round_: ChainRound, outputs: TargetOutput) -> None:
        """Accept what the target agrees with, and end the round."""
        streamed = [sequence.streamer_seconds for sequence in self.sequences]
        paths = self._write(round_, outputs)
        seconds, outcomes = self.now() - self._began, []
        for sequence, tree, path, room, before in zip(self.sequences, round_.trees, paths, self._rooms, self._lengths):
            stats = sequence.stats
            if room:
                stats.keep_tree(tree, path, sequence.tokens.ids[0, before - 1 :])
            stats.add_round(sequence.tokens.length - before, len(path), tree if room else None)
            stats.loop_seconds += seconds / len(self.sequences)
            outcomes.append(Outcome(tree, path, sequence.finished))
        waited = sum(sequence.streamer_seconds for sequence in self.sequences) - sum(streamed)
        is_usual = self._slow_calls == self._count_slow_calls()
        self.policy.end(outcomes, seconds - waited if is_usual else None)
        self._drop_finished()

    def _count_slow_calls(self) -> int:
        """Return how many calls so far took long because something was compiled."""
        return 0 if self.slots is None or self.slots.compiled is None else self.slots.compiled.slow_calls

    def _write(self, round_: ChainRound, outputs: TargetOutput) -> list[list[int]]:
        """Write what the target agrees with and leave the rest behind, also where a streamer or a criterion raises: a
        caller who goes on with this cache and the tokens so far gets the same text.

        Returns:
            The accepted nodes of each sequence.
        """
        device = self.sequences[0].tokens.ids.device
        logits = [round_.logits(outputs, index).to(device, torch.float32) for index in range(len(self.sequences))]
        paths: list[list[int]] = [[] for _ in logits]
        is_greedy = all(sequence.is_greedy for sequence in self.sequences)
        try:
            choices: Iterable[Choices | None] = round_.choices(logits) if is_greedy else [None] * len(paths)
            for sequence, tree, scores, own, path in zip(self.sequences, round_.trees, logits, choices, paths):
                sequence.accept(tree, scores, own, round_, outputs, path)
        finally:
            self._rewind(round_, paths)
        for sequence, tree, scores, path in zip(self.sequences, round_.trees, logits, paths):
            if sequence.observer is not None:
                sequence.observer.add_round(sequence.context, tree, scores[0], path)
        return paths

    def _rewind(self, round_: ChainRound, paths: list[list[int]]) -> None:
        """Leave all but each sequence's last token in the cache, and give the drafter what stays."""
        captured = self.capture.pop()
        if isinstance(round_, PromptRound) and not all(sequence.is_written for sequence in self.sequences):
            return  # interrupted before the first token: the cache holds the prompt
        kept = [
            [0, *(node + 1 for node in path)][: sequence.tokens.end - 1 - start]
            for sequence, path, start in zip(self.sequences, paths, round_.starts)
        ]
        try:
            round_.accept(self.cache, kept)
        except BaseException:  # as of Ctrl-C: some layers are cropped, and others are not
            setattr(self.cache, OPEN_FORWARDS, 1)
            raise
        for index, sequence in enumerate(self.sequences):
            sequence.residuals += [round_.residual(each, index, kept[index]) for each in captured]
            sequence.catch_up(self.policy.is_asked)

    def _drop_finished(self) -> None:
        left = [index for index, sequence in enumerate(self.sequences) if not sequence.finished]
        if left and len(left) < len(self.sequences):
            (self.cache if self.slots is None else self.slots).batch_select_indices(torch.tensor(left))
        self.sequences = [self.sequences[index] for index in left]

    @property
    def is_compiled(self) -> bool:
        """Whether its rounds run compiled."""
        return self.slots is not None and self.slots.compiled is not None

    def end(self) -> None:
        """Leave the cache as transformers' own loop would."""
        stop_recording(self.cache)
        if self.slots is not None:
            self.slots.end()
        for context in self._fixed_contexts:
            context.compiled = None  # the next turn may run eagerly

    def _kwargs(self) -> dict[str, object]:
        """Return the sequences' other arguments of the target as one's: tensors of one each are put together."""
        shared = {**self.sequences[0].kwargs, CACHE: self.cache}
        if len(self.sequences) > 1:
            for name, value in self.sequences[0].kwargs.items():
                if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == 1:
                    shared[name] = torch.cat([sequence.kwargs[name] for sequence in self.sequences])
        return shared
