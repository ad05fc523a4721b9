"""A drafter that was bound to a second target drafted for the first what it read of the second, and was saved so."""

from __future__ import annotations

import copy
import json
import threading
from collections import defaultdict

import pytest
import torch
from transformers import pipeline

from hf_hyperdflash import Eagle3Config, Eagle3Drafter, HyperDFlashConfig, HyperDFlashDrafter
from hf_hyperdflash.targets.registry import target_of

from ..conftest import prompt
from ..helpers import families
from ..helpers.gguf_files import chatting_llama

# What another program's file says of its drafter, and not of its target.
FIELDS = dict(
    vocab_size=64, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=48,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4}, initializer_range=0.2, any_streams=True,
    reducer="stream_mean", target_hc_mult=1, target_model_type="",
)  # fmt: skip
GREEDY = dict(do_sample=False, max_new_tokens=16)


def reads_usual_layers():
    """An EAGLE-3 drafter that reads the usual layers of any target, and two targets of which those are others."""
    config = Eagle3Config(**FIELDS, draft_vocab_size=40, target_layer_ids=[1, 2, 3], usual_layers=True, max_blocks=3)
    return Eagle3Drafter(config), families.qwen3(16), families.qwen3(8), [[1, 7, 12], [1, 3, 4]]


def reads_any_streams():
    """A block drafter that reads the mean of two layers, over as many streams as there are: four, and one."""
    config = HyperDFlashConfig(**FIELDS, num_hidden_layers=1, target_layer_ids=[0, 1], block_size=4, mask_token_id=1)
    return HyperDFlashDrafter(config), families.deepseek_v4(), families.qwen3(), [[0, 1]] * 2


def drafts_on(drafter, *targets, in_threads=False):
    """What it drafts for a text on each target, round by round, one target after the other or all at once."""
    drafts, draft = defaultdict(list), type(drafter).draft

    def recorded(target, requests):
        (tree,) = draft(drafter, target, requests)
        drafts[id(target.model)].append(tree.tokens.tolist())
        return [tree]

    drafter.draft = recorded
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
    del drafter.draft
    return [drafts[id(target)] for target in targets]


@pytest.mark.parametrize("make", [reads_usual_layers, reads_any_streams], ids=lambda make: make.__name__)
def test_on_each_target_it_drafts_as_if_it_had_no_other_and_is_saved_as_if_it_had_none(make, tmp_path):
    torch.manual_seed(1)
    drafter, first, second, layers = make()
    for model in (drafter, first, second):
        model.eval()
    drafter.save_pretrained(tmp_path / "before", with_code=False)
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
    assert [drafter.layers_read(target_of(target)) for target in (first, second)] == layers
    drafter.save_pretrained(tmp_path / "after", with_code=False)
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("before", "after"))
    assert before == after
    drafter.unbind(second)
    assert drafts_on(drafter, first) == alone[:1]


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
