"""Speculative decoding, one page: draft, let the target verify, accept what the target would have written. Below it
`Batch`: the sequences that share a round.

Written here instead of plugging a candidate generator into transformers' loop because that loop runs past stop
strings inside a block, feeds the prompt again when it continues from a filled cache, and cannot split V4's
four-dimensional hidden states. For loops that are not ours there is one all the same ([`~decoding.candidates`]).
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..auto.policies import MAX_AUTO_NODES, BatchPolicy, ChainPolicy, FixedPolicy, Outcome, TreePolicy
from ..drafters.base import AUTO
from ..drafters.parts.context import DraftContext
from ..targets.caches.growing import let_keys_grow
from ..targets.caches.name import CACHE, cache_of
from ..targets.caches.round_cache import RoundForward, is_of_plain_layers
from ..targets.caches.seen_keys import CachedText
from ..targets.compiled import CompiledForwards, compile_options
from ..targets.hooks import OPEN_FORWARDS, Round, is_between_writes
from ..targets.target import TargetOutput, TreeVerification, stop_recording
from ..trees.tree import DraftTree
from .outputs import generate_output
from .request import check_croppable, draft_by_adapter, is_static_attention_cache
from .rounds import ChainRound, Choices, padded, round_over
from .sequence import Sequence, store_context
from .stats import merged_stats

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
        first.drafter._remember(merged_stats([sequence.stats for sequence in sequences]))
    return generate_output(
        [sequence.tokens.ids for sequence in sequences], [sequence.recorder for sequence in sequences], first.cache
    )


def write(sequences: list[Sequence]) -> None:
    """Write sequences that share the forwards of their target, usually one, to their ends."""
    batch = Batch(sequences)
    try:
        write_first_tokens(batch, batch.prefill())
        batch.compile_drafter()
        batch.drop_finished()
        allows_inference_mode = batch.compiled is None and all(
            sequence.can_use_inference_mode for sequence in sequences
        )
        no_gradients = torch.inference_mode if allows_inference_mode else torch.no_grad
        with no_gradients():
            while batch.sequences:
                run_round(batch)
                batch.drop_finished()
    finally:
        batch.end()
    for sequence in sequences:
        sequence.end()
        with no_gradients():
            sequence.check_drafts()


def run_round(batch: Batch) -> None:
    """Write to each sequence the drafts that the target agrees with, and one token of the target's own."""
    sequences, policy, now, round_forward = batch.sequences, batch.policy, batch.now, batch.round_forward
    began, slow_calls = now(), batch.slow_calls
    lengths = [sequence.tokens.length for sequence in sequences]
    streamed = sum(sequence.streamer_seconds for sequence in sequences)

    # Draft what fits into text and cache, and pays.
    end = max(sequence.tokens.end for sequence in sequences)
    free_columns = sys.maxsize if round_forward is None else round_forward.free(end)
    limits = [min(sequence.draft_limit(), free_columns) for sequence in sequences]
    max_drafts = policy.begin(max(lengths), limits)
    counts = [min(limit, max_drafts) for limit in limits]
    known, counts = batch.known_paths(counts, free_columns)
    drafting = [(index, sequences[index], count) for index, count in enumerate(counts) if count]
    requests = [
        sequence.draft_request(count, policy.sampler(sequence.sampler), batch.cached_text(index))
        for index, sequence, count in drafting
    ]
    drafting_began = now()
    drafted_trees = iter(draft_by_adapter([sequence.pair for _, sequence, _ in drafting], requests))
    draft_seconds = (now() - drafting_began) / max(len(requests), 1)
    drafted = []
    for sequence, count, tokens in zip(sequences, counts, known):
        tree = next(drafted_trees) if count else batch.no_drafts
        sequence.stats.draft_seconds += draft_seconds if len(tree) else 0.0
        tree = policy.cut(tree) if count else tree
        budget = sequence.sampler.tree_budget or free_columns
        free = min(free_columns, budget) - len(tokens) if tokens else free_columns
        drafted.append(tree.first(min(len(tree), free)))
    trees = [tree.with_path(tokens) if tokens else tree for tree, tokens in zip(drafted, known)]

    # Verify: one forward of the target over all anchors and drafts.
    texts = [sequence.tokens for sequence in sequences]
    round_ = round_over(batch.target, batch.verification, texts, trees, round_forward)
    verifying_began = now()
    forward = Round(texts[0].last_position, shows_attention=bool(sequences[0].config.output_attentions))
    with batch.interruptible(round_), batch.binding.capturing_forward(batch.capture, forward):
        outputs = round_.forward(batch.kwargs())
    verify_seconds = (now() - verifying_began) / len(sequences)

    # Accept. A caller who goes on after an error of his streamer or criterion, with this cache and the tokens so far,
    # gets the same text: what is not written is taken back in any case.
    accepted: list[list[int]] = [[] for _ in sequences]
    try:
        logits = accept(batch, round_, outputs, accepted)
    finally:
        captured = batch.capture.pop()
        # Of each sequence the anchor (0) and the accepted nodes (node + 1), as many as tokens were written: the last
        # token that was written is the next anchor, and is in no cache.
        kept = [
            [0, *(node + 1 for node in path)][: sequence.tokens.end - 1 - start]
            for sequence, path, start in zip(sequences, accepted, round_.starts)
        ]
        with batch.interruptible():
            round_.keep(batch.cache, kept)
        for index, sequence in enumerate(sequences):
            sequence.residuals += [round_.residual(each, index, kept[index]) for each in captured]
            sequence.catch_up(policy.asks_drafter, not known[index] or counts[index] > 0)
    tell_observers(batch, drafted, logits, accepted)

    # Learn what the round cost, and what it brought.
    seconds, outcomes = now() - began, []
    for sequence, tree, own, path, limit, length in zip(sequences, trees, drafted, accepted, limits, lengths):
        stats, known_nodes = sequence.stats, len(tree) - len(own)
        own_path = [node for node in path if node < len(own)]  # the nodes of what is known are behind the drafter's
        stats.add_round(tree if limit else None, path, sequence.tokens.ids[0, length - 1 :])
        stats.known_nodes += known_nodes
        stats.known_accepted += len(path) - len(own_path)
        stats.verify_seconds += verify_seconds
        stats.loop_seconds += seconds / len(sequences)
        outcomes.append(Outcome(own, own_path, sequence.finished, known_nodes, len(path) - len(own_path)))
    waited = sum(sequence.streamer_seconds for sequence in sequences) - streamed
    policy.end(outcomes, seconds - waited if slow_calls == batch.slow_calls else None)


def write_first_tokens(batch: Batch, outputs: TargetOutput) -> None:
    """Write the first token of each sequence, from the forward over the prompts; nothing of it is taken back."""
    sequences, paths = batch.sequences, list[list[int]]([] for _ in batch.sequences)
    texts = [sequence.tokens for sequence in sequences]
    round_ = ChainRound(batch.target, texts, [batch.no_drafts] * len(texts))
    try:
        logits = accept(batch, round_, outputs, paths)
    finally:
        if all(text.end > text.prompt_length for text in texts):  # else it was interrupted before
            for sequence in sequences:
                sequence.catch_up(batch.policy.asks_drafter)
    tell_observers(batch, round_.trees, logits, paths)
    for sequence in sequences:
        sequence.stats.tokens, sequence.stats.draft_seconds = 1, 0.0  # the prompt's do not count


def accept(batch: Batch, round_: ChainRound, outputs: TargetOutput, paths: list[list[int]]) -> list[torch.Tensor]:
    """Write what the target agrees with.

    Args:
        batch: The sequences.
        round_: Over their drafts.
        outputs: The target's, of the round's forward.
        paths: Each grows by the nodes that are accepted of its sequence.

    Returns:
        The target's logits of each sequence, `[1, positions, config.vocab_size]`, float32.
    """
    device = batch.sequences[0].tokens.ids.device
    logits = [round_.logits(outputs, index).to(device, torch.float32) for index in range(len(paths))]
    is_greedy = all(sequence.is_greedy for sequence in batch.sequences)
    choices: Iterable[Choices | None] = round_.choices(logits) if is_greedy else [None] * len(paths)
    for sequence, tree, scores, own, path in zip(batch.sequences, round_.trees, logits, choices, paths):
        sequence.accept(tree, scores, own, round_, outputs, path)
    return logits


def tell_observers(
    batch: Batch, trees: Iterable[DraftTree], logits: list[torch.Tensor], paths: list[list[int]]
) -> None:
    """Tell those who follow a sequence what the target said of the drafter's drafts, the first nodes of a round."""
    for sequence, tree, scores, path in zip(batch.sequences, trees, logits, paths):
        if sequence.observer is not None:
            own = [node for node in path if node < len(tree)]
            sequence.observer.add_round(sequence.context, tree, scores[0, : len(tree) + 1], own)


class Batch:
    """Unfinished sequences that share the forwards of their target; those that end leave it.

    Args:
        sequences: One at least, of one target and drafter; several if the target can mask what each is not to see.

    Attributes:
        sequences: Those that have not ended.
        cache: The target's.
        round_forward: Runs the target over a cache of rounds; `None` where rounds run over `cache` itself.
        verification: How draft trees are verified over `cache`.
        policy: Who decides how much is drafted.
        max_positions: The most verification positions that a round may have.
        compiled: Runs rounds compiled; `None` for eager ones.
    """

    def __init__(self, sequences: list[Sequence]) -> None:
        first = sequences[0]
        self.sequences, self.request, self.pair = list(sequences), first.request, first.pair
        self.target, self.drafter = first.target, first.drafter
        self.binding, self.cache = first.target.hyperdflash_binding, first.cache
        # What one of them reads, all of them do: an observer may want more layers than the drafter.
        self.capture = self.binding.residual.new_capture(max((each.layer_ids for each in sequences), key=len))
        self.round_forward: RoundForward | None = None
        self.verification: TreeVerification = "chain"
        self.policy: FixedPolicy = FixedPolicy()
        budget = self.request.tree_budget
        nodes = MAX_AUTO_NODES if budget == AUTO else budget or 0
        self._max_drafts = max(nodes, *(each.num_drafts for each in sequences))  # of the drafter
        self.max_positions = 1 + max(self._max_drafts, self.request.max_known)
        self._no_paths: list[list[int]] = [[]] * len(sequences)
        self.compiled: CompiledForwards | None = None
        self._compiled_contexts: list[DraftContext] = []
        self.now, self.no_drafts = first.now, DraftTree.chain(first.tokens.ids.new_empty(0))

    def prefill(self) -> TargetOutput:
        """Run what of the prompts is not in the cache yet, several padded on the left. In chunks, where the caller
        asks for them, of which each reaches the drafter before the next is run, so that a long prompt's residual is
        never held whole. Nor is it where every drafter's context has a window.

        Returns:
            The target's outputs of the last tokens.
        """
        model: Any = self.target.model
        prompts = padded([sequence.tokens for sequence in self.sequences])
        width, cached = prompts.prompt_length, int(self.cache.get_seq_length())
        chunk = self.sequences[0].config.prefill_chunk_size or width
        config = copy.copy(self.sequences[0].config)
        # Not transformers' own chunks, which before 5.20 or so feed what is in the cache again.
        config.prefill_chunk_size = None
        read = [each.tokens_read for each in self.sequences]
        self.capture.last = None if None in read else max(cast("list[int]", read))
        for end in [*range(cached + chunk, width, chunk), width]:
            start = int(self.cache.get_seq_length())
            inputs = {**self.kwargs(), **prompts.inputs(start, end)}
            if start:  # by which transformers knows that the ids are all of the text
                inputs.setdefault("attention_mask", torch.ones_like(prompts.unpadded[:, :end]))
            with self.interruptible(), self.binding.capturing_forward(self.capture):
                outputs = model._prefill(prompts.unpadded[:, :end], config, inputs)
            if cache_of(outputs) is not self.cache:  # remote code may make a cache of its own
                self.cache = self.sequences[0].cache = check_croppable(cache_of(outputs))
            captured = self.capture.pop()
            for index, sequence in enumerate(self.sequences):
                padding = width - sequence.tokens.prompt_length
                for each in captured:
                    left_out = end - start - each.shape[1]  # by layers that run a prompt's last token alone
                    sequence.residuals.append(each[index : index + 1, max(max(padding - start, 0) - left_out, 0) :])
                if padding < end < width and sequence.residuals:
                    sequence.extend(end - padding)
        self.capture.last = None
        self._choose_cache()
        self._choose_policy()
        return outputs

    def _choose_cache(self) -> None:
        """Make the cache ready for rounds, and find out how it verifies drafts."""
        first, lengths = self.sequences[0], [sequence.tokens.prompt_length for sequence in self.sequences]
        can_mask = self.target.tree_verification == "mask" and is_of_plain_layers(self.cache)
        if can_mask or len(self.sequences) > 1:
            if is_static_attention_cache(self.cache):
                options = compile_options(self.target.model, {CACHE: self.cache}, first.config)
                self.compiled = None if options is None else self.binding.compiled(options)
            self.round_forward = RoundForward(
                self.target,
                self.cache,
                lengths,
                first.config.max_length - 1,
                [sequence.real for sequence in self.sequences],
                self.max_positions,
                self.request.drafting_stats is None and not self.request.max_known,
                self.compiled,
                self.capture,
            )
            self.verification = "mask"
        else:
            let_keys_grow(self.cache)
            self.cache.activate_past_recording()  # after the prompt: there is nothing in it to take back
            self.cache.crop(0)  # which trims stock layers to their window
            self.verification = self.target.tree_verification
            if self.verification == "cache":
                can_verify = all(getattr(layer, "can_verify_trees", False) for layer in self.cache.layers)
                self.verification = "mask" if can_verify else "fork"
            if self.verification == "fork" and not hasattr(self.cache, "batch_repeat_interleave"):
                self.verification = "chain"  # of remote code's own cache
        if len(self.sequences) == 1:
            store_context(
                self.cache, first.pair, first.context
            )  # the next turn takes it if both end at the same token

    def _choose_policy(self) -> None:
        """Draft trees if that is asked for and the target can verify them; and what pays, if that is asked for."""
        budget, stats = self.request.tree_budget, self.request.drafting_stats
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
            sequence.sampler = replace(sequence.sampler, tree_budget=MAX_AUTO_NODES if budget == AUTO else budget)
        self.policy = FixedPolicy(budget is not None, self.request.known_stats)
        if stats is not None and is_batch:
            self.policy = BatchPolicy(stats)
        elif stats is not None and budget == AUTO:
            self.policy = TreePolicy(stats)
        elif stats is not None and budget is None:
            self.policy = ChainPolicy(stats)

    def known_paths(self, counts: list[int], free_columns: int) -> tuple[list[list[int]], list[int]]:
        """Return of each sequence the drafts that are known without the drafter, and how many to ask the drafter for.

        Args:
            counts: How many each would be asked for.
            free_columns: How many drafts fit into the cache.
        """
        if not self.request.max_known:
            return self._no_paths, counts
        known = [sequence.known_path(free_columns) for sequence in self.sequences]
        if not any(known):
            return self._no_paths, counts
        joined = self.policy.join(known, counts)
        paths = []
        for sequence, path, (length, asks_drafter) in zip(self.sequences, known, joined):
            if asks_drafter:  # whose nodes have at least half of the budget
                length = min(length, (sequence.sampler.tree_budget or 0) // 2)
            paths.append(list(path.tokens[:length]) if path else [])
        return paths, [count if asks_drafter else 0 for count, (_, asks_drafter) in zip(counts, joined)]

    def compile_drafter(self) -> None:
        """Let the drafter's passes run compiled where the target's rounds do. With adapters they run eagerly: a
        graph does not see which one a pass uses."""
        if self.round_forward is None or self.compiled is None or self.pair.adapter is not None:
            return
        contexts = [sequence.context for sequence in self.sequences]
        config = self.sequences[0].config
        # Windows have room for any text. Its length in steps, as each other room would be compiled for.
        max_tokens = self.round_forward.cache.capacity or self.request.static_cache_length(config, config.max_length)
        max_new = 1 + max(sequence.num_drafts for sequence in self.sequences)
        sizes = max_tokens, max_new, self._max_drafts
        compiled = self.drafter.compiled_contexts(self.target, contexts, *sizes, self.compiled)
        self._compiled_contexts = cast("list[DraftContext]", list(compiled))

    @contextmanager
    def interruptible(self, round_: ChainRound | None = None) -> Iterator[None]:
        """Leave the cache whole after an interruption (Ctrl-C), or mark it so that the next call refuses it.

        Rounds over a cache of their own leave the cache alone, whatever happens to them.

        Args:
            round_: Whose forward is inside, to be taken back; `None` for what nothing takes back.
        """
        try:
            yield
        except BaseException as error:
            if self.round_forward is None:
                setattr(self.cache, OPEN_FORWARDS, 1)
                if round_ is not None and is_between_writes(self.cache, error):
                    round_.abort(self.cache)
                    setattr(self.cache, OPEN_FORWARDS, 0)
            raise

    def cached_text(self, index: int) -> CachedText:
        """Return where a sequence's accepted tokens are in the cache."""
        rounds, real = self.round_forward, self.sequences[index].real
        if rounds is None:
            return CachedText(cast(Any, self.cache), real=real)
        return CachedText(rounds.cache, rounds.rows[index], real)

    def drop_finished(self) -> None:
        left = [index for index, sequence in enumerate(self.sequences) if not sequence.finished]
        if self.round_forward is not None and left and len(left) < len(self.sequences):
            self.round_forward.batch_select_indices(torch.tensor(left))
        self.sequences = [self.sequences[index] for index in left]

    @property
    def slow_calls(self) -> int:
        """How many calls so far took long because something was compiled."""
        return 0 if self.compiled is None else self.compiled.slow_calls

    def kwargs(self) -> dict[str, object]:
        """Return the target's other arguments for all sequences; tensors of one row each are concatenated."""
        shared = {**self.sequences[0].kwargs, CACHE: self.cache}
        if len(self.sequences) > 1:
            for name, value in self.sequences[0].kwargs.items():
                if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == 1:
                    shared[name] = torch.cat([sequence.kwargs[name] for sequence in self.sequences])
        return shared

    def end(self) -> None:
        """Leave the cache as transformers' own loop would. After an error the caller may go on with one of his own."""
        for sequence in self.sequences if self.request.cache is not None else ():
            sequence.complete_context()
        if self.round_forward is not None:
            self.round_forward.cache.give_back()
        stop_recording(self.cache)
        for context in self._compiled_contexts:
            context.compiled = None  # the next turn may run eagerly
