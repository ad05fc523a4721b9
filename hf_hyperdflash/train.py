"""Train a HyperDFlash drafter for a DeepSeek-V4, by default with the paper's recipe.

    hf-hyperdflash train --stage 1 --target TARGET --output_dir stage-1
    hf-hyperdflash train --stage 2 --target TARGET --drafter stage-1 --output_dir my-drafter

Stage 1 is general chat and code, stage 2 tasks (section 3.1: datasets, learning rates, 5 epochs, 4 rows per GPU on 8
GPUs). Everything can be overridden: all of transformers' training arguments are flags. Drafters accept more when the
answers are the target's own: `examples/regenerate_answers.py` first. Several GPUs:

    accelerate launch --config_file examples/accelerate/ddp.yaml examples/train_drafter.py ...
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoTokenizer, HfArgumentParser

from .data import encode_prompts, load_rows
from .evaluation import AcceptanceCallback
from .fingerprint import as_words, target_fingerprint
from .model_card import TRAINING_RECORD
from .modeling_hyperdflash import HyperDFlashDrafter
from .target import describe, load_target
from .trainer import HyperDFlashTrainer
from .training_args import HyperDFlashTrainingArguments

RECIPE = {"num_train_epochs": 5, "per_device_train_batch_size": 4, "lr_scheduler_type": "cosine", "warmup_steps": 0.04}
STAGES: dict[int, dict[str, Any]] = {
    1: {**RECIPE, "dataset": ["zhaode/EagleChat"], "rows": 300_000, "learning_rate": 8e-4},
    2: {**RECIPE, "dataset": ["theblackcat102/evol-codealpaca-v1"], "rows": 150_000, "learning_rate": 1e-4},
}

REPORTED = (
    "learning_rate", "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps",
    "world_size", "warmup_steps", "weight_decay", "adam_beta2", "bf16", "seed", "kl_weight", "kl_positions",
    "kl_temperature", "kl_teacher", "num_anchors", "loss_decay", "feature_source", "feature_dtype", "max_length", "packing",
)  # fmt: skip


@dataclass
class ScriptArguments:
    target: str = field(metadata={"help": "path or Hub id of the target"})
    stage: int = field(default=1, metadata={"help": "whose defaults to use: 1 or 2", "choices": [1, 2]})
    drafter: str | None = field(
        default=None, metadata={"help": "go on from this drafter (stage 2); unset for a new one"}
    )
    dataset: list[str] | None = field(default=None, metadata={"help": "files or Hub names of conversations"})
    rows: int | None = field(default=None, metadata={"help": "most rows of each dataset"})
    streaming: bool = field(default=False, metadata={"help": "read the dataset while training (needs --max_steps)"})
    eval_dataset: str | None = field(default=None, metadata={"help": "held-out rows; unset to split them off"})
    eval_rows: int = field(default=64, metadata={"help": "held-out rows that are split off"})
    eval_prompts: int = field(default=32, metadata={"help": "held-out prompts generated from; 0 for none"})
    eval_max_new_tokens: int = field(default=128, metadata={"help": "tokens generated per prompt"})
    layers: int = field(default=5, metadata={"help": "layers of a new drafter"})
    intermediate_size: int | None = field(
        default=None, metadata={"help": "width of a new drafter's MLPs; unset for three times its hidden size"}
    )
    reducer: str | None = field(
        default=None, metadata={"help": "hc_gate, fc, hybrid or stream_mean; unset for the gate where it can be"}
    )
    target_layer_ids: list[int] | None = field(
        default=None, metadata={"help": "layers a new drafter reads; -1, the pre-collapse residual, if unset"}
    )
    num_draft_tokens: int = field(default=6, metadata={"help": "draft positions of a new drafter"})
    sliding_window: int = field(
        default=2048, metadata={"help": "context that a new drafter's blocks see: not more than the rows mostly have"}
    )
    mask_token_id: int | None = field(
        default=None, metadata={"help": "unset for the tokenizer's mask token or one that is not used"}
    )
    chat_template: str | None = field(default=None, metadata={"help": "a Jinja file, where the tokenizer has none"})
    target_dtype: str | None = field(
        default=None, metadata={"help": "unset for the checkpoint's on a GPU, else float32"}
    )
    device_map: str | None = field(default=None, metadata={"help": "spread the target, for example auto"})
    trust_remote_code: bool = field(default=False, metadata={"help": "run the code that the target brings along"})
    save_dtype: str = field(default="bfloat16", metadata={"help": "number format of the finished drafter"})


def parse(argv: list[str] | None, prog: str | None = None) -> tuple[ScriptArguments, HyperDFlashTrainingArguments]:
    kinds: Any = (ScriptArguments, HyperDFlashTrainingArguments)
    parser = HfArgumentParser(kinds, prog=prog, description=__doc__.split("\n")[0])
    stage = ArgumentParser(add_help=False, allow_abbrev=False)
    stage.add_argument("--stage", type=int, default=1)
    parser.set_defaults(**STAGES.get(stage.parse_known_args(argv)[0].stage, {}))
    return cast("tuple[ScriptArguments, HyperDFlashTrainingArguments]", parser.parse_args_into_dataclasses(argv))


def load_drafter(script: ScriptArguments, target: Any, tokenizer: Any) -> HyperDFlashDrafter:
    """A new drafter, or an earlier stage's, in float32: what an optimizer needs."""
    if script.drafter:
        return HyperDFlashDrafter.from_pretrained(script.drafter, dtype=torch.float32)
    width = {} if script.intermediate_size is None else {"intermediate_size": script.intermediate_size}
    return HyperDFlashDrafter.from_target(
        target,
        reducer=script.reducer,
        target_layer_ids=script.target_layer_ids,
        sliding_window=min(script.sliding_window, describe(target).max_position_embeddings),
        mask_token_id=script.mask_token_id,
        tokenizer=tokenizer,
        num_draft_tokens=script.num_draft_tokens,
        num_hidden_layers=script.layers,
        dtype=torch.float32,
        target_name_or_path=_public_name(script.target),
        **width,
    )


def load_data(script: ScriptArguments, seed: int) -> tuple[Any, Any]:
    """Training rows and held-out rows."""
    from datasets import concatenate_datasets

    parts = []
    for source in script.dataset or ():
        rows = load_rows(source, streaming=script.streaming)
        parts.append(
            rows.take(script.rows)
            if script.streaming
            else rows.select(range(min(script.rows or len(rows), len(rows))))
        )
    train = concatenate_datasets(parts)
    if script.eval_dataset:
        return train, load_rows(script.eval_dataset)
    if script.streaming:
        raise ValueError("--streaming needs --eval_dataset: nothing can be split off a stream.")
    split = train.train_test_split(script.eval_rows, seed=seed)
    return split["train"], split["test"]


def settings(script: ScriptArguments, args: HyperDFlashTrainingArguments) -> dict[str, Any]:
    """What a model card needs to know of the run, without this machine's folders."""
    told = {**vars(script), **{name: getattr(args, name) for name in REPORTED}}
    told["dataset"] = [_public_name(source) for source in script.dataset or ()]
    return told | {
        name: told[name] and _public_name(told[name])
        for name in ("target", "drafter", "eval_dataset", "chat_template")
    }


def _public_name(source: str) -> str:
    """A Hub name as it is, a path without its folders."""
    return Path(source).name if Path(source).exists() else source


def main(argv: list[str] | None = None, prog: str | None = None) -> None:
    script, args = parse(argv, prog)
    tokenizer = AutoTokenizer.from_pretrained(script.target, trust_remote_code=script.trust_remote_code)
    if script.chat_template:
        tokenizer.chat_template = Path(script.chat_template).read_text()
    dtype = script.target_dtype or ("auto" if torch.cuda.is_available() else "float32")
    target = load_target(
        script.target, dtype=dtype, device_map=script.device_map, trust_remote_code=script.trust_remote_code
    )
    torch.manual_seed(args.seed)
    drafter = load_drafter(script, target, tokenizer)
    drafter.config.target_fingerprint = as_words(target_fingerprint(target))
    train, held_out = load_data(script, args.seed)
    trainer = HyperDFlashTrainer(
        drafter, target, args, train_dataset=train, eval_dataset=held_out, processing_class=tokenizer
    )
    if script.eval_prompts:
        prompts = encode_prompts(tokenizer, held_out.select(range(min(script.eval_prompts, len(held_out)))))
        trainer.add_callback(AcceptanceCallback(trainer, prompts, max_new_tokens=script.eval_max_new_tokens))
    resume = args.resume_from_checkpoint  # a folder, or True for the last in `--output_dir`
    trainer.train(resume_from_checkpoint=True if resume in ("True", "true") else resume)
    metrics = trainer.evaluate()
    trainer.save_model(_internal_call=True)  # which does not push yet
    trainer.save_state()
    if trainer.is_world_process_zero():
        folder = Path(str(args.output_dir))
        # Loading casts what may be cast; the gate stays float32.
        HyperDFlashDrafter.from_pretrained(folder, dtype=script.save_dtype).save_pretrained(folder)
        history = [line for line in trainer.state.log_history if "eval_tau" in line]
        facts = {"settings": settings(script, args), "metrics": metrics, "history": history}
        (folder / TRAINING_RECORD).write_text(json.dumps(facts, indent=1))
        taus = [f"{name} {metrics[name]:.2f}" for name in ("eval_tau", "eval_teacher_forced_tau") if name in metrics]
        print(f"Saved to {args.output_dir}: {', '.join(taus)}")
    if args.push_to_hub:
        trainer.upload()
