"""Runs `hf-hyperdflash train`: loads data, target and drafter, trains, and saves the drafter with its record."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from transformers import HfArgumentParser, PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback, ProgressCallback
from transformers.utils import logging as transformers_logging

from ..drafters.adapters import finish_adapter, lora_config
from ..drafters.blocks.drafter import BlockDrafter
from ..drafters.configuration import DrafterConfig
from ..drafters.parts.heads import HEADS
from ..drafters.reading import HiddenStateDrafter
from ..drafters.saved import SavedDrafter
from ..hub import loading
from ..hub.kinds import KINDS, TRAINED, DrafterKind
from ..targets.registry import target_of
from .acceptance import AcceptanceCallback, check_metric
from .arguments import MAX_LENGTH, HyperDFlashTrainingArguments
from .data.encoding import encode_prompts, end_ids_of
from .data.rows import count_tokens, joined, load_rows, prepare_dataset
from .data.templates import read_chat_template
from .flags import STAGES, ScriptArguments
from .runs import checkpoints
from .runs.progress import Lines, LinesAboveBar
from .trainer import HyperDFlashTrainer

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

_COVERAGE = 0.999  # of the answers' tokens that a new drafter drafts where its LM head over all would cost most
_LAYER_WEIGHTS = 13  # of a layer, in squares of its width: about 4 of attention and 9 of an MLP of three times that
_PROMPTS = 32  # that are generated from, where the target is here whole
_NUM_DRAFT_TOKENS = 6  # of a new drafter's block
_NEGATIVE = re.compile(r"-(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$", re.IGNORECASE)  # argparse's own takes -1e-3 for a flag


class _Parser(HfArgumentParser):
    """Turns errors of argparse into a `ValueError`, which the command prints in one line."""

    def error(self, message: str) -> NoReturn:
        command = "features" if "--output" in self._option_string_actions else "train"
        raise ValueError(f"{message}. `{command} --help` lists the flags.")


def parse(argv: list[str] | None, prog: str | None = None) -> tuple[ScriptArguments, HyperDFlashTrainingArguments]:
    """Parse flags into arguments, with the defaults of the chosen stage."""
    script, args = parse_known(make_parser(argv, prog), argv)
    check_flags(script, args)
    return script, args


def parse_known(parser: HfArgumentParser, argv: list[str] | None, command: str = "train") -> list[Any]:
    """Parse flags into a parser's dataclasses, and refuse others."""
    *parsed, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    if unknown:
        names = [name for name in parser._option_string_actions if name.startswith("--")]
        near = "".join(f": {name}, perhaps" for name in get_close_matches(unknown[0].partition("=")[0], names, 1))
        raise ValueError(f"`{command}` knows no {unknown[0]!r}{near}. `{command} --help` lists its flags.")
    return parsed


def make_parser(
    argv: list[str] | None,
    prog: str | None = None,
    kinds: Any = (ScriptArguments, HyperDFlashTrainingArguments),
) -> HfArgumentParser:
    usage = "%(prog)s --target TARGET --output_dir FOLDER [--dataset ROWS] [flags], `train --help` lists them"
    parser = _Parser(kinds, prog=prog, usage=usage, allow_abbrev=False)
    # transformers would choose a folder. Another command names its own.
    parser._option_string_actions["--output_dir"].required = "--output" not in parser._option_string_actions
    stage = _Parser((), add_help=False, allow_abbrev=False)
    stage.add_argument("--stage", type=int, default=1)
    # A bar only on a terminal: transformers would decide it by its log level.
    parser.set_defaults(disable_tqdm=not sys.stderr.isatty())
    parser._negative_number_matcher = _NEGATIVE
    if defaults := STAGES.get(stage.parse_known_args(argv)[0].stage):
        parser.set_defaults(**defaults)
    return parser


def check_flags(script: ScriptArguments, args: HyperDFlashTrainingArguments, output: str = "--output_dir") -> None:
    """Refuse flags that do not fit together, before anything is loaded. `output` is the flag of the folder."""
    for name in ("target_dtype", "save_dtype"):
        value = getattr(script, name)
        named = getattr(torch, value or "auto", None)
        if value not in (None, "auto") and not (isinstance(named, torch.dtype) and named.is_floating_point):
            raise ValueError(f"`--{name}` is {value!r}, expected a number format like float32 or bfloat16.")
    own = _kind(script).train_flags or ()
    has_block = not script.drafter and "num_draft_tokens" in own
    drafts = script.num_draft_tokens or (_NUM_DRAFT_TOKENS if has_block else 0)
    if args.max_length is not None and args.max_length <= drafts:
        raise ValueError(
            f"`--max_length` is {args.max_length}, expected more than `--num_draft_tokens`, {drafts}: a block has an "
            "anchor before them."
        )
    makes_confidence_head = "confidence_head" in own and (bool(script.drafter) or script.confidence_head)
    makes_head = bool(script.drafter) or script.sequential_head not in (None, "none")
    args.check_heads(makes_confidence_head, makes_head, makes_head)
    if script.streaming and args.max_steps <= 0:
        raise ValueError("`--streaming` needs `--max_steps`: how long a stream is is not known.")
    folder = Path(str(args.output_dir)).absolute()
    existing = next(candidate for candidate in (folder, *folder.parents) if os.path.lexists(candidate))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        why = "cannot be written to" if existing.is_dir() else "is a file"
        raise ValueError(
            f"`{output}` is {args.output_dir!r}, but {existing} {why}: expected a folder of yours, which is made "
            "if needed."
        )
    if args.eval_strategy != "no":
        check_metric(args.metric_for_best_model, generates=script.eval_prompts != 0)
    if script.lora_rank:
        import_module("peft")  # which may not be installed
    if script.device_map:
        loading.check_device(script.device_map, "--device_map")
    if script.overwrite_output_dir and args.resume_from_checkpoint:
        raise ValueError(
            "`--overwrite_output_dir` begins anew and `--resume_from_checkpoint` goes on: leave one of them out."
        )
    if script.chat_template:
        read_chat_template(script.chat_template, "--chat_template")


def earlier_drafter(script: ScriptArguments, seed: int) -> SavedDrafter:
    """Load an earlier stage's drafter in float32, which an optimizer needs, with the heads and the number of draft
    positions of the flags. No weight depends on that number. What does not fit the target is refused before weights
    are loaded."""
    found = loading.check_drafter(str(script.drafter), kinds=TRAINED, or_others=True)
    loading.check_made_for(script.target, found)
    torch.manual_seed(seed)
    drafter: Any = loading.load_drafter(found, dtype=torch.float32)
    if getattr(drafter.config, "target_name_or_path", None) == "":  # other programs' files mostly do not say
        drafter.config.target_name_or_path = checkpoints.public_name(script.target)
    if script.draft_vocab_size is not None:
        if not (script.draft_vocab_size and isinstance(drafter, HiddenStateDrafter)):
            raise ValueError(
                f"`--draft_vocab_size {script.draft_vocab_size}` is not for `--drafter {script.drafter}`, a "
                f"{type(drafter).__name__}: leave it out."
            )
        drafter.check_can_draft_others()
    heads = script.head_fields()
    if not isinstance(drafter, BlockDrafter):
        if wrong := next((name for name in (*heads, "num_draft_tokens") if getattr(script, name)), None):
            raise ValueError(f"`--{wrong}` is not for a {type(drafter).__name__}: leave it out.")
        return cast(SavedDrafter, drafter)
    if heads:
        drafter = drafter.with_heads(**heads)
    if script.num_draft_tokens:
        drafter.config.block_size = script.num_draft_tokens + drafter.config.first_slot
    drafter.config.confidence_temperatures = None  # of the weights as they were
    return drafter


def new_drafter(script: ScriptArguments, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> SavedDrafter:
    """Make a new drafter in float32."""
    kind = _kind(script)
    given: dict[str, object] = dict(script.drafter_fields())
    if "mask_token_id" in (kind.train_flags or ()):  # which is found in the vocabulary, if it is not given
        given["tokenizer"] = tokenizer
    given["target_name_or_path"] = checkpoints.public_name(script.target)
    return cast(SavedDrafter, kind.drafter.from_target(target, dtype=torch.float32, **given))


def _choose_vocabulary(
    script: ScriptArguments, args: HyperDFlashTrainingArguments, target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase, train: Dataset, held_out: Dataset,
) -> Dataset | IterableDataset:  # fmt: skip
    """Set the size of a new drafter's draft vocabulary if it needs one and none is asked for, and tell its share of
    answers. Return the rows of training, tokenized where they were."""
    own = target_of(target).config
    usual = cast(type[DrafterConfig], _kind(script).config)
    layers = script.layers or usual.num_hidden_layers
    head, candidates = HEADS.get(script.sequential_head or "none"), script.head_candidates
    if head is not None and candidates is None:
        candidates = head.candidates_of(own.vocab_size, own.vocab_size)
    is_asked = script.draft_vocab_size is not None or script.drafter or script.streaming
    # Training has no loss for a choice among candidates of a draft vocabulary.
    if is_asked or candidates or own.vocab_size <= _LAYER_WEIGHTS * layers * own.hidden_size:
        return train
    length = args.max_length or min(MAX_LENGTH, getattr(own, "max_position_embeddings", MAX_LENGTH))
    how: dict[str, Any] = {"max_length": length, "vocab_size": own.vocab_size, "end_ids": end_ids_of(target)}
    tokenized, held = (prepare_dataset(rows, tokenizer, **how) for rows in (train, held_out))
    counts = [count_tokens(rows, own.vocab_size) for rows in (tokenized, held)]
    by_count = counts[0].sort(descending=True, stable=True)
    covering = int((by_count.values.cumsum(0) < _COVERAGE * int(counts[0].sum())).sum()) + 1
    script.draft_vocab_size = size = min(covering, own.vocab_size)
    drafted = by_count.indices[:size]
    in_answers, in_held_out = (f"{100 * float(each[drafted].sum() / each.sum()):.1f} %" for each in counts)
    _print_status(
        args,
        f"The drafter drafts {size:,} of {own.vocab_size:,} tokens, {in_answers} of the answers and {in_held_out} of "
        "those held out, because its LM head over all would cost more than its layers. Other text has fewer of them; "
        "`--draft_vocab_size 0` drafts all.",
    )
    return tokenized


def _kind(script: ScriptArguments) -> DrafterKind:
    return next(kind for kind in KINDS if kind.model_type == script.drafter_type)


def load_data(script: ScriptArguments, seed: int) -> tuple[Dataset | IterableDataset, Dataset]:
    """Load training rows and held-out rows, each with its position in its file."""
    parts = []
    for source in script.dataset or ():
        rows = load_rows(source, streaming=script.streaming)
        if script.rows is not None:
            rows = rows.take(script.rows) if script.streaming else rows.select(range(min(script.rows, len(rows))))
        parts.append(rows)
    train = joined(parts)
    if script.eval_dataset:
        held_out = load_rows(script.eval_dataset)
    elif len(train) <= script.eval_rows:
        raise ValueError(
            f"{', '.join(script.dataset or ())} has {len(train)} rows, and `--eval_rows` holds {script.eval_rows} of "
            "them out: lower it, or name other rows with `--eval_dataset`."
        )
    else:
        split = train.train_test_split(script.eval_rows, seed=seed)
        train, held_out = split["train"], split["test"]
    if script.eval_prompts and "input_ids" in held_out.column_names:
        raise ValueError(
            "Held-out rows are tokenized, so that there is no prompt to generate from: set `--eval_prompts 0`."
        )
    return train, held_out


def main(argv: list[str] | None = None, prog: str | None = None) -> None:
    """Train as the flags say. Ctrl-C, or a launcher's or a cluster's SIGTERM, ends with a line that says how to
    resume."""
    script, args = parse(argv, prog)
    try:
        with _quiet_output(args), _interrupted_by_sigterm():
            run(script, args)
    except KeyboardInterrupt:
        # While the flag is set the checkpoints are still the earlier run's.
        last = None if script.overwrite_output_dir else checkpoints.newest_complete(Path(str(args.output_dir)))[0]
        go_on = f"with `--resume_from_checkpoint true` goes on from {last}"
        _print_status(args, f"\nStopped. The same command {go_on if last else 'begins again: no checkpoint yet'}.")
        raise SystemExit(130) from None


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # which alone may say what a signal does
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _quiet_output(args: HyperDFlashTrainingArguments) -> Iterator[None]:
    """Hide bars of libraries where training has none, and let only the first process log."""
    import datasets

    facts = logging.getLogger(__package__.partition(".")[0])
    level, libraries = facts.level, (datasets.utils.logging, transformers_logging)
    hidden = [library for library in libraries if args.disable_tqdm and library.is_progress_bar_enabled()]
    for library in hidden:
        library.disable_progress_bar()
    if args.process_index:
        facts.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for library in hidden:
            library.enable_progress_bar()
        facts.setLevel(level)


def _choose_prompts(script: ScriptArguments, args: HyperDFlashTrainingArguments) -> None:
    """Set the number of prompts to generate from where it is not given: none for a target that cannot be here whole,
    which training from a feature cache does not need."""
    if script.eval_prompts is not None:
        return
    script.eval_prompts = _PROMPTS
    if args.feature_source == "cached":
        size, memory = loading.checkpoint_size(script.target), loading.memory_here()
        if size > memory:
            script.eval_prompts = 0
            check_metric(args.metric_for_best_model if args.eval_strategy != "no" else None, generates=False)
            _print_status(
                args,
                f"The weights of {script.target} take {size / 1e9:,.0f} GB, more than this machine's memory, "
                f"{memory / 1e9:,.0f} GB: no prompts are generated from, and its layers are not loaded.",
            )


def _print_status(args: HyperDFlashTrainingArguments, text: str) -> None:
    if args.process_index == 0:
        print(text, file=sys.stderr, flush=True)


def run(script: ScriptArguments, args: HyperDFlashTrainingArguments) -> None:
    folder, wanted = Path(str(args.output_dir)), args.resume_from_checkpoint
    resume = True if wanted in ("True", "true") else wanted  # the newest, or a checkpoint's folder
    if resume:
        checkpoints.checkpoint_to_resume(resume, folder)
    elif (found := checkpoints.describe_earlier_run(folder)) and not script.overwrite_output_dir:
        go_on = (
            "go on with that run with `--resume_from_checkpoint true`, "
            if checkpoints.newest_complete(folder)[0]
            else ""
        )
        raise ValueError(
            f"`--output_dir` is {str(folder)!r}, which has {found}: {go_on}name another folder, or replace it with "
            "`--overwrite_output_dir true`, which removes its checkpoints."
        )
    loading.check_target(script.target)
    _choose_prompts(script, args)
    earlier = earlier_drafter(script, args.seed) if script.drafter else None
    _print_status(args, f"Reading {', '.join(script.dataset or ())} ...")
    train, held_out = load_data(script, args.seed)
    _print_status(args, f"Loading {script.target} ...")
    tokenizer = loading.load_tokenizer(script.target, script.trust_remote_code)
    if script.chat_template:
        tokenizer.chat_template = read_chat_template(script.chat_template, "--chat_template")
    dtype = script.target_dtype or loading.default_dtype(script.target)
    how: dict[str, Any] = dict(dtype=dtype, device_map=script.device_map, trust_remote_code=script.trust_remote_code)
    # Its layers have nothing to do where features are cached and nothing is generated.
    without_layers = args.feature_source == "cached" and not script.eval_prompts
    target = loading.load_target(script.target, without_layers=without_layers, **how)
    train = _choose_vocabulary(script, args, target, tokenizer, train, held_out)
    torch.manual_seed(args.seed)
    drafter: Any = earlier or new_drafter(script, target, tokenizer)
    if script.lora_rank:
        drafter.name_or_path = ""  # which PEFT would look for on the Hub with each checkpoint
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT calls transformers by old names
            drafter = import_module("peft").get_peft_model(drafter, lora_config(drafter, script.lora_rank))
    trainer = HyperDFlashTrainer(
        drafter, target, args, train_dataset=train, eval_dataset=held_out, processing_class=tokenizer
    )
    # The record has the flags beside the trainer's arguments, without this machine's folders.
    facts = {name: value for name, value in vars(script).items() if name not in ("eval_rows", "overwrite_output_dir")}
    for name in ("target", "drafter", "eval_dataset", "chat_template"):
        facts[name] = facts[name] and checkpoints.public_name(facts[name])
    trainer.described = facts | {"dataset": [checkpoints.public_name(source) for source in script.dataset or ()]}
    if script.draft_vocab_size:
        trainer.choose_vocabulary(script.draft_vocab_size if earlier else None)
    for own, theirs in ((LinesAboveBar, ProgressCallback), (Lines, PrinterCallback)):
        if trainer.pop_callback(theirs):
            trainer.add_callback(own)
    prompts: list[torch.Tensor] = []
    if script.eval_prompts:
        prompts = encode_prompts(tokenizer, held_out, at_most=script.eval_prompts)
        trainer.add_callback(AcceptanceCallback(trainer, prompts, max_new_tokens=script.eval_max_new_tokens))
    rows, held_out_rows = cast(Any, trainer.train_dataset), cast(Any, trainer.eval_dataset)  # without skipped ones
    amount = f"{len(rows)} rows" if hasattr(rows, "__len__") else "a stream"
    of = f"of {script.eval_dataset}" if script.eval_dataset else f"by `--eval_rows {script.eval_rows}`"
    given = f"{len(prompts)} of them to generate from (`--eval_prompts`)"
    _print_status(args, f"Training on {amount}, {len(held_out_rows)} held out ({of}), {given}.")
    if script.overwrite_output_dir:  # now that all is loaded, and training can begin
        for earlier_checkpoint in checkpoints.checkpoints(folder) if args.process_index == 0 else ():
            checkpoints.remove_checkpoint(earlier_checkpoint)  # the earlier drafter stays until this run has one
        trainer.accelerator.wait_for_everyone()
        script.overwrite_output_dir = False
    try:
        trainer.train(resume_from_checkpoint=resume)
    except (OSError, ValueError):
        if bar := getattr(trainer.pop_callback(ProgressCallback), "training_bar", None):
            bar.close()  # which ends its line
        raise
    metrics = trainer.evaluate()
    trainer.save_model(_internal_call=True)  # which does not push yet
    trainer.save_state()
    if trainer.is_world_process_zero():
        if script.lora_rank:
            finish_adapter(folder, script.save_dtype, checkpoints.public_name(str(script.drafter)))
            trainer.create_model_card()  # instead of PEFT's, which knows nothing
        else:  # loading casts what may be cast; the gate stays float32
            loading.load_drafter(folder, dtype=script.save_dtype).save_pretrained(folder)
        checkpoints.apply_umask(folder)
        taus = [f"{name} {metrics[name]:.2f}" for name in ("eval_tau", "eval_teacher_forced_tau") if name in metrics]
        print(f"Saved to {args.output_dir}: {', '.join(taus)}")
    if args.push_to_hub:
        trainer.upload()
    trainer.leave_group()
