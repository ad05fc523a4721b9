"""The base of drafters that read layers of their target: checks, vocabularies, and the logits of fresh weights."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import PurePath
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from ..targets.registry import target_of
from ..targets.target import Target, soft_capped
from ..trees.growth import DraftVocabulary
from .configuration import SPECIAL_TOKENS, DrafterConfig
from .parts.context import DraftContext
from .parts.reducers import HCGateReducer
from .saved import SavedDrafter
from .weights import check_draft_ids, named_dtype

logger = logging.getLogger(__name__)
Own = TypeVar("Own", bound="HiddenStateDrafter")

_STATES_AT_ONCE = 64  # whose logits of the whole vocabulary are in memory
_MOST_EXCESS, _HALVINGS = 1.0, 24  # nats above a uniform guess, and how often the norm is halved

# For each target, the other targets that were reported: a copy of a drafter is not reported again.
_said: WeakKeyDictionary[PreTrainedModel, set[str]] = WeakKeyDictionary()


class LastStateDrafter(SavedDrafter):
    """The base of drafters that read the target's state of the last accepted token alone."""

    reads_each_token = False

    def new_context(self) -> DraftContext:
        """Return an empty context for one text, in which its last accepted token stays pending."""
        return DraftContext(size=0)

    def extend(
        self,
        target: Target,
        context: DraftContext,
        residual: torch.Tensor,
        position_ids: torch.Tensor,
        *_: torch.Tensor,
    ) -> None:
        """Store the residual of the last accepted token, from which the target's LM head made the anchor."""
        if residual.shape[1]:
            # A copy: what is a part of a prompt's residual would keep all of it.
            context.pending = residual[:, -1:].clone(), position_ids[:, -1:]


class HiddenStateDrafter(SavedDrafter):
    """The base of block drafters and drafters of entries: it has `config.target_layer_ids`, `config.max_draft_tokens`
    and a vocabulary that may be truncated (`config.draft_vocab_size`, `draft_ids`)."""

    norm: Any
    lm_head: torch.nn.Linear
    draft_ids: torch.Tensor

    @classmethod
    def from_target(
        cls: type[Own], target: PreTrainedModel, *, dtype: torch.dtype | str | None = None, **config_fields: Any
    ) -> Own:
        """Build an untrained drafter that fits a target.

        Args:
            target: The model to draft for. It is read, not changed. Of one on the meta device the drafter is there
                too: sizes and counts without weights.
            dtype: Of the drafter's weights (a gate stays float32), or its name; the target's residual stream's by
                default.
            **config_fields: Any field of the drafter's configuration, overriding what the target suggests.

        Raises:
            ValueError: If `target` is no target, or there is no such field or dtype.
        """
        kind, dtype, seen = cast(type[DrafterConfig], cls.config_class), named_dtype(dtype), target_of(target)
        kind.check_fields(config_fields)
        own = seen.config
        width, head_dim = (
            config_fields.get(name, value)
            for name, value in (("hidden_size", own.hidden_size), ("head_dim", min(128, seen.head_dim)))
        )
        heads = max(1, width // head_dim)
        suggested: dict[str, object] = {
            "vocab_size": own.vocab_size,
            "hidden_size": width,
            "head_dim": head_dim,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 4 if heads % 4 == 0 else heads,
            "intermediate_size": 3 * width,
            "rms_norm_eps": seen.norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": seen.rope_theta},
            "max_position_embeddings": own.max_position_embeddings,
            # An LM head of its own has no cap.
            "final_logit_softcapping": None if config_fields.get("draft_vocab_size") else seen.soft_cap,
            "hc_eps": seen.hc_eps,
            "target_hidden_size": own.hidden_size,
            "target_hc_mult": seen.streams,
            "target_num_layers": own.num_hidden_layers,
            "target_model_type": own.model_type,
            "target_name_or_path": seen.model.config._name_or_path,
            "target_revision": getattr(seen.model.config, "_commit_hash", None) or "",
            **{name: getattr(own, name, None) for name in SPECIAL_TOKENS},
        }
        device = cls.device_for(seen)
        with torch.device("meta") if device.type == "meta" else nullcontext():
            drafter = cls(kind(**{**suggested, **config_fields}))
        config = drafter.config
        drafter.check_target(seen)
        for name, part in drafter.named_children():
            # Not all at once: the gate would be rounded on its way.
            part.to(device=device, dtype=torch.float32 if name == "hc_gate" else dtype or seen.dtype)
        if config.has_gate:
            cast(HCGateReducer, drafter.hc_gate).inherit(seen.gate())
        if config.draft_vocab_size:
            drafter.draft_only(seen, torch.arange(config.draft_vocab_size))
        if seen.input_embedding.weight is seen.output_head.weight and device.type != "meta":
            drafter._flatten_first_logits(seen)
        return drafter.eval()

    def _flatten_first_logits(self, target: Target) -> None:
        """Make a fresh drafter's logits nearly flat ([`_flatten_logits`]) if the LM head is the target's embedding."""

    @property
    def target_layer_ids(self) -> list[int]:  # type: ignore[override]
        """The layers whose residual streams the drafter reads."""
        return self.config.target_layer_ids or []

    @property
    def max_draft_tokens(self) -> int:  # type: ignore[override]
        """The most tokens, one after the other, that one round can draft."""
        return self.config.max_draft_tokens

    def check_target(self, target: Target) -> None:
        """Raise a `ValueError` that names both values if the drafter does not fit `target`; warn where only its name
        differs."""
        super().check_target(target)
        config = self.config
        cap = getattr(config, "final_logit_softcapping", None)
        if cap not in (None, target.soft_cap) and not config.draft_vocab_size:
            raise ValueError(
                f"The drafter was made for a target with `final_logit_softcapping` {cap}, but this target's is "
                f"{target.soft_cap}. Load the drafter's own target."
            )
        if (getattr(config, "mask_token_id", None) or 0) >= target.config.vocab_size:
            raise ValueError(
                f"The drafter's mask token {config.mask_token_id} is outside the target's vocabulary of "
                f"{target.config.vocab_size}."
            )
        names = config.target_name_or_path, target.model.config._name_or_path
        made_for, given = (PurePath(name).name for name in names)
        said = _said.setdefault(target.model, set())
        if made_for and given and made_for.lower() != given.lower() and made_for not in said:
            said.add(made_for)
            logger.warning(
                "The drafter was made for %r and is used with %r: the text stays the target's own, but fewer drafts "
                "may be accepted.",
                *names,
            )

    def target_sizes(self) -> dict[str, int]:
        sizes = {"hidden_size": self.config.target_hidden_size, "hc_mult": self.config.target_hc_mult}
        if getattr(self.config, "any_streams", False):
            del sizes["hc_mult"]
        return sizes

    def check_trainable(self, target: Target) -> None:
        """Raise a `ValueError` if the drafter cannot be trained for `target`. Trainers call it."""
        self.check_target(target)
        own, targets = self.config.vocab_size, target.config.vocab_size
        if own != targets:
            raise ValueError(
                f"The drafter's `vocab_size` is {own} and this target's {targets}, expected the same to train it: it "
                f"only drafts for one with more tokens. Make one with `{type(self).__name__}.from_target(target)`."
            )

        config = self.config
        if config.draft_vocab_size and config.final_logit_softcapping is not None:
            raise ValueError(
                f"The drafter's `final_logit_softcapping` is {config.final_logit_softcapping} and its "
                f"`draft_vocab_size` {config.draft_vocab_size}, expected no cap: training has no loss for an LM head "
                "of the drafter's own whose logits are capped. Train a new drafter."
            )

    def to_full_vocabulary(self, target: Target, logits: torch.Tensor) -> torch.Tensor:
        """Return logits of all of a target's tokens, `[..., target.config.vocab_size]`, from those of the tokens that
        can be drafted."""
        vocabulary = self.draft_vocabulary(target)
        return logits if vocabulary is None else vocabulary.spread(logits, -torch.inf)

    def draft_vocabulary(self, target: Target) -> DraftVocabulary | None:
        """Return the tokens of a target that can be drafted; `None` if all can."""
        own, targets = self.config.vocab_size, target.config.vocab_size
        if self.config.draft_vocab_size:
            return DraftVocabulary(self.draft_ids, targets)
        return None if own == targets else DraftVocabulary(torch.arange(own, device=self.device), targets)

    @property
    def head_table(self) -> torch.Tensor | None:
        """The table with which its sequential head scores tokens, `[config.draft_vocab_size or config.vocab_size,
        config.head_rank]`; `None` without one."""
        return None

    @property
    def vocabulary_table(self) -> torch.Tensor | None:
        """The table with which it scores tokens itself, beside the target's LM head or instead of it: its head's, or
        its own LM head's weight `[config.draft_vocab_size, ...]` and its head's side by side."""
        table = self.head_table
        if not self.config.draft_vocab_size:
            return table
        own = self.lm_head.weight
        return own if table is None else torch.cat([own, table], dim=-1)

    def own_head(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits of its own LM head, `[..., config.draft_vocab_size]`, from states that it reads."""
        return soft_capped(self.lm_head(states), self.config.final_logit_softcapping)

    @torch.no_grad()
    def draft_only(self, target: Target, ids: torch.Tensor) -> None:
        """Make it draft these tokens only. Its LM head gets the target's scores of them, if the target's LM head reads
        states as wide as the drafter's.

        Args:
            target: Its target.
            ids: The tokens, `[config.draft_vocab_size]`, all different.

        Raises:
            ValueError: If they are not that many different tokens of the target's vocabulary.
        """
        config, weight = self.config, self.lm_head.weight
        check_draft_ids(ids, config.draft_vocab_size, config.vocab_size, "the drafter", then="")
        self.draft_ids.copy_(ids)
        if weight.shape[1] == config.target_hidden_size and not weight.is_meta:
            weight.copy_(self._target_rows(target, ids))

    @torch.no_grad()
    def draft_others(self, target: Target, ids: torch.Tensor) -> None:
        """Make a trained drafter draft these tokens, as many as there are. Its scores of those that it has drafted
        before stay. Rows of its LM head for the others are the target's, turned as training has turned those that it
        had at first: by the matrix that brings the target's rows nearest to its own (least squares).

        Args:
            target: Its target.
            ids: The tokens, all different.

        Raises:
            ValueError: If it cannot ([`check_can_draft_others`]), or if these are not different tokens of the target's
                vocabulary.
        """
        self.check_can_draft_others()
        config, known, rows = self.config, self.draft_ids, self.lm_head.weight
        check_draft_ids(ids, len(ids), config.vocab_size, "the drafter", then="")
        ids = ids.to(known.device)
        # In float64, which not every accelerator has.
        at_first, of_others = (self._target_rows(target, tokens).cpu().double() for tokens in (known, ids))
        made = (of_others @ (torch.linalg.pinv(at_first) @ rows.cpu().double())).to(rows)
        place = torch.full((config.vocab_size,), -1, device=known.device)
        place[known] = torch.arange(len(known), device=known.device)
        stays = place[ids] >= 0
        made[stays] = rows[place[ids][stays]]
        config.draft_vocab_size, self.draft_ids = len(ids), ids.clone()
        self.lm_head = torch.nn.Linear(rows.shape[1], len(ids), bias=False, device=rows.device, dtype=rows.dtype)
        self.lm_head.weight.copy_(made)

    def check_can_draft_others(self) -> None:
        """Raise a `ValueError` if its draft vocabulary cannot change: it has none, a head with a table for its own
        tokens, or an LM head for other states than the target's."""
        config, why = self.config, ""
        if not config.draft_vocab_size:
            why = "drafts all tokens by the target's LM head"
        elif self.head_table is not None:
            why = "has a head with a table for the tokens that it drafts"
        elif self.lm_head.in_features != config.target_hidden_size:
            why = f"has an LM head for states of width {self.lm_head.in_features}, not {config.target_hidden_size}"
        if why:
            raise ValueError(
                f"This {type(self).__name__} {why}: expected a drafter with an LM head like the target's over a draft "
                "vocabulary, if that is to change. Train a new drafter, or leave `draft_vocab_size` out."
            )

    def _target_rows(self, target: Target, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of the target's LM head for some tokens, `[tokens, config.target_hidden_size]`, also where
        they cannot be read: as its scores of unit states."""
        weight = self.lm_head.weight
        states, rows = torch.eye(weight.shape[1], device=weight.device), []
        bias = target.logits(torch.zeros_like(states[:1]))
        for part in states.split(_STATES_AT_ONCE):
            logits = target.logits(part) - bias
            rows.append(logits[:, ids.to(logits.device)].to(weight))
        return torch.cat(rows).T

    @torch.no_grad()
    def _flatten_logits(self, logits: Callable[[], torch.Tensor]) -> None:
        """Scale down a fresh drafter's last norm until its logits are nearly flat: the mean cost of a token is then at
        most about a nat above that of a uniform guess. An LM head that is the target's embedding has large rows, whose
        logits are far from flat by chance, and training would begin with unlearning them.

        Args:
            logits: Computes the drafter's logits of some states, `[..., tokens]`, each time that it is called.
        """
        for _ in range(_HALVINGS):
            guesses = logits().float()
            known = guesses.isfinite()
            cost = guesses.logsumexp(-1) - guesses.where(known, 0.0).sum(-1) / known.sum(-1)  # of any token, in nats
            if not bool((cost - known.sum(-1).log()).mean() > _MOST_EXCESS):
                break
            self.norm.weight.mul_(0.5)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the layers; a gate is always float32."""
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device of the layers."""
        return self.norm.weight.device

    @staticmethod
    def device_for(target: Target) -> torch.device:
        """Return the device of a new drafter: that of the target's LM head, or the CPU where the LM head is
        offloaded."""
        head = target.output_head
        is_offloaded = head.weight.is_meta and hasattr(head, "_hf_hook")
        return torch.device("cpu") if is_offloaded else head.weight.device
