"""Sequences that share the forwards of their target, made ready for rounds: their prompts are run, and cache, drafter
and policy chosen."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ..auto.policies import MOST_NODES, BatchPolicy, ChainPolicy, FixedPolicy, TreePolicy
from ..drafters.base import AUTO
from ..drafters.parts.context import DraftContext
from ..targets.caches.name import CACHE, cache_of
from ..targets.caches.round_cache import RoundForward, is_of_plain_layers
from ..targets.compiled import CompiledForwards, compile_options
from ..targets.hooks import OPEN_FORWARDS, is_between_writes
from ..targets.target import TargetOutput, TreeVerification, stop_recording
from ..trees.tree import DraftTree
from .request import check_croppable, is_static_attention_cache
from .rounds import ChainRound
from .sequence import Sequence, store_context
from .tokens import padded

logger = logging.getLogger(__name__)


class Batch:
    """Sequences on their way that share the forwards of their target; those that end leave it.

    Args:
        sequences: One at least, of one target and drafter; several if the target can mask what each is not to see.

    Attributes:
        sequences: Those that have not ended.
        cache: The target's.
        round_forward: Runs the target over the sequences' cache of rounds; `None` if they go on with `cache`.
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
        nodes = MOST_NODES if budget == AUTO else budget or 0
        self.max_positions = 1 + max(nodes, *(each.num_drafts for each in sequences))
        self.compiled: CompiledForwards | None = None
        self._compiled_contexts: list[DraftContext] = []
        self.now, self.no_drafts = first.now, DraftTree.chain(first.tokens.ids.new_empty(0))

    def prefill(self) -> TargetOutput:
        """Run what of the prompts is not in the cache yet, several padded on the left. In chunks, where the caller
        asks for them, of which each reaches the drafter before the next is run, so that a long prompt's residual is
        never held whole.

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
                sequence.residuals += [each[index : index + 1, max(padding - start, 0) :] for each in captured]
                if padding < end < width and sequence.residuals:
                    sequence.extend(end - padding)
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
                [sequence.tokens.mask(sequence.tokens.prompt_length) for sequence in self.sequences],
                self.max_positions,
                self.request.drafting_stats is None,
                self.compiled,
                self.capture,
            )
            self.verification = "mask"
        else:
            self.cache.activate_past_recording()  # after the prompt: there is nothing in it to take back
            self.cache.crop(0)  # which trims stock layers to their window
            self.verification = self.target.tree_verification
            if self.verification == "cache":
                can_verify = all(getattr(layer, "can_verify_trees", False) for layer in self.cache.layers)
                self.verification = "mask" if can_verify else "fork"
            if self.verification == "fork" and not hasattr(self.cache, "batch_repeat_interleave"):
                self.verification = "chain"  # of remote code's own cache
        if len(self.sequences) == 1:
            store_context(self.cache, self.drafter, first.context)  # its own whenever they end alike

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
            sequence.sampler = replace(sequence.sampler, tree_budget=MOST_NODES if budget == AUTO else budget)
        if stats is not None and is_batch:
            self.policy = BatchPolicy(stats)
        elif stats is not None and budget == AUTO:
            self.policy = TreePolicy(stats)
        elif stats is not None and budget is None:
            self.policy = ChainPolicy(stats)

    def compile_drafter(self) -> None:
        """Let the drafter's passes run compiled where the target's rounds do."""
        if self.round_forward is None or self.compiled is None:
            return
        contexts = [sequence.context for sequence in self.sequences]
        config = self.sequences[0].config
        # Windows have room for any text. Its length in steps, as each other room would be compiled for.
        max_tokens = self.round_forward.cache.capacity or self.request.static_cache_length(config, config.max_length)
        max_new = 1 + max(sequence.num_drafts for sequence in self.sequences)
        sizes = max_tokens, max_new, self.max_positions - 1
        self._compiled_contexts = list(self.drafter.compiled_contexts(self.target, contexts, *sizes, self.compiled))

    @contextmanager
    def interruptible(self, round_: ChainRound | None = None) -> Iterator[None]:
        """Let whoever goes on with the cache after an interruption, as of Ctrl-C inside, find it whole or be told.

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
        """Return the sequences' other arguments of the target as one's: tensors of one each are put together."""
        shared = {**self.sequences[0].kwargs, CACHE: self.cache}
        if len(self.sequences) > 1:
            for name, value in self.sequences[0].kwargs.items():
                if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == 1:
                    shared[name] = torch.cat([sequence.kwargs[name] for sequence in self.sequences])
        return shared

    def end(self) -> None:
        """Leave the cache as transformers' own loop would."""
        if self.round_forward is not None:
            self.round_forward.cache.give_back()
        stop_recording(self.cache)
        for context in self._compiled_contexts:
            context.compiled = None  # the next turn may run eagerly
