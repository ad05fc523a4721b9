"""How well it can be told beforehand whether a draft will be accepted: predictors side by side on rounds held out.

    python experiments/compare_survival.py --target examples/models/tiny-deepseek-v4 \
        --drafter examples/models/tiny-deepseek-v4-hyperdflash --suites FOLDER --output survival

Every draft of a round is predicted from what is known before it is drawn: the drafter's confidence and its
distribution, the token before, what was accepted lately. What became of a draft is known if all before it were
accepted. Predictors learn from the first half of each suite's prompts, and go on learning, round by round, over the
second half, where they are judged.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_hyperdflash import load_drafter, load_target, load_tokenizer
from hf_hyperdflash.auto.acceptance import AcceptanceLine
from hf_hyperdflash.auto.aslm import AugmentedSpaceLinearModel
from hf_hyperdflash.benchmark.suites import load_suite, suites_in
from hf_hyperdflash.drafters.base import Observer
from hf_hyperdflash.drafters.sampling import DraftSampler
from hf_hyperdflash.training.data.encoding import encode_prompts
from hf_hyperdflash.trees.growth import DraftStep

FEATURES = ("confidence", "top", "gap", "entropy", "drawn before", "recent", "position")
_LAST = 0.9  # of the running mean of accepted shares


@dataclass
class Round:
    """What a round's drafts looked like before they were drawn, `[drafts, features]`, and how many were accepted."""

    features: np.ndarray
    accepted: int

    @property
    def known(self) -> int:
        """Drafts whose fate is known."""
        return min(self.accepted + 1, len(self.features))

    @property
    def outcomes(self) -> np.ndarray:
        """Of these, 1 for an accepted one."""
        return (np.arange(self.known) < self.accepted).astype(float)


class Listening(DraftSampler):
    """Keeps what drafts are drawn by."""

    def __init__(self, sampler: DraftSampler) -> None:
        super().__init__(sampler.processors, sampler.do_sample)
        self.heard: list[torch.Tensor] = []

    def scored_step(self, ids: torch.Tensor, drafts: torch.Tensor, step: DraftStep) -> DraftStep:
        return super().scored_step(ids, drafts, step.whole())  # a draft's place is its token's number

    def scored(self, text: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        scores = super().scored(text, *others, **options)
        self.heard += scores.log_softmax(-1)
        return scores


@dataclass
class Recorder(Observer):
    """Stands between a drafter and the loop while texts are generated."""

    drafter: Any
    rounds: list[Round] = field(default_factory=list)
    recent: float = 0.5

    def __enter__(self) -> Recorder:
        draft, self._told = self.drafter.draft, None

        def listened(target: Any, requests: Any) -> Any:
            (request,) = requests
            listening = Listening(request.sampler)
            (tree,) = draft(target, [request._replace(sampler=listening)])
            self._told = self._features(tree, listening.heard)
            return [tree]

        self.drafter.draft, self.drafter.observer = listened, self
        return self

    def __exit__(self, *_: Any) -> None:
        del self.drafter.draft
        self.drafter.observer = None

    def _features(self, tree: Any, heard: list[torch.Tensor]) -> np.ndarray:
        rows = []
        drawn_before = 0.0
        for k, likely in enumerate(heard[: len(tree)]):
            best = likely.topk(2).values
            sure = float(tree.confidence[k]) if tree.confidence is not None else float(best[0].exp())
            entropy = float(-(likely.exp() * likely.nan_to_num(neginf=0.0)).sum())
            rows.append([logit(sure), logit(float(best[0].exp())), float((best[0] - best[1]).clamp(max=20)), entropy,
                         drawn_before, self.recent, k / 8])  # fmt: skip
            drawn_before = float(likely[tree.tokens[k]])
        return np.array(rows).reshape(-1, len(FEATURES))

    def add_round(self, context: Any, tree: Any, logits: torch.Tensor, accepted: list[int]) -> None:
        if self._told is not None and len(self._told):
            self.rounds.append(Round(self._told, len(accepted)))
            self.recent = _LAST * self.recent + (1 - _LAST) * len(accepted) / len(tree)
        self._told = None


def logit(p: float) -> float:
    p = min(max(p, 1e-4), 1 - 1e-4)
    return math.log(p / (1 - p))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# Predictors: `through(round)` are probabilities of its drafts, each once those before it are accepted; `learn(round)`.


class Constant:
    """The same for each, as often as drafts were accepted in the first half."""

    name = "constant"

    def __init__(self) -> None:
        self.seen, self.right, self.is_over = 0, 0.0, False

    def __call__(self, features: np.ndarray) -> list[float]:
        self.is_over = True
        return [self.right / max(self.seen, 1)] * len(features)

    def learn(self, round_: Round) -> None:
        if not self.is_over:
            self.seen, self.right = self.seen + round_.known, self.right + round_.outcomes.sum()


class Recent:
    """The running mean over known drafts."""

    name = "recent average"

    def __init__(self) -> None:
        self.mean = 0.5

    def __call__(self, features: np.ndarray) -> list[float]:
        return [self.mean] * len(features)

    def learn(self, round_: Round) -> None:
        for outcome in round_.outcomes:
            self.mean += 0.05 * (outcome - self.mean)


class Confidence:
    """The confidence head's word, calibrated as the drafter was saved."""

    name = "confidence head"

    def __call__(self, features: np.ndarray) -> list[float]:
        return [sigmoid(x) for x in features[:, 0].tolist()]

    def learn(self, round_: Round) -> None:
        pass


class Line:
    """The rule of `"auto"`: a line through all drafts (logistic regression)."""

    def __init__(self, name: str, column: int) -> None:
        self.name, self.column, self.line = name, column, AcceptanceLine()

    def __call__(self, features: np.ndarray) -> list[float]:
        return [self.line(sigmoid(x)) for x in features[:, self.column].tolist()]

    def learn(self, round_: Round) -> None:
        for x, outcome in zip(round_.features[:, self.column].tolist(), round_.outcomes):
            self.line.observe(sigmoid(x), bool(outcome))


class Regressed:
    """ASLM, or its linear part alone, on all features, scaled by what the first rounds had."""

    def __init__(self, name: str, **settings: Any) -> None:
        self.name, self.settings = name, settings
        self.first: list[Round] = []
        self.model: AugmentedSpaceLinearModel | None = None

    def __call__(self, features: np.ndarray) -> list[float]:
        if self.model is None:
            return [0.5] * len(features)
        # One by one: each is asked for before the next draft is made.
        return [float(np.clip(self.model.predict(row[None] / self.scale)[0], 0.01, 0.99)) for row in features]

    def learn(self, round_: Round) -> None:
        if self.model is None:
            self.first.append(round_)
            if len(self.first) < 50:
                return
            rows = np.concatenate([each.features for each in self.first])
            self.scale = np.maximum(np.abs(rows).mean(0), 1e-3)
            self.model = AugmentedSpaceLinearModel(**self.settings)
            for each in self.first:
                self._add(each)
        else:
            self._add(round_)

    def _add(self, round_: Round) -> None:
        self.model.partial_fit(round_.features[: round_.known] / self.scale, round_.outcomes)


class Linear(Regressed):
    """The linear part alone."""

    def __call__(self, features: np.ndarray) -> list[float]:
        if self.model is None:
            return [0.5] * len(features)
        said = features / self.scale @ self.model.weights[:-1] + self.model.weights[-1]
        return np.clip(said, 0.01, 0.99).tolist()


def predictors(has_confidence: bool) -> list[Any]:
    made = [Constant(), Recent()]
    if has_confidence:
        made += [Confidence(), Line("confidence, a line", 0)]
    made += [
        Line("best token's probability, a line", 1),
        Linear("linear least squares", max_centers=1),
        Regressed("ASLM, 1 neighbour", max_centers=256),
        Regressed("ASLM, 8 neighbours", n_neighbors=8, max_centers=256),
        Regressed("ASLM, 8 of 64 centres", n_neighbors=8, max_centers=64),
    ]
    return made


@dataclass
class Judged:
    """Of one predictor over the rounds it was judged on."""

    said: list[float] = field(default_factory=list)
    outcomes: list[float] = field(default_factory=list)
    expected: list[float] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    seconds: float = 0.0

    def figures(self) -> dict[str, float]:
        said, outcomes = np.array(self.said), np.array(self.outcomes)
        expected, accepted = np.array(self.expected), np.array(self.accepted)
        return {
            "calibration error": calibration_error(said, outcomes),
            "Brier score": float(((said - outcomes) ** 2).mean()),
            "AUC": auc(said, outcomes),
            "error of the expected length": float(np.abs(expected - accepted).mean()),
            "bias of the expected length": float((expected - accepted).mean()),
            "microseconds a round": 1e6 * self.seconds / len(accepted),
        }


def calibration_error(said: np.ndarray, outcomes: np.ndarray, bins: int = 10) -> float:
    places = np.minimum((said * bins).astype(int), bins - 1)
    parts = [places == place for place in range(bins) if (places == place).any()]
    return float(sum(part.mean() * abs(said[part].mean() - outcomes[part].mean()) for part in parts))


def auc(said: np.ndarray, outcomes: np.ndarray) -> float:
    """How often an accepted draft was held to be more probable than a rejected one; ties count half."""
    order = np.unique(said, return_inverse=True)[1]
    right, wrong = (np.bincount(order[outcomes == kind], minlength=order.max() + 1) for kind in (1, 0))
    if not right.sum() or not wrong.sum():
        return float("nan")
    below = np.cumsum(wrong) - wrong
    return float((right * (below + wrong / 2)).sum() / (right.sum() * wrong.sum()))


def judge(predictor: Any, first: Sequence[Round], second: Sequence[Round]) -> Judged:
    for round_ in first:
        predictor.learn(round_)
    judged = Judged()
    for round_ in second:
        began = time.perf_counter()
        said = predictor(round_.features)
        judged.seconds += time.perf_counter() - began
        judged.said += said[: round_.known]
        judged.outcomes += round_.outcomes.tolist()
        judged.expected.append(float(np.cumprod(said).sum()))
        judged.accepted.append(round_.accepted)
        began = time.perf_counter()
        predictor.learn(round_)
        judged.seconds += time.perf_counter() - began
    return judged


def rounds_of(
    target: Any, drafter: Any, tokenizer: Any, args: argparse.Namespace, temperature: float
) -> Iterator[list[Round]]:
    """Those of the first half of every suite's prompts, then those of the second half."""
    options: dict[str, Any] = {"do_sample": temperature > 0, "max_new_tokens": args.max_new_tokens}
    if temperature:
        options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    for half in (0, 1):
        with Recorder(drafter) as recorder:
            for suite in suites_in(args.suites):
                for turns in load_suite(suite, args.suites, args.limit)[half::2]:
                    ids = encode_prompts(tokenizer, [{"messages": [{"role": "user", "content": turns[0]}]}])[0]
                    torch.manual_seed(0)
                    target.generate(
                        ids, assistant_model=drafter, num_assistant_tokens=drafter.max_draft_tokens, **options
                    )
        yield recorder.rounds


def report(found: dict[str, dict[str, dict[str, float]]], counts: dict[str, list[int]], facts: dict[str, Any]) -> str:
    lines = ["# Will a draft be accepted?", "", "; ".join(f"{name}: {value}" for name, value in facts.items()), ""]
    for temperature, by_predictor in found.items():
        names = list(next(iter(by_predictor.values())))
        learned, judged = counts[temperature]
        lines += [f"## Temperature {temperature}", "", f"{judged} rounds, after {learned} to learn from.", ""]
        lines += ["| predictor | " + " | ".join(names) + " |", "|---" + "|---:" * len(names) + "|"]
        for predictor, figures in by_predictor.items():
            shown = [f"{value:.0f}" if name.startswith("micro") else f"{value:.3f}" for name, value in figures.items()]
            lines.append(f"| {predictor} | " + " | ".join(shown) + " |")
        lines.append("")
    return "\n".join(lines)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True, help="of blocks, or any that draws its drafts with the sampler")
    parser.add_argument("--suites", required=True, help="a folder of prompt suites")
    parser.add_argument("--limit", type=int, default=8, help="prompts of each suite, half of them to learn from")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    target, tokenizer = load_target(args.target, dtype=torch.float32), load_tokenizer(args.target)
    drafter = load_drafter(args.drafter, target=target)
    drafter.bind(target)
    found, counts = {}, {}
    for temperature in (0.0, 1.0):
        first, second = rounds_of(target, drafter, tokenizer, args, temperature)
        counts[f"{temperature:g}"] = [len(first), len(second)]
        has_confidence = bool(getattr(drafter.config, "confidence_head", False))
        found[f"{temperature:g}"] = {
            predictor.name: judge(predictor, copy.deepcopy(first), second).figures()
            for predictor in predictors(has_confidence)
        }
    facts = {
        "target": Path(args.target).name, "drafter": Path(args.drafter).name,
        "prompts of each suite": args.limit, "new tokens": args.max_new_tokens,
        "date": date.today().isoformat(), "hardware": platform.processor() or platform.machine(), "threads": 1,
        "torch": torch.__version__,
    }  # fmt: skip
    args.output.mkdir(parents=True, exist_ok=True)
    text = report(found, counts, facts)
    (args.output / "report.md").write_text(text + "\n")
    (args.output / "figures.json").write_text(
        json.dumps({"facts": facts, "rounds": counts, "figures": found}, indent=1)
    )
    print(text)


if __name__ == "__main__":
    main()
