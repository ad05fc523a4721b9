"""What holds of a drafter with one target is not written into the drafter: it may be bound to several targets."""

from __future__ import annotations

import copy
import json
import threading
from collections import defaultdict

import pytest
import torch
from transformers import pipeline

from hf_hyperdflash import (
    Eagle3Config,
    Eagle3Drafter,
    HyperDFlashConfig,
    HyperDFlashDrafter,
)

from ..conftest import prompt
from ..helpers import families
from ..helpers.gguf_files import chatting_llama

SHAPE = dict(
    vocab_size=64, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=48,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4}, initializer_range=0.2,
)  # fmt: skip
# What another program's file does not say of its target.
UNSAID = dict(any_streams=True, reducer="stream_mean", target_hc_mult=1, target_model_type="")
NEW, GREEDY = 16, dict(do_sample=False, max_new_tokens=16)


def reads_usual_layers():
    """An EAGLE-3 drafter that reads the usual layers of any target."""
    config = Eagle3Config(
        **SHAPE, **UNSAID, draft_vocab_size=40, target_layer_ids=[1, 2, 3], usual_layers=True, max_blocks=3
    )
    return Eagle3Drafter(config).eval()


def reads_any_streams():
    """A block drafter that reads the mean of two layers, over as many streams as there are."""
    config = HyperDFlashConfig(
        **SHAPE, **UNSAID, num_hidden_layers=1, target_layer_ids=[0, 1], block_size=4, mask_token_id=1
    )
    return HyperDFlashDrafter(config).eval()


def targets_for(make):
    """Two that a drafter fits, and of which it reads other things."""
    torch.manual_seed(1)
    if make is reads_any_streams:
        return families.deepseek_v4().eval(), families.qwen3().eval()
    return families.qwen3(16).eval(), families.qwen3(8).eval()


def drafts_on(drafter, *targets, in_threads=False):
    """What it drafts for a text on each target, round by round, one target after the other or all at once."""
    drafts, propose = defaultdict(list), type(drafter).propose

    def recorded(target, *request):
        tree = propose(drafter, target, *request)
        drafts[id(target.model)].append(tree.tokens.tolist())
        return tree

    drafter.propose = recorded
    threads = [
        threading.Thread(target=target.generate, args=(prompt(11),), kwargs={**GREEDY, "assistant_model": drafter})
        for target in targets
    ]
    for thread in threads:
        thread.start()
        if not in_threads:
            thread.join()
    for thread in threads:
        thread.join()
    del drafter.propose
    return [drafts[id(target)] for target in targets]


@pytest.mark.parametrize("make", [reads_usual_layers, reads_any_streams], ids=lambda make: make.__name__)
def test_on_each_target_it_drafts_as_if_it_had_no_other(make):
    drafter, (first, second) = make(), targets_for(make)
    alone = []
    for target in (first, second):
        only = copy.deepcopy(drafter)
        only.bind(target)
        alone += drafts_on(only, target)
        only.unbind(target)
    assert all(alone) and alone[0] != alone[1]
    for target in (first, second):
        drafter.bind(target)
    assert drafts_on(drafter, first, second, first) == [2 * alone[0], alone[1], 2 * alone[0]]
    assert drafts_on(drafter, first, second, in_threads=True) == alone
    drafter.unbind(second)
    assert drafts_on(drafter, first) == alone[:1]


def test_it_reads_the_layers_of_the_target_that_it_drafts_for():
    drafter, seen, extend = reads_usual_layers(), [], Eagle3Drafter.extend
    first, second = targets_for(reads_usual_layers)
    drafter.extend = lambda target, context, residual, *rest: (
        seen.append(residual),
        extend(drafter, target, context, residual, *rest),
    )
    for target in (first, second):
        drafter.bind(target)
    for target, layers in ((first, [1, 7, 12]), (second, [1, 3, 4]), (first, [1, 7, 12])):
        seen.clear()
        text = target.generate(prompt(11), **GREEDY, assistant_model=drafter)
        states = target(text, output_hidden_states=True).hidden_states  # of which the first are the embeddings
        expected = torch.stack([states[layer + 1] for layer in layers], dim=2)
        read = torch.cat(seen, dim=1)
        assert read.shape[1] >= NEW
        torch.testing.assert_close(read, expected[:, : read.shape[1]], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("make", [reads_usual_layers, reads_any_streams], ids=lambda make: make.__name__)
def test_saved_after_it_was_bound_it_is_as_it_was_made(make, tmp_path):
    drafter = make()
    drafter.save_pretrained(tmp_path / "before", with_code=False)
    for target in targets_for(make):
        drafter.bind(target)
        target.generate(prompt(5), **GREEDY, assistant_model=drafter)
    drafter.save_pretrained(tmp_path / "after", with_code=False)
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("before", "after"))
    assert before == after


def test_a_pipeline_takes_drafters_whatever_special_tokens_they_name():
    """Pipelines compare them, and keep the tokenizer of a drafter that names others."""
    target, tokenizer = chatting_llama()
    drafter = HyperDFlashDrafter.from_target(target.eval(), mask_token_id=1, num_hidden_layers=1)
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)("a b", **GREEDY)
    drafter.bind(target)
    assert pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)("a b", **GREEDY)
    drafter.config.eos_token_id = drafter.config.bos_token_id = None
    options = dict(tokenizer=tokenizer, assistant_model=drafter, assistant_tokenizer=tokenizer)
    assert pipeline("text-generation", model=target, **options)("a b", **GREEDY) == plain
    assert drafter.last_stats.rounds
