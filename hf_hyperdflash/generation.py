"""Speculative decoding, one page: draft a block, let the target verify it, accept what the target would have written.

Written here instead of plugging a candidate generator into transformers' loop because that loop runs past stop
strings inside a block, feeds the prompt again when it continues from a filled cache, and cannot split V4's
four-dimensional hidden states.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import torch
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .blocks import block_inputs

_CONTEXT_ATTRIBUTE = "_hyperdflash_context"


@dataclass
class SpeculationStats:
    """What one `generate` call with a drafter did.

    Attributes:
        rounds: Verification rounds (target forwards that verified at least one draft).
        tokens: New tokens, the prefill's first one included.
        draft_positions: Most drafts that a round verified.
        emitted: Tokens that each round emitted, accepted drafts and the target's own token.
        accepted: Accepted drafts of each round.
        draft_seconds: Wall-clock seconds in drafting. On an accelerator launches count, not their completion.
        verify_seconds: Wall-clock seconds in the target's forwards and in accepting, prefill excluded.
    """

    rounds: int = 0
    tokens: int = 0
    draft_positions: int = 0
    emitted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

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


def speculative_decoding(
    target: Any,
    drafter: Any,
    input_ids: torch.LongTensor,
    residuals: list[torch.Tensor],
    *,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any,
    model_kwargs: dict[str, Any],
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Generate as `target.generate` would without a drafter, several tokens per forward.

    Greedy text is the target's own; sampled text has the target's distribution (Leviathan et al., algorithm 1).

    Args:
        target: A bound target.
        drafter: The drafter, on any device.
        input_ids: `[1, seq]`, the prompt, tokens that are already in the cache included.
        residuals: Grows by the pre-collapse residual of every forward of the target.
        logits_processor: As prepared by `generate`, like the rest.

    Returns:
        What `generate` returns.
    """
    state = _Decoding(target, drafter, residuals, logits_processor, stopping_criteria, generation_config, model_kwargs)
    stats = drafter.last_stats = SpeculationStats()
    ids: torch.Tensor = input_ids
    finished = False
    drafts, draft_scores = input_ids.new_empty(1, 0), None
    while not finished:
        began = time.perf_counter()
        if stats.tokens:
            drafts, draft_scores = state.draft(ids)
        drafted = time.perf_counter()
        outputs = state.verify(ids, drafts) if stats.tokens else state.prefill(ids)
        before = ids.shape[1]
        ids, accepted, finished = state.accept(ids, drafts, draft_scores, outputs, streamer)
        state.keep(ids, before, drafts.shape[1])
        emitted = ids.shape[1] - before
        if drafts.shape[1]:
            stats.rounds += 1
            stats.draft_positions = max(stats.draft_positions, drafts.shape[1])
            stats.emitted.append(emitted)
            stats.accepted.append(accepted)
        if stats.tokens:
            stats.draft_seconds += drafted - began
            stats.verify_seconds += time.perf_counter() - drafted
        stats.tokens += emitted
    if streamer is not None:
        streamer.end()
    return state.result(ids)


class _Decoding:
    """One sequence on its way: the target's cache, the drafter's context and what the caller asked to see."""

    def __init__(
        self,
        target: Any,
        drafter: Any,
        residuals: list[torch.Tensor],
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        model_kwargs: dict[str, Any],
    ) -> None:
        self.target, self.drafter, self.residuals = target, drafter, residuals
        self.processor, self.stopping, self.config = logits_processor, stopping_criteria, generation_config
        self.kwargs = model_kwargs
        self.cache = model_kwargs["past_key_values"]
        self.num_drafts = self._num_drafts_asked()
        self.prompt_length = 0  # set by the prefill
        self.context = self._context_of_cache()
        self.seen: dict[str, list[Any]] = {"scores": [], "logits": [], "hidden_states": [], "attentions": []}

    def _num_drafts_asked(self) -> int:
        """`num_assistant_tokens` if the caller set it; `generate` has filled in transformers' default if not."""
        asked = self.config.num_assistant_tokens
        if asked in (None, GenerationConfig._get_default_generation_params().get("num_assistant_tokens")):
            return self.drafter.num_draft_tokens
        return self.drafter.check_num_draft_tokens(asked)

    def _context_of_cache(self) -> Any:
        """The context that an earlier `generate` left with this cache, if it still belongs to it; else an empty one."""
        owner, context = getattr(self.cache, _CONTEXT_ATTRIBUTE, (None, None))
        if context is None or owner != id(self.drafter) or context.end != self.cache.get_seq_length():
            context = self.drafter.new_context()
        return context

    # Draft

    def draft(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draft tokens `[1, drafts]` after `ids` and, when sampling, the scores they were drawn from
        `[1, drafts, config.vocab_size]`."""
        count = min(self.num_drafts, self.config.max_length - ids.shape[1] - 1)  # the target adds one of its own
        if count < 1:
            return ids.new_empty(1, 0), None
        shape, device = self.drafter.config, self.drafter.device
        block, positions = block_inputs(
            ids[:, -1:], self.positions(ids)[:, -1:], shape.block_size, shape.mask_token_id
        )
        embeds = self.target.get_input_embeddings()(block.to(self.target.device)).to(device)
        hidden = self.drafter(embeds, positions.to(device), self.context.layers)
        head = self.target.get_output_embeddings()
        logits = head(hidden[:, 1 : count + 1].to(head.weight)).float().to(ids.device)
        return self._choose(ids, logits)

    def _choose(self, ids: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not self.config.do_sample and len(self.processor) == 0:
            return logits.argmax(-1), None
        prefix, scores = ids, []
        for k in range(logits.shape[1]):
            scores.append(self.processor(prefix, logits[:, k]))
            token = self._pick(scores[-1])
            prefix = torch.cat([prefix, token[:, None]], dim=1)
        return prefix[:, ids.shape[1] :], torch.stack(scores, dim=1)

    def _pick(self, scores: torch.Tensor) -> torch.Tensor:
        if self.config.do_sample:
            return torch.multinomial(scores.softmax(-1), num_samples=1).squeeze(1)
        return scores.argmax(-1)

    # Verify

    def prefill(self, ids: torch.Tensor) -> Any:
        """Run the part of the prompt that is not in the cache yet, in chunks where the caller asks for them."""
        self.prompt_length = ids.shape[1]
        outputs = self.target._prefill(ids, self.config, self.kwargs)
        self.cache.activate_past_recording()  # after the prompt: there is nothing in it to take back
        return outputs

    def verify(self, ids: torch.Tensor, drafts: torch.Tensor) -> Any:
        """One forward of the target over the anchor and the drafts: logits `[1, drafts + 1, config.vocab_size]`."""
        candidates = torch.cat([ids, drafts.to(ids.device)], dim=1)
        count = drafts.shape[1] + 1
        kwargs = {**self.kwargs, "position_ids": self.positions(candidates)}
        if kwargs.get("attention_mask") is not None:
            kwargs["attention_mask"] = self._mask(candidates)
        inputs = self.target.prepare_inputs_for_generation(
            candidates, next_sequence_length=count, is_first_iteration=False, **kwargs
        )
        inputs["logits_to_keep"] = count
        return self.target(**inputs, return_dict=True)

    def positions(self, ids: torch.Tensor) -> torch.Tensor:
        """True positions `[1, seq]` of `ids`: the caller's, continued, or counted over the unpadded tokens."""
        given = self.kwargs.get("position_ids")
        if given is not None:
            steps = torch.arange(ids.shape[1], device=given.device) - (self.prompt_length - 1)
            counted = given[:, -1:] + steps
            counted[:, self.prompt_length - given.shape[1] : self.prompt_length] = given
            return counted
        if self.kwargs.get("attention_mask") is not None:
            return (self._mask(ids).cumsum(-1) - 1).clamp(min=0)
        return torch.arange(ids.shape[1], device=ids.device)[None]

    def _mask(self, ids: torch.Tensor) -> torch.Tensor:
        mask = self.kwargs["attention_mask"]
        return torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)

    # Accept

    def accept(
        self, ids: torch.Tensor, drafts: torch.Tensor, draft_scores: torch.Tensor | None, outputs: Any, streamer: Any
    ) -> tuple[torch.Tensor, int, bool]:
        """Append tokens to `ids` for as long as the target agrees with the drafts, then the target's own token.

        Processors and stopping criteria see every accepted prefix once and in order, as in plain decoding.

        Returns:
            The longer ids, the number of accepted drafts, and whether generation is finished.
        """
        count = drafts.shape[1]
        logits = outputs.logits[:, -count - 1 :].to(dtype=torch.float32, device=ids.device, copy=True)
        for k in range(count + 1):
            scores = self.processor(ids, logits[:, k].clone())
            token, agreed = self._target_choice(scores, drafts, draft_scores, k)
            ids = torch.cat([ids, token[:, None]], dim=1)
            self._record(outputs, k, scores, logits[:, k])
            if streamer is not None:
                streamer.put(token.cpu())
            finished = bool(self.stopping(ids, tuple(self.seen["scores"]) or None).all())
            if finished or not agreed:
                return ids, k + agreed, finished
        return ids, count, False

    def _target_choice(
        self, scores: torch.Tensor, drafts: torch.Tensor, draft_scores: torch.Tensor | None, k: int
    ) -> tuple[torch.Tensor, bool]:
        """The target's token `[1]` where draft `k` stands, and whether it is that draft."""
        if k < drafts.shape[1] and self.config.do_sample and draft_scores is not None:
            return speculative_choice(scores.softmax(-1), draft_scores[:, k].softmax(-1), drafts[:, k])
        token = self._pick(scores)
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
            states = outputs.hidden_states
            self.seen["hidden_states"].append(
                tuple(states) if is_prefill else tuple(state[:, row : row + 1] for state in states)
            )
        if self.config.output_attentions:
            weights = outputs.attentions
            self.seen["attentions"].append(
                tuple(weights) if is_prefill else tuple(weight[:, :, row : row + 1] for weight in weights)
            )

    def keep(self, ids: torch.Tensor, before: int, num_drafts: int) -> None:
        """Rewind the target's cache to all but the last token, and give the drafter the residual of what stays."""
        emitted = ids.shape[1] - before
        self.cache.crop(-(num_drafts + 1 - emitted))
        residual = torch.cat(self.residuals, dim=1)
        self.residuals.clear()
        residual = residual[:, : residual.shape[1] - (num_drafts + 1 - emitted)]
        end = ids.shape[1] - 1
        positions = self.positions(ids)[:, end - residual.shape[1] : end]
        if self.kwargs.get("attention_mask") is not None:  # padding is no context
            real = self._mask(ids)[0, end - residual.shape[1] : end].bool()
            residual, positions = residual[:, real], positions[:, real]
        device = self.drafter.device
        if residual.shape[1]:
            self.context.append(self.drafter.encode_context(residual.to(device), positions.to(device)))
        self.context.end = end
        setattr(self.cache, _CONTEXT_ATTRIBUTE, (id(self.drafter), self.context))

    def result(self, ids: torch.Tensor) -> GenerateDecoderOnlyOutput | torch.Tensor:
        if not self.config.return_dict_in_generate:
            return ids
        shown = {name: tuple(values) if values else None for name, values in self.seen.items()}
        return GenerateDecoderOnlyOutput(sequences=cast(torch.LongTensor, ids), past_key_values=self.cache, **shown)


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
