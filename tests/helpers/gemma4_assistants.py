"""Assistants of small Gemma 4s, and what they attend over: the keys of texts in caches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_hyperdflash.drafters.gemma4 import Gemma4AssistantDrafter, Gemma4UnifiedAssistantDrafter
from hf_hyperdflash.targets.caches.round_cache import RoundCache
from hf_hyperdflash.targets.caches.seen_keys import CachedText
from hf_hyperdflash.targets.registry import target_of

KINDS = {"gemma4_text": Gemma4AssistantDrafter, "gemma4_unified_text": Gemma4UnifiedAssistantDrafter}
LONGEST = 512


def can_be_built() -> bool:
    """Whether the installed transformers builds layers that all have keys of others: 5.23 does not."""
    config = CONFIG_MAPPING["gemma4_text"](num_hidden_layers=1, num_kv_shared_layers=1, layer_types=["full_attention"])
    try:
        return getattr(config, "kv_sharing_modes", True) is not None
    except ValueError:
        return False


def assistant_config(target: PreTrainedModel, clusters: tuple[int, int] | None = (8, 3), **fields: Any) -> Any:
    own = target.config.get_text_config()
    sliding, full = (own.per_layer_config[own.layer_types.index(f"{kind}_attention")] for kind in ("sliding", "full"))
    of_text = dict(
        vocab_size=own.vocab_size, num_attention_heads=own.num_attention_heads, sliding_window=own.sliding_window,
        num_key_value_heads=sliding.num_key_value_heads, head_dim=sliding.head_dim, global_head_dim=full.head_dim,
        attention_k_eq_v=own.attention_k_eq_v, num_global_key_value_heads=full.num_key_value_heads,
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, initializer_range=0.3, pad_token_id=0,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"], max_position_embeddings=1024,
    )  # fmt: skip
    if own.model_type == "gemma4_text":
        of_text |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    ordered = dict(zip(("num_centroids", "centroid_intermediate_top_k"), clusters or ()))
    return CONFIG_MAPPING[own.model_type.replace("_text", "_assistant")](
        text_config=CONFIG_MAPPING[own.model_type](**of_text | fields), backbone_hidden_size=own.hidden_size,
        use_ordered_embeddings=bool(clusters), **ordered,
    )  # fmt: skip


@torch.no_grad()
def assistant(target: PreTrainedModel, clusters: tuple[int, int] | None = (8, 3), **fields: Any) -> Any:
    """A random one for this target. Of so many clusters of tokens it scores some; with `None` it scores all tokens."""
    torch.manual_seed(2)
    config = assistant_config(target, clusters, **fields)
    drafter = KINDS[target.config.get_text_config().model_type](config).eval()
    for projection in (drafter.pre_projection, drafter.post_projection):
        projection.weight.normal_(std=0.2)
    if clusters:
        drafter.masked_embedding.centroids.weight.normal_(std=0.5)
        drafter.masked_embedding.token_ordering.copy_(torch.randperm(drafter.vocab_size))
    return drafter


def stock(drafter: Any, folder: Path) -> PreTrainedModel:
    """The same as transformers' own class."""
    drafter.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class RandomKeys:
    """The keys and values of texts, random and always the same, where targets have them."""

    def __init__(self, target: PreTrainedModel, texts: int) -> None:
        self.target, self.config = target_of(target), target.config.get_text_config()
        layers = self.config.num_hidden_layers - (self.config.num_kv_shared_layers or 0)
        shapes = [(own.num_key_value_heads, LONGEST, own.head_dim) for own in map(self._sizes, range(layers))]
        self._states = [[torch.randn(2, *shape) for shape in shapes] for _ in range(texts)]

    def _sizes(self, layer: int) -> Any:
        return self.config.per_layer_config[layer]

    def together(self, rows: Sequence[int], lengths: Sequence[int]) -> list[CachedText]:
        """Of texts of so many tokens, in one cache of rounds."""
        windows = self.target.windows[: len(self._states[0])]
        cache = RoundCache(self._stock(rows, lengths), windows, lengths, width=9)
        return [CachedText(cache, row) for row in range(len(rows))]

    def alone(self, row: int, length: int) -> CachedText:
        """Of one, in transformers' own cache."""
        return CachedText(self._stock([row], [length]))

    def _stock(self, rows: Sequence[int], lengths: Sequence[int]) -> DynamicCache:
        cache, most = DynamicCache(config=self.config), max(lengths)
        for layer in range(len(self._states[0])):
            states = torch.zeros(2, len(rows), *self._states[0][layer][0, :, :most].shape)
            for place, (row, length) in enumerate(zip(rows, lengths)):
                states[:, place, :, most - length :] = self._states[row][layer][:, :, :length]
            cache.update(states[0], states[1], layer)
        return cache
