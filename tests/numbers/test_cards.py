"""What is written by hand of the model cards: the rest is made of training records and results (`hub/test_cards.py`).

Its numbers are those of results and records, or stand here as what was chosen.
"""

import json
import re

import pytest

from ..conftest import MODELS
from .pages import ROOT, numbers
from .results import V4, rules, told
from .said import field, settings

PARTS = {path.stem: path.read_text() for path in sorted((ROOT / "model_cards" / "parts").glob("*.md"))}


def trained(model, *names):
    record = json.loads((MODELS / model / "training.json").read_text())
    return [record.get("settings", record)[name] for name in names]


def of_greedy_ones():
    """The rest of the rows that were trained on are drawn at temperature 1."""
    greedy, drawn = 6000, 5995
    assert [greedy + drawn] == trained("tiny-deepseek-v4-hyperdflash", "train_rows")
    return [greedy, drawn]


def of_instructions(model):
    """All conversations but GSM8K's training split."""
    return trained(model, "documents")[0] - 7473


# The part of a card, the sentence with gaps, and what results and records say.
WRITTEN = [
    ("tiny-deepseek-v4", "{:,} instructions of sahil280114/codealpaca", [of_instructions("tiny-deepseek-v4")]),
    ("tiny-qwen3", "{:,} instructions of sahil280114/codealpaca", [of_instructions("tiny-qwen3")]),
    (
        "tiny-deepseek-v4-hyperdflash-training",
        "The same with eight drafts, {:,} steps.",
        trained("tiny-deepseek-v4-hyperdflash", "steps"),
    ),
    (
        "tiny-deepseek-v4-hyperdflash-training",
        "`g0.jsonl`, {:,} greedy ones of at most 200 tokens, and `g1.jsonl`, {:,} sampled at temperature 1, at most "
        "160 tokens each.",
        of_greedy_ones(),
    ),
    (
        "tiny-deepseek-v4-hyperdflash-training",
        "The held-out prompts are {} of all seven suites' benchmark files behind the first {:.0f} of each",
        trained("tiny-deepseek-v4-hyperdflash", "held_out_rows") + settings(f"{V4}/heads", "limit"),
    ),
    (
        "tiny-deepseek-v4-hyperdflash-training",
        "`head_candidates` was set to {}, the whole vocabulary",
        [field("head_candidates")],
    ),
    (
        "tiny-deepseek-v4-hyperdflash-limits",
        "eight bring {:.0f} % more tokens a round and are the fastest there, too",
        [100 * (rules("chain of 8")[2] - 1)],
    ),
    (
        "tiny-qwen3-hyperdflash-training",
        "to {} prompts of GSM8K's and CodeAlpaca's training files; {} held-out ones of the same files are what the "
        "training's own figures are of. {} steps of {} answers:",
        trained("tiny-qwen3-hyperdflash", "train_rows", "held_out_rows", "steps", "per_device_train_batch_size"),
    ),
    (
        "tiny-qwen3-hyperdflash-limits",
        "whose step takes {:.0f} ms on a CPU",
        told("tiny-qwen3/drafter/report.md", r"(?s)\A.*target-only: [\d.]+ tokens/s, ([\d.]+) ms a step"),
    ),
]
CHOSEN = {
    "tiny-deepseek-v4": [
        "(its first 200 steps on the schedule of a 1,500-step run)",
        "about 250 tokens long",  # of 256 that a row of its training has
    ],
    "tiny-deepseek-v4-hyperdflash-training": [
        "A drafter without a head, six drafts, 15,000 steps (commit 52b9ed6",
        "cross-entropy and KL 0.6 at the first two drafts",
        "the first 1,000 steps of a schedule of 12,000.",
        "Stage 2 had",
    ],
    "tiny-deepseek-v4-hyperdflash-limits": ["Trained on answers of at most 200 tokens"],
}


def by_hand(part):
    """Without commands, and without what is filled in."""
    text = re.sub(r"^```.*?^```|^\d+\. |\{\{.*?\}\}", "·", PARTS[part], flags=re.MULTILINE | re.DOTALL)
    return " ".join(text.split())


@pytest.mark.parametrize("part", PARTS)
def test_cards_say_what_results_and_records_say(part):
    left = by_hand(part)
    said = [text.format(*values) for of, text, values in WRITTEN if of == part]
    for text in said + CHOSEN.get(part, []):
        assert text in left, text
        left = left.replace(text, "–")
    assert numbers(left) == []
    card = (ROOT / "model_cards" / f"{re.sub('-(limits|training)$', '', part)}.md").read_text()
    assert all(" ".join(text.replace("·", "").split()) in " ".join(card.split()) for text in said)
