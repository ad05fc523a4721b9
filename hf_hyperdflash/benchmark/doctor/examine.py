"""Examines a pair before long jobs are started with it: does it fit, is it fast, where is acceptance lost."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...decoding.bind import bound, learned_stats
from ...decoding.stats import SpeculationStats, exact_timing
from ...drafters.base import Drafter
from ...targets.registry import is_drafter, target_of
from ...training.trials import Local, run
from . import ablations, config_variants, fit
from .diagnosis import (
    LEAST_PROMPTS,
    LEAST_TAU,
    REMARK,
    Diagnosis,
    Examination,
    Finding,
    MeasuredCosts,
    blame_costs,
    counted,
    first_line,
)
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
_CONTEXT, _SHORT_CONTEXT = 512, 128  # tokens, where the user does not say how many; the second with few prompts
_SECONDS = {"cpu": 300.0}  # that an examination may take, and on an accelerator:
_SECONDS_ELSEWHERE = 120.0
_NEW_TOKENS, _FEWEST_NEW_TOKENS = 64, 32  # of each prompt, and where the time is short
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def check_generation(examined: Examination) -> Iterator[Finding]:
    """Generate with and without the drafter: speed, losslessness and acceptance."""
    found, target, drafter, prompts = examined.found, examined.target, examined.drafter, examined.prompts
    methods = [Local(target), Local(target, drafter)]
    least, share = (LEAST_PROMPTS, 0.17) if examined.is_thorough else (2, 0.5)
    until = time.monotonic() + share * examined.left()
    examined.say(f"generating from up to {len(prompts)} prompts with and without the drafter ...")
    few = min(8, examined.new_tokens)
    list(run(methods, prompts[:1], few))  # the first is slower than others
    ((_, _, tried),) = run(methods[:1], prompts[:1], few)
    affordable = int((until - time.monotonic()) / (2 * least * tried.seconds / tried.new_tokens))
    if max(affordable, examined.fewest_new_tokens) < examined.new_tokens:
        examined.new_tokens = max(affordable, examined.fewest_new_tokens)
        examined.say(f"this takes long here: texts have {examined.new_tokens} tokens")
    trials = run(
        methods, prompts, examined.new_tokens, first=1, fewest=least, seconds=until - time.monotonic(),
        desc="generating", disable_tqdm=examined.disable_tqdm,
    )  # fmt: skip
    records = {(number, index): record for number, index, record in trials}
    total, found.differing, timed, rounds = SpeculationStats(), 0, [], []
    kinds: dict[str, list[tuple[int, int]]] = {}
    for number in range(len(records) // 2):
        alone, drafted = records[number, 0], records[number, 1]
        text = torch.cat([prompts[number], torch.tensor([alone.output])], dim=1)
        examined.texts.append(text.to(target.device))
        found.differing += alone.output != drafted.output
        stats = cast(SpeculationStats, drafted.stats)
        total += stats
        rounds.append(ablations.rounds_of(stats))
        kinds.setdefault(_KINDS.get(examined.questions[number]) or "others", []).append(rounds[-1])
        timed.append([(each.new_tokens, each.seconds) for each in (alone, drafted)])
    examined.rounds = np.array(rounds, dtype=float)
    count = len(rounds)
    found.facts["losslessness"] = f"{count - found.differing} of {count} greedy texts are the target's own"
    if found.differing:
        yield REMARK, (
            f"{found.differing} greedy texts differ. In float32 that should not be; in lower precision it happens "
            "where the target's two best tokens are equal to within rounding."
        )  # fmt: skip
    if not total.rounds:
        yield "template", "The target ends every answer at once: the chat template is not the one it was trained with."
        return
    found.tau, found.acceptance = total.tau, total.acceptance
    found.drafts = drafter.num_draft_tokens if isinstance(drafter.num_draft_tokens, int) else None
    found.speedup = ranked([{}], np.array(timed, dtype=float))[0].speedup
    found.kinds = {kind: sum(a for a, _ in of) / max(sum(b for _, b in of), 1) for kind, of in kinds.items()}
    rates = ", ".join(f"{100 * rate:.0f}" for rate in total.acceptance)
    found.facts["acceptance"] = (
        f"tau {total.tau:.2f} over {count} prompts, {counted(total.rounds, 'round')}; drafts accepted at each "
        f"position, %: {rates}"
    )


def check_costs(examined: Examination) -> Iterator[Finding]:
    """Time rounds of several widths and drafting; compiled, too, if that is asked for."""
    found, seconds = examined.found, 0.12 * examined.left()

    def measure(**compiled: bool) -> MeasuredCosts:
        return measure_round_costs(
            examined.target, examined.drafter, examined.texts[0], context=examined.context,
            texts=examined.texts_at_once, seconds=seconds, report=examined.say, **compiled,
        )  # fmt: skip

    found.costs = measure()
    if examined.compiled:
        try:
            found.costs.compiled = measure(compiled=True)
        except Exception as error:  # what a compiler may say is no fault of the pair's
            yield REMARK, f"Compiled rounds could not be timed: {first_line(error)}"


def judge_tau(examined: Examination) -> Iterator[Finding]:
    """Check whether hardly any draft is accepted, without a cause that is known by now."""
    found, tau = examined.found, cast(float, examined.found.tau)
    if tau >= LEAST_TAU:
        return
    if not examined.has_weights:
        yield REMARK, f"Hardly any draft is accepted (tau {tau:.2f}): texts repeat too little."
    elif not found.problems:
        yield "acceptance", (
            f"Hardly any draft is accepted (tau {tau:.2f}): the drafter is hardly trained, or was trained for another "
            "target, chat template or tokenizer."
        )  # fmt: skip


def recommend(examined: Examination) -> None:
    """Time settings of `generate`, if nothing is wrong."""
    found, target, drafter = examined.found, examined.target, examined.drafter
    if not examined.is_thorough:
        count = len(examined.prompts)
        found.facts["not tried"] = (
            f"other configurations and settings of `generate`: that takes {LEAST_PROMPTS} prompts, there "
            f"{'is' if count == 1 else 'are'} {count}"
        )
        return
    if found.problems:
        return
    for temperature, share in zip(TEMPERATURES, (0.6, 1.0)):
        examined.say(f"timing settings of generate, temperature {temperature:g} ...")
        found.timed[temperature] = time_settings(
            target, drafter, examined.prompts, temperature=temperature, max_new_tokens=examined.new_tokens,
            seconds=share * examined.left(), disable_tqdm=examined.disable_tqdm,
        )  # fmt: skip
        learned = learned_stats(target, drafter)
        if learned is not None and learned.is_tried:
            found.expected = learned.costs.predict(examined.context, len(found.acceptance))
        text = "; ".join(map(str, found.timed[temperature]))
        found.facts[f"timed, temperature {temperature:g}"] = text


# In this order. After a problem of one that is marked nothing else can be examined.
Checks = tuple[tuple[Callable[[Examination], Iterator[Finding] | None], bool], ...]
BEFORE_GENERATION: Checks = (
    (fit.check_pair, True),
    (fit.check_memory, False),
    (fit.check_fingerprint, False),
    (fit.check_weights, False),
    (fit.check_vocabulary, True),
    (fit.check_mask_token, False),
    (fit.check_tokenizer, False),
    (fit.check_target_loss, False),
)
OF_GENERATION: Checks = (
    (check_generation, True),
    (fit.check_widths, False),
    (check_costs, False),
    (config_variants.try_variants, False),
    (ablations.change_one_thing, False),
    (ablations.try_learning, False),
    (judge_tau, False),
    (recommend, False),
    (blame_costs, False),
)


def examine(
    target: PreTrainedModel,
    drafter: Drafter,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompts: Sequence[str] = PROMPTS,
    max_new_tokens: int | None = None,  # 64, and down to 32 where the time is short
    context: int | None = None,  # tokens of the user's texts; 512, with fewer than 8 prompts 128
    texts: int = 1,  # that the user generates at a time
    thinking: bool = False,
    compiled: bool | None = None,  # whether compiled rounds are timed, too; on an accelerator
    seconds: float | None = None,  # that it may take, about; 300 on a CPU, 120 elsewhere
    began: float | None = None,  # when these began, by `time.monotonic()`; now
    disable_tqdm: bool | None = True,
    report: Callable[[str], object] | None = None,
) -> Diagnosis:
    """Examine a pair: whether it fits, how many times as fast it is, what that takes, and where acceptance is lost.

    For HyperDFlash and DFlash drafters it tries what is easily misread in others' formats: every layer one lower and
    one higher, the other anchor convention, and other bases of RoPE. For every drafter it tries long texts, another
    precision, the other thinking mode, no template, and settings of `generate`. With fewer than 8 prompts nothing is
    changed and no settings are timed, which is quick.
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
    if texts < 1:
        raise ValueError(f"`texts` is {texts}: expected at least 1, which is how many you generate at a time.")
    seconds = seconds or _SECONDS.get(target.device.type, _SECONDS_ELSEWHERE)
    if compiled is None:
        compiled = target.device.type not in ("cpu", "mps")
    context = context or max(min(_CONTEXT if len(prompts) >= LEAST_PROMPTS else _SHORT_CONTEXT, room // 2), 1)
    examined = Examination(
        target, drafter, tokenizer, prompts, ablations.encode(tokenizer, [[prompt] for prompt in prompts], thinking),
        new_tokens=max_new_tokens or _NEW_TOKENS,
        fewest_new_tokens=max_new_tokens or _FEWEST_NEW_TOKENS, context=context, texts_at_once=texts,
        thinking=thinking, compiled=compiled, seconds=seconds, began=time.monotonic() if began is None else began,
        disable_tqdm=disable_tqdm, report=report,
    )  # fmt: skip
    found, config = examined.found, target_of(target).config
    found.is_mixture = any(getattr(config, name, None) for name in _EXPERTS)
    found.facts["versions"] = f"torch {torch.__version__}, transformers {transformers.__version__}"
    with exact_timing():
        if _passes(examined, BEFORE_GENERATION):
            with bound(target):
                _passes(examined, OF_GENERATION)
    return found


def _passes(examined: Examination, checks: Checks) -> bool:
    """Add what checks find, one after the other, and return whether all could run."""
    for check, ends in checks:
        for cause, text in check(examined) or ():
            examined.found.add(cause, text)
            if ends and cause != REMARK:
                return False
    return True
