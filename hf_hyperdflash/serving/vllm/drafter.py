"""A HyperDFlash drafter as a model of vLLM: its DFlash Qwen3 layers, with this package's reducers and heads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.model_loader.utils import get_model_architecture
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM
from vllm.platforms import current_platform

from ...drafters.parts.heads import HEADS, ConfidenceHead, SequentialHead
from ...drafters.parts.reducers import REDUCERS
from ..ordered_drafts import ordered_logits
from .config import check_one_number_of_drafts, check_served_pair, reads_paths
from .plugin import PATHS


def embedding_scale(target: Any) -> float:
    """What a target of vLLM's own multiplies its embeddings with, after the table that it shares with drafters.

    Args:
        target: The configuration of the target's text model.
    """
    if target.model_type.startswith("gemma"):
        return target.hidden_size**0.5
    return getattr(target, "embedding_multiplier", 1.0)


class ServedDrafter(DFlashQwen3ForCausalLM):
    """vLLM's DFlash drafter, whose context is made by one of our reducers and whose drafts may know each other.

    Raises:
        ValueError: If vLLM cannot run it with its target as it was started.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        speculative, target = vllm_config.speculative_config, vllm_config.model_config
        config, text = speculative.draft_model_config.hf_config, target.hf_text_config
        check_served_pair(config, text, speculative.num_speculative_tokens, target.max_model_len)
        check_one_number_of_drafts(config, getattr(speculative, "num_speculative_tokens_per_batch_size", None))
        kind, _ = get_model_architecture(target)
        if not supports_eagle3(kind):
            raise ValueError(
                f"vLLM's {kind.__name__} does not hand out its layers' states, which drafters read: start it with "
                "`--model-impl transformers`, whose models do, or serve without a drafter."
            )
        if reads_paths(config) and not hasattr(kind, "hands_out_paths"):
            raise ValueError(
                f"vLLM's {kind.__name__} hands out the mean of its residual paths, but the drafter reads each: start "
                f"vLLM with the environment variable {PATHS}=1."
            )
        config.draft_vocab_size = config.draft_vocab_size or config.vocab_size
        # vLLM has RoPE ready for this many positions, and the drafter's are the target's.
        config.max_position_embeddings = max(config.max_position_embeddings, target.max_model_len)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.drafts = speculative.num_speculative_tokens
        self.embedding_scale = embedding_scale(text)
        self.logits_processor = LogitsProcessor(
            config.draft_vocab_size,
            scale=1 / getattr(text, "logits_scaling", 1.0),
            soft_cap=getattr(text, "final_logit_softcapping", None),
        )
        self.reducer, head = REDUCERS[config.reducer], HEADS.get(config.sequential_head)
        self.own = self.reducer.modules(config) | ({} if head is None else {head.key: head(config)})
        del self.model.fc
        for name, module in self.own.items():
            self.model.add_module(name, module)
        self.head: SequentialHead | None = None if head is None else getattr(self.model, head.key)
        self._block_ids: torch.Tensor | None = None
        if current_platform.is_cpu():
            # There vLLM 0.32's kernel for all layers' keys at once takes the first layer's weights for every layer.
            self.model._normalize_context_k = self._keys_layer_by_layer

    # What the blocks are conditioned on

    def combine_hidden_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The layers' states of each token, one after the other, `[tokens, config.num_paths *
        config.target_hidden_size]`, to the conditioning feature `[tokens, config.hidden_size]`, before its norm."""
        config = self.config
        residual = hidden_states.unflatten(-1, (-1, config.target_hidden_size)).unsqueeze(0)
        if config.reducer == "stream_mean":  # which is what vLLM hands out: a mean of equal paths is each of them
            residual = residual.repeat_interleave(config.target_hc_mult, dim=2)
        expected = len(config.target_layer_ids) * config.target_hc_mult
        if residual.shape[2] != expected:
            raise ValueError(
                f"The drafter reads {expected} residual paths, but the target hands out {residual.shape[2]}: serve "
                "the drafter's own target, with the layers that the drafter's config.json names."
            )
        return self.reducer.reduce(self.model, residual, self.model.norm.weight.dtype).squeeze(0)

    def _keys_layer_by_layer(self, keys: torch.Tensor) -> torch.Tensor:
        """The context's keys `[layers, tokens, config.num_key_value_heads, config.head_dim]`, normed."""
        return torch.stack([layer.self_attn.k_norm(own) for layer, own in zip(self.model.layers, keys)])

    # Blocks

    def embed_input_ids(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """The target's embeddings of tokens, as its first layer reads them."""
        embeds, is_scaled = self.model.embed_input_ids(input_ids), hasattr(self.model.embed_tokens, "embed_scale")
        return embeds if self.embedding_scale == 1 or is_scaled else embeds * self.embedding_scale

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, inputs_embeds: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Blocks one after the other, `[blocks * (drafts + 1)]`, to their states; with padding at the end."""
        self._block_ids = input_ids  # a view of vLLM's buffer: what a head reads of it is still there
        if inputs_embeds is None and self.embedding_scale != 1:
            inputs_embeds = self.embed_input_ids(input_ids)
        return self.model(input_ids, positions, inputs_embeds)

    # Drafts

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """States of draft positions `[blocks * drafts, config.hidden_size]`, block after block, to logits over the
        target's vocabulary."""
        blocks = len(hidden_states) // self.drafts
        if self.head is None or self._block_ids is None or len(hidden_states) != blocks * self.drafts:
            return self._of_vocabulary(self._drafted(hidden_states))
        anchors = self._block_ids[: blocks * (self.drafts + 1) : self.drafts + 1].long()
        states = hidden_states.unflatten(0, (blocks, self.drafts))
        count = self.config.head_candidates or 0
        logits = ordered_logits(self.head, states, anchors, self._drafted, self.embed_input_ids, self._token_of, count)
        return self._of_vocabulary(logits.flatten(0, 1))

    def get_top_tokens(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The best token of each draft position, for vLLM's `use_local_argmax_reduction`."""
        return self.compute_logits(hidden_states).argmax(-1)

    def _drafted(self, states: torch.Tensor) -> torch.Tensor:
        """Logits over the tokens that can be drafted, `[..., config.draft_vocab_size]`."""
        flat = self.logits_processor(self.lm_head, states.flatten(0, -2))
        tokens = self._token_of(torch.arange(flat.shape[-1], device=flat.device))
        flat = flat.masked_fill(tokens == self.config.mask_token_id, -torch.inf)  # which is never drafted
        return flat.unflatten(0, states.shape[:-1])

    def _token_of(self, index: torch.Tensor) -> torch.Tensor:
        return index if self.draft_id_to_target_id is None else index + self.draft_id_to_target_id[index]

    def _of_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        if self.draft_id_to_target_id is None:
            return logits
        ids = self._token_of(torch.arange(logits.shape[-1], device=logits.device))
        full = logits.new_full((len(logits), self.config.vocab_size), -torch.inf)
        return full.index_copy(-1, ids, logits)

    # Weights

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As a drafter's folder has them. A confidence head is left out: vLLM verifies every draft.

        Raises:
            RuntimeError: If the reducer's or the head's are not all there, or others.
        """
        # Not by vLLM's loader, which takes any `up_proj` for a part of its MLP.
        ours: dict[str, dict[str, torch.Tensor]] = {name: {} for name in self.own}
        theirs = []
        for name, weight in weights:
            module, _, rest = name.partition(".")
            if module in ours:
                ours[module][rest] = weight
            elif module == "draft_ids":  # vLLM's are offsets
                theirs.append(("d2t", weight - torch.arange(len(weight))))
            elif module != ConfidenceHead.key:
                theirs.append((name, weight))
        for name, state in ours.items():
            getattr(self.model, name).load_state_dict(state)
        super().load_weights(theirs)
