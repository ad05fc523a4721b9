"""Compares what a server of the same pair accepts with what the drafter accepts here, and names the first thing that
differs: tokenizer, template, target, number of drafts, or how the server reads the drafter."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...decoding.stats import SpeculationStats
from ...drafters.base import Drafter
from ...drafters.blocks.configuration_hyperdflash import HyperDFlashConfig
from ...drafters.blocks.modeling_hyperdflash import HyperDFlashDrafter
from ...training.acceptance import bound
from ..doctor.lost_acceptance import encode
from ..doctor.other_settings import cause_of, draft_every_round, other_settings
from .endpoint import Answer, EndpointSettings, converse, fetch, metrics, served_models
from .served_counts import SGLANG_OPTIONS, DraftCounters, counts_of_run, total

_FEWEST = 3  # equal texts, of which acceptance is compared; with fewer, all are
_SAME_TAU, _SAME_RATE = 0.03, 0.05  # differences of tokens a round and of a position's rate that are none
_EARLY = 0.25  # of a text: where two that part so early, parted for more than rounding


@dataclass
class ServedDiagnosis:
    """What a server and this machine made of the same prompts.

    Attributes:
        cause: The first thing that differs, in a word or two; empty if nothing does.
        meaning: What that is, and what to do.
        same: Answers that are the text that is written here, and how many were compared.
        here: Acceptance here, over the rounds of the texts that are compared.
        there: The server's; `None` if it tells nothing of its drafts.
        tried: The mean difference of a position's rate from the server's, as configured and with other readings.
        tells_tokens: Whether the server tells its tokens (`/tokenize`); prompts of equal length cannot be told apart
            without.
    """

    cause: str = ""
    meaning: str = ""
    same: tuple[int, int] = (0, 0)
    here: DraftCounters | None = None
    there: DraftCounters | None = None
    tried: dict[str, float] = field(default_factory=dict)
    tells_tokens: bool = True

    def __str__(self) -> str:
        lines = []
        if self.same[1]:
            lines.append(f"{self.same[0]} of {self.same[1]} greedy answers are the text that is written here.")
        for name, counted in (("The server", self.there), ("Here the drafter", self.here)):
            if counted is not None and counted.rounds:
                lines.append(
                    f"{name}: {counted.tau:.2f} tokens a round over {counted.rounds:.0f} rounds; drafts accepted at "
                    f"each position, %: {', '.join(f'{100 * rate:.0f}' for rate in counted.acceptance)}"
                )
        if self.tried:
            nearest = sorted(self.tried.items(), key=lambda item: item[1])[:4]
            told = "; ".join(f"{name}: {100 * gap:.1f}" for name, gap in nearest)
            lines.append(f"Nearest to the server's rates, mean difference in points: {told}")
        if not self.tells_tokens:
            lines.append(
                "The server does not tell its tokens (`/tokenize`): of its template only the length is known."
            )
        return "\n".join([*lines, f"FIRST DIFFERENCE ({self.cause}): {self.meaning}" if self.cause else self.meaning])

    def record(self) -> str:
        """Return what an issue needs, as JSON. No text, path or name is in it."""
        return json.dumps(asdict(self), indent=1) + "\n"


class _Here(NamedTuple):
    """A prompt's tokens, what the target writes after it here, and that as text.

    A few more tokens than asked for are written, so that a last round is not cut, as none of a server's is.
    """

    ids: torch.Tensor
    text: torch.Tensor
    answer: str


def examine_server(
    target: PreTrainedModel,
    drafter: Drafter,
    tokenizer: PreTrainedTokenizerBase,
    endpoint: str,
    *,
    model: str | None = None,
    prompts: Sequence[str],
    max_new_tokens: int = 64,
    thinking: bool = False,
    report: Callable[[str], object] | None = None,
) -> ServedDiagnosis:
    """Ask a server of the pair, which nobody else uses meanwhile, and say what first differs from here.

    Args:
        target: The target, as it should be served. It is bound meanwhile.
        drafter: Its drafter. Of HyperDFlash and DFlash drafters other readings are tried: layers, anchor, positions,
            precision.
        tokenizer: The target's tokenizer.
        endpoint: The server's address, with `/v1` or without.
        model: What the server calls the target; may be left out where it serves one alone.
        prompts: Questions, asked greedily, one after the other.
        max_new_tokens: Of each answer.
        thinking: Whether the target is asked to think here. The server is asked as its own template has it.
        report: Called with a line for each step.

    Raises:
        ValueError: If the server does not answer, or serves several models and none is named.
    """
    say = report or (lambda line: None)
    named = EndpointSettings(endpoint, model or "", [], max_new_tokens=max_new_tokens)
    owners = served_models(named)
    if model not in owners and (model is not None or len(owners) != 1):
        raise ValueError(f"{endpoint} serves {', '.join(owners)}: name one of these with `--served-model`.")
    settings = EndpointSettings(endpoint, model or next(iter(owners)), [], max_new_tokens=max_new_tokens)
    found = ServedDiagnosis()
    ids = encode(tokenizer, [[text] for text in prompts], thinking)
    say(f"asking {settings.model} at {settings.root}, {len(prompts)} prompts ...")
    answers, counted = _ask(settings, prompts, owners[settings.model] == "sglang")
    if _differs_in_tokens(found, settings, tokenizer, prompts, ids, answers, thinking):
        return found
    verified = max((len(each.accepted) for each in counted if each), default=0)
    own, most = drafter.num_draft_tokens, drafter.max_draft_tokens
    if owners[settings.model] == "sglang" and isinstance(own, int):  # whose lists end with what was accepted
        verified = max(own, verified)
    if most and verified > most:
        found.cause = "draft count"
        found.meaning = (
            f"The server verifies {verified} drafts a round, and the drafter was trained for {most}: set "
            f"`num_speculative_tokens` to {most}."
        )
        return found
    with bound(target):
        say("writing the same here ...")
        here, stats = _write(target, drafter, tokenizer, ids, max_new_tokens, verified)
        shares = [_shared(each.answer, answer.text) for each, answer in zip(here, answers)]
        equal = [index for index, share in enumerate(shares) if share == 1]
        found.same = len(equal), len(prompts)
        compared = equal if len(equal) >= _FEWEST else list(range(len(prompts)))
        found.there = total(counted[index] for index in compared)
        found.here = total(stats[index] for index in compared)
        if len(equal) < len(prompts) and np.median(shares) < _EARLY:
            found.cause = "target"
            found.meaning = (
                "The texts part early, so the server's target has other weights, or is quantized: serve the "
                "checkpoint that the drafter was trained for, or compare with the one that is served."
            )
            return found
        if found.there is None or not found.there.rounds:
            found.cause = "no drafts"
            found.meaning = (
                "The server tells of no drafts: it was started without a drafter, or without its metrics (SGLang: "
                "`--enable-metrics`)."
            )
            return found
        walk = _Walk(target, [here[index] for index in compared], max_new_tokens, verified)
        _compare_acceptance(found, drafter, walk, say)
    if not found.cause and len(equal) < len(prompts):
        found.cause = "dtype of the target"
        found.meaning = (
            f"Texts part late, in {len(prompts) - len(equal)} of {len(prompts)}, where two tokens almost tie: the "
            "server computes in another precision or with other kernels. Acceptance is the same. Nothing to do, or "
            "serve in the dtype that is used here."
        )
    return found


def _ask(
    settings: EndpointSettings, prompts: Sequence[str], is_sglang: bool
) -> tuple[list[Answer], list[DraftCounters | None]]:
    """Return the answers, and the server's counts of each."""
    more, answers, counted = SGLANG_OPTIONS if is_sglang else {}, [], []
    page = metrics(settings)
    for prompt in prompts:
        before = page
        (answer,) = converse(settings, [prompt], 0.0, more)
        page = metrics(settings)
        run = counts_of_run(settings.model, [answer.counted], before, page)
        answers.append(answer)
        # SGLang's list is empty where no draft was accepted, and where its counters know no positions.
        is_known = run.rounds and run.tau is not None and abs(1 + sum(run.acceptance) - run.tau) < 1e-6
        counted.append(
            DraftCounters(run.rounds or 0, [run.rounds * each for each in run.acceptance])  # type: ignore[operator]
            if is_known
            else None
        )
    return answers, counted


def _differs_in_tokens(
    found: ServedDiagnosis, settings: EndpointSettings, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str],
    ids: Sequence[torch.Tensor], answers: Sequence[Answer], thinking: bool,
) -> bool:  # fmt: skip
    """Name another tokenizer, template or thinking mode, by the server's tokens (`/tokenize`) or their number."""
    plain = tokenizer(prompts[0], add_special_tokens=False)["input_ids"]
    told = _tokens(settings, prompt=prompts[0], add_special_tokens=False)
    if told is not None and told != plain:
        found.cause = "tokenizer"
        found.meaning = (
            f"Plain text has {len(told)} tokens there and {len(plain)} here, or others: give the server the target's "
            "own tokenizer (`--tokenizer`)."
        )
        return True
    chat = _tokens(settings, messages=[{"role": "user", "content": prompts[0]}])
    found.tells_tokens, own = chat is not None, ids[0][0].tolist()
    lengths = [answer.prompt_tokens for answer in answers]
    usual = [each.shape[1] for each in ids]
    if chat == own or (chat is None and (None in lengths or lengths == usual)):
        return False
    flipped = encode(tokenizer, [[text] for text in prompts], not thinking)
    if chat == flipped[0][0].tolist() or (chat is None and lengths == [each.shape[1] for each in flipped]):
        found.cause = "thinking"
        found.meaning = (
            f"The server asks with thinking {'off' if thinking else 'on'}, here it is {'on' if thinking else 'off'}: "
            "`chat_template_kwargs` of a request, or `--mode` here."
        )
        return True
    gaps = {there - here for there, here in zip(lengths, usual) if there is not None}
    is_constant = chat is not None or len(gaps) == 1
    found.cause = "template" if is_constant else "tokenizer"
    length = len(chat) if chat is not None else lengths[0]
    found.meaning = f"The first prompt has {length} tokens there and {usual[0]} here, " + (
        "around the same question: the server's chat template, or its system prompt, is another one "
        "(`--chat-template`)."
        if is_constant
        else "and others differ by other numbers: give the server the target's own tokenizer (`--tokenizer`)."
    )
    return True


def _tokens(settings: EndpointSettings, **asked: Any) -> list[int] | None:
    """Ask for the tokens of a text or of a chat, as vLLM tells them; `None` where a server does not."""
    try:
        return json.loads(fetch(f"{settings.root}/tokenize", {"model": settings.model, **asked}))["tokens"]
    except (ValueError, KeyError, TypeError):
        return None


def _write(
    target: PreTrainedModel, drafter: Drafter, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[torch.Tensor],
    new: int, drafts: int,
) -> tuple[list[_Here], list[DraftCounters]]:  # fmt: skip
    """Write greedily with as many drafts a round as the server verifies, and return texts and what was accepted."""
    written, counted = [], []
    for prompt in prompts:
        ids = prompt.to(target.device)
        text = cast(Any, target).generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new + drafts,
            assistant_model=drafter, num_assistant_tokens=drafts or None,
        )  # fmt: skip
        stats = cast(SpeculationStats, drafter.last_stats)
        counted.append(DraftCounters(stats.rounds, [stats.rounds * rate for rate in stats.acceptance]))
        answer = tokenizer.decode(text[0, ids.shape[1] :][:new], skip_special_tokens=True)
        written.append(_Here(ids, text, str(answer)))
    return written, counted


def _shared(here: str, there: str) -> float:
    """Return the share of a text up to where the two part."""
    here, there = here.strip(), there.strip()
    if here == there:
        return 1.0
    parted = next((i for i, (a, b) in enumerate(zip(here, there)) if a != b), min(len(here), len(there)))
    return min(parted / max(len(here), len(there), 1), 0.999)


def _compare_acceptance(found: ServedDiagnosis, drafter: Drafter, walk: _Walk, say: Callable[[str], object]) -> None:
    """Compare position by position, and where they differ, look for the reading of the drafter that the server has."""
    is_block = drafter.config.model_type == HyperDFlashConfig.model_type
    if is_block:
        own = cast(HyperDFlashDrafter, drafter)
        (found.here,) = walk.accepted(own, [own.config])
    here, there = cast(DraftCounters, found.here), cast(DraftCounters, found.there)
    if _is_same(here, there):
        found.meaning = "Nothing differs: the server accepts what is accepted here, position by position."
        return
    found.tried["as configured"] = _gap(here, there)
    if is_block:
        say("trying other readings of the drafter ...")
        for cause, name, counted in _readings(own, walk):
            found.tried[name] = gap = _gap(counted, there)
            if gap == min(found.tried.values()):
                found.cause, found.meaning = cause, _READ.format(name)
        if min(found.tried.values()) > 0.5 * found.tried["as configured"]:
            found.cause = ""
    if not found.cause:
        rates = zip_longest(there.acceptance, here.acceptance, fillvalue=0.0)
        lower = [k for k, (a, b) in enumerate(rates, 1) if b - a > _SAME_RATE]
        at = f"from position {lower[0]} on" if lower else "at no one position"
        found.cause = "drafter"
        of = "Its drafter has other weights" if lower[:1] == [1] else "Its drafts may see other context"
        found.meaning = (
            f"The server accepts less {at}, and no other reading that was tried explains it. {of}: compare the files' "
            "checksums, then ask its makers with `served.json` (`--output`)."
        )


_READ = (
    "The server accepts as if the drafter had {}: its configuration is read so there, or was exported so. Correct the "
    "`config.json` that is served, or report it to the server's makers with `served.json` (`--output`)."
)


def _is_same(here: DraftCounters, there: DraftCounters) -> bool:
    gaps = _gaps(here, there)
    return abs(cast(float, there.tau) / cast(float, here.tau) - 1) <= _SAME_TAU and max(gaps) <= _SAME_RATE


def _gap(here: DraftCounters, there: DraftCounters) -> float:
    """Return the mean difference of a position's rate."""
    return float(np.mean(_gaps(here, there)))


def _gaps(here: DraftCounters, there: DraftCounters) -> list[float]:
    """Return the difference of each position's rate; a list that ends early has none accepted from there on."""
    return [abs(a - b) for a, b in zip_longest(here.acceptance, there.acceptance, fillvalue=0.0)]


def _readings(drafter: HyperDFlashDrafter, walk: _Walk) -> Iterator[tuple[str, str, DraftCounters]]:
    """Yield other readings of a drafter, as cause and name, with what would be accepted."""
    others = other_settings(drafter.config, walk.target)
    for name, counted in zip(others, walk.accepted(drafter, list(others.values()))):
        yield cause_of(name), name, counted
    for shift, name in ((-1, "earlier"), (1, "later")):
        (counted,) = walk.accepted(drafter, [drafter.config], shift)
        yield "positions", f"its block 1 position {name}", counted
    for dtype in {torch.float16, torch.bfloat16, torch.float32} - {drafter.dtype}:
        (counted,) = walk.accepted(cast(Any, copy.deepcopy(drafter)).to(dtype), [drafter.config])
        yield "dtype", f"weights in {str(dtype).removeprefix('torch.')}", counted


class _Walk(NamedTuple):
    """Texts that the target wrote, to walk through by rounds: what a round accepts is known after every token, so it
    is known where the next one begins."""

    target: PreTrainedModel
    texts: Sequence[_Here]
    new: int
    drafts: int

    def accepted(
        self, drafter: HyperDFlashDrafter, configs: Sequence[HyperDFlashConfig], shift: int = 0
    ) -> list[DraftCounters]:
        """Return what would be accepted with each configuration."""
        rounds = [0] * len(configs)
        accepted = [[0.0] * self.drafts for _ in configs]
        for each in self.texts:
            emitted, _ = draft_every_round(self.target, drafter, each.text, each.ids.shape[1], configs, shift)
            for index, row in enumerate(emitted.tolist()):
                at = 0
                while at < min(len(row), self.new - 1):
                    count = min(row[at] - 1, self.drafts)
                    accepted[index][:count] = [1 + before for before in accepted[index][:count]]
                    rounds[index], at = rounds[index] + 1, at + 1 + count
        return [DraftCounters(*each) for each in zip(rounds, accepted)]
