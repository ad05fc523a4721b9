"""Finds where acceptance is lost: changes one thing at a time, and counts tokens a round before and after."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...decoding.stats import SpeculationStats
from ...drafters.base import Drafter
from ...hub.loading import load_drafter, set_window
from ...training.adaptation.learner import AdaptationConfig, Learner, ReplayBuffer, Sample
from ...training.data.encoding import encode_prompts
from ...training.losses.objective import compute_residual
from ...training.trials import Local, run
from ..intervals import drawn_ratios, interval
from .config_variants import CAUSES
from .diagnosis import LEAST_TAU, REMARK, Change, Examination, Finding, first_line

_FEWEST, _MOST = 3, 8  # prompts of a change
_WINDOW = 256  # tokens of a window that is tried
_STEPS = 16  # of training that are tried
_LEAST = {"thinking": 1.25, "position": 1.1, "drafter dtype": 1.1}  # times as many tokens that are a problem
_OTHER_WEIGHTS = {"other weights", "quantization"}  # causes that training may undo
OTHER_LANGUAGES = (
    "Erkläre in zwei Sätzen, warum der Himmel blau ist.",
    "Escribe una receta corta de tortitas.",
    "Combien font 12 fois 7, et pourquoi ?",
    "请用两句话介绍北京。",
)


def encode(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Sequence[str]],
    thinking: bool = False,
    as_chat: bool = True,
) -> list[torch.Tensor]:
    """Encode conversations, questions and answers by turns, each ending in a question; plain text if there is no
    template, or it is not to be used."""
    if as_chat and tokenizer.chat_template:
        rows = [
            {
                "messages": [
                    {"role": role, "content": text} for role, text in zip(("user", "assistant") * len(turns), turns)
                ]
            }
            for turns in conversations
        ]
        return encode_prompts(tokenizer, rows, thinking=thinking)
    return [tokenizer("\n\n".join([*turns, ""]), return_tensors="pt")["input_ids"] for turns in conversations]


def long_conversations(
    tokenizer: PreTrainedTokenizerBase, asked: Sequence[tuple[str, str]], tokens: int
) -> list[list[str]]:
    """Return conversations with so many tokens before the last question, put together from questions and answers."""
    lengths = [len(tokenizer(question + answer)["input_ids"]) + 8 for question, answer in asked]
    found = []
    for index, (question, _) in enumerate(asked):
        turns: list[str] = []
        length, other = 0, index
        while length < tokens:
            other += 1
            if other % len(asked) != index:
                turns += asked[other % len(asked)]
                length += lengths[other % len(asked)]
            elif len(asked) == 1:
                break
        found.append([*turns, question])
    return found


def count_rounds(
    target: PreTrainedModel, drafter: Drafter, prompts: Sequence[torch.Tensor], max_new_tokens: int, seconds: float
) -> np.ndarray:
    """Generate from some prompts, and return tokens and rounds of each, `[prompts, 2]`."""
    trials = run([Local(target, drafter)], prompts[:_MOST], max_new_tokens, fewest=_FEWEST, seconds=seconds)
    return np.array([rounds_of(cast(SpeculationStats, record.stats)) for _, _, record in trials], dtype=float)


def change_one_thing(examined: Examination) -> Iterator[Finding]:
    """Check whether acceptance rises if one thing is changed: long texts, precision, thinking mode, template."""
    if not examined.is_thorough:
        return
    found, tokenizer, seconds = examined.found, examined.tokenizer, 0.35 * examined.left()
    end = time.monotonic() + seconds

    def count(prompts: Sequence[torch.Tensor], drafter: Drafter | None = None) -> np.ndarray:
        left = min(seconds / 5, end - time.monotonic())
        return count_rounds(examined.target, drafter or examined.drafter, prompts, examined.new_tokens, left)

    for change in changes(examined, count):
        examined.say(f"changed: {change.name}: {change.after:.2f} tokens a round instead of {change.before:.2f}")
        found.changes.append(change)
    tokens, rounds = count(encode(tokenizer, [[text] for text in OTHER_LANGUAGES], examined.thinking)).sum(0)
    found.kinds["German, Spanish, French, Chinese"] = float(tokens / max(rounds, 1))
    yield from judge_changes(examined)


def changes(examined: Examination, count: Callable[..., np.ndarray]) -> Iterator[Change]:
    """Measure one change after the other. `count` generates from prompts with a drafter, or the examined one."""
    drafter, tokenizer, thinking = examined.drafter, examined.tokenizer, examined.thinking
    texts = examined.texts
    prompts, as_is = examined.prompts[: len(texts)], examined.rounds
    questions = [[question] for question in examined.questions[: len(texts)]]
    shortest = max(ids.shape[1] for ids in prompts)
    if examined.context >= 2 * (shortest + examined.new_tokens):
        asked = [
            (question, str(tokenizer.decode(text[0, ids.shape[1] :], skip_special_tokens=True)))
            for (question,), ids, text in zip(questions, prompts, texts)
        ]
        far = encode(tokenizer, long_conversations(tokenizer, asked, examined.context - shortest), thinking)
        rounds = count(far)
        yield compare("long texts", f"short texts instead of some {examined.context:,} tokens", rounds, as_is)
        windowed = with_window(drafter)
        if windowed is not None:
            name = f"in these long texts a window of {_WINDOW} tokens"
            yield compare("position", name, rounds, count(far, windowed))
    saved = as_saved(drafter)
    if saved is not None:
        name = f"the drafter in {str(cast(Any, saved).dtype).removeprefix('torch.')}, as it was saved"
        yield compare("drafter dtype", name, as_is, count(prompts, saved))
    other = encode(tokenizer, questions, not thinking)
    if not all(map(torch.equal, prompts, other)):
        yield compare("thinking", f"thinking {'off' if thinking else 'on'}", as_is, count(other))
    if tokenizer.chat_template:
        plain = encode(tokenizer, questions, as_chat=False)
        yield compare("no template", "no chat template", as_is, count(plain))


def judge_changes(examined: Examination) -> Iterator[Finding]:
    """Name what of the changes is a problem."""
    found, problems = examined.found, set(examined.found.problems)
    by_cause = {change.cause: change for change in found.changes}
    if not problems.isdisjoint(CAUSES.values()):  # with a wrong configuration a window can look better by accident
        by_cause.pop("position", None)
    for cause, least in _LEAST.items():
        change = by_cause.get(cause)
        if change is not None and (change.matters(least) or change.after > LEAST_TAU > change.before):
            rates = f"{change.after:.2f} tokens a round instead of {change.before:.2f}"
            problems.add(cause)
            yield cause, _MEANINGS[cause].format(rates, window=_WINDOW)
    for cause, least in (("long texts", 1.3), ("no template", 1.5)):
        change = by_cause.get(cause)
        if change is not None and change.matters(least) and "position" not in problems:
            yield REMARK, (
                f"With {change.name} there are {change.after:.2f} tokens a round instead of {change.before:.2f}: "
                f"{_MEANINGS[cause]}"
            )  # fmt: skip


def try_learning(examined: Examination) -> Iterator[Finding]:
    """Train a copy of the drafter on half of the texts, and measure it on the others, where the target's weights are
    not those that it was trained for."""
    found, texts, prompts = examined.found, examined.texts, examined.prompts
    cause = next((cause for cause in found.problems if cause in _OTHER_WEIGHTS), None)
    if cause is None or not examined.is_thorough:
        return
    half, target = len(texts) // 2, examined.target
    starts = [ids.shape[1] for ids in prompts[half : len(texts)]]
    examined.say(f"training a copy of the drafter on {len(starts)} of the texts ...")
    try:
        taught, steps, seconds = fine_tune_briefly(
            target, examined.drafter, texts[half:], starts, 0.25 * examined.left()
        )
    except (RuntimeError, ValueError) as error:  # no drafter that is trained, no such memory, no such kernel
        yield REMARK, f"What training would bring back was not tried: {first_line(error)}"
        return
    after = count_rounds(target, taught, prompts[:half], examined.new_tokens, examined.left() / 5)
    name = f"{steps} training steps on {len(starts)} other texts"
    change = compare("learning", name, examined.rounds, after)
    examined.say(f"changed: {change.name}: {change.after:.2f} tokens a round instead of {change.before:.2f}")
    found.changes.append(change)
    low, high = change.ratio.low, change.ratio.high
    yield cause, (
        f"{found.problems[cause]} Tried here: after {steps} training steps ({seconds:.0f} s) on {len(starts)} of "
        f"these texts it has {change.after:.2f} tokens a round instead of {change.before:.2f} on others ({low:.2f} to "
        f"{high:.2f} times as many). An hour has {3600 / max(seconds, 1e-3):,.0f} times those steps."
    )  # fmt: skip


def rounds_of(stats: SpeculationStats) -> tuple[int, int]:
    """Return tokens and rounds of a generation."""
    return sum(stats.emitted), stats.rounds


def compare(cause: str, name: str, before: np.ndarray, after: np.ndarray) -> Change:
    """Compare tokens and rounds of the same questions, `[prompts, 2]`, with an interval over prompts."""
    count = min(len(before), len(after))
    earlier, later = (drawn_ratios(each[:count, 0], each[:count, 1]) for each in (before, after))
    with np.errstate(invalid="ignore", divide="ignore"):
        return Change(cause, name, float(earlier[0]), float(later[0]), interval(later / earlier))


def with_window(drafter: Drafter) -> Drafter | None:
    """Return a copy of a drafter that sees the last tokens alone; `None` if it sees no more, or can have no window."""
    if (getattr(drafter.config, "sliding_window", None) or _WINDOW + 1) <= _WINDOW:
        return None
    try:
        set_window(copy.deepcopy(drafter.config), _WINDOW, "the drafter")
    except ValueError:
        return None
    changed = copy.deepcopy(drafter)
    set_window(changed.config, _WINDOW, "the drafter")
    return changed


def as_saved(drafter: Drafter) -> Drafter | None:
    """Load a drafter once more, in the precision that it was saved in; `None` if it is in that, in a wider one, or
    was not loaded. Casting back would not bring back what did not fit."""
    dtype, name = getattr(drafter, "dtype", torch.float32), getattr(drafter.config, "_name_or_path", "")
    if dtype.itemsize > 2 or not name:
        return None
    try:
        saved = load_drafter(name, device=cast(Any, drafter).device)
    except (OSError, ValueError):  # it was built in code, say
        return None
    return None if saved.dtype == dtype else saved


def fine_tune_briefly(
    target: PreTrainedModel, drafter: Drafter, texts: Sequence[torch.Tensor], starts: Sequence[int], seconds: float
) -> tuple[Drafter, int, float]:
    """Train a copy of a drafter on a few texts of the target, with the steps that learning while serving takes."""
    settings = AdaptationConfig()
    learner, replay = Learner(drafter, target, settings), ReplayBuffer(settings.max_bytes, settings.seed)
    for text, start in zip(texts, starts):
        positions, sample = torch.arange(text.shape[1] - 1)[None], Sample(learner.layer_ids, settings.max_bytes // 4)
        residual = compute_residual(target, text[:, :-1], positions.to(text.device), learner.layer_ids)
        for part in (slice(start), slice(start, None)):
            if positions[:, part].numel():  # nothing was computed of an answer's last token
                sample.add_tokens(residual[:, part], positions[:, part], text[:, 1:][:, part], part.start is not None)
        if (row := sample.row()) is not None:
            replay.add(row)
    if not replay.rows:
        raise ValueError("The target's answers are too short to learn from.")
    began = time.monotonic()
    learner.learn("all", [replay.draw_batch(settings.rows, len(replay.rows)) for _ in range(_STEPS)], seconds)
    taught = copy.deepcopy(cast(Any, drafter))
    taught.load_state_dict(learner.copy.state_dict())
    return taught, learner.steps_taken, time.monotonic() - began


_MEANINGS = {
    "thinking": (
        "In the other thinking mode there are {}: the drafter was trained for that. Ask in that mode, or train the "
        "drafter on with answers of yours."
    ),
    "position": (
        "In long texts a drafter that sees the last {window} tokens alone has {}: it was trained on shorter "
        "ones. Load it with `load_drafter(..., sliding_window={window})`, or train it on with rows of your length "
        "(`--max_length`)."
    ),
    "drafter dtype": (
        "In the precision that it was saved in the drafter has {}: its weights or states do not fit into that which "
        "it is loaded in. Load it as it was saved (`dtype`), or in float32."
    ),
    "long texts": "the drafter, or the target itself, does worse in them.",
    "no template": "the drafter may have been trained without the template, or plain text repeats itself.",
}
