"""A HyperDFlash drafter as a model of vLLM: its DFlash Qwen3 layers, with this package's reducers and heads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.model_loader.utils import get_model_architecture
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM
from vllm.platforms import current_platform

from ...drafters.parts.heads import HEADS, ConfidenceHead, SequentialHead
from ...drafters.parts.reducers import REDUCERS
from ..ordered_drafts import ordered_logits
from ..served_config import check_served_pair
from .config import VLLMConfig, check_one_number_of_drafts, reads_streams
from .plugin import STREAMS_VARIABLE


def embedding_scale(target: PreTrainedConfig) -> float:
    """Return the factor that a target of vLLM applies to embeddings, after the table that it shares with drafters."""
    if target.model_type.startswith("gemma"):
        return target.hidden_size**0.5
    return getattr(target, "embedding_multiplier", 1.0)


class ServedDrafter(DFlashQwen3ForCausalLM):
    """vLLM's DFlash drafter, with one of our reducers for its context and our sequential heads for its drafts."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        speculative, target = vllm_config.speculative_config, vllm_config.model_config
        config, text = speculative.draft_model_config.hf_config, target.hf_text_config
        check_served_pair(VLLMConfig, config, text, speculative.num_speculative_tokens, target.max_model_len)
        check_one_number_of_drafts(config, getattr(speculative, "num_speculative_tokens_per_batch_size", None))
        kind, _ = get_model_architecture(target)
        if not supports_eagle3(kind):
            raise ValueError(
                f"vLLM's {kind.__name__} does not hand out its layers' states, which drafters read: start it with "
                "`--model-impl transformers`, whose models do, or serve without a drafter."
            )
        if reads_streams(config) and not hasattr(kind, "hands_out_streams"):
            raise ValueError(
                f"vLLM's {kind.__name__} hands out the mean of its residual streams, but the drafter reads each: "
                f"start vLLM with the environment variable {STREAMS_VARIABLE}=1."
            )
        has_own_head = bool(config.draft_vocab_size)
        config.draft_vocab_size = config.draft_vocab_size or config.vocab_size
        # vLLM computes RoPE for this many positions; the drafter has those of the target.
        config.max_position_embeddings = max(config.max_position_embeddings, target.max_model_len)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.drafts = speculative.num_speculative_tokens
        self.embedding_scale = embedding_scale(text)
        if has_own_head:
            scale, soft_cap = 1.0, config.final_logit_softcapping
        else:  # the target's, and what it does to its logits
            scale = 1 / getattr(text, "logits_scaling", 1.0)
            soft_cap = getattr(text, "final_logit_softcapping", None)
        self.logits_processor = LogitsProcessor(config.draft_vocab_size, scale=scale, soft_cap=soft_cap)
        self.reducer, head = REDUCERS[config.reducer], HEADS.get(config.sequential_head)
        self.own_modules = self.reducer.modules(config) | ({} if head is None else {head.key: head(config)})
        del self.model.fc
        for name, module in self.own_modules.items():
            self.model.add_module(name, module)
        self.head: SequentialHead | None = None if head is None else getattr(self.model, head.key)
        self._block_ids: torch.Tensor | None = None
        if current_platform.is_cpu():
            # On a CPU vLLM 0.32's kernel for the keys of all layers uses the first layer's weights for every layer.
            self.model._normalize_context_k = self._keys_layer_by_layer

    # Conditioning

    def combine_hidden_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Reduce the concatenated states of each token, `[tokens, config.num_streams * config.target_hidden_size]`, to
        the conditioning feature `[tokens, config.hidden_size]`, before its norm."""
        config = self.config
        residual = hidden_states.unflatten(-1, (-1, config.target_hidden_size)).unsqueeze(0)
        if config.reducer == "stream_mean":  # vLLM gives the mean already; the mean of its copies is the same
            residual = residual.repeat_interleave(config.target_hc_mult, dim=2)
        expected = len(config.target_layer_ids) * config.target_hc_mult
        if residual.shape[2] != expected:
            raise ValueError(
                f"The drafter reads {expected} residual streams, but the target hands out {residual.shape[2]}: serve "
                "the drafter's own target, with the layers that the drafter's config.json names."
            )
        return self.reducer.reduce(self.model, residual, self.model.norm.weight.dtype).squeeze(0)

    def _keys_layer_by_layer(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the normed keys of the context, `[layers, tokens, config.num_key_value_heads, config.head_dim]`."""
        return torch.stack([layer.self_attn.k_norm(layer_keys) for layer, layer_keys in zip(self.model.layers, keys)])

    # Blocks

    def embed_input_ids(self, input_ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """Return the target's embeddings of tokens, as its first layer reads them."""
        embeds, is_scaled = self.model.embed_input_ids(input_ids), hasattr(self.model.embed_tokens, "embed_scale")
        return embeds if self.embedding_scale == 1 or is_scaled else embeds * self.embedding_scale

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, inputs_embeds: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the states of blocks that are laid end to end, `[blocks * (drafts + 1)]`; padding comes last."""
        self._block_ids = input_ids  # a view of vLLM's buffer, which is unchanged when a head reads it
        if inputs_embeds is None and self.embedding_scale != 1:
            inputs_embeds = self.embed_input_ids(input_ids)
        return self.model(input_ids, positions, inputs_embeds)

    # Drafts

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute logits over the target's vocabulary from states of draft positions, `[blocks * drafts,
        config.hidden_size]`."""
        blocks = len(hidden_states) // self.drafts
        if self.head is None or self._block_ids is None or len(hidden_states) != blocks * self.drafts:
            return self._to_full_vocabulary(self._drafted(hidden_states))
        anchors = self._block_ids[: blocks * (self.drafts + 1) : self.drafts + 1].long()
        states = hidden_states.unflatten(0, (blocks, self.drafts))
        count = self.config.head_candidates or 0
        logits = ordered_logits(
            self.head, states, anchors, self._drafted, self.embed_input_ids, self._to_token_ids, count
        )
        return self._to_full_vocabulary(logits.flatten(0, 1))

    def get_top_tokens(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the best token of each draft position, for vLLM's `use_local_argmax_reduction`."""
        return self.compute_logits(hidden_states).argmax(-1)

    def _drafted(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits over the tokens that can be drafted, `[..., config.draft_vocab_size]`."""
        flat = self.logits_processor(self.lm_head, states.flatten(0, -2))
        tokens = self._to_token_ids(torch.arange(flat.shape[-1], device=flat.device))
        flat = flat.masked_fill(tokens == self.config.mask_token_id, -torch.inf)  # never drafted
        return flat.unflatten(0, states.shape[:-1])

    def _to_token_ids(self, index: torch.Tensor) -> torch.Tensor:
        return index if self.draft_id_to_target_id is None else index + self.draft_id_to_target_id[index]

    def _to_full_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        if self.draft_id_to_target_id is None:
            return logits
        ids = self._to_token_ids(torch.arange(logits.shape[-1], device=logits.device))
        full = logits.new_full((len(logits), self.config.vocab_size), -torch.inf)
        return full.index_copy(-1, ids, logits)

    # Weights

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the weights of a drafter's folder, without a confidence head: vLLM verifies every draft."""
        # vLLM's loader would use any `up_proj` as a part of its MLP.
        ours: dict[str, dict[str, torch.Tensor]] = {name: {} for name in self.own_modules}
        engine_weights = []
        for name, weight in weights:
            module, _, parameter = name.partition(".")
            if module in ours:
                ours[module][parameter] = weight
            elif module == "draft_ids":  # vLLM's are offsets
                engine_weights.append(("d2t", weight - torch.arange(len(weight))))
            elif module != ConfidenceHead.key:
                engine_weights.append((name, weight))
        for name, state in ours.items():
            getattr(self.model, name).load_state_dict(state)
        super().load_weights(engine_weights)
