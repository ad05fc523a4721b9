"""A HyperDFlash drafter as a model of SGLang: its DFlash layers, with this package's reducers and heads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.models.dflash import DFlashDraftModel
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from ...drafters.parts.heads import HEADS, ConfidenceHead
from ...drafters.parts.reducers import REDUCERS
from ..served_config import check_served_pair
from .config import SGLangConfig
from .last_layer import hand_out_last_layer
from .selector import HeadSelector

# At this call both models are loaded, and no memory has been sized or captured yet.
BOTH_LOADED = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2.alloc_memory_pool"


class ServedDrafter(DFlashDraftModel):
    """SGLang's DFlash drafter, with one of our reducers for its context and our sequential heads for its drafts."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config=config, quant_config=quant_config, prefix=prefix)
        self.reducer = REDUCERS[config.reducer]
        del self.fc
        for name, module in self.reducer.modules(config).items():
            self.add_module(name, module)
        self.lm_head: Any = None  # SGLang puts the target's here for a selector
        head = HEADS.get(config.sequential_head)
        if head is not None or config.draft_vocab_size:
            self.candidate_selector = HeadSelector(config, head)
        self.requires_grad_(False)
        for parameter in self.parameters():
            parameter.fill_(torch.nan)  # so that a parameter that is not loaded is noticed
        HookRegistry.register(BOTH_LOADED, introduce, HookType.BEFORE)
        HookRegistry.apply_hooks()

    def meet(self, target: torch.nn.Module, target_config: Any) -> None:
        """Set what the drafter needs of its target; raise a `ValueError` if SGLang cannot run the two as it was
        started. `target_config` is SGLang's `ModelConfig`."""
        text, longest = target_config.hf_text_config, target_config.context_len
        check_served_pair(SGLangConfig, self.config, text, self.block_size - 1, longest)
        if {-1, text.num_hidden_layers - 1} & {*self.config.target_layer_ids}:
            hand_out_last_layer(target, len(self.config.target_layer_ids))
        if self.candidate_selector is not None:
            self.candidate_selector.meet(target, text)

    # Conditioning

    def project_target_hidden(self, target_hidden: torch.Tensor) -> torch.Tensor:
        """Reduce the concatenated states of each token, `[tokens, config.num_streams * config.target_hidden_size]`, to
        the normed conditioning feature `[tokens, config.hidden_size]`."""
        read, width = len(self.config.target_layer_ids), self.config.target_hidden_size
        if target_hidden.shape[-1] != read * width:
            raise ValueError(
                f"The drafter reads {read} layers of {width}, but the target hands out {target_hidden.shape[-1]} "
                "numbers of each token: serve the drafter's own target."
            )
        residual = target_hidden.unflatten(-1, (read, width)).unsqueeze(0)
        return self.hidden_norm(self.reducer.reduce(self, residual, self.norm.weight.dtype).squeeze(0))

    # Blocks

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        input_embeds: torch.Tensor | None = None,
        **kwargs: object,
    ) -> Any:
        """Compute the states of blocks that are laid end to end, `[blocks * config.block_size]`."""
        if input_embeds is not None:  # SGLang passes them in bfloat16, whatever dtype the models have
            input_embeds = input_embeds.to(self.norm.weight.dtype)
        return super().forward(input_ids, positions, forward_batch, input_embeds=input_embeds, **kwargs)

    # Drafts, if the drafter does not choose the best token of each position by the target's LM head as SGLang does

    def compute_candidates(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate tokens and logits `[drafts, 1]` for the drafts of states `[drafts, config.hidden_size]`."""
        return hidden.new_zeros(len(hidden), 1, dtype=torch.long), hidden.new_zeros(len(hidden), 1)

    # Weights

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the weights of a drafter's folder, without a confidence head: SGLang verifies every draft."""
        selected, engine_weights = {}, []
        for name, weight in weights:
            if self.candidate_selector is not None and self.candidate_selector.owns(name):
                selected[name] = weight
            elif name.partition(".")[0] != ConfidenceHead.key:
                engine_weights.append((name, weight))
        super().load_weights(engine_weights)
        if self.candidate_selector is not None:
            self.candidate_selector.load(selected)
        missing = [name for name, parameter in self.named_parameters() if parameter.isnan().any()]
        if missing:
            raise RuntimeError(
                f"The drafter's folder has no numbers for {', '.join(missing)}: expected every weight of its "
                "config.json. Save it again with `save_pretrained`."
            )


def introduce(worker: Any, *_: object, **__: object) -> None:
    """Pass the target to a drafter of ours, before SGLang's worker allocates memory for both models."""
    if isinstance(worker.draft_model, ServedDrafter):
        runner = worker.target_worker.model_runner
        worker.draft_model.meet(runner.model, runner.model_config)
