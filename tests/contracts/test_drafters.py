"""Every kind of drafter against every promise that holds for all of them. A new kind is one more row of `KINDS`."""

from __future__ import annotations

import pytest
import torch

from hf_hyperdflash import DeepseekV4DSparkDrafter, DeepseekV4MTPDrafter, MedusaConfig, MedusaDrafter, load_drafter
from hf_hyperdflash.drafters.without_weights.prompt_lookup import PromptLookupDrafter

from ..conftest import prompt, tiny_config, tiny_drafter, tiny_target
from ..fuzz_trees import padded_on_the_left
from ..helpers import families
from ..helpers.deepseek_checkpoints import dspark_fields, dspark_shapes, mtp_shapes, random_tensors, write
from ..helpers.headed_drafters import headed
from ..helpers.loops import in_transformers_loop
from ..helpers.training import rows, trainer_for, weights
from ..helpers.unrolled import unrolled

READ = {"target_layer_ids": [0, -1]}


def of_checkpoint(kind, shapes, **fields):
    """A drafter out of a checkpoint of DeepSeek-V4's, and that checkpoint's target."""

    def made(folder):
        config = tiny_config(**fields)
        drafter = kind.from_target(write(folder, config, random_tensors(shapes(config))), dtype=torch.float32)
        return tiny_target(), drafter

    return made


def of_family(family, drafter):
    def made(folder):
        torch.manual_seed(0)
        target = family().eval()
        return target, drafter(target)

    return made


KINDS = {
    "hyperdflash": of_family(tiny_target, tiny_drafter),
    "dflash": of_family(families.qwen3, lambda target: tiny_drafter(target, **READ)),
    "dspark": of_family(families.qwen3, lambda target: headed(target, "markov", **READ)),
    "state head": of_family(families.llama, lambda target: headed(target, "state", confidence_head=True, **READ)),
    "dflash2": of_family(families.gemma3, lambda target: headed(target, "selector", head_candidates=5, **READ)),
    "eagle3": of_family(families.qwen3, lambda target: unrolled("eagle3", target, max_blocks=5)),
    "specblock": of_family(families.qwen3, lambda target: unrolled("specblock", target, block_size=3, max_blocks=2)),
    "medusa": of_family(
        families.qwen3, lambda _: MedusaDrafter(MedusaConfig(medusa_num_heads=3, hidden_size=64, vocab_size=64))
    ),
    "v4 dspark": of_checkpoint(DeepseekV4DSparkDrafter, dspark_shapes, **dspark_fields()),
    "v4 mtp": of_checkpoint(DeepseekV4MTPDrafter, mtp_shapes),
    "prompt lookup": of_family(families.qwen3_next, PromptLookupDrafter),
}
SAVED = sorted(KINDS.keys() - {"prompt lookup"})
TRAINED = sorted(KINDS.keys() - {"prompt lookup", "medusa", "v4 mtp"})
WAYS = [{}, {"tree_budget": 7}, {"num_assistant_tokens": "auto"}, {"tree_budget": "auto"}, {"num_assistant_tokens": 2}]


@pytest.fixture(params=KINDS)
def pair(request, tmp_path):
    return KINDS[request.param](tmp_path)


def test_the_text_is_the_targets(pair):
    target, drafter = pair
    ids, options = prompt(19), dict(do_sample=False, max_new_tokens=20)
    plain = target.generate(ids, **options)
    drafter.bind(target)
    for way in WAYS:
        assert torch.equal(target.generate(ids, assistant_model=drafter, **options, **way), plain), way
        assert drafter.last_stats.rounds > 0
    assert torch.equal(in_transformers_loop(target, drafter, ids, **options), plain)
    drafter.unbind(target)
    assert torch.equal(target.generate(ids, **options), plain)


def test_a_batch_writes_for_each_text_what_it_would_alone(pair):
    target, drafter = pair
    texts = [prompt(length, seed=length)[0] for length in (5, 12, 9)]
    ids, mask = padded_on_the_left(texts)
    options = dict(do_sample=False, max_new_tokens=12)
    alone = [target.generate(text[None], **options)[0, len(text) :] for text in texts]
    drafter.bind(target)
    for way in ({}, {"tree_budget": 5}):
        found = target.generate(ids, attention_mask=mask, assistant_model=drafter, **options, **way)
        assert torch.equal(found[:, ids.shape[1] :], torch.stack(alone)), way


def test_a_seed_gives_the_sampled_text_again(pair):
    """Its law is enumerated elsewhere (tests/trees/test_verification.py); here sampling runs for each kind."""
    target, drafter = pair
    drafter.bind(target)
    for way in ({}, {"tree_budget": 6}):
        texts = []
        for _ in range(2):
            torch.manual_seed(1)
            texts.append(target.generate(prompt(7), do_sample=True, max_new_tokens=10, assistant_model=drafter, **way))
        assert torch.equal(*texts) and texts[0].shape == (1, 17)


@pytest.mark.parametrize("kind", SAVED)
def test_what_is_saved_drafts_alike(kind, tmp_path):
    target, drafter = KINDS[kind](tmp_path / "checkpoint")
    drafter.save_pretrained(tmp_path / "saved")
    again = load_drafter(tmp_path / "saved", target=target, dtype=torch.float32)
    assert type(again) is type(drafter)
    tensors = again.state_dict()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in drafter.state_dict().items())
    ids, found = prompt(15), []
    for one in (drafter, again):
        one.bind(target)
        target.generate(ids, do_sample=False, max_new_tokens=12, assistant_model=one)
        found.append(one.last_stats.accepted)
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", TRAINED)
def test_a_step_of_training_moves_the_weights(kind, tmp_path):
    target, drafter = KINDS[kind](tmp_path)
    before, of_target = weights(drafter), weights(target)
    recipe = {"recipe": drafter.recipe} if hasattr(drafter, "recipe") else {}
    trainer_for(tmp_path, target, drafter, rows(4), max_steps=1, **recipe).train()
    after = weights(drafter)
    assert after.isfinite().all() and not torch.equal(before, after)
    assert torch.equal(weights(target), of_target)
