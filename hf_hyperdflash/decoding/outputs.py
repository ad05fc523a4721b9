"""What a caller asked to see of a generation: scores, logits, hidden states and attention weights of every token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..targets.caches.name import CACHE
from ..targets.caches.protocols import RewindableCache
from ..targets.target import Target, TargetOutput
from .rounds import ChainRound


class OutputRecorder:
    """Collects, token by token, what plain decoding would return beside the text.

    Args:
        config: The request's generation configuration.
        target: The target's.
    """

    def __init__(self, config: GenerationConfig, target: Target) -> None:
        self.config, self.target = config, target
        self.steps: dict[str, list[Any]] = {"scores": [], "logits": [], "hidden_states": [], "attentions": []}

    def add(
        self,
        outputs: TargetOutput,
        round_: ChainRound,
        position: int,
        scores: torch.Tensor,
        logits: torch.Tensor,
        cache: RewindableCache | None,
    ) -> None:
        """Add the token that was chosen from `scores` `[1, config.vocab_size]`.

        Args:
            outputs: The target's forward.
            round_: What it was over.
            position: The verification position that the token was chosen at.
            scores: Processed.
            logits: Raw.
            cache: The target's, as the forward left it.
        """
        if not self.config.return_dict_in_generate:
            return
        if self.config.output_scores:
            self.steps["scores"].append(scores.clone())  # else it keeps those of all drafts
        if self.config.output_logits:
            self.steps["logits"].append(logits.clone())
        is_prefill = not self.steps["hidden_states"] and not self.steps["attentions"]
        if self.config.output_hidden_states:
            states = outputs.hidden_states  # remote code may have none to show
            i, k = round_.coordinates(position)
            self.steps["hidden_states"].append(
                states
                if is_prefill or states is None
                else tuple(state[i : i + 1, k : k + 1].clone() for state in states)
            )
        if self.config.output_attentions:
            weights = outputs.attentions  # none of an implementation that computes none, as sdpa
            self.steps["attentions"].append(
                weights if is_prefill or not weights else self._attention_of(weights, round_, position, cache)
            )

    def all(self) -> dict[str, tuple[Any, ...] | None]:
        """Return all of it, by the names of `generate`'s output."""
        return {name: tuple(values) if values else None for name, values in self.steps.items()}

    def _attention_of(
        self, weights: Sequence[torch.Tensor], round_: ChainRound, position: int, cache: RewindableCache | None
    ) -> tuple[torch.Tensor, ...]:
        """Return what one token attended to, `[batch, heads, 1, keys]` of every attention layer, over the keys that
        plain decoding would have had at this token: in a sliding window those that had not left it."""
        (i, k), seen, of_position = round_.coordinates(position), round_.visible(position), []
        for of_layer, layer in zip(weights, round_.layers_with_keys(cast(RewindableCache, cache)), strict=True):
            keys = self.target.attention_keys(layer, of_layer.shape[3], of_layer.shape[2], seen)
            of_position.append(of_layer[i : i + 1, :, k : k + 1, keys.to(of_layer.device)])
        return tuple(of_position)


def generate_output(
    texts: Sequence[torch.Tensor], recorders: Sequence[OutputRecorder], cache: RewindableCache | None
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Return what `generate` returns: of several texts those that end early padded on the right, and no cache to go on
    with, as each has another length.

    Args:
        texts: Of each sequence, `[1, seq]`.
        recorders: Of each.
        cache: Of the only one.
    """
    config = recorders[0].config
    pad = getattr(config, "_pad_token_tensor", None)
    # Without a token to pad with, none is known that ends a text.
    value = 0 if pad is None else int(pad)
    ids: Any = pad_sequence([text[0] for text in texts], batch_first=True, padding_value=value)
    if not config.return_dict_in_generate:
        return ids
    if len(recorders) == 1:
        beside: dict[str, Any] = {CACHE: cache, **recorders[0].all()}
        return GenerateDecoderOnlyOutput(ids, **beside)
    return GenerateDecoderOnlyOutput(ids, scores=_by_step(recorders, "scores"), logits=_by_step(recorders, "logits"))


def _by_step(recorders: Sequence[OutputRecorder], name: str) -> Any:
    """Return tensors `[batch, config.vocab_size]`, one a step, from those of several sequences; zeros where one has
    ended."""
    values = [recorder.steps[name] for recorder in recorders]
    if not values[0]:
        return None
    nothing = torch.zeros_like(values[0][0])
    steps = range(max(map(len, values)))
    return tuple(torch.cat([row[step] if step < len(row) else nothing for row in values]) for step in steps)
