"""Examines a pair before long jobs are started with it: does it fit, is it fast, where is acceptance lost."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...decoding.bind import learned_stats
from ...decoding.proposals import checked_pair
from ...decoding.stats import SpeculationStats
from ...drafters.base import Drafter
from ...drafters.blocks.configuration_hyperdflash import HyperDFlashConfig
from ...drafters.blocks.modeling_hyperdflash import HyperDFlashDrafter
from ...targets.registry import is_drafter, target_of
from ...training.acceptance import bound
from ...training.runs.progress import progress_bar
from ..runner import Method, generate_once
from .diagnosis import LEAST_TAU, Diagnosis
from .fit import check_fit, check_target_loss, check_widths
from .lost_acceptance import LostAcceptance, compare, encode, report_changes, rounds_of, teach
from .other_settings import LEAST_PROMPTS, Setting, cause_of, compare_settings, matters
from .recommended import TEMPERATURES, ranked, time_settings
from .round_costs import measure_round_costs

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
_SUBJECTS = {"c": "code", "m": "mathematics", "t": "chat"}
_KINDS = dict(zip(PROMPTS, map(_SUBJECTS.get, "cmcmtcmtcmcmtmctmctmctmc")))
_OTHER_LANGUAGES = (
    "Erkläre in zwei Sätzen, warum der Himmel blau ist.",
    "Escribe una receta corta de tortitas.",
    "Combien font 12 fois 7, et pourquoi ?",
    "请用两句话介绍北京。",
)
_CONTEXT, _SHORT_CONTEXT = 512, 128  # tokens, where the user does not say how many; the second with few prompts
_SECONDS = {"cpu": 300.0}  # that an examination may take, and on an accelerator:
_SECONDS_ELSEWHERE = 120.0
_NEW_TOKENS, _FEWEST_NEW_TOKENS = 64, 32  # of each prompt, and where the time is short
_OTHER_WEIGHTS = {"other weights", "quantization"}  # causes that training may undo
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def examine(
    target: PreTrainedModel,
    drafter: Drafter,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompts: Sequence[str] = PROMPTS,
    max_new_tokens: int | None = None,
    context: int | None = None,
    texts: int = 1,
    thinking: bool = False,
    compiled: bool | None = None,
    seconds: float | None = None,
    began: float | None = None,
    disable_tqdm: bool | None = True,
    report: Callable[[str], object] | None = None,
) -> Diagnosis:
    """Examine a pair: whether it fits, how many times as fast it is, what that takes, and where acceptance is lost.

    For HyperDFlash and DFlash drafters it tries what is easily misread in others' formats: every layer one lower and
    one higher, the other anchor convention, and other bases of RoPE. For every drafter it tries long texts, another
    precision, the other thinking mode, no template, and settings of `generate`.

    Args:
        target: The target. It is bound meanwhile.
        drafter: Its drafter, of any kind. Of one without weights, as prompt lookup is, there is less to look at.
        tokenizer: The target's tokenizer.
        prompts: Questions, asked as chat turns. With fewer than 8 nothing is changed and no settings are timed, which
            is quick.
        max_new_tokens: Most tokens generated from each; 64 by default, and down to 32 where the time is short.
        context: Tokens of the user's texts, for what rounds cost and whether acceptance falls; by default 512, with
            fewer than 8 prompts 128.
        texts: That the user generates at a time, for what rounds cost.
        thinking: Whether the target is asked to think.
        compiled: Whether rounds over a static cache, compiled, are timed, too; by default on an accelerator.
        seconds: That it may take, about; by default 300 on a CPU, and 120 elsewhere. Fewer prompts are used then.
        began: When these seconds began, by `time.monotonic()`: before the models were loaded, say; now by default.
        disable_tqdm: `False` for a progress bar on stderr, `None` for one on a terminal and lines elsewhere.
        report: Called with a line for each step.

    Raises:
        ValueError: If there is no prompt, drafter or tokenizer is not one, or the target has no room for `context`.
    """
    if not prompts:
        raise ValueError("`prompts` is empty: expected at least one question.")
    for name, given, is_one, loaded_by in (
        ("drafter", drafter, is_drafter(drafter), "load_drafter"),
        ("tokenizer", tokenizer, isinstance(tokenizer, PreTrainedTokenizerBase), "AutoTokenizer.from_pretrained"),
    ):
        if not is_one:
            raise ValueError(f"`{name}` is {given!r:.60}, expected a {name}: load it with `{loaded_by}` first.")
    positions = getattr(target_of(target).config, "max_position_embeddings", None) or sys.maxsize
    room = positions - (max_new_tokens or _NEW_TOKENS)
    if context is not None and not 0 < context <= room:
        raise ValueError(
            f"`context` is {context}: expected 1 to {room}, as the target has {positions} positions and "
            f"{positions - room} new tokens follow."
        )
    seconds = seconds or _SECONDS.get(target.device.type, _SECONDS_ELSEWHERE)
    if compiled is None:
        compiled = target.device.type not in ("cpu", "mps")
    context = context or max(min(_CONTEXT if len(prompts) >= LEAST_PROMPTS else _SHORT_CONTEXT, room // 2), 1)
    time_left = seconds, time.monotonic() if began is None else began
    examination = _Examination(target, drafter, tokenizer, max_new_tokens, context, *time_left, disable_tqdm, report)
    return examination.run(prompts, texts, thinking, compiled)


class _Examination:
    """The steps of [`examine`], each with its share of the time."""

    def __init__(
        self, target: PreTrainedModel, drafter: Drafter, tokenizer: PreTrainedTokenizerBase,
        max_new_tokens: int | None, context: int, seconds: float, began: float, disable_tqdm: bool | None,
        report: Callable[[str], object] | None,
    ) -> None:  # fmt: skip
        self.target, self.drafter, self.tokenizer = target, drafter, tokenizer
        self.new, self._least_new = max_new_tokens or _NEW_TOKENS, max_new_tokens or _FEWEST_NEW_TOKENS
        self.context, self.seconds, self.disable_tqdm = context, seconds, disable_tqdm
        self._report, self._began = report, began
        self.found = Diagnosis()
        config = target_of(target).config
        self.found.is_mixture = any(getattr(config, name, None) for name in _EXPERTS)

    def say(self, line: str) -> None:
        """Report a step, with the seconds so far."""
        if self._report:
            self._report(f"[{time.monotonic() - self._began:.0f} s of about {self.seconds:.0f}] {line}")

    def _left(self) -> float:
        """Return the seconds that are left, some at least."""
        return max(self.seconds - (time.monotonic() - self._began), 0.05 * self.seconds)

    def run(self, prompts: Sequence[str], texts: int, thinking: bool, compiled: bool) -> Diagnosis:
        found, target, drafter = self.found, self.target, self.drafter
        found.facts["versions"] = f"torch {torch.__version__}, transformers {transformers.__version__}"
        try:
            checked_pair(target_of(target), drafter)
        except ValueError as error:
            found.problems["fit"] = str(error)
            return found
        if not check_fit(found, target, drafter, self.tokenizer):
            return found
        ids = encode(self.tokenizer, [[prompt] for prompt in prompts], thinking)
        check_target_loss(found, target, ids[:LEAST_PROMPTS])
        with bound(target):
            generated, counted = self._generate(ids, prompts)
            if found.tau is None:
                return found
            check_widths(found, target, generated[0])
            self._measure_costs(generated[0], texts, compiled)
            enough = len(prompts) >= LEAST_PROMPTS
            if enough:
                self._find_losses(prompts, ids, generated, counted, thinking)
            else:
                found.facts["not tried"] = (
                    f"other configurations and settings of `generate`: that takes {LEAST_PROMPTS} prompts, there "
                    f"{'is' if len(ids) == 1 else 'are'} {len(ids)}"
                )
            self._judge_tau()
            if not found.problems and enough:
                self._time_settings(ids)
        found.blame_costs()
        return found

    def _generate(
        self, prompts: Sequence[torch.Tensor], questions: Sequence[str]
    ) -> tuple[list[torch.Tensor], np.ndarray]:
        """Generate with and without the drafter: speed, losslessness and acceptance.

        Returns:
            The target's own texts, and tokens and rounds of each, `[prompts, 2]`.
        """
        found, target = self.found, self.target
        methods = [Method("alone"), Method("drafted", self.drafter)]
        least, share = (LEAST_PROMPTS, 0.17) if len(prompts) >= LEAST_PROMPTS else (2, 0.5)
        until = time.monotonic() + share * self._left()
        self.say(f"generating from up to {len(prompts)} prompts with and without the drafter ...")
        first = prompts[0].to(target.device)
        for method in methods:  # the first is slower than others
            generate_once(target, method, first, 0.0, min(8, self.new))
        tried: dict[str, Any] = generate_once(target, methods[0], first, 0.0, min(8, self.new))[0]
        affordable = int((until - time.monotonic()) / (2 * least * tried["seconds"] / tried["new_tokens"]))
        if max(affordable, self._least_new) < self.new:
            self.new = max(affordable, self._least_new)
            self.say(f"this takes long here: texts have {self.new} tokens")
        total, differing, texts, timed, counted = SpeculationStats(), 0, [], [], []
        by_kind: dict[str, list[tuple[int, int]]] = {}
        progress = progress_bar(prompts, desc="generating", unit="prompt", leave=False, disable=self.disable_tqdm)
        began = time.monotonic()
        for number, prompt in enumerate(progress):
            now = time.monotonic()
            if number >= least and now + (now - began) / number > until:  # another would end too late
                break
            ids, outputs = prompt.to(target.device), {}
            for method in methods[:: 1 if number % 2 else -1]:
                outputs[method.name] = generate_once(target, method, ids, 0.0, self.new)
            texts.append(torch.cat([ids, torch.tensor([outputs["alone"][1]], device=ids.device)], dim=1))
            differing += outputs["alone"][1] != outputs["drafted"][1]
            stats = cast(SpeculationStats, self.drafter.last_stats)
            total += stats
            counted.append(rounds_of(stats))
            by_kind.setdefault(_KINDS.get(questions[number]) or "others", []).append(counted[-1])
            timed.append([(each["new_tokens"], each["seconds"]) for each, _ in map(outputs.get, ("alone", "drafted"))])  # type: ignore[misc]
        found.differing = differing
        found.facts["losslessness"] = f"{len(texts) - differing} of {len(texts)} greedy texts are the target's own"
        if differing:
            found.remarks.append(
                f"{differing} greedy texts differ. In float32 that should not be; in lower precision it happens "
                "where the target's two best tokens are equal to within rounding."
            )
        if not total.rounds:
            found.problems["template"] = (
                "The target ends every answer at once: the chat template is not the one it was trained with."
            )
            return texts, np.array(counted, dtype=float)
        found.tau, found.acceptance = total.tau, total.acceptance
        asked = self.drafter.num_draft_tokens
        found.drafts = asked if isinstance(asked, int) else None
        (default,) = ranked([{}], np.array(timed, dtype=float))
        found.speedup = default.speedup
        found.kinds = {kind: sum(a for a, _ in of) / max(sum(b for _, b in of), 1) for kind, of in by_kind.items()}
        rounds = f"{total.rounds} round{'s' * (total.rounds != 1)}"
        rates = ", ".join(f"{100 * rate:.0f}" for rate in total.acceptance)
        found.facts["acceptance"] = (
            f"tau {total.tau:.2f} over {len(texts)} prompts, {rounds}; drafts accepted at each position, %: {rates}"
        )
        return texts, np.array(counted, dtype=float)

    def _measure_costs(self, text: torch.Tensor, texts: int, compiled: bool) -> None:
        options: dict[str, Any] = {
            "context": self.context, "texts": texts, "seconds": 0.12 * self._left(), "report": self.say,
        }  # fmt: skip
        self.found.costs = measure_round_costs(self.target, self.drafter, text, **options)
        if not compiled:
            return
        try:
            self.found.costs.compiled = measure_round_costs(self.target, self.drafter, text, **options, compiled=True)
        except Exception as error:  # what a compiler may say is no fault of the pair's
            said = (str(error) or type(error).__name__).splitlines()[0]
            self.found.remarks.append(f"Compiled rounds could not be timed: {said:.200}")

    def _find_losses(
        self, questions: Sequence[str], prompts: list[torch.Tensor], texts: list[torch.Tensor], counted: np.ndarray,
        thinking: bool,
    ) -> None:  # fmt: skip
        found, prompts = self.found, prompts[: len(texts)]
        if self.drafter.config.model_type == HyperDFlashConfig.model_type:
            self.say("trying other layers, the other anchor convention, other bases of RoPE ...")
            few = slice(None, None if len(texts) <= LEAST_PROMPTS else LEAST_PROMPTS + 2)
            _try_other_settings(
                found, self.target, cast(HyperDFlashDrafter, self.drafter), prompts[few], texts[few], self.disable_tqdm
            )
        lost = LostAcceptance(self.target, self.drafter, self.new, 0.35 * self._left())
        answers = [
            str(self.tokenizer.decode(text[0, ids.shape[1] :], skip_special_tokens=True))
            for ids, text in zip(prompts, texts)
        ]
        asked = list(zip(questions, answers))
        for change in lost.changes(self.tokenizer, asked, counted, thinking, self.context):
            self.say(f"changed: {change.name}: {change.after:.2f} tokens a round instead of {change.before:.2f}")
            found.changes.append(change)
        tokens, rounds = lost.rounds(encode(self.tokenizer, [[each] for each in _OTHER_LANGUAGES], thinking)).sum(0)
        found.kinds["German, Spanish, French, Chinese"] = float(tokens / max(rounds, 1))
        report_changes(found)
        cause = next((cause for cause in found.problems if cause in _OTHER_WEIGHTS), None)
        if cause is not None:
            found.problems[cause] += self._try_learning(prompts, texts, counted)

    def _try_learning(
        self, prompts: Sequence[torch.Tensor], texts: Sequence[torch.Tensor], counted: np.ndarray
    ) -> str:
        """Train a copy of the drafter on half of the texts, measure it on the others, and say what that brings."""
        half = len(texts) // 2
        self.say(f"training a copy of the drafter on {len(texts) - half} of the texts ...")
        starts = [ids.shape[1] for ids in prompts[half:]]
        try:
            taught = teach(self.target, self.drafter, texts[half:], starts, 0.25 * self._left())
        except (RuntimeError, ValueError) as error:  # no drafter that is trained, no such memory, no such kernel
            said = (str(error) or type(error).__name__).splitlines()[0]
            self.found.remarks.append(f"What training would bring back was not tried: {said:.200}")
            return ""
        lost = LostAcceptance(self.target, taught.drafter, self.new, self._left())
        learned = f"{taught.steps} training steps on {len(starts)} other texts"
        change = compare("learning", learned, counted, lost.rounds(prompts[:half]))
        self.say(f"changed: {change.name}: {change.after:.2f} tokens a round instead of {change.before:.2f}")
        self.found.changes.append(change)
        low, high = change.ratio.low, change.ratio.high
        return (
            f" Tried here: after {taught.steps} training steps ({taught.seconds:.0f} s) on {len(starts)} of these "
            f"texts it has {change.after:.2f} tokens a round instead of {change.before:.2f} on others ({low:.2f} to "
            f"{high:.2f} times as many). An hour has {3600 / max(taught.seconds, 1e-3):,.0f} times those steps."
        )

    def _judge_tau(self) -> None:
        found, tau = self.found, cast(float, self.found.tau)
        if tau >= LEAST_TAU:
            return
        if not hasattr(self.drafter, "get_memory_footprint"):
            found.remarks.append(f"Hardly any draft is accepted (tau {tau:.2f}): texts repeat too little.")
        elif not found.problems:
            found.problems["acceptance"] = (
                f"Hardly any draft is accepted (tau {tau:.2f}): the drafter is hardly trained, or "
                "was trained for another target, chat template or tokenizer."
            )

    def _time_settings(self, prompts: list[torch.Tensor]) -> None:
        for temperature, share in zip(TEMPERATURES, (0.6, 1.0)):
            self.say(f"timing settings of generate, temperature {temperature:g} ...")
            timed = time_settings(
                self.target, self.drafter, prompts, temperature=temperature, max_new_tokens=self.new,
                seconds=share * self._left(), disable_tqdm=self.disable_tqdm,
            )  # fmt: skip
            self.found.timed[temperature] = timed
            learned = learned_stats(self.target, self.drafter)
            if learned is not None and learned.is_tried:
                self.found.expected = learned.costs.predict(self.context, len(self.found.acceptance))
            self.found.facts[f"timed, temperature {temperature:g}"] = "; ".join(map(str, timed))


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
    ahead = [setting for setting in others if matters(setting, tau) and setting.tau >= LEAST_TAU]
    better = [setting for setting in ahead if setting.ahead.low > 0]
    worse = sum(setting.ahead.high < 0 for setting in others)
    found.facts["other configurations"] = (
        f"{len(others)} tried in {text}, neighbouring layers, the other anchor convention, other bases of RoPE: "
        f"{worse} certainly worse, {len(better)} clearly better, of the others none makes a clear difference"
    )
    if better:
        best = max(better, key=lambda setting: setting.ahead.value)
        found.problems[cause_of(best.name)] = (
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
