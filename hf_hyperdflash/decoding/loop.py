"""Speculative decoding, one page: draft, let the target verify, accept what the target would have written.

Written here instead of plugging a candidate generator into transformers' loop because that loop runs past stop
strings inside a block, feeds the prompt again when it continues from a filled cache, and cannot split V4's
four-dimensional hidden states. For loops that are not ours there is one all the same ([`~decoding.candidates`]).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..auto.policies import Outcome
from ..targets.target import TargetOutput
from .batch import Batch
from .outputs import generate_output
from .rounds import ChainRound, Choices, round_over
from .sequence import Sequence
from .stats import merged_stats


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
        can_infer = batch.compiled is None and all(sequence.can_use_inference_mode for sequence in sequences)
        no_gradients = torch.inference_mode if can_infer else torch.no_grad
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
    longest = max(sequence.tokens.end for sequence in sequences)
    free = sys.maxsize if round_forward is None else round_forward.free(longest)
    limits = [min(sequence.draft_limit(), free) for sequence in sequences]
    max_drafts = policy.begin(max(lengths), limits)
    counts = [min(limit, max_drafts) for limit in limits]
    drafting = [(sequence, count) for sequence, count in zip(sequences, counts) if count]
    requests = [sequence.draft_request(count, policy.sampler(sequence.sampler)) for sequence, count in drafting]
    drafting_began = now()
    drafts = iter(batch.pair.draft(requests))
    draft_seconds = (now() - drafting_began) / max(len(requests), 1)
    trees = []
    for sequence, count in zip(sequences, counts):
        tree = next(drafts) if count else batch.no_drafts
        sequence.stats.draft_seconds += draft_seconds if len(tree) else 0.0
        tree = policy.cut(tree) if count else tree
        trees.append(tree.first(min(len(tree), free)))

    # Verify: one forward of the target over all anchors and drafts.
    texts = [sequence.tokens for sequence in sequences]
    round_ = round_over(batch.target, batch.verification, texts, trees, round_forward)
    verifying_began = now()
    with batch.interruptible(round_), batch.binding.capturing_forward(batch.capture, is_round=True):
        outputs = round_.forward(batch.kwargs())
    verify_seconds = (now() - verifying_began) / len(sequences)

    # Accept. A caller who goes on after an error of his streamer or criterion, with this cache and the tokens so far,
    # gets the same text: what is not written is taken back in any case.
    paths: list[list[int]] = [[] for _ in sequences]
    try:
        logits = accept(batch, round_, outputs, paths)
    finally:
        captured = batch.capture.pop()
        kept = [
            [0, *(node + 1 for node in path)][: sequence.tokens.end - 1 - start]
            for sequence, path, start in zip(sequences, paths, round_.starts)
        ]
        with batch.interruptible():
            round_.accept(batch.cache, kept)
        for index, sequence in enumerate(sequences):
            sequence.residuals += [round_.residual(each, index, kept[index]) for each in captured]
            sequence.catch_up(policy.is_asked)
    tell_observers(batch, round_, logits, paths)

    # Learn what the round cost, and what it brought.
    seconds, outcomes = now() - began, []
    for sequence, tree, path, limit, length in zip(sequences, trees, paths, limits, lengths):
        stats = sequence.stats
        if limit:
            stats.keep_tree(tree, path, sequence.tokens.ids[0, length - 1 :])
        stats.add_round(sequence.tokens.length - length, len(path), tree if limit else None)
        stats.verify_seconds += verify_seconds
        stats.loop_seconds += seconds / len(sequences)
        outcomes.append(Outcome(tree, path, sequence.finished))
    waited = sum(sequence.streamer_seconds for sequence in sequences) - streamed
    policy.end(outcomes, seconds - waited if slow_calls == batch.slow_calls else None)


def write_first_tokens(batch: Batch, outputs: TargetOutput) -> None:
    """Write the first token of each sequence, by the target's forward over the prompts, of which all stays."""
    sequences, paths = batch.sequences, list[list[int]]([] for _ in batch.sequences)
    texts = [sequence.tokens for sequence in sequences]
    round_ = ChainRound(batch.target, texts, [batch.no_drafts] * len(texts))
    try:
        logits = accept(batch, round_, outputs, paths)
    finally:
        if all(sequence.is_written for sequence in sequences):  # else it was interrupted before
            for sequence in sequences:
                sequence.catch_up(batch.policy.is_asked)
    tell_observers(batch, round_, logits, paths)
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


def tell_observers(batch: Batch, round_: ChainRound, logits: list[torch.Tensor], paths: list[list[int]]) -> None:
    """Tell those who follow a sequence what the target said of its drafts."""
    for sequence, tree, scores, path in zip(batch.sequences, round_.trees, logits, paths):
        if sequence.observer is not None:
            sequence.observer.add_round(sequence.context, tree, scores[0], path)
