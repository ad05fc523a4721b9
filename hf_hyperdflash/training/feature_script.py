"""Runs `hf-hyperdflash features`: the rows that `train` would train on, and the states of its target for them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..hub import loading
from ..targets.registry import target_of
from .arguments import MAX_LENGTH, HyperDFlashTrainingArguments
from .data.encoding import end_ids_of
from .data.rows import prepare_dataset
from .data.templates import read_chat_template
from .features.engine import find_engine, served_checkpoint
from .features.identity import feature_identity, token_bytes
from .features.parts import part_defect, read_row
from .features.writing import FeatureWriter, Producer, TargetProducer
from .flags import FeatureFlags, ScriptArguments
from .losses.objective import compute_document_residuals, layers_needed, split_documents
from .script import check_flags, earlier_drafter, load_data, make_parser, new_drafter, parse_known

if TYPE_CHECKING:
    from datasets import Dataset

# Parts are a 64th of all, so that several processes can share the work; but of 8 rows, which run together.
_PARTS, _MIN_ROWS, _MAX_BYTES = 64, 8, 2**26
# How far a row may be from what is computed here, on average over its tokens: what the number format rounds to, and
# what two programs differ by that compute in bfloat16. Another layer's states differ by a third and more.
_TOLERANCE = {"float32": 0.03, "bfloat16": 0.03, "float8": 0.06}


def main(argv: list[str] | None = None, prog: str | None = None) -> None:
    """Write the features as the flags say."""
    flags, script, args = parse(argv, prog)
    if not script.target:
        script.target = served_checkpoint(str(flags.endpoint), flags.served_model)
    loading.check_target(script.target)
    tokenizer = loading.load_tokenizer(script.target, script.trust_remote_code)
    if script.chat_template:
        tokenizer.chat_template = read_chat_template(script.chat_template, "--chat_template")
    unloaded = loading.unloaded_target(script.target, trust_remote_code=script.trust_remote_code)
    layers = _layers(script, args, unloaded, tokenizer)
    folder = Path(flags.output)
    identity = feature_identity(unloaded, dtype=args.feature_dtype, target_layer_ids=layers, tokenizer=tokenizer)
    engine = None
    if flags.endpoint:
        engine = find_engine(
            flags.endpoint,
            folder,
            unloaded,
            identity,
            served_model=flags.served_model,
            tokenizer=tokenizer,
            concurrency=flags.concurrency,
        )
    _say(f"Reading {', '.join(script.dataset or ())} ...")
    rows = read_rows(script, args, unloaded, tokenizer)
    loaded: list[PreTrainedModel] = []

    def target() -> PreTrainedModel:
        """Load the target, once."""
        if not loaded:
            _say(f"Loading {script.target} ...")
            dtype = script.target_dtype or loading.default_dtype(script.target)
            device = script.device_map or ("cuda" if torch.cuda.is_available() else "cpu")
            options: dict[str, Any] = dict(dtype=dtype, device_map=device, trust_remote_code=script.trust_remote_code)
            loaded.append(loading.load_target(script.target, **options))
        return loaded[0]

    here = TargetProducer(unloaded, identity, flags.batch_size, target)
    producer: Producer = here if engine is None else engine
    size = sum(map(len, rows["input_ids"])) * token_bytes(identity)
    size = min(size // min(_PARTS, -(-len(rows) // _MIN_ROWS)), _MAX_BYTES)
    writer = FeatureWriter(folder, rows, producer, size, flags.share, args.feature_gigabytes)
    writer.complete()
    print(writer.summary())
    if flags.check:
        print(check_rows(writer, target(), flags.check))


def parse(
    argv: list[str] | None, prog: str | None = None
) -> tuple[FeatureFlags, ScriptArguments, HyperDFlashTrainingArguments]:
    """Parse flags: those of `train`, of which some matter here, and this command's own."""
    parser = make_parser(argv, prog, (FeatureFlags, ScriptArguments, HyperDFlashTrainingArguments))
    given = {part.partition("=")[0] for part in (sys.argv[1:] if argv is None else argv)}
    parser._option_string_actions["--target"].required = False
    if not given & {"--target", "--endpoint"}:
        raise ValueError("`features` needs `--target`, or `--endpoint`, whose server says what it serves.")
    flags, script, args = parse_known(parser, argv, "features")
    if flags.served_model and not flags.endpoint:
        raise ValueError(f"`--served_model` is {flags.served_model!r}, but no server is asked: add `--endpoint`.")
    args.output_dir = flags.output
    check_flags(script, args, "--output")
    if script.streaming:
        raise ValueError("`--streaming` is not for `features`: how long a stream is is not known.")
    return flags, script, args


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _layers(
    script: ScriptArguments,
    args: HyperDFlashTrainingArguments,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> list[int]:
    """Return the layers that training the drafter of the flags reads."""
    if script.drafter:
        drafter = earlier_drafter(script, args.seed)
    else:
        drafter = new_drafter(script, target, tokenizer)
    return layers_needed(drafter, target_of(target))


def read_rows(
    script: ScriptArguments,
    args: HyperDFlashTrainingArguments,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> Dataset:
    """Return the rows of `train` with these flags, tokenized: those held out first, because an evaluation needs them
    at once, then the others in a random order, in which training reads them."""
    from datasets import concatenate_datasets

    train, held_out = cast(Any, load_data(script, args.seed))
    config = target_of(target).config
    positions = getattr(config, "max_position_embeddings", None)
    how: dict[str, Any] = {
        "max_length": args.max_length or min(MAX_LENGTH, positions or MAX_LENGTH), "vocab_size": config.vocab_size,
        "positions": positions, "end_ids": end_ids_of(target),
    }  # fmt: skip
    train, held_out = (
        prepare_dataset(part, tokenizer, packing=packing, **how)
        for part, packing in ((train, args.packing), (held_out, False))
    )
    return concatenate_datasets([held_out, train.shuffle(seed=args.seed)])


def check_rows(writer: FeatureWriter, target: PreTrainedModel, count: int) -> str:
    """Compare `count` rows, spread over the parts that are there, with what a target computes here. Return a line with
    the largest and mean error, relative to each token's states; raise a `ValueError` if that is more than rounding."""
    there = [i for i, part in enumerate(writer.parts) if not part_defect(part.path(writer.directory), writer.key)]
    places = [(i, row) for i in there for row in range(writer.parts[i].rows)]
    chosen = places[:: max(1, len(places) // count)][:count]
    dtype, layers = writer.identity["dtype"], writer.identity["target_layer_ids"]
    errors, worst, worst_row = list[torch.Tensor](), -1.0, 0
    for i, row in chosen:
        stored = read_row(writer.parts[i].path(writer.directory), row, layers, layers)
        documents = split_documents(stored["input_ids"], stored["position_ids"])
        exact = torch.cat([compute_document_residuals(target, [each], layers)[0].cpu() for each in documents]).float()
        # A token's vector in each stream: attention sinks have values a thousand times the others'.
        error = (stored["residual"].float() - exact).norm(dim=-1) / exact.norm(dim=-1).clamp(min=1e-30)
        errors.append(error.flatten())
        if float(error.mean()) > worst:
            worst, worst_row = float(error.mean()), writer.first_rows[i] + row
    found = torch.cat(errors)
    said = (
        f"{len(chosen)} rows computed again: relative error {found.mean():.2%} on average, {found.max():.2%} at most"
    )
    if not worst <= _TOLERANCE[dtype]:
        raise ValueError(
            f"{said}. Row {worst_row} has {worst:.2%}, where {_TOLERANCE[dtype]:.0%} is rounding in {dtype}: "
            "these are no states of this target, its layers and these tokens. Write them again, in another folder."
        )
    return f"{said}, as rounding makes it."
