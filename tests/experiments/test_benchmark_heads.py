"""`experiments/benchmark heads` counts operations and bytes as torch does, and times each head."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from hf_hyperdflash import HyperDFlashDrafter
from hf_hyperdflash.drafters.blocks.configuration_hyperdflash import HyperDFlashConfig
from hf_hyperdflash.drafters.blocks.path import BlockPath
from hf_hyperdflash.targets.registry import target_of

from ..conftest import prompt, tiny_drafter, tiny_target
from ..helpers.scripts import DRAFTER, EXAMPLES, ROOT, rows_of

HEADS = ["--vocab-size", 300, "--hidden-size", 128, "--layers", 1, "--repeats", 1, "--context", 8]


def shown_here(monkeypatch, capsys, name, *arguments) -> str:
    """What a measurement prints, run in this process."""
    monkeypatch.setattr("sys.argv", ["experiments/benchmark", name, *map(str, arguments)])
    monkeypatch.setattr("sys.path", [*sys.path])
    runpy.run_path(str(ROOT / "experiments" / "benchmark"), run_name="__main__")
    return capsys.readouterr().out


def test_benchmark_of_heads_counts_and_times_each(monkeypatch, capsys):
    shown = shown_here(monkeypatch, capsys, "heads", *HEADS)
    counted, small, large = (rows for rows in shown.split("## ")[1:])
    lines = [line.strip("| ").split(" | ") for line in counted.splitlines() if line.startswith("| ")][2:]
    within = {(kind, candidates): cells[-1] for kind, candidates, *cells in lines}
    assert len(within) == 26 and [key for key, said in within.items() if said == "no"] == [("state", "all")]
    assert "verification 185.7 G, 29.81 GB; drafter's layers 13.5 G, 1.93 GB; LM head 6.4 G, 1.06 GB" in counted
    for timed, numbers in ((small, 5), (large, 4)):  # of candidates, fewer than the vocabulary has tokens
        assert len([line for line in timed.splitlines() if line.startswith("| ")]) == 2 + 5 * numbers


@pytest.fixture(scope="module")
def heads_script():
    return runpy.run_path(str(ROOT / "experiments" / "benchmark" / "heads.py"))


def test_operations_are_those_that_torch_counts(heads_script):
    """Of the layers but attention, which depends on the context, of the LM head, and of every head."""
    target, ids = tiny_target(), prompt(9)
    for kind, fields in heads_script["variants"]():
        rank, candidates = {"head_rank": 5} if "head_rank" in fields else {}, fields.get("head_candidates")
        if (candidates or 0) > 16:
            continue
        drafter = tiny_drafter(target, **fields | rank)
        states = torch.randn(1, 7, 32)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            drafter(states, torch.arange(7)[None], drafter.new_context())
        of_operators = {str(name): count for name, count in counter.get_flop_counts()["Global"].items()}
        attention = sum(count for name, count in of_operators.items() if "attention" in name or "bmm" in name)
        assert counter.get_total_flops() - attention == heads_script["block"](drafter).operations
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            path = BlockPath(drafter, target_of(target), states[:, :6])
        assert counter.get_total_flops() == heads_script["lm_head"](drafter, 6).operations
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            for k in range(6):
                path(k, ids[:, k], ids.new_zeros(1))
        assert counter.get_total_flops() == 6 * heads_script["step"](drafter).operations, (kind, candidates)


def test_a_verification_reads_the_experts_that_its_tokens_choose(heads_script):
    """DeepSeek says 13 billion active parameters of 284; experts by drawing them, layer by layer."""
    with torch.device("meta"):
        flash = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config())
    assert flash.num_parameters() == pytest.approx(284e9, rel=0.005)
    assert heads_script["verification"](flash, 1).operations / 2 == pytest.approx(13e9, rel=0.03)
    generator = torch.Generator().manual_seed(0)
    choices = torch.rand(2000, 7, 256, generator=generator).topk(6).indices.flatten(1)
    read = sum(len(set(layer)) for layer in choices.tolist()) / 2000 / 256
    routed = 43 * 256 * 3 * 4096 * 2048
    one, seven = (heads_script["verification"](flash, tokens).bytes for tokens in (1, 7))
    # Over 2,000 layers the mean of 39 experts is off by 0.1 with a chance below 1e-6.
    assert seven - one == pytest.approx((read - 6 / 256) * routed * (0.5 + 1 / 32), rel=0.005)


def test_bytes_of_a_head_are_its_weights_once_a_draft(heads_script):
    vocabulary, width, rank = 129280, 4096, 256
    config = {"vocab_size": vocabulary, "hidden_size": width, "head_rank": rank}
    for kind, own in {
        "markov": 0, "gated_markov": rank * (width + rank), "recurrent": 3 * rank * (width + 2 * rank),
        "selector": rank * width,
    }.items():  # fmt: skip
        for candidates in (0, 64):
            with torch.device("meta"):
                fields = config | {"sequential_head": kind, "head_candidates": candidates}
                drafter = HyperDFlashDrafter(HyperDFlashConfig(**fields, num_hidden_layers=1))
            weights = own + rank + rank * (candidates or vocabulary)
            found = heads_script["step"](drafter).bytes - 2 * weights
            # Rows of the vocabulary's width: a few passes, never as much as the table.
            assert vocabulary * 2 <= found <= vocabulary * 32, kind


def test_candidates_of_a_trained_head(tmp_path, monkeypatch, capsys):
    target = AutoModelForCausalLM.from_pretrained(EXAMPLES / "models" / "tiny-deepseek-v4", dtype=torch.float32)
    HyperDFlashDrafter.from_target(
        target, num_hidden_layers=1, mask_token_id=3, sequential_head="state", head_rank=8, head_candidates=5
    ).save_pretrained(tmp_path)
    shown = shown_here(
        monkeypatch, capsys, "heads", "--drafter", tmp_path, "--candidates", 0, 5, "--limit", 1,
        "--max-new-tokens", 4,
    )  # fmt: skip
    rows = rows_of(shown)
    assert list(rows) == ["---", "5 (its own)", "all"] and rows["all"][0] == rows["5 (its own)"][0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafter", "blind"], "has no sequential head"),
        (["--drafter", "nowhere"], "nowhere"),
        (["--drafter", "headed", "--candidates", "3000"], "`head_candidates` is 3000, expected at most the 2048"),
        (["--drafter", "headed", "--prompts", "torn.jsonl"], "torn.jsonl:1 is no JSON"),
        (["--target", "nowhere", "--repeats", "1"], "nowhere"),
    ],
)
def test_benchmark_of_heads_says_what_is_wrong(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    config = HyperDFlashConfig.from_pretrained(DRAFTER)
    for name, config.sequential_head, config.head_rank in (("blind", "none", 4), ("headed", "markov", 4)):
        HyperDFlashDrafter(config).save_pretrained(name)
    Path("torn.jsonl").write_text('{"turns"')
    with pytest.raises(SystemExit) as stopped:
        shown_here(monkeypatch, capsys, "heads", *arguments)
    assert str(stopped.value.code).startswith("Error: ") and message in str(stopped.value.code)
