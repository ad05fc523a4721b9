"""The flags of `hf-hyperdflash train`, and their help without loading PyTorch: what is defined elsewhere is read there."""

from __future__ import annotations

import ast
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, cast

RECIPE = {"num_train_epochs": 5, "per_device_train_batch_size": 4, "lr_scheduler_type": "cosine", "warmup_steps": 0.04}
STAGES: dict[int, dict[str, Any]] = {
    1: {**RECIPE, "dataset": ["zhaode/EagleChat"], "rows": 300_000, "learning_rate": 8e-4},
    2: {**RECIPE, "dataset": ["theblackcat102/evol-codealpaca-v1"], "rows": 150_000, "learning_rate": 1e-4},
}


@dataclass
class ScriptArguments:
    target: str = field(metadata={"help": "path or Hub id of the target"})
    stage: int = field(default=1, metadata={"help": "whose defaults to use: 1 or 2", "choices": [1, 2]})
    drafter: str | None = field(
        default=None, metadata={"help": "go on from this drafter, as stage 2 does; unset for a new one"}
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
    sliding_window: str | None = field(
        default=None,
        metadata={
            "help": "context that a new drafter's blocks see, in tokens, not more than the rows mostly have; none for all "
            "(vLLM and SGLang have words only for that); unset for the drafter's own default"
        },
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


class Flag(NamedTuple):
    name: str
    default: str
    help: str


INTRODUCTION = """\
usage: {prog} --target TARGET --output_dir FOLDER [--dataset ROWS] [flags]

Train a HyperDFlash drafter, by default with the paper's recipe:

  {prog} --stage 1 --target TARGET --output_dir stage-1
  {prog} --stage 2 --target TARGET --drafter stage-1 --output_dir my-drafter

Stage 1 is general chat and code, stage 2 tasks (section 3.1: datasets, learning rates, 5 epochs, 4 rows per GPU on 8
GPUs). Drafters accept more when the answers are the target's own: examples/regenerate_answers.py first. Several GPUs:

  accelerate launch --config_file examples/accelerate/ddp.yaml examples/train_drafter.py ...
"""


def help_text(prog: str) -> str:
    """All flags with their defaults, those of stage 1 where the stages differ."""
    ours = list(_written_in(Path(__file__).with_name("arguments.py"), "HyperDFlashTrainingArguments"))
    # Beside `transformers/__init__.py`, which stays unimported.
    source = Path(cast(Any, find_spec("transformers")).origin).with_name("training_args.py")
    theirs = [flag for flag in _written_in(source, "TrainingArguments") if flag.name not in {own.name for own in ours}]
    script = [Flag(part.name, _shown(part.default), part.metadata["help"]) for part in fields(ScriptArguments)]
    groups = {"The run:": script, "Training a drafter:": ours, "Training, transformers' own:": theirs}
    parts = [INTRODUCTION.format(prog=prog)]
    width = min(shutil.get_terminal_size().columns, 120)
    for title, flags in groups.items():
        parts += ["", title, *(_entry(flag, width) for flag in flags)]
    return "\n".join(parts)


def _entry(flag: Flag, width: int) -> str:
    first, second = (stage.get(flag.name) for stage in (STAGES[1], STAGES[2]))
    default = flag.default if first is None else _shown(first)
    if second != first:
        default += f" (stage 2: {_shown(second)})"
    text = textwrap.fill(flag.help, width, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return f"  --{flag.name} {default}".rstrip() + f"\n{text}"


def _shown(default: Any) -> str:
    if isinstance(default, (list, tuple)):
        return " ".join(map(str, default))
    return str(default) if isinstance(default, (str, int, float)) else ""


def _written_in(source: Path, name: str) -> Iterator[Flag]:
    """The fields of a dataclass as its source has them."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Call):
            given = {keyword.arg: keyword.value for keyword in node.value.keywords}
            if "init" not in given:
                yield Flag(node.target.id, _default(given.get("default")), _help(given.get("metadata")))


def _default(node: ast.expr | None) -> str:
    if node is None:
        return ""
    try:
        return _shown(ast.literal_eval(node))
    except ValueError:  # an expression
        return ast.unparse(node)


def _help(metadata: ast.expr | None) -> str:
    entries = zip(metadata.keys, metadata.values) if isinstance(metadata, ast.Dict) else ()
    words = (value for key, value in entries if isinstance(key, ast.Constant) and key.value == "help")
    return next((ast.literal_eval(value).replace("%%", "%") for value in words), "")  # as argparse shows it
