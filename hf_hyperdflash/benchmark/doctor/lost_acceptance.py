"""Finds where acceptance is lost: changes one thing at a time, and counts tokens a round before and after."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...decoding.stats import SpeculationStats
from ...drafters.base import Drafter
from ...hub.loading import load_drafter
from ...training.adaptation.configuration import AdaptationConfig
from ...training.adaptation.learner import Learner
from ...training.adaptation.samples import ReplayBuffer, Sample
from ...training.data.encoding import encode_prompts
from ...training.features.capture import compute_residual
from ..intervals import draw, interval
from .diagnosis import LEAST_TAU, Change, Diagnosis
from .other_settings import CAUSES

_FEWEST, _MOST = 3, 8  # prompts of a change
_WINDOW = 256  # tokens of a window that is tried
_STEPS = 16  # of training that are tried
_LEAST = {"thinking": 1.25, "position": 1.1, "drafter dtype": 1.1}  # times as many tokens that are a problem


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
    """Return conversations of about that many tokens before the last question, put together from short ones.

    Args:
        tokenizer: The target's.
        asked: Questions, and what the target answered.
        tokens: Of the earlier turns.
    """
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


class LostAcceptance:
    """Measures changes on the same questions.

    Args:
        target: The target, bound.
        drafter: Its drafter.
        max_new_tokens: Of each text.
        seconds: That all changes together may take, about.
    """

    def __init__(self, target: PreTrainedModel, drafter: Drafter, max_new_tokens: int, seconds: float) -> None:
        self._target: Any = target
        self._drafter, self._new = drafter, max_new_tokens
        self._end, self._each = time.monotonic() + seconds, seconds / 5

    def rounds(self, prompts: Sequence[torch.Tensor], drafter: Drafter | None = None) -> np.ndarray:
        """Generate from some prompts, and return tokens and rounds of each, `[prompts, 2]`."""
        drafter, began = drafter or self._drafter, time.monotonic()
        counted: list[tuple[int, int]] = []
        for prompt in prompts[:_MOST]:
            if len(counted) >= _FEWEST and time.monotonic() > min(began + self._each, self._end):
                break
            ids = prompt.to(self._target.device)
            self._target.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=self._new,
                assistant_model=drafter,
            )  # fmt: skip
            counted.append(rounds_of(cast(SpeculationStats, drafter.last_stats)))
        return np.array(counted, dtype=float)

    def changes(
        self, tokenizer: PreTrainedTokenizerBase, asked: Sequence[tuple[str, str]], as_is: np.ndarray, thinking: bool,
        context: int,
    ) -> Iterator[Change]:  # fmt: skip
        """Measure one change after the other, as long as there is time.

        Args:
            tokenizer: The target's.
            asked: Questions, and what the target answered.
            as_is: Tokens and rounds of each without a change, `[prompts, 2]`.
            thinking: Whether the target was asked to think.
            context: Tokens that the user's texts have.
        """
        questions = [[question] for question, _ in asked]
        usual = encode(tokenizer, questions, thinking)
        shortest = max(ids.shape[1] for ids in usual)
        if context >= 2 * (shortest + self._new):
            far = encode(tokenizer, long_conversations(tokenizer, asked, context - shortest), thinking)
            rounds = self.rounds(far)
            yield compare("long texts", f"short texts instead of some {context:,} tokens", rounds, as_is)
            windowed = with_window(self._drafter)
            if windowed is not None:
                name = f"in these long texts a window of {_WINDOW} tokens"
                yield compare("position", name, rounds, self.rounds(far, windowed))
        saved = as_saved(self._drafter)
        if saved is not None:
            name = f"the drafter in {str(cast(Any, saved).dtype).removeprefix('torch.')}, as it was saved"
            yield compare("drafter dtype", name, as_is, self.rounds(usual, saved))
        other = encode(tokenizer, questions, not thinking)
        if not all(map(torch.equal, usual, other)):
            name = f"thinking {'off' if thinking else 'on'}"
            yield compare("thinking", name, as_is, self.rounds(other))
        if tokenizer.chat_template:
            plain = encode(tokenizer, questions, as_chat=False)
            yield compare("no template", "no chat template", as_is, self.rounds(plain))


def rounds_of(stats: SpeculationStats) -> tuple[int, int]:
    """Return tokens and rounds of a generation."""
    return sum(stats.emitted), stats.rounds


def compare(cause: str, name: str, before: np.ndarray, after: np.ndarray) -> Change:
    """Compare tokens and rounds of the same questions, `[prompts, 2]`, with an interval over prompts."""
    count = min(len(before), len(after))
    drawn = draw(count, np.random.default_rng(0)) if count > 1 else np.ones((2, 1))
    with np.errstate(invalid="ignore", divide="ignore"):
        taus = [(drawn @ each[:count, 0]) / (drawn @ each[:count, 1]) for each in (before, after)]
        ratio = interval(taus[1] / taus[0])
    return Change(cause, name, float(taus[0][0]), float(taus[1][0]), ratio)


def with_window(drafter: Drafter) -> Drafter | None:
    """Return a copy of a drafter that sees the last tokens alone; `None` if it has such a window, or can have none."""
    config = drafter.config
    if getattr(config, "sliding_window", 0) is not None or getattr(config, "layer_types", None):
        return None
    changed = copy.deepcopy(drafter)
    changed.config.sliding_window = _WINDOW
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


class Taught(NamedTuple):
    """A drafter that has learned from a few texts.

    Attributes:
        drafter: A copy, with other weights.
        steps: Training steps that it has taken.
        seconds: That these took.
    """

    drafter: Drafter
    steps: int
    seconds: float


def teach(
    target: PreTrainedModel, drafter: Drafter, texts: Sequence[torch.Tensor], starts: Sequence[int], seconds: float
) -> Taught:
    """Train a copy of a drafter on a few texts of the target, with the steps that learning while serving takes.

    Args:
        target: The target.
        drafter: Its drafter, which stays as it is.
        texts: Prompts and what the target wrote after them, `[1, seq]` each.
        starts: Where in each the prompt ends.
        seconds: After which no other step begins.

    Raises:
        ValueError: If the drafter cannot be trained for the target, or there is too little text.
    """
    settings = AdaptationConfig()
    learner, replay = Learner(drafter, target, settings), ReplayBuffer(settings.most_bytes, settings.seed)
    for text, start in zip(texts, starts):
        positions, sample = torch.arange(text.shape[1] - 1)[None], Sample(learner.layer_ids, settings.most_bytes // 4)
        residual = compute_residual(target, text[:, :-1], positions.to(text.device), learner.layer_ids)
        for part in (slice(start), slice(start, None)):
            if positions[:, part].numel():  # nothing was computed of an answer's last token
                sample.add(residual[:, part], positions[:, part], text[:, 1:][:, part], part.start is not None)
        if (row := sample.row()) is not None:
            replay.add(row)
    if not len(replay):
        raise ValueError("The target's answers are too short to learn from.")
    began = time.monotonic()
    learner.learn("all", [replay.draw_batch(settings.rows, len(replay)) for _ in range(_STEPS)], seconds)
    taught = copy.deepcopy(cast(Any, drafter))
    taught.load_state_dict(learner.copy.state_dict())
    return Taught(taught, learner.steps_taken, time.monotonic() - began)


def report_changes(found: Diagnosis) -> None:
    """Name what of the changes is a problem.

    A drafter that reads what it was not trained on may do better if it reads less of it. So a window says nothing
    where its configuration is already known to be wrong.
    """
    by_cause = {change.cause: change for change in found.changes}
    if not found.problems.keys().isdisjoint(CAUSES.values()):
        by_cause.pop("position", None)
    for cause, least in _LEAST.items():
        change = by_cause.get(cause)
        if change is not None and (change.matters(least) or change.after > LEAST_TAU > change.before):
            rates = f"{change.after:.2f} tokens a round instead of {change.before:.2f}"
            found.problems[cause] = _MEANINGS[cause].format(rates, window=_WINDOW)
    for cause, least in (("long texts", 1.3), ("no template", 1.5)):
        change = by_cause.get(cause)
        if change is not None and change.matters(least) and "position" not in found.problems:
            found.remarks.append(
                f"With {change.name} there are {change.after:.2f} tokens a round instead of {change.before:.2f}: "
                f"{_MEANINGS[cause]}"
            )


_MEANINGS = {
    "thinking": (
        "In the other thinking mode there are {}: the drafter was trained for that. Ask in that mode, or train the "
        "drafter on with answers of yours."
    ),
    "position": (
        "In long texts a drafter that sees the last {window} tokens alone has {}: it was trained on shorter "
        "ones. Set `sliding_window` to {window} in its `config.json`, or train it on with rows of your length "
        "(`--max_length`)."
    ),
    "drafter dtype": (
        "In the precision that it was saved in the drafter has {}: its weights or states do not fit into that which "
        "it is loaded in. Load it as it was saved (`dtype`), or in float32."
    ),
    "long texts": "the drafter, or the target itself, does worse in them.",
    "no template": "the drafter may have been trained without the template, or plain text repeats itself.",
}
