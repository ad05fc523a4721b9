"""Gemma 4's assistants: layers without keys of their own, which attend over those that the target has in its cache.

A pass reads the embedding of a token and a state: of the anchor the target's last state before it, of a draft the
assistant's own of the pass that drafted it. All passes of a round have the anchor's position and see the same keys,
those of the target's last full and last sliding layer that have some, so that the paths of a tree are queries beside
each other. The layers are transformers' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.gemma4_assistant import modeling_gemma4_assistant as of_gemma4
from transformers.models.gemma4_assistant.configuration_gemma4_assistant import Gemma4AssistantConfig
from transformers.models.gemma4_unified_assistant import modeling_gemma4_unified_assistant as of_unified
from transformers.models.gemma4_unified_assistant.configuration_gemma4_unified_assistant import (
    Gemma4UnifiedAssistantConfig,
)

from ..targets.caches.seen_keys import CachedText, SeenKeys, seen_keys
from ..targets.target import Target, attention_mask_for
from ..trees.growth import DraftStep
from ..trees.padding import Padding
from ..trees.tree import DraftTree
from .parts.context import anchors_of
from .reading import LastStateDrafter
from .sampling import DraftRequest, draft_batch, draft_known

_TARGETS = ("gemma4_text", "gemma4_unified_text")  # by the `model_type` of their text configuration


class SharedKeysDrafter(LastStateDrafter):
    """The base of Gemma 4's assistants, before transformers' own class of each: `load_drafter` reads published ones,
    and none are trained here."""

    model: Any
    masked_embedding: Any
    lm_head: nn.Linear
    pre_projection: nn.Linear
    post_projection: nn.Linear
    target_layer_ids = [-1]
    carries_code = False

    def __init__(self, config: PreTrainedConfig) -> None:
        check_can_build(config)
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.is_causal = False  # the paths of a tree, queries of one pass, see none of each other

    @property
    def _usual_drafts(self) -> int:  # type: ignore[override]
        return self.generation_config.num_assistant_tokens or 4

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, **kwargs: Any) -> None:  # type: ignore[override]
        """Save the assistant in its publisher's layout: transformers' own class loads it, too."""
        super().save_pretrained(save_directory, is_main_process, **kwargs)
        if is_main_process:
            stock = next(kind for kind in type(self).__mro__ if kind.__module__.startswith("transformers.models."))
            self.config.architectures = [stock.__name__]
            self.config.save_pretrained(save_directory)

    # The target

    def check_target(self, target: Target) -> None:
        """Raise a `ValueError` that names both values if the assistant does not fit `target`: if it is no Gemma 4, or
        has keys of another shape."""
        kind = target.config.model_type
        if kind not in _TARGETS:
            raise ValueError(
                f"The drafter is a {self.config.model_type}, which reads keys of its target, and the target is a "
                f"{kind} model: expected {' or '.join(_TARGETS)}. Load the Gemma 4 that the assistant was made for."
            )
        super().check_target(target)
        config, layers = self.config.get_text_config(), self._shared_layers(target)
        for kind, index in zip(config.layer_types, range(config.num_hidden_layers)):
            if kind not in layers:
                raise ValueError(
                    f"The drafter reads keys of `{kind}` layers, and the target has {sorted(layers)} with keys: load "
                    "the drafter's own target."
                )
            own, targets = _keys_of(config, index), _keys_of(target.config, layers[kind])
            if own != targets:
                raise ValueError(
                    f"The drafter was made for a target whose `{kind}` layers have keys of (`num_key_value_heads`, "
                    f"`head_dim`) {own}, but this target's are {targets}. Load the drafter's own target."
                )

    def target_sizes(self) -> dict[str, int]:
        return {"hidden_size": self.config.backbone_hidden_size}

    @staticmethod
    def _shared_layers(target: Target) -> dict[str, int]:
        """Return the target's layers whose keys are read, by their kind: the last ones that have their own."""
        config = target.config
        with_keys = config.layer_types[: config.num_hidden_layers - (config.num_kv_shared_layers or 0)]
        return {kind: index for index, kind in enumerate(with_keys)}

    @torch.no_grad()
    def draft(self, target: Target, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Draft the next tokens of all texts pass by pass; nothing where a context is empty, or where nobody says
        where the text is in the target's cache."""
        are_known = [each.context.pending is not None and each.cached is not None for each in requests]
        return draft_known(requests, are_known, partial(self._draft_known, target))

    def _draft_known(self, target: Target, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        texts, position_ids = (
            [cast(CachedText, each.cached) for each in requests],
            anchors_of(requests, self.device)[1],
        )
        lengths, kinds = [each.ids.shape[1] - 1 for each in requests], self.model.config.layer_types
        layers = {kind: layer for kind, layer in self._shared_layers(target).items() if kind in kinds}
        seen = {kind: seen_keys(target, layer, texts, lengths) for kind, layer in layers.items()}
        shared = {kind: (self._near(each.keys), self._near(each.values)) for kind, each in seen.items()}
        states = self._near(target.collapse(torch.cat([each.context.pending[0] for each in requests])))[:, 0]
        rotary = {kind: self.model.rotary_emb(states, position_ids, kind) for kind in layers}
        is_chain = requests[0].sampler.tree_budget is None
        text_of = list(range(len(requests)))  # of each path

        def steps(k: int, tokens: torch.Tensor, rows: torch.Tensor) -> DraftStep:
            nonlocal states, text_of
            if k and not is_chain:
                text_of, states = [text_of[row] for row in rows.tolist()], states[rows.to(self.device)]
            padding = Padding([text_of.count(text) for text in range(len(requests))], self.device)
            masks = {kind: self._mask(each, padding.width) for kind, each in seen.items()}
            inputs = torch.cat([self._near(target.embed(tokens[None])[0]), states], dim=-1)
            hidden = padding.add(self.pre_projection(inputs))
            for kind, layer in zip(kinds, self.model.layers):
                hidden = layer(
                    hidden, shared_kv_states=shared, position_embeddings=rotary[kind], attention_mask=masks[kind],
                    position_ids=position_ids,
                )  # fmt: skip
            hidden = padding.remove(self.model.norm(hidden))
            states = self.post_projection(hidden)
            return DraftStep(self._logits(target, hidden))

        return [replace(tree, passes=tree.depths) for tree in draft_batch(requests, steps)]

    def _near(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, self.dtype)

    def _mask(self, seen: SeenKeys, queries: int) -> Any:
        if seen.mask is None:
            return None
        mask = seen.mask.to(self.device).expand(-1, -1, queries, -1)
        return attention_mask_for(self.model.config._attn_implementation, mask, self.dtype)

    def _logits(self, target: Target, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits after paths, `[paths, target.config.vocab_size]`, from their normed states `[paths, hidden]`.
        With centroids only the tokens of the best ones are scored. The others have minus infinity, and so have tokens
        that the target got later."""
        if self.masked_embedding is None:
            logits, count = self.lm_head(hidden), self.lm_head.out_features
            return nn.functional.pad(logits, (0, target.config.vocab_size - count), value=-torch.inf)
        clusters = self.masked_embedding
        best = clusters.centroids(hidden).topk(clusters.centroid_intermediate_top_k).indices
        ids = clusters.token_ordering.view(clusters.num_centroids, -1)[best].flatten(1)
        scores = torch.einsum("pd,ptd->pt", hidden, self.lm_head.weight[ids])
        return hidden.new_full((len(hidden), target.config.vocab_size), -torch.inf).scatter(1, ids, scores)


def check_can_build(config: PreTrainedConfig) -> None:
    """Raise a `ValueError` if the installed transformers builds no layers that all have keys of others, as 5.23."""
    try:
        getattr(config.get_text_config(), "kv_sharing_modes", None)
    except ValueError as error:
        raise ValueError(
            f"transformers {transformers.__version__} cannot build a {config.model_type}, no layer of which has keys "
            "of its own: expected 5.24 or later, or 5.22 or earlier. `pip install -U transformers`."
        ) from error


def _keys_of(config: PreTrainedConfig, layer: int) -> tuple[int, int]:
    """Return the number and the width of the key heads of a layer."""
    own = config.per_layer_config[layer]
    return own.num_key_value_heads, own.head_dim


class Gemma4AssistantDrafter(SharedKeysDrafter, of_gemma4.Gemma4AssistantForCausalLM):  # type: ignore[misc]
    """The assistant of a Gemma 4 (`Gemma4AssistantForCausalLM`)."""

    config: Gemma4AssistantConfig
    config_class = Gemma4AssistantConfig
    target_model_type = "gemma4"


class Gemma4UnifiedAssistantDrafter(SharedKeysDrafter, of_unified.Gemma4UnifiedAssistantForCausalLM):  # type: ignore[misc]
    """The assistant of a Gemma 4 Unified (`Gemma4UnifiedAssistantForCausalLM`)."""

    config: Gemma4UnifiedAssistantConfig
    config_class = Gemma4UnifiedAssistantConfig
    target_model_type = "gemma4_unified"
