"""Check the arithmetic of experiments whose figures are published, each against a plain count. `.ci/nightly` runs it;
`tools/check_examples.py` runs the scripts.

    python tools/check_experiments.py            # all
    python tools/check_experiments.py survival   # the checks that have this word
"""

from __future__ import annotations

import json
import os
import random
import re
import runpy
import sys
import tempfile
import time
from collections import Counter
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from pytest import approx
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "experiments")]

from hf_hyperdflash import load_drafter  # noqa: E402
from hf_hyperdflash.decoding.stats import keep_trees  # noqa: E402
from hf_hyperdflash.drafters.blocks.drafter import BlockPath  # noqa: E402
from hf_hyperdflash.targets.registry import target_of  # noqa: E402
from hf_hyperdflash.training.data.encoding import encode_prompts  # noqa: E402
from tests.conftest import MODELS, prompt, tiny_drafter, tiny_target  # noqa: E402
from tests.helpers.oracle_aslm import Oracle  # noqa: E402
from tests.helpers.processes import python  # noqa: E402
from tests.helpers.served_drafters import qwen3  # noqa: E402
from tests.helpers.tokenizers import characters  # noqa: E402

TARGET, DRAFTER = MODELS / "tiny-deepseek-v4", MODELS / "tiny-deepseek-v4-hyperdflash"


def script(name: str) -> Any:
    """Return the names of a script of `experiments/`."""
    os.environ["HYPERDFLASH_DEEPSEEK_V4_PATHS"] = "1"  # as `serve_deepseek_v4.py` sets it itself
    return SimpleNamespace(**runpy.run_path(str(ROOT / "experiments" / f"{name}.py"), run_name="script"))


@cache
def pair() -> Any:
    """Return the shipped target, its tokenizer and its drafter."""
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    return target, AutoTokenizer.from_pretrained(TARGET), load_drafter(DRAFTER, target=target)


def asked(tokenizer: Any, text: str) -> torch.Tensor:
    return encode_prompts(tokenizer, [{"messages": [{"role": "user", "content": text}]}])[0]


def run(name: str, *arguments: Any) -> str:
    ran = python(ROOT / "experiments" / name, *arguments)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def check_errors_of_the_augmented_space_linear_model(tmp_path: Path) -> None:
    run("compare_aslm.py", "--seeds", 1, "--train", 40, "--output", tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    told = {(row["problem"], row["noise"], row["method"]): row["error"] for row in results}
    drawn = list(script("compare_aslm").problems(40, 0))
    assert len(drawn) == 24 and len(told) == len(results) == 24 * 6
    for problem, noise, learned, (inputs, clean) in drawn:
        oracle = Oracle(penalty=0.1, neighbours=1)
        oracle.learn(*(part.tolist() for part in learned))
        spread = sum((d - clean.mean()) ** 2 for d in clean)
        for method, predict in (("ridge", oracle.linear), ("ASLM k=1", oracle.predict)):
            error = sum((predict(x) - d) ** 2 for x, d in zip(inputs.tolist(), clean)) / spread
            assert told[problem, noise, method] == approx(error, rel=1e-3), (problem, noise, method)


def check_figures_of_survival(tmp_path: Path) -> None:
    """Of the predictor that says the same of every draft, on rounds that it has not learned from."""
    target, tokenizer, drafter = pair()
    texts = ["What is 3 plus 4?", "Write a Python function that adds two numbers.", "List three fruits."]
    (tmp_path / "gsm8k.jsonl").write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts))
    given = ["--target", TARGET, "--drafter", DRAFTER, "--suites", tmp_path, "--output", tmp_path / "out"]
    run("compare_survival.py", *given, "--limit", 3, "--max-new-tokens", 40)
    figures = json.loads((tmp_path / "out" / "figures.json").read_text())
    drafter.bind(target)
    learned, judged = rounds = [], []
    for number, text in enumerate(texts):
        torch.manual_seed(0)
        options = {"assistant_model": drafter, "num_assistant_tokens": 8, "max_new_tokens": 40, "do_sample": False}
        with keep_trees():
            target.generate(asked(tokenizer, text), **options)
        trees = (tree for tree in drafter.last_stats.trees if len(tree.drafts))
        rounds[number % 2].extend((len(tree.drafts), len(tree.accepted)) for tree in trees)
    assert figures["rounds"]["0"] == [len(learned), len(judged)]
    p = sum(accepted for _, accepted in learned) / sum(min(accepted + 1, drafts) for drafts, accepted in learned)
    outcomes = [k < accepted for drafts, accepted in judged for k in range(min(accepted + 1, drafts))]
    off = [sum(p**k for k in range(1, drafts + 1)) - accepted for drafts, accepted in judged]
    expected = {
        "calibration error": abs(p - sum(outcomes) / len(outcomes)),
        "Brier score": sum((p - outcome) ** 2 for outcome in outcomes) / len(outcomes),
        "AUC": 0.5,
        "error of the expected length": sum(map(abs, off)) / len(off),
        "bias of the expected length": sum(off) / len(off),
    }
    told = figures["figures"]["0"]["constant"]
    assert {name: told[name] for name in expected} == approx(expected)


def check_what_is_drafted_from_everywhere_is_what_rounds_draft(tmp_path: Path) -> None:
    """And a rule of "auto" takes what its rounds take."""
    auto, (target, tokenizer, drafter) = script("simulate_auto"), pair()
    ids = asked(tokenizer, "Count from 1 to 30.")
    text = target.generate(ids, max_new_tokens=60, do_sample=False)
    drafted = auto.drafted_everywhere(target, drafter, text, ids.shape[1])
    assert len(drafted) == text.shape[1] - ids.shape[1] - 1 > 20
    drafter.bind(target)
    rounds, exact = (
        auto.Rounds(plain=10.0, start=15.0, each=1.0),
        SimpleNamespace(gauss=lambda *_: 0.0, random=lambda: 1.0),
    )
    for count in (1, 8):
        options = {"assistant_model": drafter, "num_assistant_tokens": count, "do_sample": False}
        with keep_trees():
            target.generate(ids, max_new_tokens=60, **options)
        place, spent = 0, 0.0
        for tree in drafter.last_stats.trees:
            here = drafted[place]
            assert len(tree.drafts) == min(count, len(here.signals))
            assert len(tree.accepted) == min(count, here.accepted)
            place, spent = place + len(tree.tokens), spent + 15 + len(tree.drafts)
        last_alone = len(drafted) - place  # with no room for a draft that is no round of the drafter's
        assert last_alone in (0, 1)
        assert auto.fixed(count)(drafted, rounds, exact) == approx(spent + 10 * last_alone)
    hard = [auto.Drafted([0.02] * 8, 0)] * 200
    assert auto.by_choice(auto.foreseen)(hard, rounds, exact) == 10 * len(hard)
    noisy = [rounds.take(4, random.Random(seed)) for seed in range(2000)]
    assert 19 < sum(noisy) / len(noisy) < 19.5
    found = {"1 drafts": [{"b": 1.0, "a": 2.0}], "2 drafts": [{"b": 2.0, "a": 2.0}], "auto": [{"b": 1.0, "a": 3.0}]}
    found |= {auto.LEARNED: found["auto"], "foresight": [{"b": 4.0, "a": 4.0}]}
    (row,) = re.findall(r"^\| auto \| (.*) \|$", auto.report(found, {}), re.MULTILINE)
    assert [cell.split()[0] for cell in row.split(" | ")] == ["2.00×", "+0.0", "-50.0", "+50.0"]


def check_operations_of_heads_are_those_that_torch_counts(tmp_path: Path) -> None:
    """Of the layers but attention, which depends on the context, of the LM head, and of every head."""
    heads, target, ids = script("benchmark/heads"), tiny_target(), prompt(9)

    def counted(call):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            made = call()
        by_name = {str(name): count for name, count in counter.get_flop_counts().get("Global", {}).items()}
        attention = sum(count for name, count in by_name.items() if "attention" in name or "bmm" in name)
        return counter.get_total_flops(), attention, made

    for kind, fields in heads.variants():
        candidates = fields.get("head_candidates")
        if (candidates or 0) > 16:
            continue
        drafter = tiny_drafter(target, **fields | ({"head_rank": 5} if "head_rank" in fields else {}))
        states = torch.randn(1, 7, 32)
        none, positions = torch.zeros(1, 0, drafter.config.num_streams, 32), torch.zeros(1, 0, dtype=torch.long)
        no_context = {"residual": none, "residual_position_ids": positions}
        total, attention, _ = counted(lambda: drafter(states, torch.arange(7)[None], **no_context))  # noqa: B023
        assert total - attention == heads.block(drafter).operations
        total, _, path = counted(lambda: BlockPath(drafter, target_of(target), states[:, :6]))  # noqa: B023
        assert total == heads.lm_head(drafter, 6).operations
        total, *_ = counted(lambda: [path(k, ids[:, k], ids.new_zeros(1)) for k in range(6)])  # noqa: B023
        assert total == 6 * heads.step(drafter).operations, (kind, candidates)


def check_a_verification_reads_the_experts_that_its_tokens_choose(tmp_path: Path) -> None:
    """DeepSeek says 13 billion active parameters of 284; experts by drawing them, layer by layer."""
    verification = script("benchmark/heads").verification
    with torch.device("meta"):
        flash = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config())
    assert verification(flash, 1).operations / 2 == approx(13e9, rel=0.03)
    choices = torch.rand(2000, 7, 256, generator=torch.Generator().manual_seed(0)).topk(6).indices.flatten(1)
    read = sum(len(set(layer)) for layer in choices.tolist()) / 2000 / 256
    routed = 43 * 256 * 3 * 4096 * 2048
    # Over 2,000 layers the mean of 39 experts is off by 0.1 with a chance below 1e-6.
    more = verification(flash, 7).bytes - verification(flash, 1).bytes
    assert more == approx((read - 6 / 256) * routed * (0.5 + 1 / 32), rel=0.005)


def check_what_trees_and_rows_cost_is_counted(tmp_path: Path) -> None:
    """A dense target reads as much for any tree, experts more for every node. A token of Qwen3-8B is two operations a
    weight, all but the embedding's 0.6e9 of 8.2e9."""
    said = run("benchmark", "tree_cost", "--results", ROOT / "experiments/results/tiny-deepseek-v4/trees")
    rows = [
        line.strip("| ").split(" | ") for line in said.splitlines() if line.startswith(("| chain of", "| 8", "| 64"))
    ]
    for chain, same, wide in (rows[:3], rows[3:]):
        assert chain[5] == same[5] == wide[5] and chain[3] == same[3] and float(wide[3]) > 2 * float(chain[3])
        for nodes, row in ((9, chain), (65, wide)):
            assert 1 < float(row[3]) < 256 * (1 - (1 - 6 / 256) ** nodes) / 6  # of those that one token reads
    rows = [
        line.split(" | ") for line in run("benchmark", "training_cost").splitlines() if line.startswith("| 500,000")
    ]
    assert abs(float(rows[-1][2]) - 500_000 * 400 * 2 * 7.57e9 / 150e12 / 3600) < 0.05


def check_where_texts_part_is_counted_in_steps_of_the_format(tmp_path: Path) -> None:
    parting, target = script("count_ties").parting, qwen3(initializer_range=0.3).to(torch.bfloat16)
    ids = torch.tensor([[7, 8, 9, 10]])
    alone = target.generate(ids, attention_mask=ids > 0, max_new_tokens=6, min_new_tokens=6, do_sample=False)[0, 4:]
    assert parting(target, ids, alone, alone.clone()) is None
    logits = target(torch.cat([ids, alone[None, :3]], dim=1)).logits[0, -1]
    best, second = logits.topk(2).indices.tolist()
    other = alone.clone()
    other[3] = second if int(alone[3]) == best else best
    found, top = parting(target, ids, alone, other), float(logits.max())
    spacing = next(2.0**n for n in range(10, -10, -1) if 2.0**n <= abs(top)) * 2**-7  # bfloat16 has 8 bits
    assert found["token"] == 3
    assert abs(found["steps"] - abs(float(logits[best] - logits[second])) / spacing) <= 2


def check_a_draft_vocabulary_is_counted_in_answers_that_it_was_not_chosen_from(tmp_path: Path) -> None:
    """By source, without the questions; the last tenth is held out."""
    counting, tokenizer = script("count_vocabulary"), characters()
    texts = {"sums": ["1 2"] * 9 + ["3 3"], "talk": ["abb"] * 9 + ["abc"]}
    rows = [
        {"source": source, "messages": [{"role": "user", "content": "zzz"}, {"role": "assistant", "content": text}]}
        for source, answers in texts.items()
        for text in answers
    ]
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    seen, held_out = counting.count_answers(tmp_path / "answers.jsonl", tokenizer)
    one, two, three, space, a, b, c = tokenizer.convert_tokens_to_ids([*"123 abc"])
    assert seen == {"sums": Counter({one: 9, space: 9, two: 9}), "talk": Counter({a: 9, b: 18})}
    assert held_out == {"sums": Counter({three: 2, space: 1}), "talk": Counter({a: 1, b: 1, c: 1})}
    assert counting.covered(seen["talk"], 2, held_out["talk"]) == 2 / 3


def check_texts_of_servers_may_part_where_two_tokens_tie(tmp_path: Path) -> None:
    parted_at_a_tie = script("serve_deepseek_v4").parted_at_a_tie
    for other, is_one in (
        ([5, 6, 7], True), ([5, 8, 9], True), ([9, 6, 7], False), ([5, 6, 8], False), ([5, 8], True), ([5], True),
        ([5, 6, 7, 8], False), ([], False),
    ):  # fmt: skip
        assert parted_at_a_tie([5, 6, 7], other, [3.0, 0.1, 1.5]) == is_one, other


def check_a_block_of_figures_is_the_reports_average(tmp_path: Path) -> None:
    """Which the benchmark wrote. A stale one is named."""
    page, tool = tmp_path / "page.md", ROOT / "tools" / "write_numbers.py"
    report = (ROOT / "experiments/results/tiny-deepseek-v4/heads/report.md").read_text()
    (row,) = re.findall(
        r"^\| State head \(8\) \|.*\| (.*) \|$", report.partition("*Temperature = 1*")[0], re.MULTILINE
    )
    for field, figure, is_stale in (("tau", "6.15", True), ("speedup", "2.77×", False)):
        block = f'<!-- result: average tiny-deepseek-v4/heads "State head (8)" 0 {field} -->{figure}<!-- end -->'
        page.write_text(block)
        assert python(tool, "--check", page).returncode == is_stale
        assert python(tool, page).returncode == python(tool, "--check", page).returncode == 0
        found = re.search(r"-->(.*?)<!--", page.read_text())
        assert found and found[1] in row.replace("*", "").split(" / ")


def main() -> int:
    checks = {name: check for name, check in globals().items() if name.startswith("check_")}
    for name, check in checks.items():
        if all(word in name for word in sys.argv[1:]):
            began = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                check(Path(folder))
            print(f"{time.perf_counter() - began:6.1f} s  {name}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
