"""The flags of `hf-hyperdflash train` and their help. Importing this file does not import PyTorch."""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar

from ..hub.descriptions import in_words
from ..hub.kinds import KINDS

_T = TypeVar("_T")


# Defaults of the paper's recipe (section 3.1), for both kinds of arguments: of both stages, and of each.
_BOTH_STAGES: dict[str, object] = {
    "num_train_epochs": 5, "per_device_train_batch_size": 4, "lr_scheduler_type": "cosine", "warmup_steps": 0.04,
}  # fmt: skip
STAGES: dict[int, dict[str, object]] = {
    1: {"dataset": ["zhaode/EagleChat"], "rows": 300_000, "learning_rate": 8e-4, **_BOTH_STAGES},
    2: {"dataset": ["theblackcat102/evol-codealpaca-v1"], "rows": 150_000, "learning_rate": 1e-4, **_BOTH_STAGES},
}
_TRAINED = {kind.model_type: kind.train_flags for kind in KINDS if kind.train_flags is not None}
_TYPES = list(_TRAINED)
_OF_ONE_KIND = tuple(dict.fromkeys(flag for flags in _TRAINED.values() for flag in flags))
_OF_HEADS = ("sequential_head", "head_rank", "head_candidates", "confidence_head")
_OF_ANY_KIND = ("intermediate_size", "draft_vocab_size", "reducer", "target_layer_ids")
_OF_NEW_DRAFTERS = [
    flag
    for flag in ("drafter_type", "layers", *_OF_ANY_KIND, *_OF_ONE_KIND)
    if flag not in (*_OF_HEADS, "num_draft_tokens", "draft_vocab_size")
]

# What numbers are allowed, of our fields and of transformers'.
LOSS_WEIGHTS = ("ce_weight", "kl_weight", "tv_weight", "confidence_weight", "blind_weight")
_LEAST = {  # of whole numbers
    "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "gradient_accumulation_steps": 1,
    "kl_positions": 1, "num_anchors": 1, "loss_chunk_size": 1, "max_length": 2, "max_steps": 1, "seed": 0,
    "dataloader_num_workers": 0, "rows": 1, "eval_rows": 1, "eval_prompts": 0, "eval_max_new_tokens": 1, "layers": 1,
    "intermediate_size": 1, "draft_vocab_size": 0, "num_draft_tokens": 1, "block_size": 1, "max_blocks": 1, "check": 0,
    "batch_size": 1, "concurrency": 1, "lora_rank": 1,
}  # fmt: skip
_NOT_NEGATIVE = (*LOSS_WEIGHTS, "rank_weight", "block_first", "learning_rate", "weight_decay")
_POSITIVE = ("kl_temperature", "loss_decay", "num_train_epochs", "save_steps", "feature_gigabytes")
_BELOW_1 = ("adam_beta1", "adam_beta2")


def _flag(default: _T, help: str, **choices: Sequence[object]) -> _T:
    return field(default=default, metadata={"help": help, **choices})


def check_fields(given: TrainingFlags | ScriptArguments | FeatureFlags, dashes: str = "") -> None:
    """Raise a `ValueError` if a field is none of its choices, or out of its range. Each may keep its default."""
    for each in fields(given):
        name, value = each.name, getattr(given, each.name)
        least, choices = _LEAST.get(name), each.metadata.get("choices")
        is_number = isinstance(value, (int, float)) and 0 <= value < math.inf
        if value == each.default:
            continue
        if least is not None and (not isinstance(value, int) or value < least):
            expected = f"a whole number of at least {least}"
        elif name in _NOT_NEGATIVE and not is_number:
            expected = "a number of at least 0"
        elif name in _POSITIVE and not (is_number and value):
            expected = "a number of more than 0"
        elif name in _BELOW_1 and not (is_number and value < 1):
            expected = "a number from 0 to below 1"
        elif choices and value not in choices:
            expected = f"one of {', '.join(map(str, choices))}"
        else:
            continue
        raise ValueError(f"`{dashes}{name}` is {value!r}, expected {expected}.")


# Complete settings of the loss. A recipe sets the fields that the user did not set.
_PAPER: dict[str, float | None] = {
    "ce_weight": 1.0, "kl_weight": 0.15, "kl_positions": 2, "tv_weight": 0.0, "confidence_weight": 1.0,
    "blind_weight": 0.1, "loss_decay": None, "rank_weight": 1.0, "valid_prefix": False, "block_first": 0.0,
    "kl_by_token": False,
}  # fmt: skip
# EAGLE-3's paper's: distillation alone, 0.8 of the weight with each further step
_DISTILLED = {**_PAPER, "ce_weight": 0.0, "kl_weight": 1.0, "kl_positions": None, "loss_decay": 4.48}
RECIPES: dict[str, dict[str, Any]] = {
    "hyperdflash": _PAPER,
    # Theirs: 0.1 cross-entropy + 0.9 L1 + 1.0 confidence; L1 is twice the total variation.
    "dspark": {**_PAPER, "ce_weight": 0.1, "kl_weight": 0.0, "tv_weight": 1.8, "loss_decay": 4.0},
    "ours": {**_PAPER, "kl_weight": 1.0, "kl_positions": None, "tv_weight": 1.0, "loss_decay": 4.0},
    "eagle3": _DISTILLED,
    "specblock": {**_DISTILLED, "valid_prefix": True},  # its paper's
    # SpecForge's and NVIDIA's settings: the base's weight falls from 1 to 0 over all of training
    "domino": {**_PAPER, "kl_weight": 0.0, "loss_decay": 7.0, "block_first": 1.0},
    # its paper's (Eq. 9): the mean over all drafts, all of the same weight
    "jetspec": {**_PAPER, "ce_weight": 0.0, "kl_weight": 1.0, "kl_positions": None, "kl_by_token": True},
}


@dataclass
class TrainingFlags:
    """The trainer's own arguments beside transformers', see [`HyperDFlashTrainingArguments`]."""

    learning_rate: float = _flag(8e-4, "Peak learning rate (the paper's stage 1).")
    remove_unused_columns: bool = _flag(False, "The trainer needs the loss mask and positions: leave it off.")
    recipe: str = _flag(
        "hyperdflash",
        "The loss where nothing else is said: hyperdflash (the paper's), dspark, ours, eagle3, specblock, domino, "
        "jetspec.",
        choices=tuple(RECIPES),
    )
    ce_weight: float | None = _flag(None, "Weight of the cross-entropy, 0 or more; unset for the recipe's.")
    kl_weight: float | None = _flag(
        None, "Weight of the distillation term (Eq. 3; the paper: 0.1 to 0.2); unset for the recipe's."
    )
    kl_positions: int | None = _flag(None, "Draft positions that are distilled (Eq. 2); unset for the recipe's.")
    tv_weight: float | None = _flag(
        None, "Weight of the drafts' probability to be rejected, 0 or more; unset for the recipe's."
    )
    confidence_weight: float | None = _flag(
        None, "Weight of a confidence head's loss, 0 or more; unset for the recipe's."
    )
    blind_weight: float | None = _flag(
        None,
        "Weight of the block's own cross-entropy, where a head chooses among its best tokens; unset for the recipe's.",
    )
    loss_decay: float | None = _flag(
        None, "Weight position k by exp(-(k-1)/loss_decay), inf for equal weights; unset for the recipe's."
    )
    rank_weight: float | None = _flag(None, "Weight of a rank head's loss, 0 or more; unset for the recipe's.")
    valid_prefix: bool | None = _flag(
        None, "Let a draft count only where those before it are right; unset for the recipe's."
    )
    block_first: float | None = _flag(
        None,
        "Go from the block's own cross-entropy to its head's in this part of training, 0 or more; unset for the "
        "recipe's.",
    )
    kl_by_token: bool | None = _flag(
        None, "Distil by the mean over drafts, and not over positions; unset for the recipe's."
    )
    kl_temperature: float = _flag(1.0, "Temperature of the distillation (Eq. 2).")
    kl_teacher: str = _flag("hc_head", "hc_head (exact) or mean_pool (the paper's)", choices=("hc_head", "mean_pool"))
    num_anchors: int = _flag(512, "Most blocks per row and step.")
    loss_chunk_size: int = _flag(256, "Draft positions with logits in memory at once.")
    feature_source: str = _flag("online", "Run the target in every step, or once.", choices=("online", "cached"))
    feature_cache_dir: str | None = _flag(None, "Directory of cached features; <output_dir>/_features by default.")
    feature_dtype: str = _flag(
        "bfloat16", "Number format of cached features.", choices=("float32", "bfloat16", "float8")
    )
    feature_retention: str | None = _flag(
        None,
        "Train beside `hf-hyperdflash features`, which fills the folder, and keep or delete what has been trained on.",
        choices=("keep", "delete"),
    )
    feature_gigabytes: float | None = _flag(None, "What the folder may hold with `delete`; unset for no limit.")
    max_length: int | None = _flag(None, "Longest row in tokens; unset for 4096, or the target's positions if fewer.")
    packing: bool = _flag(False, "Lay several conversations in one row.")


@dataclass
class ScriptArguments:
    """The flags that are not the trainer's arguments; the help of each says what it means."""

    target: str = field(metadata={"help": "path or Hub id of the target, or of a GGUF file in it"})
    stage: int = _flag(1, "whose defaults to use: 1 or 2", choices=[1, 2])
    drafter: str | None = _flag(None, "go on from this drafter, as stage 2 does; unset for a new one")
    lora_rank: int | None = _flag(
        None, "train a LoRA adapter of `--drafter` of this rank, and save it alone; unset for the drafter itself"
    )
    overwrite_output_dir: bool = _flag(
        False, "begin anew where `--output_dir` holds an earlier run, and remove its checkpoints"
    )
    dataset: list[str] | None = field(default=None, metadata={"help": "files or Hub names of conversations"})
    rows: int | None = _flag(None, "most rows of each dataset")
    streaming: bool = _flag(False, "read the dataset while training (needs --max_steps)")
    eval_dataset: str | None = _flag(None, "held-out rows; unset to split them off")
    eval_rows: int = _flag(64, "held-out rows that are split off")
    eval_prompts: int | None = _flag(
        None,
        "held-out prompts generated from; 0 for none, and with `--feature_source cached` the target is loaded without "
        "its layers; unset for 32, or for none where it is larger than this machine's memory",
    )
    eval_max_new_tokens: int = _flag(128, "tokens generated per prompt")
    drafter_type: str = _flag(
        "hyperdflash",
        f"kind of a new drafter: {in_words(_TYPES, 'or')}",
        choices=_TYPES,
    )
    layers: int | None = _flag(None, "layers of a new drafter; unset for 5, P-EAGLE's 4, SpecBlock's 2, EAGLE-3's 1")
    draft_vocab_size: int | None = _flag(
        None,
        "draft only so many tokens, those that answers in `--dataset` have most often, by an LM head of the drafter's "
        "own; 0 for all, by the target's; unset for all, or for 99.9 % of what answers have where an LM head over all "
        "costs more than the drafter's layers. With `--drafter` other tokens than before",
    )
    intermediate_size: int | None = _flag(None, "width of a new drafter's MLPs; unset for three times its hidden size")
    reducer: str | None = _flag(
        None,
        "hc_gate, fc, hybrid or stream_mean; unset for the gate where it can be",
        choices=("hc_gate", "fc", "hybrid", "stream_mean"),
    )
    target_layer_ids: list[int] | None = field(
        default=None,
        metadata={
            "help": "layers a new drafter reads: more know more, and each widens reducer and feature cache; unset for "
            "-1, the pre-collapse residual, of a target with several streams, for three of EAGLE-3's and SpecBlock's, "
            "and else for as many as the drafter has, spread over the target's"
        },
    )
    num_draft_tokens: int | None = _flag(None, "draft positions of a block; unset for 6, or those of `--drafter`")
    block_size: int | None = _flag(None, "slots of a new SpecBlock drafter's blocks; unset for 4")
    max_blocks: int | None = _flag(
        None, "passes of a round of a new SpecBlock or EAGLE-3 drafter, drafts of a P-EAGLE one; unset for 2, 7 and 7"
    )
    shift: bool = _flag(True, "let a new SpecBlock drafter's slots take in the one before")
    broadcast: bool = _flag(True, "tell all slots of a new SpecBlock drafter's blocks condition and token")
    rank_head: bool = _flag(True, "give a new SpecBlock drafter a head that says how wide its trees are")
    sample_from_anchor: bool = _flag(False, "let the anchor's slot of a new drafter draft, too, as DSpark's does")
    sequential_head: str | None = _flag(
        None,
        "what lets each draft know the one before it: markov, gated_markov, recurrent, gru, selector or state; unset "
        "for none, or the one that `--drafter` has",
        choices=("none", "markov", "gated_markov", "recurrent", "gru", "selector", "state"),
    )
    head_rank: int | None = _flag(None, "width of that head; unset for 256")
    head_candidates: int | None = _flag(
        None, "the block's best tokens that it chooses among, 0 for all; unset for the head's own number"
    )
    causal_layers: str = _flag(
        "none",
        "layers of a new drafter in which slots see no later ones of their block: none, sliding, or all (JetSpec's)",
        choices=("none", "sliding", "all"),
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

    def __post_init__(self) -> None:
        if self.stage == 2 and not self.drafter:
            raise ValueError(
                "`--stage 2` goes on from stage 1: name its drafter with `--drafter FOLDER`. For a new drafter leave "
                "`--stage` out and set `--dataset` and `--learning_rate`."
            )
        if self.drafter and (ignored := self._first_given(_OF_NEW_DRAFTERS)):
            raise ValueError(
                f"`--{ignored}` is for a new drafter, but `--drafter {self.drafter}` has its own: leave one out."
            )
        check_fields(self, "--")
        if self.lora_rank and not self.drafter:
            raise ValueError(
                f"`--lora_rank` is {self.lora_rank}, for an adapter of a drafter: name that with `--drafter`."
            )
        if self.lora_rank and (changed := self._first_given((*_OF_HEADS, "num_draft_tokens", "draft_vocab_size"))):
            raise ValueError(
                f"`--{changed}` changes the drafter itself, and `--lora_rank` trains an adapter beside it: leave one "
                "out."
            )
        own = _TRAINED[self.drafter_type]
        if wrong := self._first_given(flag for flag in _OF_ONE_KIND if flag not in own):
            raise ValueError(f"`--{wrong}` is not for a drafter of type {self.drafter_type}: leave it out.")
        if self.streaming and not self.eval_dataset:
            raise ValueError("`--streaming` needs `--eval_dataset`: nothing can be split off a stream.")
        if self.streaming and self.draft_vocab_size:
            raise ValueError("`--draft_vocab_size` counts the tokens of a dataset, not of a stream: leave one out.")
        self.window_field()

    def _first_given(self, names: Iterable[str]) -> str | None:
        unset = {flag.name: flag.default for flag in fields(self)}
        return next((name for name in names if getattr(self, name) != unset[name]), None)

    def window_field(self) -> dict[str, int | None]:
        """Return the field `sliding_window` of a new drafter; nothing for its default."""
        given = self.sliding_window
        if given is None:
            return {}
        if given.lower() in ("none", "0"):
            return {"sliding_window": None}
        if not given.isdecimal():
            raise ValueError(f"`--sliding_window` is {given!r}, expected a number of tokens, or none for no window.")
        return {"sliding_window": int(given)}

    def head_fields(self) -> dict[str, str | int | bool]:
        """Return the flags about heads as fields of a drafter's configuration."""
        given = {name: getattr(self, name) for name in _OF_HEADS}
        return {name: value for name, value in given.items() if value is not None and value is not False}

    def drafter_fields(self) -> dict[str, str | int | bool | list[int] | None]:
        """Return the flags about a new drafter as fields of its configuration."""
        given = {name: getattr(self, name) for name in (*_OF_ANY_KIND, *_TRAINED[self.drafter_type])}
        given["num_hidden_layers"] = self.layers
        return {name: value for name, value in given.items() if value is not None} | self.window_field()


@dataclass
class FeatureFlags:
    """The flags of `hf-hyperdflash features` alone."""

    output: str = field(metadata={"help": "the folder of the features; a stopped run continues there"})
    part: str | None = _flag(
        None, "make this share of the parts alone, 3/8 for the third of eight, here or on another machine; folders "
        "are joined by putting their files into one",
    )  # fmt: skip
    check: int = _flag(0, "rows that are computed again here and compared")
    batch_size: int = _flag(8, "documents that the target runs over at once")
    endpoint: str | None = _flag(
        None, "a vLLM server with our connector, which makes the features instead of a target here; what it serves is "
        "`--target`, unless that is given; for another server the error has the command that starts one",
    )  # fmt: skip
    served_model: str | None = _flag(None, "the model's name there; unset for its only one")
    concurrency: int = _flag(64, "rows that the server is asked for at once")

    def __post_init__(self) -> None:
        check_fields(self, "--")
        self.share  # noqa: B018  # refuses what is none

    @property
    def share(self) -> tuple[int, int]:
        """The share of `part`: its number and how many there are."""
        number, _, shares = (self.part or "1/1").partition("/")
        if not (number.isdecimal() and shares.isdecimal() and 1 <= int(number) <= int(shares)):
            raise ValueError(f"`--part` is {self.part!r}, expected a share: 3/8 is the third of eight.")
        return int(number), int(shares)


# Of `train`'s flags those that `features` has, too: with the same ones it makes what training reads.
_OF_FEATURES = (
    "target", "dataset", "rows", "eval_dataset", "eval_rows", "drafter", "drafter_type", "layers", "target_layer_ids",
    "chat_template", "target_dtype", "device_map", "trust_remote_code", "feature_dtype", "feature_gigabytes",
    "max_length", "packing",
)  # fmt: skip
_FEATURES_INTRODUCTION = """\
usage: {prog} (--target TARGET | --endpoint URL) --dataset ROWS --output FOLDER [flags]

Write the target's states of the rows that `train` with the same flags would train on, each once. It says bytes and
hours first. Several of these commands may fill one folder, and

  hf-hyperdflash train --target TARGET --dataset ROWS --feature_source cached --feature_cache_dir FOLDER ...

may read it at the same time (`--feature_retention`).
"""
INTRODUCTION = """\
usage: {prog} --target TARGET --output_dir FOLDER [--dataset ROWS] [flags]

Train a HyperDFlash drafter, by default with the paper's recipe:

  {prog} --stage 1 --target TARGET --output_dir stage-1
  {prog} --stage 2 --target TARGET --drafter stage-1 --output_dir my-drafter

Stage 1 is general chat and code, stage 2 tasks (section 3.1: datasets, learning rates, 5 epochs, 4 rows per GPU on 8
GPUs). Drafters accept more when the answers are the target's own: `hf-hyperdflash answers` first. Several GPUs:

  accelerate launch --num_processes 8 -m hf_hyperdflash.cli.app train ...
"""


THEIRS = """\
Training, transformers' own: every argument of its TrainingArguments is a flag, too, with the default it has there,
but for

{set_here}

`python -c "help(__import__('transformers').TrainingArguments)"` lists them.
"""


def help_text(prog: str) -> str:
    """Return the help: our flags with their defaults, those of stage 1 where the stages differ, and how to see
    transformers' own."""
    parts = [INTRODUCTION.format(prog=prog), "", "The run:", *map(_entry, fields(ScriptArguments))]
    parts += ["", "Training a drafter:", *map(_entry, fields(TrainingFlags))]
    set_here = "\n".join(f"  --{name} {default}" for name, default in _BOTH_STAGES.items())
    return "\n".join([*parts, "", THEIRS.format(set_here=set_here)])


def features_help(prog: str) -> str:
    """Return the help of `features`: its flags, and those of `train` that matter there."""
    known = {flag.name: flag for flag in (*fields(ScriptArguments), *fields(TrainingFlags))}
    own = [_entry(flag) for flag in fields(FeatureFlags)]
    shared = [*(_entry(known[name]) for name in _OF_FEATURES), "  --seed 42\n        of the rows' order"]
    return "\n".join([_FEATURES_INTRODUCTION.format(prog=prog), *own, "", "As of `train`:", *shared])


def _entry(flag: Field[object]) -> str:
    """Return the lines of a flag in the help."""
    first, second = (stage.get(flag.name) for stage in STAGES.values())
    shown = _shown(flag.default if first is None else first)
    if second != first:
        shown += f" (stage 2: {_shown(second)})"
    text = textwrap.fill(flag.metadata["help"].replace("%%", "%"), min(shutil.get_terminal_size().columns, 120) - 8)
    return f"  --{flag.name} {shown}".rstrip() + "\n" + textwrap.indent(text, " " * 8)


def _shown(default: object) -> str:
    if isinstance(default, list):
        return " ".join(map(str, default))
    return str(default) if isinstance(default, (str, int, float)) else ""
