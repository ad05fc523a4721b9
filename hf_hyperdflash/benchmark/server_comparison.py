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

from ..decoding.bind import bound
from ..decoding.stats import SpeculationStats
from ..drafters.base import Drafter
from ..drafters.blocks.configuration_hyperdflash import HyperDFlashConfig
from ..drafters.blocks.modeling_hyperdflash import HyperDFlashDrafter
from ..training.data.blocks import walk_rounds
from ..training.data.endpoint import fetch, find_endpoint
from ..training.trials import Local, Record, run
from .doctor.ablations import encode
from .doctor.config_variants import cause_of, draft_every_round, variants
from .doctor.diagnosis import Finding
from .server import DraftCounters, Server, counts_of_answers, total

_FEWEST = 3  # equal texts, of which acceptance is compared; with fewer, all are
_SAME_TAU, _SAME_RATE = 0.03, 0.05  # differences of tokens a round and of a position's rate that are none
_EARLY = 0.25  # of a text: where two that part so early, parted for more than rounding

_SAME = "Nothing differs: the server accepts what is accepted here, position by position."


@dataclass
class ServedDiagnosis:
    """What a server and this machine made of the same prompts."""

    cause: str = ""  # the first thing that differs, in a word or two
    meaning: str = ""  # what that is, and what to do
    same: tuple[int, int] = (0, 0)  # answers that are the text that is written here, and how many were compared
    here: DraftCounters | None = None
    there: DraftCounters | None = None
    tried: dict[str, float] = field(default_factory=dict)  # mean difference of a position's rate by each reading
    tells_tokens: bool = True  # by `/tokenize`; prompts of equal length cannot be told apart without

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
    """A prompt's tokens, what the target writes after it here, and that as text."""

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
    """Ask a server of the pair, which nobody else uses meanwhile, and say what first differs from here."""
    server = Server(endpoint, find_endpoint(endpoint, model, "--served-model").model)
    found = ServedDiagnosis()
    say = report or (lambda line: None)
    say(f"asking {server.model} at {server.root}, {len(prompts)} prompts ...")
    answers, counted, page = list[Record](), list[DraftCounters | None](), server.metrics()
    asked = [[{"role": "user", "content": text}] for text in prompts]
    for _, _, answer in run([server], asked, max_new_tokens):
        before, page = page, server.metrics()
        counts = counts_of_answers(server.model, [answer.counted], before, page)
        answers.append(answer)
        counted.append(counts if counts.rounds else None)
    ids = encode(tokenizer, [[text] for text in prompts], thinking)
    first = _compare_tokens(found, server, tokenizer, prompts, ids, answers, thinking)
    if first is None:
        comparison = _DraftComparison(found, server, target, drafter, max_new_tokens, say)
        with bound(target):
            first = comparison.compare_texts(tokenizer, ids, answers, counted)
    found.cause, found.meaning = first or ("", _SAME)
    return found


def _compare_tokens(
    found: ServedDiagnosis, server: Server, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str],
    ids: Sequence[torch.Tensor], answers: Sequence[Record], thinking: bool,
) -> Finding | None:  # fmt: skip
    """Name another tokenizer, template or thinking mode, by the server's tokens (`/tokenize`) or their number."""
    plain = tokenizer(prompts[0], add_special_tokens=False)["input_ids"]
    told = _tokens(server, prompt=prompts[0], add_special_tokens=False)
    if told is not None and told != plain:
        return "tokenizer", (
            f"Plain text has {len(told)} tokens there and {len(plain)} here, or others: give the server the target's "
            "own tokenizer (`--tokenizer`)."
        )
    chat = _tokens(server, messages=[{"role": "user", "content": prompts[0]}])
    found.tells_tokens, own = chat is not None, ids[0][0].tolist()
    lengths = [answer.prompt_tokens for answer in answers]
    usual = [each.shape[1] for each in ids]
    if chat == own or (chat is None and (None in lengths or lengths == usual)):
        return None
    flipped = encode(tokenizer, [[text] for text in prompts], not thinking)
    if chat == flipped[0][0].tolist() or (chat is None and lengths == [each.shape[1] for each in flipped]):
        return "thinking", (
            f"The server asks with thinking {'off' if thinking else 'on'}, here it is {'on' if thinking else 'off'}: "
            "`chat_template_kwargs` of a request, or `--mode` here."
        )
    gaps = {there - here for there, here in zip(lengths, usual) if there is not None}
    length = len(chat) if chat is not None else lengths[0]
    told_lengths = f"The first prompt has {length} tokens there and {usual[0]} here, "
    if chat is not None or len(gaps) == 1:
        return "template", (
            f"{told_lengths}around the same question: the server's chat template, or its system prompt, is another "
            "one (`--chat-template`)."
        )
    return "tokenizer", (
        f"{told_lengths}and others differ by other numbers: give the server the target's own tokenizer "
        "(`--tokenizer`)."
    )


def _tokens(server: Server, **asked: Any) -> list[int] | None:
    """Ask for the tokens of a text or of a chat, as vLLM tells them; `None` where a server does not."""
    try:
        return json.loads(fetch(f"{server.root}/tokenize", {"model": server.model, **asked}))["tokens"]
    except (ValueError, KeyError, TypeError):
        return None


@dataclass
class _DraftComparison:
    """The texts and drafts of a server beside those of the pair here."""

    found: ServedDiagnosis
    server: Server
    target: PreTrainedModel
    drafter: Drafter
    new: int
    say: Callable[[str], object]
    verified: int = 0  # drafts a round, at the server
    texts: list[_Here] = field(default_factory=list)  # that the target writes here, of which acceptance is compared

    def compare_texts(
        self, tokenizer: PreTrainedTokenizerBase, ids: Sequence[torch.Tensor], answers: Sequence[Record],
        counted: Sequence[DraftCounters | None],
    ) -> Finding | None:  # fmt: skip
        """Name what differs of the texts, or of the drafts that are accepted: write the same here, with as many drafts
        a round as the server verifies."""
        found, own, most = self.found, self.drafter.num_draft_tokens, self.drafter.max_draft_tokens
        self.verified = max((len(each.accepted) for each in counted if each), default=0)
        if self.server.is_sglang and isinstance(own, int):  # whose lists end with what was accepted
            self.verified = max(own, self.verified)
        if most and self.verified > most:
            return "draft count", (
                f"The server verifies {self.verified} drafts a round, and the drafter was trained for {most}: set "
                f"`num_speculative_tokens` to {most}."
            )
        self.say("writing the same here ...")
        here, stats = [], []
        method = Local(self.target, self.drafter, {"num_assistant_tokens": self.verified or None})
        # So many more tokens that no last round is cut, as at a server.
        for number, _, record in run([method], ids, self.new + self.verified):
            text = torch.cat([ids[number], torch.tensor([record.output])], dim=1).to(self.target.device)
            own_stats = cast(SpeculationStats, record.stats)
            stats.append(DraftCounters(own_stats.rounds, [own_stats.rounds * rate for rate in own_stats.acceptance]))
            answer = str(tokenizer.decode(record.output[: self.new], skip_special_tokens=True))
            here.append(_Here(ids[number], text, answer))
        shares = [_shared(each.answer, answer.output) for each, answer in zip(here, answers)]
        equal = [index for index, share in enumerate(shares) if share == 1]
        found.same, parted = (len(equal), len(ids)), len(ids) - len(equal)
        compared = equal if len(equal) >= _FEWEST else list(range(len(ids)))
        found.there = total(counted[index] for index in compared)
        found.here = total(stats[index] for index in compared)
        if parted and np.median(shares) < _EARLY:
            return "target", (
                "The texts part early, so the server's target has other weights, or is quantized: serve the "
                "checkpoint that the drafter was trained for, or compare with the one that is served."
            )
        if found.there is None or not found.there.rounds:
            return "no drafts", (
                "The server tells of no drafts: it was started without a drafter, or without its metrics (SGLang: "
                "`--enable-metrics`)."
            )
        self.texts = [here[index] for index in compared]
        other = self.compare_acceptance()
        if other is None and parted:
            return "dtype of the target", (
                f"Texts part late, in {parted} of {len(ids)}, where two tokens almost tie: the server computes in "
                "another precision or with other kernels. Acceptance is the same. Nothing to do, or serve in the "
                "dtype that is used here."
            )
        return other

    def compare_acceptance(self) -> Finding | None:
        """Compare position by position; where they differ, look for the reading of the drafter that the server has."""
        found, own = self.found, cast(HyperDFlashDrafter, self.drafter)
        is_block = own.config.model_type == HyperDFlashConfig.model_type
        if is_block:
            (found.here,) = self.accepted(own, [own.config])
        here, there = cast(DraftCounters, found.here), cast(DraftCounters, found.there)
        gaps, ratio = _gaps(here, there), cast(float, there.tau) / cast(float, here.tau)
        if abs(ratio - 1) <= _SAME_TAU and max(gaps) <= _SAME_RATE:
            return None
        found.tried["as configured"] = usual = float(np.mean(gaps))
        if is_block:
            self.say("trying other readings of the drafter ...")
            causes = {}
            for cause, name, counted in self.readings(own):
                causes[name], found.tried[name] = cause, float(np.mean(_gaps(counted, there)))
            nearest = min(found.tried, key=lambda name: found.tried[name])
            if found.tried[nearest] <= 0.5 * usual:
                return causes[nearest], (
                    f"The server accepts as if the drafter had {nearest}: its configuration is read so there, or was "
                    "exported so. Correct the `config.json` that is served, or report it to the server's makers with "
                    "`served.json` (`--output`)."
                )
        rates = zip_longest(there.acceptance, here.acceptance, fillvalue=0.0)
        lower = [k for k, (a, b) in enumerate(rates, 1) if b - a > _SAME_RATE]
        at = f"from position {lower[0]} on" if lower else "at no one position"
        of = "Its drafter has other weights" if lower[:1] == [1] else "Its drafts may see other context"
        return "drafter", (
            f"The server accepts less {at}, and no other reading that was tried explains it. {of}: compare the files' "
            "checksums, then ask its makers with `served.json` (`--output`)."
        )

    def readings(self, drafter: HyperDFlashDrafter) -> Iterator[tuple[str, str, DraftCounters]]:
        """Yield other readings of a drafter, as cause and name, with what would be accepted."""
        others = variants(drafter.config, self.target)
        for name, counted in zip(others, self.accepted(drafter, list(others.values()))):
            yield cause_of(name), name, counted
        for shift, name in ((-1, "earlier"), (1, "later")):
            (counted,) = self.accepted(drafter, [drafter.config], shift)
            yield "positions", f"its block 1 position {name}", counted
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            if dtype != drafter.dtype:
                (counted,) = self.accepted(cast(Any, copy.deepcopy(drafter)).to(dtype), [drafter.config])
                yield "dtype", f"weights in {str(dtype).removeprefix('torch.')}", counted

    def accepted(
        self, drafter: HyperDFlashDrafter, configs: Sequence[HyperDFlashConfig], shift: int = 0
    ) -> list[DraftCounters]:
        """Return what would be accepted with each configuration, by walking through the texts by rounds: what a round
        accepts is known after every token, so it is known where the next one begins."""
        accepted: list[list[int]] = [[] for _ in configs]  # of each round
        for each in self.texts:
            emitted, _ = draft_every_round(self.target, drafter, each.text, each.ids.shape[1], configs, shift)
            for found, row in zip(accepted, torch.from_numpy(emitted)[:, : self.new - 1]):
                matched = (row - 1).clamp(max=self.verified)
                found += [count for _, count in walk_rounds(torch.arange(len(row)), matched, matched + 1)]
        positions = range(1, self.verified + 1)
        return [DraftCounters(len(each), [float(sum(n >= k for n in each)) for k in positions]) for each in accepted]


def _shared(here: str, there: str) -> float:
    """Return the share of a text up to where the two part."""
    here, there = here.strip(), there.strip()
    if here == there:
        return 1.0
    parted = next((i for i, (a, b) in enumerate(zip(here, there)) if a != b), min(len(here), len(there)))
    return min(parted / max(len(here), len(there), 1), 0.999)


def _gaps(here: DraftCounters, there: DraftCounters) -> list[float]:
    """Return the difference of each position's rate; a list that ends early has none accepted from there on."""
    return [abs(a - b) for a, b in zip_longest(here.acceptance, there.acceptance, fillvalue=0.0)]
