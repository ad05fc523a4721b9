"""The flags of `hf-hyperdflash train`, and the help of its own ones without PyTorch."""

from __future__ import annotations

import ast
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..hub.kinds import KINDS

_BOTH_STAGES = {
    "num_train_epochs": 5, "per_device_train_batch_size": 4, "lr_scheduler_type": "cosine", "warmup_steps": 0.04
}  # fmt: skip
STAGES: dict[int, dict[str, Any]] = {
    1: {**_BOTH_STAGES, "dataset": ["zhaode/EagleChat"], "rows": 300_000, "learning_rate": 8e-4},
    2: {**_BOTH_STAGES, "dataset": ["theblackcat102/evol-codealpaca-v1"], "rows": 150_000, "learning_rate": 1e-4},
}
_TYPES = [kind.model_type for kind in KINDS if kind.train_flags is not None]


def _flag(default: Any, help: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": help, **more})


@dataclass
class ScriptArguments:
    target: str = field(metadata={"help": "path or Hub id of the target"})
    stage: int = _flag(1, "whose defaults to use: 1 or 2", choices=[1, 2])
    drafter: str | None = _flag(None, "go on from this drafter, as stage 2 does; unset for a new one")
    overwrite_output_dir: bool = _flag(
        False, "begin anew where `--output_dir` holds an earlier run, and remove its checkpoints"
    )
    dataset: list[str] | None = field(default=None, metadata={"help": "files or Hub names of conversations"})
    rows: int | None = _flag(None, "most rows of each dataset")
    streaming: bool = _flag(False, "read the dataset while training (needs --max_steps)")
    eval_dataset: str | None = _flag(None, "held-out rows; unset to split them off")
    eval_rows: int = _flag(64, "held-out rows that are split off")
    eval_prompts: int = _flag(32, "held-out prompts generated from; 0 for none")
    eval_max_new_tokens: int = _flag(128, "tokens generated per prompt")
    drafter_type: str = _flag(
        "hyperdflash",
        f"kind of a new drafter: {', '.join(_TYPES[:-1])} or {_TYPES[-1]}",
        choices=_TYPES,
    )
    layers: int | None = _flag(None, "layers of a new drafter; unset for 5, SpecBlock's 2, EAGLE-3's 1")
    draft_vocab_size: int | None = _flag(
        None,
        "draft only so many tokens, those that answers in `--dataset` have most often, by an LM head of the drafter's "
        "own; unset for all, by the target's",
    )
    intermediate_size: int | None = _flag(None, "width of a new drafter's MLPs; unset for three times its hidden size")
    reducer: str | None = _flag(None, "hc_gate, fc, hybrid or stream_mean; unset for the gate where it can be")
    target_layer_ids: list[int] | None = field(
        default=None, metadata={"help": "layers a new drafter reads; -1, the pre-collapse residual, if unset"}
    )
    num_draft_tokens: int | None = _flag(None, "draft positions of a block; unset for 6, or those of `--drafter`")
    block_size: int | None = _flag(None, "slots of a new SpecBlock drafter's blocks; unset for 4")
    max_blocks: int | None = _flag(None, "passes of a round of a new SpecBlock or EAGLE-3 drafter; unset for 2 and 7")
    shift: bool = _flag(True, "let a new SpecBlock drafter's slots take in the one before")
    broadcast: bool = _flag(True, "tell all slots of a new SpecBlock drafter's blocks condition and token")
    rank_head: bool = _flag(True, "give a new SpecBlock drafter a head that says how wide its trees are")
    sample_from_anchor: bool = _flag(False, "let the anchor's slot of a new drafter draft, too, as DSpark's does")
    sequential_head: str | None = _flag(
        None,
        "what lets each draft know the one before it: markov, gated_markov, recurrent, selector or state; unset for "
        "none, or the one that `--drafter` has",
    )
    head_rank: int | None = _flag(None, "width of that head; unset for 256")
    head_candidates: int | None = _flag(
        None, "the block's best tokens that it chooses among, 0 for all; unset for the head's own number"
    )
    conv_kernel_size: int | None = _flag(None, "taps of convolutions in a new drafter's layers; unset for none")
    confidence_head: bool = _flag(False, "let the drafter say how probable each draft's acceptance is")
    sliding_window: str | None = _flag(
        None,
        "context that a new drafter's blocks see, in tokens, not more than the rows mostly have; none for all (vLLM "
        "and SGLang have words only for that); unset for the drafter's own default",
    )
    mask_token_id: int | None = _flag(None, "unset for the tokenizer's mask token or one that is not used")
    chat_template: str | None = _flag(None, "a Jinja file, where the tokenizer has none")
    target_dtype: str | None = _flag(None, "unset for the checkpoint's on a GPU, else float32")
    device_map: str | None = _flag(None, "spread the target, for example auto")
    trust_remote_code: bool = _flag(False, "run the code that the target brings along")
    save_dtype: str = _flag("bfloat16", "number format of the finished drafter")


INTRODUCTION = """\
usage: {prog} --target TARGET --output_dir FOLDER [--dataset ROWS] [flags]

Train a HyperDFlash drafter, by default with the paper's recipe:

  {prog} --stage 1 --target TARGET --output_dir stage-1
  {prog} --stage 2 --target TARGET --drafter stage-1 --output_dir my-drafter

Stage 1 is general chat and code, stage 2 tasks (section 3.1: datasets, learning rates, 5 epochs, 4 rows per GPU on 8
GPUs). Drafters accept more when the answers are the target's own: `hf-hyperdflash answers` first. Several GPUs:

  accelerate launch --config_file examples/accelerate/ddp.yaml examples/train_drafter.py ...
"""


THEIRS = """\
Training, transformers' own: every argument of its TrainingArguments is a flag, too, with the default it has there,
but for

{set_here}

`python -c "help(__import__('transformers').TrainingArguments)"` lists them.
"""


def help_text(prog: str) -> str:
    """Our flags with their defaults, those of stage 1 where the stages differ, and what transformers' own are."""
    parts = [INTRODUCTION.format(prog=prog)]
    for title, flags in _flags().items():
        parts += ["", f"{title}:", *(_entry(name, *told) for name, told in flags.items())]
    set_here = "\n".join(f"  --{name} {value}" for name, value in _BOTH_STAGES.items())
    return "\n".join([*parts, "", THEIRS.format(set_here=set_here)])


def _flags() -> dict[str, dict[str, tuple[str, str]]]:
    """Default and help of each of ours, by what they are for."""
    script = {part.name: (_shown(part.default), part.metadata["help"]) for part in fields(ScriptArguments)}
    source = Path(__file__).with_name("arguments.py")  # to import it takes PyTorch
    return {"The run": script, "Training a drafter": dict(_fields_in(source, "HyperDFlashTrainingArguments"))}


def _entry(name: str, default: str, help: str) -> str:
    first, second = (stage.get(name) for stage in STAGES.values())
    shown = default if first is None else _shown(first)
    if second != first:
        shown += f" (stage 2: {_shown(second)})"
    text = textwrap.fill(help, min(shutil.get_terminal_size().columns, 120) - 8)
    return f"  --{name} {shown}".rstrip() + "\n" + textwrap.indent(text, " " * 8)


def _shown(default: Any) -> str:
    if isinstance(default, list):
        return " ".join(map(str, default))
    return str(default) if isinstance(default, (str, int, float)) else ""


def _fields_in(source: Path, name: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """The fields of a dataclass with defaults and help, as its source has them."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call):
            given: dict[str | None, Any] = {keyword.arg: keyword.value for keyword in node.value.keywords}
            metadata, default = given.get("metadata", ast.Dict([], [])), given.get("default", ast.Constant(None))
            words = [value for key, value in zip(metadata.keys, metadata.values) if ast.unparse(key) == "'help'"]
            if "init" not in given:
                help = "".join(map(ast.literal_eval, words)).replace("%%", "%")  # as argparse shows it
                yield ast.unparse(node.target), (_written(default), help)


def _written(default: ast.expr) -> str:
    try:
        return _shown(ast.literal_eval(default))
    except ValueError:  # an expression
        return ast.unparse(default)
