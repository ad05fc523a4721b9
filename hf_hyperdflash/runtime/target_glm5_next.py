"""GLM-5 Next, whose `hc_head` takes the mean of the residual paths."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from .target_hyper_connections import HyperConnected


class Glm5Next(HyperConnected):
    """A target whose `hc_head` has no parameters."""

    title = "GLM-5 Next (GLM-5.3-Flash)"
    forked_types = frozenset({"glm5_next_text"})

    @classmethod
    def fits(cls, target: PreTrainedModel, trunk: Any) -> bool:
        return super().fits(target, trunk) and not hasattr(trunk.hc_head, "hc_fn")

    def gate(self) -> dict[str, torch.Tensor]:
        """The gate whose collapse is the mean of the paths, whatever they hold."""
        return {
            "hc_fn": torch.zeros(self.paths, self.paths * self.config.hidden_size),
            "hc_base": torch.tensor(1 / self.paths - self.config.hc_eps).logit().repeat(self.paths),
            "hc_scale": torch.ones(1),
        }
