"""Finds what is wrong with a target and its drafter, before long jobs are started with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import transformers
from transformers import DeepseekV4Config, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...decoding.bind import check_once
from ...decoding.stats import SpeculationStats, clock
from ...drafters.base import Drafter
from ...drafters.blocks.configuration_hyperdflash import HyperDFlashConfig
from ...drafters.blocks.modeling_hyperdflash import HyperDFlashDrafter
from ...drafters.saved import SavedDrafter
from ...hub.kinds import describe
from ...targets.registry import is_drafter, target_of
from ...training.acceptance import bound
from ...training.data.rows import encode_prompts
from ...training.features.fingerprint import changed_parts
from ...training.runs.progress import progress_bar
from .other_settings import LEAST_PROMPTS, Setting, compare_settings, matters
from .recommended import TEMPERATURES, count_generations, recommendation, time_settings

PROMPTS = (
    "Write a Python function that adds two numbers.",
    "Tom has 12 marbles and gives 5 of them to his sister. How many marbles does he have now?",
    "Write a Python function that checks whether a string is a palindrome.",
    "A baker sells 24 loaves of bread a day for $3 each. How much money does she make in a week?",
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that returns the largest number in a list.",
    "A train travels 60 miles an hour. How far does it travel in 2 hours and 30 minutes?",
    "List three things to take along on a hike.",
    "Write a SQL query that counts the rows of a table called users.",
    "Anna reads 15 pages each day. How many days does she need for a book of 240 pages?",
    "Write a Python function that reverses the words of a sentence.",
    "A shirt costs $40 and is sold for 25% less. How much does it cost now?",
    "What is the difference between a list and a tuple in Python?",
    "A farmer has 3 fields with 45 trees each and cuts down 20 trees. How many trees are left?",
    "Write a JavaScript function that removes duplicates from an array.",
    "Give me a short recipe for pancakes.",
    "Maria is twice as old as her brother, who is 9. How old will she be in 4 years?",
    "Write a regular expression that matches an email address.",
    "Summarize in one sentence what photosynthesis is.",
    "A tank holds 300 litres and loses 12 litres an hour. How much is left after 10 hours?",
    "Write a Python program that reads a file and counts its lines.",
    "Write a friendly message that reminds a colleague of a meeting.",
    "Paul buys 4 notebooks for $2.50 each and pays with $20. How much change does he get?",
    "Write a function that computes the n-th Fibonacci number.",
)
_LEAST_TAU = 1.2  # below it no hardware has a speedup


@dataclass
class Diagnosis:
    """The result of [`examine`].

    Attributes:
        problems: Each problem and its fix, a sentence or two each.
        remarks: Other observations that may matter.
        facts: Everything that was examined, as name and value.
        tau: Tokens per verification round over the prompts; `None` if nothing could be generated.
        differing: Greedy texts that are not the target's own.
    """

    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    tau: float | None = None
    differing: int | None = None

    def __str__(self) -> str:
        lines = [f"{name}: {value}" for name, value in self.facts.items()]
        lines += [f"PROBLEM: {text}" for text in self.problems] + [f"Remark: {text}" for text in self.remarks]
        return "\n".join([*lines, "Problems found." if self.problems else "No problem found."])


def examine(
    target: PreTrainedModel,
    drafter: Drafter,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompts: Sequence[str] = PROMPTS,
    max_new_tokens: int = 64,
    disable_tqdm: bool | None = True,
    report: Callable[[str], object] | None = None,
) -> Diagnosis:
    """Check a pair: whether it fits, the tokenizer, memory, and generation from a few prompts.

    For HyperDFlash and DFlash drafters it tries what is easily misread in others' formats: every layer one lower and
    one higher, and the other anchor convention. If one drafts clearly better, that is a problem; if it may, a remark.
    For every drafter it times some settings of `generate` and recommends one.

    Args:
        target: The target. It is bound meanwhile.
        drafter: Its drafter, of any kind. Of one without weights, as prompt lookup is, there is less to look at.
        tokenizer: The target's tokenizer.
        prompts: Questions, asked as chat turns. With fewer than 8 no settings are tried or timed, which is quick.
        max_new_tokens: Tokens generated from each.
        disable_tqdm: `False` for a progress bar on stderr, `None` for one on a terminal and lines elsewhere.
        report: Called with a line that says how many texts will be generated and about how long that takes.

    Raises:
        ValueError: If there is no prompt, or drafter or tokenizer is not one.
    """
    if not prompts:
        raise ValueError("`prompts` is empty: expected at least one question.")
    for name, given, is_one, loaded_by in (
        ("drafter", drafter, is_drafter(drafter), "load_drafter"),
        ("tokenizer", tokenizer, isinstance(tokenizer, PreTrainedTokenizerBase), "AutoTokenizer.from_pretrained"),
    ):
        if not is_one:
            raise ValueError(f"`{name}` is {given!r:.60}, expected a {name}: load it with `{loaded_by}` first.")
    found = Diagnosis()
    found.facts["versions"] = f"torch {torch.__version__}, transformers {transformers.__version__}"
    try:
        check_once(target, drafter)
    except ValueError as error:
        found.problems.append(str(error))
        return found
    has_weights = hasattr(drafter, "get_memory_footprint")
    if has_weights:
        _report_memory(found, target, cast(SavedDrafter, drafter))
        _compare_fingerprints(found, target, drafter.config)
    else:
        found.facts["drafter"] = f"{type(drafter).__name__}, which has no weights"
    _report_rounding(found, target)
    if _check_tokenizer(found, target, drafter.config, tokenizer):
        ids = encode_prompts(tokenizer, [{"messages": [{"role": "user", "content": text}]} for text in prompts])
        _check_target_loss(found, target, ids)
        if report:
            report(_announce_duration(target, drafter, ids, max_new_tokens))
        with bound(target):
            texts = _generate(found, target, drafter, ids, max_new_tokens, disable_tqdm)
        if found.tau is not None:
            enough = len(ids) >= LEAST_PROMPTS
            if not enough:
                found.facts["not tried"] = (
                    f"other configurations and settings of `generate`: that takes {LEAST_PROMPTS} prompts, there "
                    f"{'is' if len(ids) == 1 else 'are'} {len(ids)}"
                )
            elif drafter.config.model_type == HyperDFlashConfig.model_type:
                _try_other_settings(found, target, cast(HyperDFlashDrafter, drafter), ids, texts, disable_tqdm)
            if found.tau < _LEAST_TAU and not has_weights:
                found.remarks.append(f"Hardly any draft is accepted (tau {found.tau:.2f}): texts repeat too little.")
            elif found.tau < _LEAST_TAU and not found.problems:
                found.problems.append(
                    f"Hardly any draft is accepted (tau {found.tau:.2f}): the drafter is hardly trained, or "
                    "was trained for another target, chat template or tokenizer."
                )
            if not found.problems and enough:
                _recommend(found, target, drafter, ids, max_new_tokens, disable_tqdm)
    return found


def _report_rounding(found: Diagnosis, target: PreTrainedModel) -> None:
    if getattr(target, "is_loaded_in_8bit", False):
        found.remarks.append(
            "The target is loaded in 8 bits by bitsandbytes, whose forwards over several tokens round otherwise than "
            "over one, so greedy texts differ from those without a drafter. Load it in 4 bits where they must not."
        )


def _report_memory(found: Diagnosis, target: PreTrainedModel, drafter: SavedDrafter) -> None:
    described = describe(drafter.config)
    found.facts["drafter"] = (
        f"{described.drafts}; {drafter.num_parameters():,} parameters. {' '.join(described.sentences)}"
    )
    found.facts["memory"] = (
        f"target {_size(target.get_memory_footprint())}, drafter "
        f"{_size(drafter.get_memory_footprint(return_buffers=False))}{_context_memory(drafter)}"
    )


def _context_memory(drafter: SavedDrafter) -> str:
    """Describe the memory of a drafter's context; empty if its configuration does not give its keys and values."""
    config = drafter.config
    window = getattr(drafter.new_context(), "window", None) or getattr(config, "sliding_window", None)
    visible = window or getattr(config, "max_position_embeddings", None)
    sizes = [getattr(config, name, None) for name in ("num_hidden_layers", "num_key_value_heads", "head_dim")]
    if not visible or None in sizes:
        return ""
    each = 1 if isinstance(config, DeepseekV4Config) else 2  # whose values are its keys
    token = each * math.prod(cast(list[int], sizes)) * drafter.dtype.itemsize
    sees, most = _size(visible * token), _size(2 * visible * token)
    return (
        f" and {_size(token)} for each token of its context, of which it sees {visible:,}: {sees}, and up to {most} "
        "while its buffer has room for as many again"
    )


def _size(count: float) -> str:
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:.3g} {units[0]}"


def _compare_fingerprints(found: Diagnosis, target: PreTrainedModel, config: PreTrainedConfig) -> None:
    if not getattr(config, "target_fingerprint", ""):
        found.remarks.append("The drafter does not say which weights it was trained for; that cannot be compared.")
        return
    changed = changed_parts(config.target_fingerprint, target)
    if changed is None:
        found.remarks.append(
            "An earlier release recorded which weights the drafter was trained for, in a way that cannot be compared "
            "any more."
        )
    elif changed == ["config"]:
        found.remarks.append(
            "The target's weights are those that the drafter was trained for, its configuration is not: a field was "
            "changed, or another version of transformers has other fields."
        )
    elif changed:
        parts = " and ".join(part for part in changed if part != "config")
        found.problems.append(
            f"The target's weights ({parts}) are not those that the drafter was trained for: the target was "
            "fine-tuned since, is another checkpoint, or is loaded in another quantization or precision. The text "
            "stays right, but fewer drafts are accepted: train the drafter on for this target (`hf-hyperdflash train "
            "--drafter`)."
        )


def _check_tokenizer(
    found: Diagnosis, target: PreTrainedModel, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> bool:
    """Report problems of the tokenizer, and return whether generation is possible with it."""
    vocabulary = target_of(target).config.vocab_size
    if len(tokenizer) > vocabulary:
        found.problems.append(
            f"The tokenizer has {len(tokenizer)} tokens, the target's vocabulary {vocabulary}: it "
            "belongs to another model. Load the target's own."
        )
        return False
    if hasattr(config, "mask_token_id"):
        _check_mask_token(found, config.mask_token_id, tokenizer)
    ends = target.generation_config.eos_token_id if target.generation_config else None
    ends = ends if isinstance(ends, list) else [ends]
    if tokenizer.eos_token_id is not None and None not in ends and tokenizer.eos_token_id not in ends:
        found.problems.append(
            f"The tokenizer ends text with token {tokenizer.eos_token_id}, the target with {ends}: one of the two "
            "belongs to another model."
        )
    if not tokenizer.chat_template:
        found.problems.append("The tokenizer has no chat template, so chat cannot be asked as in training.")
    return bool(tokenizer.chat_template)


def _check_mask_token(found: Diagnosis, token: int | None, tokenizer: PreTrainedTokenizerBase) -> None:
    if token is None:
        found.facts["mask token"] = "none, but a vector of the drafter's own"
        return
    mask = tokenizer.convert_ids_to_tokens(token)
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    if mask is not None and token not in special:
        found.remarks.append(
            f"The drafter's mask token {token} is {mask!r}, an ordinary token: it should be one that never occurs in "
            "text."
        )
    found.facts["mask token"] = f"{token}, {repr(mask) if mask else 'which the tokenizer does not use'}"


def _check_target_loss(found: Diagnosis, target: PreTrainedModel, prompts: list[torch.Tensor]) -> None:
    """Report whether the target finds text in the tokenizer's tokens more likely than noise."""
    with torch.no_grad():
        losses = [target(ids.to(target.device), labels=ids.to(target.device)).loss.item() for ids in prompts]
    mean, noise = sum(losses) / len(losses), math.log(target_of(target).config.vocab_size)
    found.facts["target"] = f"{mean:.2f} nats a token on the prompts, where noise has {noise:.2f}"
    if mean > 0.8 * noise:
        found.problems.append(
            f"To the target, plain questions look like noise ({mean:.2f} nats a token of {noise:.2f}): the tokenizer "
            "belongs to another model, or the target is untrained."
        )


def _announce_duration(
    target: PreTrainedModel, drafter: Drafter, prompts: list[torch.Tensor], max_new_tokens: int
) -> str:
    """Return a line with the number of texts and the time that they take, estimated from a first text."""
    ids, texts, now = prompts[0].to(target.device), 2 * len(prompts), clock(target.device)
    if len(prompts) >= LEAST_PROMPTS:
        texts += len(TEMPERATURES) * count_generations(target, drafter, len(prompts))
    began = now()
    text: torch.Tensor = target.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False
    )
    seconds = texts * max_new_tokens * (now() - began) / (text.shape[1] - ids.shape[1])
    length = f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.0f} minutes"
    return f"Generating {texts} texts of up to {max_new_tokens} tokens from {len(prompts)} prompts: about {length} ..."


def _generate(
    found: Diagnosis,
    target: Any,
    drafter: Drafter,
    prompts: list[torch.Tensor],
    max_new_tokens: int,
    disable_tqdm: bool | None,
) -> list[torch.Tensor]:
    """Generate with and without the drafter, report losslessness and acceptance, and return the target's own texts."""
    stats, found.differing, texts = SpeculationStats(), 0, []
    for prompt in progress_bar(prompts, desc="generating", unit="prompt", leave=False, disable=disable_tqdm):
        ids = prompt.to(target.device)
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": max_new_tokens, "do_sample": False}
        texts.append(target.generate(ids, **options))
        found.differing += not torch.equal(target.generate(ids, assistant_model=drafter, **options), texts[-1])
        stats += cast(SpeculationStats, drafter.last_stats)
    count = len(prompts)
    found.facts["losslessness"] = f"{count - found.differing} of {count} greedy texts are the target's own"
    if found.differing:
        found.remarks.append(
            f"{found.differing} greedy texts differ. In float32 that should not be; in lower precision it happens "
            "where the target's two best tokens are equal to within rounding."
        )
    if not stats.rounds:
        found.problems.append(
            "The target ends every answer at once: the chat template is not the one it was trained with."
        )
        return texts
    found.tau = stats.tau
    rounds = f"{stats.rounds} round{'s' * (stats.rounds != 1)}"
    rates = ", ".join(f"{100 * rate:.0f}" for rate in stats.acceptance)
    found.facts["acceptance"] = (
        f"tau {stats.tau:.2f} over {count} prompts, {rounds}; drafts accepted at each position, %: {rates}"
    )
    return texts


def _recommend(
    found: Diagnosis,
    target: Any,
    drafter: Drafter,
    prompts: list[torch.Tensor],
    max_new_tokens: int,
    disable_tqdm: bool | None,
) -> None:
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "disable_tqdm": disable_tqdm}
    with bound(target):
        for temperature in TEMPERATURES:
            timed = time_settings(target, drafter, prompts, temperature=temperature, **options)
            found.facts[f"recommended, temperature {temperature:g}"] = recommendation(timed)


def _try_other_settings(
    found: Diagnosis,
    target: PreTrainedModel,
    drafter: HyperDFlashDrafter,
    prompts: list[torch.Tensor],
    texts: list[torch.Tensor],
    disable_tqdm: bool | None,
) -> None:
    """Report settings that would change much. Small changes are normal: neighbouring layers are nearly the same."""
    starts = [ids.shape[1] for ids in prompts]
    rounds, tau, others = compare_settings(target, drafter, texts, starts, disable_tqdm=disable_tqdm)
    text = f"{rounds:,} rounds over {len(prompts)} prompts"
    # Of an untrained drafter some setting is the least bad.
    ahead = [setting for setting in others if matters(setting, tau) and setting.tau >= _LEAST_TAU]
    better = [setting for setting in ahead if setting.ahead.low > 0]
    worse = sum(setting.ahead.high < 0 for setting in others)
    found.facts["other configurations"] = (
        f"{len(others)} tried in {text}, neighbouring layers and the other anchor convention: {worse} certainly "
        f"worse, {len(better)} clearly better, of the others none makes a clear difference"
    )
    if better:
        best = max(better, key=lambda setting: setting.ahead.value)
        found.problems.append(
            f"With {best.name} the drafter finds the target's text likelier ({_describe(best, tau)} in {text}): the "
            "configuration does not say how the drafter was trained. Correct it in `config.json`."
        )
    elif ahead:
        best = max(ahead, key=lambda setting: setting.ahead.value)
        found.remarks.append(
            f"The drafter may have been trained with {best.name} ({_describe(best, tau)} in {text}): longer texts may "
            "tell, from a larger `--max-new-tokens` (in Python `max_new_tokens`)."
        )


def _describe(setting: Setting, tau: float) -> str:
    ahead = setting.ahead
    return (
        f"{ahead.value:+.2f} nats a draft, between {ahead.low:+.2f} and {ahead.high:+.2f}; {setting.tau:.2f} tokens a "
        f"round instead of {tau:.2f}"
    )
