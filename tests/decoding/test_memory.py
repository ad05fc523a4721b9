"""How much memory rounds hold."""

import pytest
import torch

from hf_hyperdflash import Conversation, PromptLookupDrafter, bind
from hf_hyperdflash.decoding import conversation, sequence
from hf_hyperdflash.decoding.stats import keep_trees
from hf_hyperdflash.drafters.base import Observer
from hf_hyperdflash.targets.caches import round_cache

from ..conftest import prompt, tiny_drafter
from ..helpers.families import made
from ..helpers.live_memory import LiveMemory
from ..helpers.medusa import medusa


@pytest.mark.parametrize("rows", [1, 3])
@torch.no_grad()
def test_a_cache_that_grows_holds_no_text_twice(rows, monkeypatch):
    target = bind(made("qwen3", intermediate_size=48, num_hidden_layers=16, num_key_value_heads=2).eval())
    drafter, config = PromptLookupDrafter(target), target.config
    monkeypatch.setattr(round_cache, "_GROWTH", 4)
    ids = torch.cat([prompt(700, seed=row) for row in range(rows)])
    with LiveMemory() as memory:
        target.generate(ids, assistant_model=drafter, max_new_tokens=30, pad_token_id=0, prefill_chunk_size=50)
    of_keys = 16 * 2 * 4 * rows * 730 * config.num_key_value_heads * config.head_dim
    assert of_keys < memory.peak < 1.6 * of_keys


def given_of_prompts(drafter, generate):
    """The text, the drafts, and of how many tokens the drafter was given the residual, of the longest call, with how
    many tokens its memory has."""
    extend, given = drafter.extend, [(0, 0)]

    def extended(target, context, residual, *rest):
        held = residual.untyped_storage().nbytes() // (residual[0, 0].numel() * residual.element_size())
        given.append((residual.shape[1], held))
        return extend(target, context, residual, *rest)

    drafter.extend = extended
    try:
        with keep_trees():
            text = generate()
    finally:
        del drafter.extend
    drafts = [round_.drafts.tokens.tolist() for round_ in drafter.last_stats.trees]
    return text, drafts, max(given), max(held for _, held in given)


@pytest.mark.parametrize("way", ["alone", "chunks", "batch", "conversation"])
@pytest.mark.parametrize("kind", ["window", "window from slot", "last state"])
def test_of_a_prompt_no_more_is_held_than_a_drafter_reads(kind, way, monkeypatch):
    target = made("qwen3", intermediate_size=48, num_hidden_layers=4, num_key_value_heads=2, sliding_window=8,
                  layer_types=["full_attention", "sliding_attention"] * 2, use_sliding_window=True).eval()  # fmt: skip
    fields = {"sliding_window": 9, "target_layer_ids": [0, 2], "num_draft_tokens": 4}
    if kind == "last state":
        drafter, most = medusa(target), 1
    elif kind == "window":
        drafter, most = tiny_drafter(target, **fields), 9
    else:
        drafter, most = tiny_drafter(target, **fields, window_from="slot"), 8
    drafter.bind(target)
    rows, chunk = 3 if way == "batch" else 1, 40 if way == "chunks" else None
    ids = torch.cat([prompt(100, seed=row) for row in range(rows)])
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : 30 * row] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "prefill_chunk_size": chunk}

    def generate():
        if way == "conversation":
            return Conversation(target).generate(ids, assistant_model=drafter, **options)
        return target.generate(ids, attention_mask=mask, assistant_model=drafter, **options)

    text, drafts, (longest, _), held = given_of_prompts(drafter, generate)
    assert longest <= max(most, 5) and held <= rows * max(most, 5)
    for module in (sequence, conversation):
        monkeypatch.setattr(module, "tokens_read", lambda *_: None)
    whole, same, (longest, _), _ = given_of_prompts(drafter, generate)
    assert torch.equal(text, whole) and drafts == same and longest >= 40


def test_who_hears_of_a_prompt_hears_of_all_of_it_and_a_window_is_of_tokens_that_are_context():
    target = made("qwen3", intermediate_size=48, num_hidden_layers=2, num_key_value_heads=2).eval()
    drafter, heard = tiny_drafter(target, sliding_window=9, target_layer_ids=[0]), []

    class Listener(Observer):
        def add_tokens(self, residual, position_ids, next_ids, is_written):
            heard.append(residual.shape[1])

    drafter.bind(target)
    options = {"assistant_model": drafter, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones(1, 100, dtype=torch.long)
    mask[:, 93:95] = 0
    (_, _, (longest, _), _) = given_of_prompts(
        drafter, lambda: target.generate(prompt(100), attention_mask=mask, **options)
    )
    assert longest == 98
    drafter.observer = Listener()
    target.generate(prompt(100), **options)
    assert heard[0] == 100
