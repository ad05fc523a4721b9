"""Training a drafter: transformers' `Trainer` with the target's residual, blocks and their loss."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate.logging import get_logger
from huggingface_hub import CommitInfo, HfApi
from safetensors import SafetensorError
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from transformers import EvalPrediction, PreTrainedModel, PreTrainedTokenizerBase, Trainer
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy, SaveStrategy, TrainOutput
from transformers.utils.hub import PushInProgress

from ..decoding.stats import SpeculationStats
from ..drafters.blocks.configuration_hyperdflash import HyperDFlashConfig
from ..drafters.saved import SavedDrafter
from ..drafters.weights import not_finite
from ..hub.cards import adapter_card, drafter_card, has_whole_modules
from ..hub.publish import drafter_files, reaching_hub
from ..targets.registry import target_of
from .acceptance import AcceptanceCallback, check_metric
from .arguments import MAX_LENGTH, HyperDFlashTrainingArguments
from .data.blocks import expected_rounds, sample_anchors, walk_rounds
from .data.encoding import end_ids_of
from .data.rows import count_tokens, prepare_dataset
from .features.fingerprint import short_fingerprint, target_fingerprint
from .features.parts import read_lists
from .features.store import FeatureCache
from .features.streaming import DeletesTrainedParts, FolderOrder, StreamedFeatures
from .losses.loss import IGNORE_INDEX, DrafterLoss
from .losses.objective import Batch, BlockObjective, collate, compute_residual, make_objective
from .runs.checkpoints import (
    CHECKPOINT,
    RUN_RECORD,
    Identity,
    apply_umask,
    check_same_run,
    checkpoint_to_resume,
    data_digest,
    describe_earlier_run,
    newest_complete,
    remove_checkpoint,
    run_identity,
    write_record,
)

logger = get_logger(__name__)  # of several processes the first logs

_LIBRARIES = ("transformers.", "hf_hyperdflash.")  # their callbacks add no metrics, except `AcceptanceCallback`
TERMS = DrafterLoss._fields[1:7]


class HyperDFlashTrainer(Trainer):
    """Train a [`HyperDFlashDrafter`] for a target, or a [`SpecBlockDrafter`] or [`Eagle3Drafter`], as their papers do
    ([`~objective.UnrolledObjective`]).

    `save_model` writes `training.json` beside the drafter, for the part of its model card about training. The
    drafter's configuration records the target that it was trained for.

    The target is frozen: only the drafter is optimized, saved and synchronized. The target may be spread with
    `device_map` or quantized; its LM head must not be sharded by FSDP or ZeRO-3, because processes call it a different
    number of times. Besides transformers' own values, the terms of the loss that are in use are logged:
    `cross_entropy`, `kl`, `tv`, `confidence` and `blind` ([`DrafterLoss`]). `evaluate` adds the tokens per
    verification round that generation of the held-out text would have: `teacher_forced_tau` greedily and
    `expected_tau` at temperature 1, from the probability that each draft is accepted. They assume that the text is the
    target's own (`hf-hyperdflash answers`). Add [`AcceptanceCallback`] for the acceptance of real generation
    beside them.

    Args:
        model: The drafter, plain or wrapped by PEFT.
        target: The target it drafts for. It is put in eval mode, frozen, and moved to the training device unless it
            was placed with `device_map`.
        args: The arguments.
        train_dataset: Conversations (any of the formats of [`to_messages`]), rows of `input_ids` and `loss_mask`, or a
            [`FeatureCache`]. Map-style, streaming or a list of rows.
        eval_dataset: The same, or a dictionary of them.
        processing_class: The target's tokenizer; not needed for rows that are tokenized already. It stays the target's
            and is not saved with the drafter.
        **kwargs: Anything else that [`~transformers.Trainer`] takes.

    Raises:
        ValueError: If drafter, target, tokenizer and data do not fit together, or weights are not finite.
    """

    args: HyperDFlashTrainingArguments

    def __init__(
        self,
        model: nn.Module,
        target: PreTrainedModel,
        args: HyperDFlashTrainingArguments | None = None,
        *,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        **kwargs: Any,
    ) -> None:
        self.args = args = args or HyperDFlashTrainingArguments(output_dir="hyperdflash-drafter")
        if not isinstance(args, HyperDFlashTrainingArguments):
            raise ValueError(f"`args` is a {type(args).__name__}: pass HyperDFlashTrainingArguments.")
        if processing_class is not None and not isinstance(processing_class, PreTrainedTokenizerBase):
            raise ValueError(
                f"`processing_class` is a {type(processing_class).__name__}, expected the target's tokenizer: "
                "`AutoTokenizer.from_pretrained(...)`."
            )
        if not hasattr(model, "check_trainable"):
            raise ValueError(
                f"`model` is a {type(model).__name__}, expected a HyperDFlashDrafter or another drafter of blocks. "
                "Make one with `HyperDFlashDrafter.from_target(target)` and pass the target as `target`."
            )
        if adapters := getattr(model, "adapters", ()):
            raise ValueError(
                f"`model` has adapters to choose among ({', '.join(adapters)}), expected a drafter without, or one "
                "that PEFT wraps: `get_peft_model(load_drafter(FOLDER, dtype=torch.float32), config)`."
            )
        seen = target_of(target)
        cast(Any, model).check_trainable(seen)
        config = self.drafter_config = cast(HyperDFlashConfig, model.config)
        _check_trainable(config, args, processing_class, drafter=model, target=target)
        if args.feature_source == "online":
            seen.check_computes()
        self.objective: BlockObjective = make_objective(model, seen, args, args.seed)
        self.target = target.eval().requires_grad_(False)
        if getattr(config, "own_embedding", False):
            cast(Any, model).embed_tokens.requires_grad_(False)  # it is a target's, as EAGLE-3's is
        if getattr(target, "hf_device_map", None) is None and not getattr(target, "is_quantized", False):
            cast(nn.Module, target).to(args.device)
        self._terms = torch.zeros(len(TERMS) + 1)  # and steps since the last log
        kwargs = {"data_collator": collate, **kwargs}
        kwargs["compute_metrics"] = kwargs.get("compute_metrics") or self._teacher_forced_metrics
        self.drafter_kind = type(model).__name__  # FSDP2 changes the class
        self._positions: int | None = getattr(seen.config, "max_position_embeddings", None)  # that it is made for
        if self._positions and (args.max_length or 0) > self._positions:
            raise ValueError(
                f"`max_length` is {args.max_length}, expected at most {self._positions}, the positions that the "
                "target has (`max_position_embeddings`)."
            )
        self.max_length = args.max_length or min(MAX_LENGTH, self._positions or MAX_LENGTH)
        self.described: dict[str, object] = {}  # more entries for the record of the run
        self.measured: dict[str, float] = {}  # of the weights as they are now
        self._evaluated: dict[int, dict[str, float]] = {}  # by step
        self._tokenizer = processing_class
        self._train_rows = self._prepare_rows(train_dataset, "train", args.packing)
        eval_rows = self._prepare_rows(eval_dataset, "eval")
        super().__init__(model=model, args=args, train_dataset=self._train_rows, eval_dataset=eval_rows, **kwargs)
        self.objective.total = lambda value: self.accelerator.reduce(value, "sum")
        if args.feature_source == "cached":  # only now that the arguments have been found good
            self.train_dataset = self._write_features(self._train_rows, "train")
            self.eval_dataset = self._write_features(eval_rows, "eval")
            if load_whole := vars(self.target).get("load_whole"):
                load_whole.cache_clear()  # the layers have done their work
            self._delete_trained_features()
        # `compute_loss` divides by the counts of the whole optimizer step itself.
        self.model_accepts_loss_kwargs = self.loss_is_scaled_for_ga = True

    def _prepare_rows(self, dataset: Any, name: str, packing: bool = False) -> Any:
        """Turn a user's dataset into rows that the trainer reads."""
        args = self.args
        if dataset is None:
            return None
        if isinstance(dataset, FeatureCache):
            return dataset.select_layers(self.objective.layer_ids)
        if isinstance(dataset, dict) and name == "eval":  # several evaluation sets
            return {key: self._prepare_rows(part, f"{name}-{key}") for key, part in dataset.items()}
        if args.feature_source == "online" and not len(self.objective.target.layers):
            raise ValueError(
                "`feature_source` is 'online', and the target has no layers to run: set it to 'cached', or load the "
                "target whole, without `num_hidden_layers=0`."
            )
        with args.main_process_first(desc="tokenizing"):
            rows = prepare_dataset(
                dataset,
                self._tokenizer,
                max_length=self.max_length,
                packing=packing,
                vocab_size=self.drafter_config.vocab_size,
                positions=self._positions,
                end_ids=end_ids_of(self.target),
            )
        if args.feature_source == "cached" and not hasattr(rows, "__len__"):
            raise ValueError("`feature_source='cached'` needs a dataset of known length, not a streaming one.")
        return rows

    def _write_features(self, rows: Any, name: str) -> Any:
        """Write the feature cache of rows, or open it, and return it."""
        if rows is None or isinstance(rows, FeatureCache):
            return rows
        if isinstance(rows, dict):
            return {key: self._write_features(part, f"{name}-{key}") for key, part in rows.items()}
        args, layers = self.args, self.objective.layer_ids
        folder = Path(args.feature_cache_dir or Path(str(args.output_dir)) / "_features")
        if args.feature_retention or read_lists(folder):  # `hf-hyperdflash features` writes, or has written, there
            return StreamedFeatures(folder, rows, self.target, args.feature_dtype, layers, self._tokenizer)
        directory = folder / name
        with args.main_process_first(local=False, desc="writing features"):
            if args.process_index:  # the first has written it: the others read no rows
                return FeatureCache(directory, self.target).select_layers(layers)
            return FeatureCache.write(
                directory,
                rows,
                self.target,
                dtype=args.feature_dtype,
                target_layer_ids=layers,
                tokenizer=self._tokenizer,
            )

    @property
    def _rows_at_once(self) -> int:
        """The rows of one micro-batch of all processes together."""
        return self.args.train_batch_size * self.args.world_size

    def _delete_trained_features(self) -> None:
        """Have features deleted that training is done with, if that is wanted."""
        args, rows = self.args, self.train_dataset
        if args.feature_retention != "delete" and args.feature_gigabytes is not None:
            raise ValueError(
                f"`feature_gigabytes` is {args.feature_gigabytes:g}, which is for `feature_retention='delete'`: set "
                "that, or leave it out."
            )
        if args.feature_retention != "delete" or not isinstance(rows, StreamedFeatures):
            return
        step_rows = self._rows_at_once * args.gradient_accumulation_steps
        if args.max_steps > -(-len(rows) // step_rows):
            raise ValueError(
                f"`max_steps` is {args.max_steps}, which is more than one epoch of {len(rows)} rows, and "
                "`feature_retention` 'delete': rows are deleted once they have been trained on. 'keep' them."
            )
        evaluated = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
        held_out = [each for each in evaluated.values() if isinstance(each, StreamedFeatures)]
        ahead = self._rows_at_once * (1 + args.dataloader_num_workers * (args.dataloader_prefetch_factor or 2))
        self.add_callback(DeletesTrainedParts(rows, held_out, step_rows, ahead, args.feature_gigabytes))

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        rows = self.train_dataset if train_dataset is None else train_dataset
        if not isinstance(rows, StreamedFeatures):
            return super()._get_train_sampler(train_dataset)
        at_once, accumulated = self._rows_at_once, self.args.gradient_accumulation_steps
        steps = -(-len(rows) // (at_once * accumulated))  # of an epoch
        is_alone = self.args.world_size == 1
        return FolderOrder(
            len(rows), 1 if is_alone else at_once, self.args.seed, lambda: self.state.global_step // steps
        )

    # One training step

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], torch.Tensor | None]:
        """Return the micro-batches of one optimizer step with anchors and labels, and the divisors of their loss."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.objective.progress = self.state.global_step / max(self.state.max_steps, 1)
        for batch in batches:
            self.objective.add_anchors(batch, self.state.global_step)
        self._terms[-1] += 1
        if not batches:
            return batches, None
        return batches, self.accelerator.reduce(self.objective.counts(batches).to(device), "sum")

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Compute the loss of one micro-batch, divided by the counts of the whole step. The losses of micro-batches
        and processes so add up to one big batch's loss."""
        if "labels" not in inputs:  # called without `get_batch_samples`
            self.objective.add_anchors(inputs, self.state.global_step)
        if num_items_in_batch is None:
            counts = self.objective.counts([inputs]).to(self.args.device)
            num_items_in_batch = self.accelerator.reduce(counts, "sum")
        inputs = {**inputs, "residual": self.residual(inputs)}
        terms = self.objective.step(model, inputs, self._table(model), torch.as_tensor(num_items_in_batch))
        if not torch.isfinite(terms.loss):
            raise self._diverged(f"The loss is {terms.loss.item()}", inputs["residual"])
        self._terms[:-1] += torch.stack(terms[1:7]).cpu()
        loss = terms.loss * self.accelerator.num_processes  # gradients are averaged over processes: make it a sum
        return (loss, terms) if return_outputs else loss

    def residual(self, batch: Batch) -> torch.Tensor:
        """Return the residual streams of the objective's layers, from the feature cache or by a forward."""
        if "residual" in batch:
            return batch["residual"]
        return compute_residual(self.target, batch["input_ids"], batch["position_ids"], self.objective.layer_ids)

    def _table(self, model: nn.Module) -> torch.Tensor | None:
        """Return the drafter's own table of token scores, gathered on every process. Each process has the gradient of
        its own loss, and FSDP2 expects the mean."""
        table = cast(Any, self.accelerator.unwrap_model(model, keep_torch_compile=False)).vocabulary_table
        return table.full_tensor(grad_placements=[Partial("avg")]) if isinstance(table, DTensor) else table

    def _diverged(self, sign: str, residual: torch.Tensor | None = None) -> ValueError:
        cause = f"the drafter diverged. Lower `learning_rate`, now {self.args.learning_rate}, or warm up longer"
        if residual is not None and not torch.isfinite(residual).all():
            cause = "the target's residual is not finite. A float16 target overflows: load it in bfloat16"
        return ValueError(f"{sign} at step {self.state.global_step}: {cause}{self._advice()}.")

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, and add the means of the loss's terms over the steps since the last log."""
        if "loss" in logs and self._terms[-1]:
            means = self.accelerator.reduce(self._terms[:-1].to(self.args.device), "sum") / self._terms[-1].item()
            in_use = {
                "tv": self.objective.trains_acceptance,
                "confidence": self.drafter_config.confidence_head,
                "blind": self.objective.selects_candidates or bool(self.objective.block_first),
                "rank": getattr(self.drafter_config, "rank_head", False),
            }
            logs |= {name: mean for name, mean in zip(TERMS, means.tolist()) if in_use.get(name, True)}
            self._terms.zero_()
        super().log(logs, start_time)

    # Evaluation

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Batch,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor, Any, torch.Tensor | None]:
        """Draft at every possible anchor, then find the rounds that generation of the text would have. Return the
        loss; per row and round the emitted tokens, `[batch, rounds]`, -100 where a row has fewer rounds, with the
        rounds to be expected at temperature 1, `[batch]`; and the accepted drafts per row and round."""
        batch = self._prepare_inputs(inputs)
        batch["residual"] = self.residual(batch)
        anchors = sample_anchors(self.objective.candidates(batch))
        # Where the drafter is sharded, all processes have to call it equally often.
        anchors = self.accelerator.pad_across_processes(anchors, dim=1, pad_index=-1)
        positions = None if prediction_loss_only else self.drafter_config.max_draft_tokens
        with torch.no_grad():  # the table is gathered
            walk = self.objective.walk(model, batch, anchors, self._table(model), positions, self.args.num_anchors)
        if prediction_loss_only:
            return walk.loss, None, None
        matched = walk.matches.long().cumprod(-1).sum(-1)
        rounds = [torch.tensor(walk_rounds(*row)).view(-1, 2) for row in zip(anchors, matched, walk.available)]
        emitted, accepted = nn.utils.rnn.pad_sequence(rounds, True, float(IGNORE_INDEX)).to(anchors).unbind(-1)
        expected = [expected_rounds(*row) for row in zip(anchors, walk.acceptance, walk.available)]
        return (
            walk.loss,
            (emitted.contiguous(), anchors.new_tensor(expected, dtype=torch.float32)),
            accepted.contiguous(),
        )

    def _teacher_forced_metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        """Compute tau at temperatures 0 and 1, and the acceptance per draft position, from the rounds of
        `prediction_step`."""
        walked, expected = cast(Any, prediction.predictions)
        parts = (np.asarray(part).ravel() for part in (walked, prediction.label_ids))
        emitted, accepted = (part[part != IGNORE_INDEX].tolist() for part in parts)
        if not emitted:
            return {}
        drafts = self.drafter_config.max_draft_tokens
        stats = SpeculationStats(len(emitted), draft_positions=drafts, emitted=emitted, accepted=accepted)
        shares = {f"teacher_forced_acceptance_{k}": share for k, share in enumerate(stats.acceptance, start=1)}
        return {"teacher_forced_tau": stats.tau, "expected_tau": sum(emitted) / float(np.sum(expected)), **shares}

    # Checkpoints

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        try:
            return super()._determine_best_metric(metrics, trial)
        except KeyError as error:  # metrics of a user's callbacks are only known now; the work so far is saved
            self._save_checkpoint(self.model_wrapped, trial)
            raise ValueError(
                f"`metric_for_best_model` is {self.args.metric_for_best_model!r}, which the evaluation does not give, "
                f"expected one of {', '.join(metrics)}: choose one of these, and go on from "
                f"{self.args.output_dir}/checkpoint-{self.state.global_step}, which has the work so far "
                "(`resume_from_checkpoint`)."
            ) from error

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train, or resume from a checkpoint: its folder, or `True` for the newest complete one in `output_dir`.

        Raises:
            ValueError: If there is no checkpoint to resume from, it lacks a part, it belongs to a run with other data,
                another target, drafter or recipe, no evaluation gives `metric_for_best_model`, or the disk has no
                space for one checkpoint.
        """
        config, own = self.drafter_config, self.objective.target.config
        config.target_fingerprint = self.target_fingerprint
        if getattr(config, "target_model_type", None) == "":  # another program's drafter is of this target from now on
            config.target_model_type = own.model_type
            config.target_num_layers = config.target_num_layers or own.num_hidden_layers
        if resume_from_checkpoint:
            folder, skipped = checkpoint_to_resume(resume_from_checkpoint, Path(str(self.args.output_dir)))
            for line in skipped:
                logger.warning("A checkpoint that is not whole was skipped, %s.", line)
            if not check_same_run(folder, run_identity(self)):
                logger.warning("%s does not say which run it is of: it is taken for this one's.", folder)
            if (of_fsdp := any(folder.glob("pytorch_model_fsdp*"))) != self.is_fsdp_enabled:
                raise ValueError(
                    f"{folder} is of a run {'with' if of_fsdp else 'without'} FSDP, which keeps the optimizer's state "
                    "in a form of its own: go on as that run was launched, with any number of processes, or begin a "
                    f"new run with its drafter (`--drafter {folder}`)."
                )
            logger.warning("Going on from %s.", folder)
            resume_from_checkpoint = str(folder)
        elif found := describe_earlier_run(Path(str(self.args.output_dir))):
            logger.warning("%s has %s, which this run overwrites.", self.args.output_dir, found)
        # A metric that is known to be in no evaluation of this run; others may be a user's callback's.
        callbacks = self.callback_handler.callbacks
        is_ours = self.compute_metrics == self._teacher_forced_metrics and not isinstance(self.eval_dataset, dict)
        is_ours = is_ours and type(self).evaluate is HyperDFlashTrainer.evaluate
        is_ours = is_ours and all(type(callback).__module__.startswith(_LIBRARIES) for callback in callbacks)
        if self.args.eval_strategy != "no" and is_ours:
            generates = any(isinstance(callback, AcceptanceCallback) for callback in callbacks)
            check_metric(self.args.metric_for_best_model, generates)
        self._check_disk_space()
        with self._all_alive():
            result = super().train(resume_from_checkpoint or None, trial, ignore_keys_for_eval)
        best_step = self.state.best_global_step if self.args.load_best_model_at_end else None
        self.measured = self._evaluated.get(best_step or self.state.global_step, {})
        return result

    def _check_disk_space(self) -> None:
        """Refuse a disk without space for one checkpoint, or for the drafter if no checkpoints are written."""
        model = cast(nn.Module, self.model)
        is_saved_whole = isinstance(model, SavedDrafter)  # of an adapter only the trained weights
        sizes = [(p.numel() * p.element_size(), p.requires_grad) for p in model.parameters()]
        saves_moments = self.args.optim in ("adamw_torch", "adamw_torch_fused") and not self.args.save_only_model
        moments = 2 if saves_moments and self.args.save_strategy != SaveStrategy.NO else 0
        needed = sum(size * ((is_saved_whole or trained) + moments * trained) for size, trained in sizes)
        folder = self.args.output_dir
        if self.args.should_save and (free := shutil.disk_usage(str(folder)).free) < needed:
            raise ValueError(
                f"`output_dir` is {folder!r}, where {free / 2**20:,.0f} MiB are free, expected at least "
                f"{needed / 2**20:,.0f} MiB for {'a checkpoint' if moments else 'the drafter'}: make room there, or "
                "choose another folder."
            )

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        with self._all_alive():
            metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        if eval_dataset is None and metric_key_prefix == "eval":  # not of some other text
            self._evaluated[self.state.global_step] = self.measured = metrics
        return metrics

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint, with `trainer_state.json` as the last file: without it a checkpoint is incomplete."""
        if bad := not_finite(model.named_parameters()):
            raise self._diverged(f"{bad[0]} is not finite")  # resuming from it would be useless
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save:
            remove_checkpoint(folder)  # an earlier run's of the same step, or half of one
        self.accelerator.wait_for_everyone()
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, RuntimeError, SafetensorError) as error:
            if self.args.should_save:
                remove_checkpoint(folder)
            if _is_of_lost_process(error):
                raise
            raise OSError(
                f"Checkpoint {folder} could not be written ({error.__cause__ or error}) and was removed. Make room "
                f"(or lower `save_total_limit`){self._advice()}."
            ) from error

    @cached_property
    def target_fingerprint(self) -> str:
        """The target's fingerprint for the drafter's configuration; empty if its weights are in other processes."""
        try:
            return short_fingerprint(target_fingerprint(self.target))
        except ValueError:
            return ""

    @cached_property
    def data_digest(self) -> Identity | None:
        """The digest of the training rows; `None` for a stream."""
        return data_digest(self._train_rows)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self.args.should_save:
            (Path(output_dir) / RUN_RECORD).write_text(json.dumps(run_identity(self), indent=1))
        self.accelerator.wait_for_everyone()  # then the first process writes `trainer_state.json`

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        if not self.args.should_save:
            return super()._save(output_dir, state_dict)
        folder = Path(output_dir or str(self.args.output_dir))
        drafter = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        # A checkpoint needs no code unless it is pushed, and an adapter never has it.
        if CHECKPOINT.fullmatch(folder.name) and isinstance(drafter, SavedDrafter) and not self.args.push_to_hub:
            drafter.save_pretrained(folder, state_dict=state_dict, with_code=False)
            torch.save(self.args, folder / TRAINING_ARGS_NAME)
        else:
            super()._save(output_dir, state_dict)
            if self.state.global_step and not CHECKPOINT.fullmatch(folder.name):
                write_record(self, folder)
        apply_umask(folder)

    @contextmanager
    def _all_alive(self) -> Iterator[None]:
        """Say in one line that another process is gone, which others learn from the next exchange with it."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            if not _is_of_lost_process(error):
                raise
            raise ConnectionError(
                f"Another process of this training is gone, at step {self.state.global_step}: its own lines, or the "
                f"launcher's, say why. Mend that{self._advice()}."
            ) from error

    def _advice(self) -> str:
        """Return the end of an error message: how to resume, or to begin again."""
        last, _ = newest_complete(Path(str(self.args.output_dir)))
        return f", then go on from {last} with `resume_from_checkpoint=True`" if last else " and begin again"

    # The Hub

    def push_to_hub(  # type: ignore[override]
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> CommitInfo | Future[CommitInfo] | None:
        """Save the drafter and [`upload`] it. Other arguments are [`create_model_card`]'s."""
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        return self.upload(commit_message, blocking=blocking, token=token, revision=revision, **kwargs)

    def upload(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> CommitInfo | Future[CommitInfo] | None:
        """Upload the drafter or adapter that `output_dir` holds, its code and its card, and return the commit: a
        `Future` if `blocking` is `False`, `None` on all processes but the first. Nothing else there is uploaded: no
        features, no checkpoints, no pickles."""
        if not self.is_world_process_zero():
            return None
        self.create_model_card(**kwargs)
        self._finish_current_push()
        return self._upload(commit_message, token or self.args.hub_token, revision, not blocking)

    def create_model_card(  # type: ignore[override]
        self, license: str | None = None, tags: str | list[str] | None = None, **kwargs: Any
    ) -> None:
        """Write `README.md` in `output_dir` from facts ([`~hub.cards.drafter_card`], [`~hub.cards.adapter_card`]);
        that of an adapter with whole modules is PEFT's."""
        folder = Path(str(self.args.output_dir))
        make = drafter_card if (folder / "config.json").exists() else adapter_card
        if make is adapter_card and has_whole_modules(folder):
            return super().create_model_card(license=license, tags=tags, **kwargs)
        if self.is_world_process_zero():
            tags = [tags] if isinstance(tags, str) else tags
            card = make(folder, repo_id=self.hub_model_id or folder.name, license=license, tags=tags)
            card.save(folder / "README.md")

    def choose_vocabulary(self, size: int | None = None) -> None:
        """Choose the draft vocabulary: the most frequent tokens in answers of the training rows. Those of a new
        drafter, whose default is the first tokens, are at first scored as the target scores them.

        A drafter that has been trained drafts `size` tokens from now on, and keeps what it has learned of those that
        it drafts already ([`~drafters.reading.HiddenStateDrafter.draft_others`])."""
        count = size or self.drafter_config.draft_vocab_size
        if not count or not hasattr(self._train_rows, "__len__"):
            raise ValueError(
                f"`draft_vocab_size` is {count} and the training rows a {type(self._train_rows).__name__}: expected "
                "at least 1 and a dataset of known length, whose tokens are counted."
            )
        counts = count_tokens(self._train_rows, self.drafter_config.vocab_size)
        by_count = counts.sort(descending=True, stable=True).indices  # of equally frequent ones the first
        drafter: Any = self.model
        (drafter.draft_others if size else drafter.draft_only)(self.objective.target, by_count[:count].sort().values)

    def leave_group(self) -> None:
        """Leave the process group of the training. Call it last, before the process ends: else the threads of torch's
        gloo outlive the interpreter, and one that frees a tensor aborts the process, long after all is saved."""
        # Nothing may refer to the group when it is destroyed.
        self.model_wrapped = self.accelerator.unwrap_model(self.model_wrapped)
        self.accelerator.free_memory()
        self.accelerator.end_training()

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push the drafter of a checkpoint. transformers' own method adds pickles, which are only for resuming from
        the Hub."""
        strategy = self.args.hub_strategy
        if strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            return super()._push_from_checkpoint(checkpoint_folder)
        busy = self.push_in_progress is not None and not self.push_in_progress.is_done()
        if not self.is_world_process_zero() or strategy == HubStrategy.END or (busy and not self.args.hub_always_push):
            return
        self._finish_current_push()
        for name in drafter_files(Path(checkpoint_folder)):  # copied: old checkpoints are removed
            copy = Path(str(self.args.output_dir)) / name
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(Path(checkpoint_folder) / name, copy)
        message = f"Training in progress, step {self.state.global_step}"
        job = self._upload(message, self.args.hub_token, self.args.hub_revision, True)
        self.push_in_progress = PushInProgress([job])  # type: ignore[assignment,arg-type]

    def _upload(
        self, message: str | None, token: str | None, revision: str | None, run_as_future: bool
    ) -> CommitInfo | Future[CommitInfo]:
        folder = Path(str(self.args.output_dir))
        with reaching_hub(str(self.hub_model_id)):
            return HfApi(token=token).upload_folder(  # type: ignore[call-overload]
                repo_id=self.hub_model_id,
                folder_path=folder,
                commit_message=message,
                revision=revision,
                allow_patterns=drafter_files(folder),
                run_as_future=run_as_future,
            )


def _is_of_lost_process(error: BaseException) -> bool:
    """Return whether an exchange between processes failed: NCCL has an error of its own, gloo's says its name."""
    return isinstance(error, torch.distributed.DistError) or (
        torch.distributed.is_available() and torch.distributed.is_initialized() and "gloo" in str(error)
    )


def _check_trainable(
    config: HyperDFlashConfig,
    args: HyperDFlashTrainingArguments,
    tokenizer: PreTrainedTokenizerBase | None,
    **models: nn.Module,
) -> None:
    """Refuse settings that do not fit the drafter, and weights that are not finite, which would look like
    divergence."""
    args.check_heads(config.confidence_head, bool(config.head_candidates), config.sequential_head != "none")
    if is_deepspeed_zero3_enabled() and (config.draft_vocab_size or config.sequential_head not in ("none", "state")):
        raise ValueError(
            f"The drafter's `sequential_head` is {config.sequential_head!r} and its `draft_vocab_size` "
            f"{config.draft_vocab_size}: the loss reads the table of a head or of an own vocabulary whole, and "
            "DeepSpeed ZeRO-3 keeps it in parts: train with ZeRO-2, FSDP2 or DDP."
        )
    for name, model in models.items():
        if bad := not_finite(model.named_parameters()):
            raise ValueError(
                f"The {name} has weights that are not finite, in {len(bad)} tensors: {', '.join(bad[:3])}. Load a "
                "checkpoint that is whole, in bfloat16 if its values do not fit into float16."
            )
    if tokenizer is not None and len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"The tokenizer has {len(tokenizer)} tokens, but the target's vocabulary {config.vocab_size}: pass the "
            "target's own tokenizer as `processing_class`."
        )
