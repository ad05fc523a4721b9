"""Rounds after every token of a text against rounds that generation really has, and how often chance is taken for
more."""

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList

from hf_hyperdflash import HyperDFlashConfig, bind
from hf_hyperdflash.benchmark.doctor.config_variants import (
    cause_of,
    compare_variants,
    draft_every_round,
    leads_over_first,
    variants,
)
from hf_hyperdflash.drafters.sampling import DraftRequest, DraftSampler
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.training.losses.objective import compute_residual

from ..conftest import CSA, SLIDING, prompt, tiny_drafter, tiny_target


@pytest.mark.parametrize(
    "fields",
    [{}, {"reducer": "fc", "target_layer_ids": [0, 1]}, {"sample_from_anchor": True}, {"draft_vocab_size": 4}],
)
def test_rounds_are_those_of_generation(fields):
    """So few tokens that an untrained drafter is right now and then."""
    target = bind(tiny_target(2, vocab_size=6, layer_types=[SLIDING, CSA]))
    drafter = tiny_drafter(target, num_hidden_layers=1, sliding_window=16, **fields)
    accepted = 0
    for seed in range(3):
        ids = prompt(9, seed, vocab_size=6)
        text = target.generate(ids, assistant_model=drafter, do_sample=False, max_new_tokens=60)
        (emitted,), (nats,) = draft_every_round(target, drafter, text, 9, [drafter.config])
        assert emitted.shape == nats.shape == (59,)
        walked, at = [], 0
        for real in drafter.last_stats.emitted[:-1]:  # the last one may be cut off
            walked.append(emitted[at])
            at += real
        assert walked == drafter.last_stats.emitted[:-1]
        accepted += sum(drafter.last_stats.accepted)
    assert accepted


def test_settings_are_tried_and_left():
    target = tiny_target()
    drafter = tiny_drafter(target, reducer="fc", target_layer_ids=[1, -1])
    before = drafter.config.to_dict()
    texts = [prompt(30, seed) for seed in range(8)]
    rounds, own, others = compare_variants(target, drafter, texts, [10] * 8)
    assert drafter.config.to_dict() == before and rounds == 8 * 19
    names = [variant.name for variant in others]
    assert names == [  # layer 2 is the last one, which is read already
        "`target_layer_ids` [0, -1] instead of [1, -1]",
        "`sample_from_anchor` True",
        "`rope_theta` 1,000,000 instead of 10,000",
    ]
    assert [cause_of(name) for name in names] == ["layers", "anchor", "RoPE"]
    deeper = tiny_target(4)  # all layers at once, the first one, too
    assert "`target_layer_ids` [1, 2] instead of [0, 1]" in variants(
        tiny_drafter(deeper, reducer="fc", target_layer_ids=[0, 1]).config, deeper
    )
    taus = [own, *(variant.tau for variant in others)]
    for tau, fields in zip(taus, [{}, {"target_layer_ids": [0, -1]}, {"sample_from_anchor": True}]):
        config = HyperDFlashConfig.from_dict({**before, **fields})
        emitted = [draft_every_round(target, drafter, text, 10, [config])[0] for text in texts]
        assert tau == pytest.approx(np.concatenate(emitted, axis=1).mean())


@pytest.mark.parametrize("fields", [{}, {"sample_from_anchor": True}, {"sliding_window": 4}, {"draft_vocab_size": 32}])
def test_likelihood_is_that_of_drafting_one_round_at_a_time(fields):
    target, text, start = tiny_target(), prompt(24), 9
    drafter = tiny_drafter(target, **fields)
    if "draft_vocab_size" in fields:
        drafter.draft_ids.copy_(torch.randperm(64, generator=torch.Generator().manual_seed(0))[:32])
    (_,), (nats,) = draft_every_round(target, drafter, text, start, [drafter.config])
    positions = torch.arange(24)[None]
    residual, sampler = compute_residual(target, text, positions), DraftSampler(LogitsProcessorList(), do_sample=True)
    for anchor, got in enumerate(nats.tolist(), start=start):
        context = drafter.new_context()
        drafter.extend(
            target_of(target), context, residual[:, :anchor], positions[:, :anchor], text[:, 1 : anchor + 1]
        )
        with torch.no_grad():
            request = DraftRequest(context, text[:, : anchor + 1], positions[:, : anchor + 1], 6, sampler)
            (tree,) = drafter.draft(target_of(target), [request])
        both = drafter.config.block_size - 1  # positions that both anchor conventions draft
        likely = [tree.q[k].log()[text[0, anchor + 1 + k]] for k in range(min(both, 23 - anchor))]
        assert got == pytest.approx(torch.stack(likely).clamp(min=-np.log(64)).mean().item(), abs=1e-4)


@pytest.mark.parametrize(("prompts", "share"), [(24, 0.02), (8, 0.07)])
def test_chance_is_seldom_taken_for_more(prompts, share):
    """Six settings that are no better than the first, on prompts that differ a lot. Nothing of it is random."""
    rng, alarms = np.random.default_rng(0), 0
    for _ in range(300):
        of_prompts, noise = rng.normal(-3, 1, (prompts, 1)), rng.normal(0, 0.2, (prompts, 7))
        alarms += any(lead.low > 0 for lead in leads_over_first(60 * (of_prompts + noise), np.full(prompts, 60)))
    assert alarms / 300 == pytest.approx(share, abs=0.02)


def test_what_all_prompts_agree_on_is_more_than_chance():
    rng = np.random.default_rng(1)
    sums = rng.normal(-3, 1, (10, 1)) + np.array([0, 0.3, 0.0, -0.3]) + rng.normal(0, 0.1, (10, 4))
    better, _, worse = leads_over_first(sums, np.ones(10))
    assert better.low > 0 > worse.high and better.value == pytest.approx((sums[:, 1] - sums[:, 0]).mean())
