"""Nothing was ever accepted of a drafter whose states overflow in float16, and nobody said why: the text is the
target's, and a warning says it once, as at loading."""

from __future__ import annotations

import logging
import math
from itertools import product

import pytest
import torch
from transformers import CompileConfig

from hf_hyperdflash import MedusaConfig, MedusaDrafter, bind, load_drafter, load_target
from hf_hyperdflash.auto.acceptance import AcceptanceLine
from hf_hyperdflash.hub.formats import export_dflash
from hf_hyperdflash.trees.growth import DraftStep, drawn
from hf_hyperdflash.trees.tree import DraftTree

from ..conftest import mostly_nightly, prompt, tiny_drafter
from ..helpers import families
from ..helpers.draft_trees import SAMPLING_RULES, steps_by
from ..helpers.enumerated_draws import every_outcome
from ..helpers.headed_drafters import headed
from ..helpers.unrolled import unrolled

NEW = 12


def qwen3():
    torch.manual_seed(0)
    return bind(families.qwen3().eval())


def medusa(target):
    torch.manual_seed(0)
    sizes = dict(hidden_size=target.config.hidden_size, vocab_size=target.config.vocab_size)
    return MedusaDrafter(MedusaConfig(medusa_num_heads=4, **sizes)).eval()


KINDS = {
    "block": lambda target: tiny_drafter(target, target_layer_ids=[1]),
    "head": lambda target: headed(target, "markov", target_layer_ids=[1]),
    "draft vocabulary": lambda target: tiny_drafter(target, target_layer_ids=[1], draft_vocab_size=40),
    "eagle3": lambda target: unrolled("eagle3", target, target_layer_ids=[0, 1]),
    "specblock": lambda target: unrolled("specblock", target, target_layer_ids=[0, 1]),
    "medusa": medusa,
}


@torch.no_grad()
def overflowing(drafter):
    """The same in float16, in which what its last layers compute is beyond the largest number."""
    for name, parameter in drafter.named_parameters():
        if name.endswith(("up_proj.weight", "gate_proj.weight", ".linear.weight")):
            parameter.mul_(5e4 / parameter.abs().max())
    return drafter.half()


def compiling() -> dict:
    config = CompileConfig(mode=None, fullgraph=True, backend="eager")
    config._compile_all_devices = True  # a CPU's, too
    return dict(cache_implementation="static", compile_config=config)


WAYS = {
    "chain": {},
    "drawn chain": dict(do_sample=True),
    "tree": dict(tree_budget=8),
    "drawn tree": dict(tree_budget=8, do_sample=True),
    "auto": dict(num_assistant_tokens="auto"),
    "drawn auto": dict(num_assistant_tokens="auto", do_sample=True),
    "auto nodes": dict(num_assistant_tokens="auto", tree_budget="auto"),
    "static cache": dict(cache_implementation="static"),
    "compiled": compiling(),  # takes 5 s: rounds are traced
    "rows": dict(do_sample=True, tree_budget=6),
}
# On each change every kind as a chain and as a tree, and a block in every way.
CASES = sorted(product(KINDS, WAYS), key=lambda pair: pair[0] != "block" and pair[1] not in ("chain", "tree"))


@pytest.mark.parametrize(("kind", "way"), mostly_nightly(CASES, 20))
def test_scores_that_are_not_finite_are_told_of_once(kind, way, caplog):
    target, options = qwen3(), {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, **WAYS[way]}
    if way == "rows":  # of a target that is in float16 itself, which the warning does not depend on
        target = target.half()
    drafter = overflowing(KINDS[kind](target))
    drafter.bind(target)
    torch._dynamo.reset()
    for length in (8, 9):
        ids = torch.cat([prompt(length, seed=seed) for seed in range(3 if way == "rows" else 1)])
        out = target.generate(ids, assistant_model=drafter, **options)
        assert drafter.last_stats.tau == 1 and out.shape[1] == length + NEW
        if not options["do_sample"]:
            plain = target.generate(ids, do_sample=False, max_new_tokens=NEW, pad_token_id=0)
            assert torch.equal(out, plain)
    torch._dynamo.reset()
    assert len(of_dtypes(caplog)) == 1


def of_dtypes(caplog):
    """What was said of dtypes."""
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return [line for line in said if "float16" in line and "bfloat16" in line]


@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_drafts_of_no_number_leave_the_targets_distribution(rule):
    """Also where the draft before them has a number, and is accepted as often as without them."""
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    nothing = torch.full_like(p, torch.nan)
    law, accepted = torch.zeros(3, dtype=torch.float64), 0.0
    for first in range(3):
        tree = DraftTree.chain(torch.tensor([first, 2, 2]), [q, nothing, nothing])
        for weight, steps in every_outcome(lambda tree=tree: list(steps_by(rule, tree, lambda _: p))):
            law[steps[0][0]] += q[first] * weight
            accepted += float(q[first]) * weight * (steps[0][1] is not None)
            assert len(steps) <= 2  # what is no number is rejected
    torch.testing.assert_close(law, p)
    assert accepted == pytest.approx(float(torch.minimum(p, q).sum()))


def test_a_drawn_tree_of_no_number_is_empty_beside_others():
    def steps(k, tokens, rows):
        logits = torch.zeros(len(tokens), 8)
        logits[tokens < 100] = torch.nan  # the first text's alone
        return DraftStep(logits)

    def scored(paths, step, counts):
        return step

    nothing, tree = drawn(torch.tensor([7, 107]), [3, 3], 6, lambda k, t, r: steps(k, t + 100 * (k > 0), r), scored)
    assert len(nothing) == 0 and len(tree) > 1


def test_what_auto_has_learned_outlives_a_signal_of_no_number():
    line, other = AcceptanceLine(), AcceptanceLine()
    line.observe(math.nan, False)
    other.observe(0.0, False)
    assert line(0.7) == other(0.7) and line(math.nan) == other(0.0)


@pytest.mark.parametrize("chosen", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float32])
def test_loading_in_float16_what_was_trained_in_bfloat16(saved, chosen, tmp_path, caplog):
    target = families.qwen3().eval().to(saved)
    drafter = tiny_drafter(target, target_layer_ids=[1])
    target.save_pretrained(tmp_path / "target")
    drafter.save_pretrained(tmp_path / "drafter")
    export_dflash(drafter, tmp_path / "theirs", format="z-lab")
    caplog.clear()
    loads = (
        lambda: load_target(str(tmp_path / "target"), dtype=chosen),
        lambda: load_drafter(tmp_path / "drafter", dtype=chosen),
        lambda: load_drafter(tmp_path / "theirs", dtype=chosen),
    )
    for number, load in enumerate(loads, start=1):
        assert str(load().dtype) == f"torch.{chosen}"
        assert len(of_dtypes(caplog)) == (number if saved == torch.bfloat16 and chosen == "float16" else 0)
