"""Arguments of the trainer: transformers' own and what training a drafter adds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from transformers import TrainingArguments
from transformers.integrations import get_available_reporting_integrations

from .flags import LOSS_WEIGHTS, RECIPES, TrainingFlags, check_fields

MAX_LENGTH = 4096  # the default for targets with at least as many positions
_WEEK = 7 * 24 * 3600  # seconds
_UNLISTED = ("azure_ml", "flyte")  # reporters that transformers may not list as installed


@dataclass
class HyperDFlashTrainingArguments(TrainingFlags, TrainingArguments):
    r"""Arguments of [`HyperDFlashTrainer`]: all of [`~transformers.TrainingArguments`] and the following.

    Args:
        recipe: The entry of [`RECIPES`] that sets the fields of the loss: `"hyperdflash"`, the paper's, cross-entropy
            and KL; `"dspark"`, DSpark's, total variation with a little cross-entropy; `"ours"`, which measured best;
            `"eagle3"` and `"specblock"`, these papers'. It sets those of the fields up to `valid_prefix` that are left
            out, and they have its values afterwards.
        ce_weight: Weight of the cross-entropy, 0 or more.
        kl_weight: Weight alpha of the distillation term (Eq. 3), 0 or more (the paper: 0.1 to 0.2).
        kl_positions: P, the number of first draft positions that are distilled (Eq. 2); `None` afterwards if the
            recipe distills all.
        tv_weight: Weight of the total variation between draft and target at every draft position, 0 or more. It is
            the probability that speculative sampling at temperature 1 rejects a draft, and half the L1 distance.
        confidence_weight: Weight of the confidence head's binary cross-entropy, 0 or more. It trains only that head,
            and a recipe's weight has no effect on a drafter without it.
        blind_weight: Weight of the cross-entropy of the block's own logits, 0 or more. They choose a head's candidates
            (`head_candidates`), and no other term trains them. It has no effect without such a head.
        loss_decay: All terms but the KL weight draft position k with exp(-(k - 1) / loss_decay). `math.inf` gives
            equal weights, and is `None` afterwards. EAGLE-3 and SpecBlock drafters weight the KL so, too, and start
            again with each block.
        rank_weight: Weight of a rank head's loss, 0 or more. It trains only that head.
        valid_prefix: Whether a draft counts only if the drafts before it in its block equal the text (SpecBlock). In
            generation the others would not be reached.
        kl_temperature: Temperature of teacher and student (Eq. 2).
        kl_teacher: How the teacher collapses the residual streams: `"hc_head"`, the target's own gated collapse and so
            its exact next-token distribution, or `"mean_pool"`, the mean of the streams as in the paper (section 2.3).
        num_anchors: Most blocks per row and step, drawn anew for every step.
        loss_chunk_size: Draft positions whose logits are in memory at once.
        feature_source: `"online"` runs the target in every step; `"cached"` runs it once and reads `feature_cache_dir`
            afterwards.
        feature_cache_dir: The folder of `"cached"` residuals, which all processes see; `<output_dir>/_features` by
            default. A complete cache of the same data and target is used as it is.
        feature_dtype: Their number format: `"bfloat16"`, `"float32"`, or `"float8"` with a scale per token and stream.
        feature_retention: `None` writes a cache that is not there yet before training. `"keep"` and `"delete"` train
            on a folder that `hf-hyperdflash features` fills meanwhile, row by row in its order in the first epoch, and
            wait for it. With `"delete"`, which is for one epoch, parts that have been trained on are deleted once a
            checkpoint is past them.
        feature_gigabytes: What the folder may hold with `"delete"`: those who fill it wait, and checkpoints are
            written as often as that needs. No limit by default.
        max_length: Longest row in tokens, at most the target's number of positions; that number, or 4096 if it is
            larger, by default. Longer conversations are cut such that assistant text stays.
        packing: Whether to put several conversations into one row. The target still runs each alone, and blocks see
            only their own conversation.

    Defaults that differ from transformers': `learning_rate` is 8e-4 (the paper's stage 1); `remove_unused_columns`,
    `ddp_find_unused_parameters` and accelerate's `dispatch_batches` are off; with `"cached"` features `ddp_timeout` is
    a week, because a process may wait so long for those who make them.

    Raises:
        ValueError: If a field is out of range, or a reporter is not installed.
    """

    def __post_init__(self) -> None:
        if self.feature_source == "cached" and self.ddp_timeout == TrainingArguments.ddp_timeout:
            self.ddp_timeout = _WEEK
        super().__post_init__()
        if self.ddp_find_unused_parameters is None:
            self.ddp_find_unused_parameters = False  # a step uses every parameter of a drafter
        if self.device.type == "cpu":
            self.dataloader_pin_memory = False  # useless on a CPU, with a warning of PyTorch at every epoch
        recipe = RECIPES.get(self.recipe, {})
        self.set_by_user = {name for name in recipe if getattr(self, name) is not None}
        for name in recipe.keys() - self.set_by_user:
            setattr(self, name, recipe[name])
        if self.loss_decay == math.inf:
            self.loss_decay = None
        accelerator: Any = self.accelerator_config  # an AcceleratorConfig by now
        if accelerator.dispatch_batches is None:
            accelerator.dispatch_batches = False  # rows of a streamed dataset differ in length
        check_fields(self)
        if self.seed >= 2**32:
            raise ValueError(f"`seed` is {self.seed}, expected a whole number below 2**32.")
        if not any(getattr(self, name) for name in LOSS_WEIGHTS[:3]):  # the others train parts of a drafter alone
            raise ValueError("`ce_weight`, `kl_weight` and `tv_weight` are all 0: expected one to train with.")
        if self.remove_unused_columns:
            raise ValueError("`remove_unused_columns` is True, expected False: it would drop the loss mask.")
        if self.feature_retention and self.feature_source != "cached":
            raise ValueError(
                f"`feature_retention` is {self.feature_retention!r} and `feature_source` {self.feature_source!r}, "
                "expected 'cached': online nothing is stored."
            )
        if self.feature_retention == "delete":
            for name, needed in (
                ("save_only_model", False),
                ("ignore_data_skip", False),
                ("auto_find_batch_size", False),
            ):
                if getattr(self, name) != needed:
                    raise ValueError(
                        f"`{name}` is {getattr(self, name)} and `feature_retention` 'delete', which deletes rows that "
                        f"a killed run could not go on without: expected {needed}."
                    )
            if self.num_train_epochs > 1 and self.max_steps <= 0:
                raise ValueError(
                    f"`num_train_epochs` is {self.num_train_epochs:g} and `feature_retention` 'delete', expected 1: "
                    "rows are deleted once they have been trained on. 'keep' them for more epochs."
                )
        if self.fp16 and self.device.type == "cpu":
            raise ValueError("`fp16` is True, expected a GPU, but training is on a CPU: leave it out, or set `bf16`.")
        installed = get_available_reporting_integrations()
        for reporter in self.report_to or ():
            if reporter not in installed and reporter not in _UNLISTED:
                raise ValueError(
                    f"`report_to` names {reporter!r}, which is not installed, or which transformers does not know: "
                    f"install it, or choose {', '.join(sorted(['none', *installed]))}."
                )

    def check_heads(self, confidence_head: bool, chooses_candidates: bool) -> None:
        """Raise a `ValueError` if a user set the weight of a term that trains what a drafter does not have."""
        if self.confidence_weight and "confidence_weight" in self.set_by_user and not confidence_head:
            raise ValueError(
                f"`confidence_weight` is {self.confidence_weight}, but the drafter has no confidence head: leave it "
                "out, or make the drafter with `confidence_head=True` (`--confidence_head`)."
            )
        if self.blind_weight and "blind_weight" in self.set_by_user and not chooses_candidates:
            raise ValueError(
                f"`blind_weight` is {self.blind_weight}, but the drafter has no head that chooses among candidates: "
                "leave it out, or make the drafter with `head_candidates` and a `sequential_head` "
                "(`--sequential_head`)."
            )
