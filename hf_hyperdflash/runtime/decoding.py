"""Speculative decoding, one page: draft a block, let the target verify it, accept what the target would have written.

Written here instead of plugging a candidate generator into transformers' loop because that loop runs past stop
strings inside a block, feeds the prompt again when it continues from a filled cache, and cannot split V4's
four-dimensional hidden states.
"""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol, cast

import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .attentions import attention_rows
from .draft_processors import without_state

_CONTEXT_ATTRIBUTE, _PADDING_ATTRIBUTE = "_hyperdflash_context", "_hyperdflash_padding"


@dataclass
class SpeculationStats:
    """What one `generate` call with a drafter did.

    Attributes:
        rounds: Verification rounds: target forwards after the prefill for which drafts were asked. A drafter may have
            had none (prompt lookup); with no room for a draft before the end of the text it is no round.
        tokens: New tokens, the prefill's first one included.
        draft_positions: Most drafts that a round verified.
        emitted: Tokens that each round emitted, accepted drafts and the target's own token.
        accepted: Accepted drafts of each round.
        draft_seconds: Wall-clock seconds in the drafter: drafting and taking in what was accepted, prompt excluded. On
            an accelerator launches count, not their completion, unless the drafter's `synchronize_timing` is set.
        verify_seconds: Wall-clock seconds in the target's forwards, prefill excluded.
        loop_seconds: Wall-clock seconds of everything after the prefill; what is not in the other two is our overhead.
    """

    rounds: int = 0
    tokens: int = 0
    draft_positions: int = 0
    emitted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    loop_seconds: float = 0.0

    def __iadd__(self, other: SpeculationStats) -> SpeculationStats:
        """Add another call's."""
        self.draft_positions = max(self.draft_positions, other.draft_positions)
        for name in (
            "rounds", "tokens", "emitted", "accepted", "draft_seconds", "verify_seconds", "loop_seconds",
        ):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self

    @property
    def tau(self) -> float:
        """Mean tokens per verification round, accepted drafts plus the target's own (the paper's accepted length)."""
        return sum(self.emitted) / self.rounds if self.rounds else 0.0

    @property
    def mean_accepted_drafts(self) -> float:
        """Mean accepted drafts per round."""
        return sum(self.accepted) / self.rounds if self.rounds else 0.0

    @property
    def acceptance(self) -> list[float]:
        """Per draft position k = 1, 2, ..: the fraction of rounds in which it was accepted (Figure 1)."""
        return [sum(n >= k for n in self.accepted) / self.rounds for k in range(1, self.draft_positions + 1)]

    @property
    def conditional_acceptance(self) -> list[float]:
        """Per draft position k: the fraction accepted of the rounds in which position k - 1 was (0 where none was)."""
        prefix = [1.0, *self.acceptance]
        return [now / before if before else 0.0 for before, now in pairwise(prefix)]


class Drafter(Protocol):
    """What [`speculative_decoding`] asks of a drafter.

    Attributes:
        num_draft_tokens: Tokens to draft per round.
        target_layer_ids: Whose residual paths it reads, as in [`~runtime.targets.capture_residual`]; empty for none.
        last_stats: Set by every `generate`.
        synchronize_timing: Whether an accelerator is waited for where times are taken. Slower, but each second counts
            where it was spent.
    """

    num_draft_tokens: int
    target_layer_ids: Sequence[int]
    last_stats: SpeculationStats | None
    synchronize_timing: bool

    def check_target(self, target: Any) -> None:
        """Raise a `ValueError` if the drafter does not fit the target."""

    def check_num_draft_tokens(self, value: int) -> int:
        """Return `value` if that many tokens can be drafted, else raise a `ValueError`."""

    def new_context(self) -> Any:
        """State of one sequence, with an attribute `end`: tokens of the sequence that were taken in."""

    def extend(
        self,
        target: Any,
        context: Any,
        residual: torch.Tensor | None,
        position_ids: torch.Tensor,
        next_ids: torch.Tensor,
    ) -> None:
        """Take in accepted tokens.

        Args:
            residual: `[1, new, paths, config.hidden_size]` of `target_layer_ids`, `None` if they are empty.
            position_ids: The tokens' true positions, `[1, new]`.
            next_ids: The token that follows each, `[1, new]`.
        """

    def draft(
        self, target: Any, context: Any, ids: torch.Tensor, position_ids: torch.Tensor, count: int, choose: Choice
    ) -> None:
        """Draft up to `count` tokens after the anchor, the last of `ids` `[1, seq]`, through `choose`."""


class Choice:
    """Picks drafted tokens as the request asks for (greedy or sampled, with its processors) and remembers them.

    Attributes:
        tokens: Drafted so far, `[1, drafts]`.
        scores: What each was drawn from, `[1, config.vocab_size]`; empty if nothing was drawn.
    """

    def __init__(self, ids: torch.Tensor, processor: Any, do_sample: bool) -> None:
        self.ids, self.processor, self.do_sample = ids, processor, do_sample
        self.tokens = ids.new_empty(1, 0)
        self.scores: list[torch.Tensor] = []

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """The next tokens, `[1, new]` from the logits `[1, new, config.vocab_size]` of a drafter."""
        logits = logits.float().to(self.ids.device)
        if not self.do_sample and not len(self.processor):
            self.propose(logits.argmax(-1))
        else:
            for k in range(logits.shape[1]):
                prefix = torch.cat([self.ids, self.tokens], dim=1)
                self.scores.append(self.processor(prefix, logits[:, k]))
                self.propose(pick(self.scores[-1], self.do_sample)[:, None])
        return self.tokens[:, -logits.shape[1] :]

    def propose(self, tokens: torch.Tensor) -> None:
        """Draft these tokens `[1, new]`, which no distribution was asked for."""
        self.tokens = torch.cat([self.tokens, tokens], dim=1)


def pick(scores: torch.Tensor, do_sample: bool) -> torch.Tensor:
    """A token `[1]` from processed scores `[1, config.vocab_size]`."""
    return torch.multinomial(scores.softmax(-1), num_samples=1).squeeze(1) if do_sample else scores.argmax(-1)


class KeptContext:
    """A drafter's context that stays with the target's cache between turns. Copies of the cache get a copy of it.

    Args:
        drafter: Whose context it is. Another's would be read as if it were one's own, so it is told apart by the object
            itself: an `id` comes back once its owner is gone.
        context: The context.
    """

    def __init__(self, drafter: Drafter, context: Any) -> None:
        self._drafter, self.context = weakref.ref(drafter), context

    def is_of(self, drafter: Drafter) -> bool:
        """Whether `drafter` made the context."""
        return self._drafter() is drafter

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptContext:
        again = object.__new__(KeptContext)
        again._drafter, again.context = self._drafter, copy.deepcopy(self.context, memo)
        return again

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # pickled with a cache it is no context: elsewhere there is no such drafter


def speculative_decoding(
    target: Any,
    drafter: Drafter,
    input_ids: torch.LongTensor,
    num_drafts: int,
    *,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any,
    model_kwargs: dict[str, Any],
    skip_padding: bool = False,
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Generate as `target.generate` would without a drafter, several tokens per forward.

    Greedy text is the target's own; sampled text has the target's distribution (Leviathan et al., algorithm 1).

    Args:
        target: A bound target.
        drafter: The drafter, on any device.
        input_ids: `[1, seq]`, the prompt, tokens that are already in the cache included.
        num_drafts: Most drafted tokens per round. The cache can take back one more.
        logits_processor: As prepared by `generate`, like the rest.
        skip_padding: Feed the target what comes after a prompt's left padding only.

    Returns:
        What `generate` returns.
    """
    state = _Decoding(
        target, drafter, input_ids, num_drafts, logits_processor, stopping_criteria, generation_config, streamer,
        model_kwargs,
    )  # fmt: skip
    if skip_padding:
        state.skip_padding()
    stats = drafter.last_stats = state.stats
    outputs = state.prefill()
    _, finished = state.advance(Choice(input_ids, state.draft_processor, state.config.do_sample), outputs)
    stats.tokens, stats.draft_seconds = 1, 0.0  # the prompt's do not count
    began = state.now()
    while not finished:
        before, count = state.ids.shape[1], state.room()
        choice = state.draft(count)
        outputs = state.verify(choice.tokens)
        accepted, finished = state.advance(choice, outputs)
        emitted = state.ids.shape[1] - before
        stats.tokens += emitted
        if count:
            stats.rounds += 1
            stats.draft_positions = max(stats.draft_positions, choice.tokens.shape[1])
            stats.emitted.append(emitted)
            stats.accepted.append(accepted)
    stats.loop_seconds = state.now() - began
    if streamer is not None:
        streamer.end()
    return state.result()


class _Decoding:
    """One sequence on its way: its tokens, the target's cache, the drafter's context and what the caller asked to see."""

    def __init__(
        self,
        target: Any,
        drafter: Drafter,
        input_ids: torch.Tensor,
        num_drafts: int,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        streamer: Any,
        model_kwargs: dict[str, Any],
    ) -> None:
        self.target, self.drafter, self.ids, self.num_drafts = target, drafter, input_ids, num_drafts
        self.processor, self.draft_processor = logits_processor, without_state(logits_processor)
        self.stopping, self.config, self.streamer = stopping_criteria, generation_config, streamer
        self.kwargs = model_kwargs
        self.cache = model_kwargs["past_key_values"]
        self.stats = SpeculationStats()
        self.residuals: list[torch.Tensor] = []  # of what is in the cache and not yet in the drafter's context
        self.padding = getattr(self.cache, _PADDING_ATTRIBUTE, 0)  # columns on the left that the target never saw
        self.prompt_length = 0  # set by the prefill
        self.context = self._context_of_cache()
        self.seen: dict[str, list[Any]] = {"scores": [], "logits": [], "hidden_states": [], "attentions": []}

    def skip_padding(self) -> None:
        """Take the padding on the left out of what the target is given; the caller's ids keep it."""
        mask = self.kwargs.get("attention_mask")
        if mask is not None and mask.ndim == 2 and self.cache.get_seq_length() == 0:
            self.padding = int(mask[0].long().argmax())
        if self.padding:
            setattr(self.cache, _PADDING_ATTRIBUTE, self.padding)
            for name in ("attention_mask", "position_ids"):
                if self.kwargs.get(name) is not None:
                    self.kwargs[name] = self.kwargs[name][..., self.padding :]

    def _context_of_cache(self) -> Any:
        """The context that an earlier `generate` left with this cache, if it still belongs to it; else an empty one."""
        kept: KeptContext | None = getattr(self.cache, _CONTEXT_ATTRIBUTE, None)
        if kept is None or not kept.is_of(self.drafter) or kept.context.end != self.cache.get_seq_length():
            return self.drafter.new_context()
        return kept.context

    def now(self) -> float:
        if self.drafter.synchronize_timing and self.target.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    # Draft

    def room(self) -> int:
        """How many tokens to draft: what was asked for, or what fits, as the target adds one of its own."""
        return max(0, min(self.num_drafts, self.config.max_length - self.ids.shape[1] - 1))

    def draft(self, count: int) -> Choice:
        """Draft up to `count` tokens."""
        choice = Choice(self.ids, self.draft_processor, self.config.do_sample)
        if count:
            ids = self.ids[:, self.padding :]
            positions, began = self.positions(ids), self.now()
            self.drafter.draft(self.target, self.context, ids, _text_axis(positions), count, choice)
            self.stats.draft_seconds += self.now() - began
        return choice

    # Verify

    @contextmanager
    def own_forward(self, verified_position_ids: torch.Tensor | None = None) -> Iterator[None]:
        """Run a forward of the target inside: its residual is read, and that of nobody else's forwards."""
        layer_ids = self.drafter.target_layer_ids
        with self.target.hyperdflash_hooks.own_forward(layer_ids, verified_position_ids) as captured:
            yield
        self.residuals += captured

    def prefill(self) -> Any:
        """Run the part of the prompt that is not in the cache yet. In chunks, where the caller asks for them, of which each
        reaches the drafter before the next is run, so that a long prompt's residual is never held whole."""
        ids = self.ids[:, self.padding :]
        self.prompt_length = length = ids.shape[1]
        chunk = self.config.prefill_chunk_size or length
        for end in [*range(self.cache.get_seq_length() + chunk, length, chunk), length]:
            outputs = self.feed_prompt(ids[:, :end], length - end)
            if end < length and self.residuals:
                self.extend(ids, end)
        self.cache.activate_past_recording()  # after the prompt: there is nothing in it to take back
        return outputs

    def feed_prompt(self, ids: torch.Tensor, rest: int) -> Any:
        """Run what of `ids` is not in the cache; `rest` tokens of the prompt come later."""
        config, kwargs = copy.copy(self.config), dict(self.kwargs)
        # Not transformers' own chunks, which before 5.20 or so feed what is in the cache again.
        config.prefill_chunk_size, config._mask_length = None, ids.shape[1]
        for name in ("attention_mask", "position_ids"):
            if rest and kwargs.get(name) is not None:
                kwargs[name] = kwargs[name][..., :-rest]
        with self.own_forward():
            outputs = self.target._prefill(ids, config, kwargs)
        if outputs.past_key_values is not self.cache:  # remote code may make a cache of its own
            self.cache = self.kwargs["past_key_values"] = check_cache(outputs.past_key_values)
        return outputs

    def verify(self, drafts: torch.Tensor) -> Any:
        """One forward of the target over the anchor and the drafts: logits `[1, drafts + 1, config.vocab_size]`."""
        candidates = torch.cat([self.ids[:, self.padding :], drafts.to(self.ids.device)], dim=1)
        count = drafts.shape[1] + 1
        kwargs = {**self.kwargs, "position_ids": self.positions(candidates)}
        if kwargs.get("attention_mask") is not None:
            kwargs["attention_mask"] = self._mask(candidates)
        inputs = self.target.prepare_inputs_for_generation(
            candidates, next_sequence_length=count, is_first_iteration=False, **kwargs
        )
        inputs["logits_to_keep"] = count
        began = self.now()
        with self.own_forward(_text_axis(kwargs["position_ids"])[:, -count:]):
            outputs = self.target(**inputs, return_dict=True)
        self.stats.verify_seconds += self.now() - began
        return outputs

    def positions(self, ids: torch.Tensor) -> torch.Tensor:
        """True positions `[1, seq]` of `ids`: the caller's, continued, or counted over the unpadded tokens. Multimodal
        targets have them for several axes, `[axes, 1, seq]`."""
        given = self.kwargs.get("position_ids")
        if given is not None:
            steps = torch.arange(ids.shape[1], device=given.device) - (self.prompt_length - 1)
            counted = given[..., -1:] + steps
            counted[..., self.prompt_length - given.shape[-1] : self.prompt_length] = given
            return counted
        if self.kwargs.get("attention_mask") is not None:
            return (self._mask(ids).cumsum(-1) - 1).clamp(min=0)
        return torch.arange(ids.shape[1], device=ids.device)[None]

    def _mask(self, ids: torch.Tensor) -> torch.Tensor:
        mask = self.kwargs["attention_mask"]
        return torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)

    # Accept

    def advance(self, choice: Choice, outputs: Any) -> tuple[int, bool]:
        """Accept what the target agrees with and leave the rest behind, also where a streamer or a criterion raises: a
        caller who goes on with this cache and the tokens so far gets the same text.

        Returns:
            The number of accepted drafts, and whether generation is finished.
        """
        try:
            return self.accept(choice, outputs)
        finally:
            self.keep()

    def accept(self, choice: Choice, outputs: Any) -> tuple[int, bool]:
        """Append tokens for as long as the target agrees with the drafts, then the target's own token.

        Processors and stopping criteria see every accepted prefix once and in order, as in plain decoding.
        """
        count, device = choice.tokens.shape[1], self.ids.device
        logits = outputs.logits[:, -count - 1 :].to(dtype=torch.float32, device=device, copy=True)
        for k in range(count + 1):
            scores = self.processor(self.ids, logits[:, k].clone())
            token, agreed = self._target_choice(scores, choice, k)
            self.ids = torch.cat([self.ids, token[:, None]], dim=1)
            self._record(outputs, k, scores, logits[:, k])
            if self.streamer is not None:
                self.streamer.put(token.cpu())
            finished = bool(self.stopping(self.ids, tuple(self.seen["scores"]) or None).all())
            if finished or not agreed:
                return k + agreed, finished
        return count, False

    def _target_choice(self, scores: torch.Tensor, choice: Choice, k: int) -> tuple[torch.Tensor, bool]:
        """The target's token `[1]` where draft `k` stands, and whether it is that draft."""
        drafts = choice.tokens
        if k < len(choice.scores) and self.config.do_sample:
            return speculative_choice(scores.softmax(-1), choice.scores[k].softmax(-1), drafts[:, k])
        # A draft that was not drawn at random is right with the probability that the target draws it.
        token = pick(scores, self.config.do_sample)
        return token, k < drafts.shape[1] and bool((token == drafts[:, k]).all())

    def _record(self, outputs: Any, row: int, scores: torch.Tensor, logits: torch.Tensor) -> None:
        if not self.config.return_dict_in_generate:
            return
        if self.config.output_scores:
            self.seen["scores"].append(scores)
        if self.config.output_logits:
            self.seen["logits"].append(logits)
        is_prefill = not self.seen["hidden_states"] and not self.seen["attentions"]
        if self.config.output_hidden_states:
            states = outputs.hidden_states  # remote code may have none to show
            is_whole = is_prefill or states is None
            self.seen["hidden_states"].append(
                states if is_whole else tuple(state[:, row : row + 1] for state in states)
            )
        if self.config.output_attentions:
            weights = outputs.attentions
            is_whole = is_prefill or weights is None
            self.seen["attentions"].append(weights if is_whole else attention_rows(weights, row, self.cache))

    def keep(self) -> None:
        """Rewind the target's cache to all but the last token, and give the drafter what stays."""
        ids = self.ids[:, self.padding :]
        kept = ids.shape[1] - 1
        if kept < self.prompt_length:
            return  # interrupted before the first token: the cache holds the prompt
        rejected = self.cache.get_seq_length() - kept
        self.cache.crop(-rejected)
        if self.cache.get_seq_length() != kept:
            raise RuntimeError(
                f"The cache, a {type(self.cache).__name__}, holds {self.cache.get_seq_length()} tokens after it was "
                f"cropped, expected {kept}: its `crop(-n)` must take back the last n tokens."
            )
        if self.residuals and rejected:
            self.residuals[-1] = self.residuals[-1][:, :-rejected]
        self.extend(ids, kept)
        setattr(self.cache, _CONTEXT_ATTRIBUTE, KeptContext(self.drafter, self.context))

    def extend(self, ids: torch.Tensor, end: int) -> None:
        """Give the drafter the tokens before `end` that are new to it."""
        residual, new = None, end - self.context.end
        if self.drafter.target_layer_ids:
            residual = self.residuals[0] if len(self.residuals) == 1 else torch.cat(self.residuals, dim=1)
            self.residuals.clear()
            new = residual.shape[1]  # less than what is new to the drafter after another's turn on the same cache
        positions, following = _text_axis(self.positions(ids))[:, end - new : end], ids[:, end - new + 1 : end + 1]
        # Padding is no context. After the prompt there is none, and to look for it would be to wait for the device.
        if self.kwargs.get("attention_mask") is not None and end - new < self.prompt_length:
            real = self._mask(ids)[0, end - new : end].bool()
            positions, following = positions[:, real], following[:, real]
            residual = None if residual is None else residual[:, real.to(residual.device)]
        if following.shape[1]:
            began = self.now()
            self.drafter.extend(self.target, self.context, residual, positions, following)
            self.stats.draft_seconds += self.now() - began
        self.context.end = end

    def result(self) -> GenerateDecoderOnlyOutput | torch.Tensor:
        if not self.config.return_dict_in_generate:
            return self.ids
        shown = {name: tuple(values) if values else None for name, values in self.seen.items()}
        return GenerateDecoderOnlyOutput(
            sequences=cast(torch.LongTensor, self.ids), past_key_values=self.cache, **shown
        )


def _text_axis(position_ids: torch.Tensor) -> torch.Tensor:
    """`[1, seq]`: where tokens have a position on several axes, text has the same on each."""
    return position_ids[0] if position_ids.ndim == 3 else position_ids


def check_cache(cache: Any) -> Any:
    """Return a cache that drafts can be taken back from.

    Raises:
        ValueError: If it cannot.
    """
    if not getattr(cache, "is_croppable", False):
        raise ValueError(
            f"Assisted generation cannot rewind a {type(cache).__name__}: leave `cache_implementation` out. A cache of "
            "remote code needs `is_croppable = True` and a `crop(-n)` that takes back the last n tokens."
        )
    return cache


def speculative_choice(p: torch.Tensor, q: torch.Tensor, draft: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Accept a draft drawn from `q` with probability min(1, p/q), or draw from what `p` has more of.

    The token returned is distributed as `p` whatever `q` is (Leviathan et al., algorithm 1).

    Args:
        p: The target's distribution, `[1, config.vocab_size]`.
        q: The drafter's distribution, same shape.
        draft: The drafted token, `[1]`.

    Returns:
        The token, `[1]`, and whether it is the draft.
    """
    index = draft[:, None]
    ratio = p.gather(1, index) / q.gather(1, index)
    if bool((torch.rand_like(ratio) < ratio).all()):
        return draft, True
    residual = (p - q).clamp(min=0)
    # Rounding can leave nothing where p and q are equal: then p itself is right.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)
    return torch.multinomial(residual, num_samples=1).squeeze(1), False
