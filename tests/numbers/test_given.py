"""No number of the pages is left that neither a result nor this list accounts for.

Here stands what nobody measured: settings, what the code has as a default, what the papers report. Defaults are read
from the code. Whoever changes a number of a page has to say here, or in `test_sentences.py`, where it comes from.
"""

import re

import pytest
from transformers import DeepseekV4Config, TrainingArguments

from hf_hyperdflash.benchmark import other_settings, recommended
from hf_hyperdflash.benchmark.doctor import PROMPTS
from hf_hyperdflash.runtime import schedule, tree_schedule
from hf_hyperdflash.runtime.configuration_eagle3 import Eagle3Config
from hf_hyperdflash.runtime.configuration_specblock import SpecBlockConfig
from hf_hyperdflash.runtime.request import MOST_NODES
from hf_hyperdflash.training.adaptation import AdaptationConfig
from hf_hyperdflash.training.flags import ScriptArguments

from .pages import PAGES, numbers, prose
from .said import field
from .test_sentences import SENTENCES
from .test_tables import ESTIMATED, ROW_BY_ROW, TRACED

LEARNS, EAGLE, BLOCKS = AdaptationConfig(), Eagle3Config(), SpecBlockConfig()
FLASH = DeepseekV4Config()
FIRST_LOOK, LAST_LOOK = schedule._LOOKS

GIVEN = {
    "adapting": [
        f"over the next {LEARNS.horizon} requests (`horizon`)",
        "three whenever tokens per round fall by 15 %",
        "(`examples/finetune_target.py`, 300 steps)",
    ],
    "benchmarks": [
        "the paths after layers 1 and 3, a gate for each",
        "for 9,000 steps of four rows, half of them the target's answers at temperature 1",
        "the target's own MTP block after 9,000 steps of four of the same rows",
        'What the head alone is worth: "Paper, 1500 steps" is',
        "with a state head of width 256, taken from its MLPs",
        "trained alike: 15,000 steps of four rows, the target's own",
        "a KL weight of 0.6 for all",
        '"On 1, 3" is the paper\'s gate over the paths after layers 1 and 3 instead of the last.',
        "unlike in the paper (2.14 against 3.69)",
        "(two prompts of 96 were run again after",
        "both at the same time on 2 cores",
        "AMD EPYC, 2 cores, one thread a run",
    ],
    "choosing-drafts": [
        f"at most {LEARNS.most_bytes // 2**20} MiB of text to learn from",
        f"for {FIRST_LOOK} rounds, then {2 * FIRST_LOOK}, up to {schedule._LATE_LOOKS}, and looked at again",
        f"a round in {LAST_LOOK}, later in {schedule._RARE_LOOKS}, goes without it, and one in {LAST_LOOK} drafts all",
        f"a tree has those, {tree_schedule.MOST_NODES} at most, that are",
        "(2,987 greedy, 1,592 at temperature 1;",
        "(prompts 13 to 20 of each suite)",
        "hardly any that has to guess can be 8 % ahead",
        "Eight prompts a suite, at most 96 tokens",
        "both temperatures at the same time on 2 cores",
    ],
    "concepts": [
        "with probability min(1, `p(x)` / `q(x)`)",
        "max(0, `p` - `q`) scaled to 1 (Leviathan et al., algorithm 1)",
        "never above 1, so that a draft",
        "so never below 1.",
    ],
    "drafters": [
        "four prompts a suite, at most 96 tokens (",
        "AMD EPYC, one thread, both temperatures at the same time on 2 cores,",
        "not to the paper's 1.08",
        "choose among the block's 16 best tokens",
        "of the block's 1,024 best tokens",
        "7 inputs, 7 drafts",
        "On the V4 with more steps, 1,200, and 4,575 answers",
        "trained anew on 4,579 answers",
        "0.1 cross-entropy and 0.9 of the L1 distance",
        "(`--blind_weight`, 0.1 in every recipe)",
        f"its whole vocabulary, of {field('vocab_size'):,} tokens",
        "much by choosing among 16 tokens.",
        "A weight of 1 makes a choice cost less",
        "with up to 8,192 tokens the default is all of them",
        f"at most `max_blocks` ({EAGLE.max_blocks}) deep and `tree_width` ({EAGLE.tree_width}) nodes wide",
        f"drafts K = {BLOCKS.block_size} tokens a pass",
        f"`max_blocks` ({BLOCKS.max_blocks}) passes a round",
        "; layers 1, 3 and the last",
        "for 800 steps of four rows, 64 anchors each, one seed",
        "trained anew as above (800 steps of four rows, 64 anchors, one seed, 2,400 answers of the target",
        "(44 to 52 % there)",
        "two runs at a time on 2 cores",
        "AMD EPYC, 2 cores,",
    ],
    "serving": [
        "AMD EPYC, 2 cores shared with others",
        "torch 2.14.1 for CUDA 13 and",
        "SGLang (read in 0.5.20, 0.5.22 and 0.5.23)",
        "An SGLang without those (0.5.16, say)",
        "a V4 drafter's window of 2,048 tokens, the default",
    ],
    "sglang": ["one candidate of probability 1 each"],
    "sharing": [
        f"what {len(PROMPTS)} prompts give",
        "a CPU build of 0.32, which",
        f"by {other_settings._MATTERS_NATS} nats a draft or more, likelier with it and has "
        f"{100 * (other_settings._MATTERS_TAU - 1):.0f} % more tokens a round",
        f"times settings of `generate` on {recommended._MOST_PROMPTS} of the prompts, greedy and at temperature 1",
        f"(or within {100 * (recommended._SAME - 1):.0f} %)",
        "generates from 4 prompts only",
    ],
    "targets": ["(5.23, not 5.17)", "`DistributedConfig(ep_size=...)`, 5.23)", "300 tokens on windows of 4 to 16"],
    "tools": ["With `batch_size` above 1", "lines 842 and 872 in 5.24.0)"],  # read there in test_snippets.py
    "training": [
        f"transformers logs the loss every {TrainingArguments.logging_steps:.0f} steps",
        f"as {ScriptArguments.eval_rows} are held out by default",
        "the last 2,048 tokens, or all of them",
        f"a token: {2 * FLASH.hc_mult * FLASH.hidden_size // 1024} KiB for V4-Flash",
        "rows of 100 tokens of prompt and 300 of answer, answers written at 1,000 tokens a second",
        "one accelerator that does 150 TFLOP/s",
        "From about 5,000 rows on",
        "the paper reports 3.69 tokens a round with six drafts at temperature 0, without a head, after five epochs "
        "over 450,000 rows",
    ],
    "trees": [
        f"of at most `tree_budget` nodes, 1 to {MOST_NODES}, and",
        "AMD EPYC, 2 cores, one thread beside other work",
        "AMD EPYC, 2 cores, one thread,",
        "a round reads at batch 1, not measured",
        "the tests run the first 240.",
    ],
    "troubleshooting": [
        f"problems below with 4 prompts. Without `--quick` it takes {len(PROMPTS)}, tries",
        "Its exit status is 1 if",
        "`drafter.last_stats.tau` is near 1;",
        "`num_beams` above 1",
        "| tau near 1 |",
        "but this target's are 0 to …",
    ],
    "using": [
        "in bfloat16 from transformers 5.20 on",
        "0 for the target",
        "At most 128 tokens can be taken back",
    ],
}


@pytest.mark.parametrize("page", PAGES)
def test_no_number_is_left(page):
    known = [begins for of, begins, *_ in TRACED + ROW_BY_ROW + ESTIMATED if of == page] + ["| Method |"]
    left = prose(page, tuple(known))
    said = [text.format(*values) for of, text, values in SENTENCES if of == page]
    for text in sorted(said + GIVEN.get(page, []), key=len, reverse=True):
        assert text in left, text
        left = left.replace(text, "–")
    assert numbers(left) == []


def test_a_number_is_seen_wherever_it_stands():
    """But in names, dates, versions and code."""
    text = "DFlash 2 with torch 2.13.0 (2026-11-24) at temperature 0: `x = 3`, Qwen3-8B, [that](a/2.md)"
    assert numbers(text) == []
    assert [re.sub(r".*?([\d.,e-]+).*", r"\1", found) for found in numbers("3 of 4.5 MB, 1,024 texts, 2.5e-05, 6×")]
    assert len(numbers("3 of 4.5 MB, 1,024 texts, 2.5e-05, 6×")) == 5
