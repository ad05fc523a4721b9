"""Measures the acceptance of real generation, by a function or at each evaluation of a training."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..decoding.bind import bound
from ..decoding.stats import SpeculationStats
from ..targets.registry import target_of
from .trials import Local, run

# Patterns of the metrics of generation and of the trainer's own evaluations.
_GENERATION_METRICS = r"tau|mean_accepted_drafts|tokens_per_second|(conditional_)?acceptance_\d+"
_TEACHER_FORCED_METRICS = r"loss|teacher_forced_tau|expected_tau|teacher_forced_acceptance_\d+"
# One token by the prefill, one draft, one by the target: fewer tokens have no verification round.
_MIN_NEW_TOKENS = 3
# Of `SpeculationStats`.
_STATISTICS = ("tau", "mean_accepted_drafts", "acceptance", "conditional_acceptance", "rounds", "tokens")


def measure_acceptance(
    target: PreTrainedModel,
    drafter: Any,
    prompts: Sequence[torch.Tensor],
    *,
    max_new_tokens: int = 128,
    disable_tqdm: bool | None = True,
    **generate_kwargs: Any,
) -> dict[str, Any]:
    """Generate from every prompt, greedily by default, and measure how many drafts the target accepts.

    Both models run in eval mode and get their training mode back. A target that is not bound is bound meanwhile.

    Args:
        target: The target.
        drafter: Its drafter, plain or wrapped by PEFT, with unsharded parameters (see [`gathered`]).
        prompts: Token ids `[1, seq]` each.
        max_new_tokens: Most new tokens per prompt.
        disable_tqdm: `False` for a progress bar on stderr, `None` for one on a terminal and lines elsewhere.
        **generate_kwargs: More arguments of `target.generate`, `num_assistant_tokens` for example.

    Returns:
        `tau` (tokens per verification round), `mean_accepted_drafts`, the lists `acceptance` and
        `conditional_acceptance` per draft position, `tokens_per_second` (new tokens over the whole time in `generate`,
        prefill included), and the numbers of `rounds` and new `tokens`.

    Raises:
        ValueError: If there is no prompt, or no prompt leads to a verification round.
    """
    _check_prompts(prompts, max_new_tokens)
    # Ranks generate in lockstep and none ends early: the forwards that `synced_gpus` would add are not needed.
    method = Local(target, drafter, {"use_cache": True, "synced_gpus": False, "streamer": None, **generate_kwargs})
    total, seconds = SpeculationStats(), 0.0
    # One by one: parts of a model may have been in eval mode before.
    training = [module for model in (target, drafter) for module in model.modules() if module.training]
    for model in (target, drafter):
        model.eval()
    try:
        with bound(target):
            for _, _, record in run([method], prompts, max_new_tokens, desc="acceptance", disable_tqdm=disable_tqdm):
                total += cast(SpeculationStats, record.stats)
                seconds += record.seconds
    finally:
        for module in training:
            module.training = True
    if not total.rounds:
        raise ValueError(
            f"None of the {len(prompts)} prompts led to a verification round: the target ended every answer at its "
            "first token. Pass prompts that end where the answer begins (`add_generation_prompt=True`)."
        )
    return {**{name: getattr(total, name) for name in _STATISTICS}, "tokens_per_second": total.tokens / seconds}


def _check_prompts(prompts: Sequence[torch.Tensor], max_new_tokens: int) -> None:
    if prompts is None or not len(prompts):
        raise ValueError(f"`prompts` is {prompts!r}: expected at least one prompt of token ids `[1, seq]`.")
    for prompt in prompts:
        is_tensor = isinstance(prompt, torch.Tensor)
        if not is_tensor or prompt.ndim != 2 or prompt.shape[0] != 1 or not prompt.shape[1]:
            found = f"of shape {list(prompt.shape)}" if is_tensor else f"{prompt!r:.40}, a {type(prompt).__name__}"
            raise ValueError(
                f"A prompt is {found}: expected a list of token ids `[1, seq]`, a tensor per prompt. Pass the "
                '`input_ids` of `tokenizer(text, return_tensors="pt")`.'
            )
    if max_new_tokens < _MIN_NEW_TOKENS:
        raise ValueError(
            f"`max_new_tokens` is {max_new_tokens}, expected at least {_MIN_NEW_TOKENS}: the first token needs no "
            "draft, and a round adds a draft and the target's own token."
        )


def check_metric(name: str | None, generates: bool) -> None:
    """Raise a `ValueError` if evaluations, which an [`AcceptanceCallback`] extends if the run generates, give no
    metric of that name, as `metric_for_best_model` has it, with `eval_` before it or without."""
    bare = (name or "loss").removeprefix("eval_")
    if re.fullmatch(_GENERATION_METRICS, bare) and not generates:
        raise ValueError(
            f"`metric_for_best_model` is {name!r}, which is measured by generating: add an `AcceptanceCallback` "
            "(`--eval_prompts` above 0), or choose teacher_forced_tau, expected_tau or loss."
        )
    if not re.fullmatch(f"{_GENERATION_METRICS}|{_TEACHER_FORCED_METRICS}", bare):
        raise ValueError(
            f"`metric_for_best_model` is {name!r}, expected tau, teacher_forced_tau, expected_tau, loss or another "
            "that evaluations give."
        )


@contextmanager
def gathered(accelerator: Accelerator, model: nn.Module) -> Iterator[nn.Module]:
    """Unwrap the drafter of `trainer.model_wrapped`, with all of its parameters on every rank inside the `with`.

    Parameters that FSDP2 or DeepSpeed ZeRO-3 shard are gathered once and sharded again at the end. Every rank must
    enter. The parameters must not be changed inside."""
    from torch.distributed.fsdp import FSDPModule

    drafter = accelerator.unwrap_model(model, keep_torch_compile=False)  # every length of text would recompile
    if any(hasattr(parameter, "ds_id") for parameter in drafter.parameters()):
        from deepspeed.runtime.zero import unwrap_model_for_generation

        with unwrap_model_for_generation(model):
            yield drafter
        return
    units = [module for module in drafter.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield drafter
    finally:
        for unit in units:
            # As `accelerate` sets it; the outermost unit stays whole until the backward pass, as FSDP2 has it.
            reshard = unit is not drafter and bool(accelerator.state.fsdp_plugin.reshard_after_forward)
            unit.set_reshard_after_forward(reshard, recurse=False)
            unit.reshard()


class AcceptanceCallback(TrainerCallback):
    """Measures the acceptance of real generation at every evaluation, with the drafter's weights of that moment.

    Adds to the evaluation's metrics `eval_tau`, `eval_mean_accepted_drafts`, `eval_tokens_per_second` and, per draft
    position k, `eval_acceptance_k` and `eval_conditional_acceptance_k`, so that `metric_for_best_model="tau"` works,
    and logs them in one line with the trainer's cheap teacher-forced estimates. A callback that reads them, such as
    `EarlyStoppingCallback`, must be added after this one.

    An evaluation on several datasets generates once; one with a `metric_key_prefix` that does not begin with `eval`
    does not generate. In a distributed run every rank generates from all prompts, in lockstep: a sharded target would
    hang otherwise. The first rank's numbers count, and it shows the progress on a terminal unless the trainer's
    `disable_tqdm` is set.

    Example:
        ```python
        trainer.add_callback(AcceptanceCallback(trainer, prompts))
        ```

    Args:
        trainer: A [`HyperDFlashTrainer`].
        prompts: Held-out prompts, token ids `[1, seq]` each.
        max_new_tokens: Most new tokens per prompt.

    Raises:
        ValueError: If there is no prompt, `max_new_tokens` leaves no room for a verification round, or the target has
            no layers.
    """

    def __init__(self, trainer: Trainer, prompts: Sequence[torch.Tensor], max_new_tokens: int = 128) -> None:
        _check_prompts(prompts, max_new_tokens)
        if not len(target_of(cast(Any, trainer).target).layers):
            raise ValueError(
                "The target was loaded without its layers, so that nothing can be generated from prompts: load it "
                "whole, or leave the callback out (`--eval_prompts 0`)."
            )
        self.trainer, self.prompts, self.max_new_tokens = trainer, prompts, max_new_tokens
        self._step: int | None = None
        self._prefixes: set[str] = set()  # of the evaluations that have the last measurement
        self._measured: dict[str, float] = {}

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        metrics: dict[str, float] = kwargs["metrics"]  # the dictionary that `Trainer.evaluate` returns
        # Its `metric_key_prefix`: the trainer itself always adds `<prefix>_runtime`.
        names = (name for name in metrics if name.endswith("_runtime"))
        prefix = min(names, key=len, default="eval_runtime").removesuffix("_runtime")
        if not prefix.startswith("eval"):
            return
        if state.global_step != self._step or prefix in self._prefixes:
            self._measured = self._measure()
            self._step, self._prefixes = state.global_step, set()
            estimates = {name: value for name, value in metrics.items() if "teacher_forced" in name}
            self.trainer.log({**self._measured, **estimates})
        self._prefixes.add(prefix)
        metrics.update(self._measured)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._step = None  # the best checkpoint's weights may be in place now, at the same step

    def _measure(self) -> dict[str, float]:
        trainer: Any = self.trainer
        is_silent = trainer.args.disable_tqdm or not trainer.is_world_process_zero()
        options: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "disable_tqdm": True if is_silent else None}
        with gathered(trainer.accelerator, trainer.model_wrapped) as drafter:
            measured = measure_acceptance(trainer.target, drafter, self.prompts, **options)
        values = {f"eval_{name}": measured[name] for name in ("tau", "mean_accepted_drafts", "tokens_per_second")}
        for name in ("acceptance", "conditional_acceptance"):
            values |= {f"eval_{name}_{k}": value for k, value in enumerate(measured[name], start=1)}
        return broadcast_object_list([values])[0]  # ranks must agree on which checkpoint is the best
