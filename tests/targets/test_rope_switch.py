"""Texts of targets whose rotary frequencies follow the length of the text, across where they change."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedModel

from hf_hyperdflash import PromptLookupDrafter
from hf_hyperdflash.targets.rope_switch import RopeSwitch, rope_switch_of

from ..conftest import half_right_about, prompt
from ..helpers.families import made
from ..helpers.loops import in_transformers_loop

SMALL = dict(intermediate_size=48, num_hidden_layers=2, num_key_value_heads=2)
LONG = dict(
    rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 8, long_factor=[4.0] * 8, factor=4.0,
    original_max_position_embeddings=24,
)  # fmt: skip
ROPES = {
    "dynamic": dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=4.0), max_position_embeddings=24),
    "longrope": dict(rope_parameters=LONG, max_position_embeddings=96),
}


def llama(rope: str) -> PreTrainedModel:
    """Made anew for every text: "dynamic" frequencies remember the longest."""
    torch.manual_seed(0)
    return made("llama", **SMALL, **ROPES[rope]).eval()


def drafter_for(target, kind, text):
    drafter = (
        PromptLookupDrafter(target, max_matching_ngram_size=1) if kind == "lookup" else half_right_about(target, text)
    )
    drafter.bind(target)
    return drafter


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("kind", ["chain", "tree", "lookup", "transformers' loop"])
@pytest.mark.parametrize("length", [5, 24, 30])
def test_text_is_the_targets_own_across_the_length(rope, kind, length):
    ids, options = prompt(length), dict(do_sample=False, max_new_tokens=50)
    expected = llama(rope).generate(ids, **options)
    target = llama(rope)
    drafter = drafter_for(target, kind, expected[0])
    if kind == "transformers' loop":
        assert torch.equal(in_transformers_loop(target, drafter, ids, **options), expected)
        return
    options |= dict(tree_budget=6) if kind == "tree" else {}
    assert torch.equal(target.generate(ids, assistant_model=drafter, **options), expected)
    stats = drafter.last_stats
    if kind != "lookup" and (rope == "longrope" or length < 20):
        assert any(stats.accepted) and stats.tau > 1  # it has drafted where it may


@pytest.mark.parametrize("rope", ROPES)
def test_rows_of_a_batch_do_not_turn_each_other(rope):
    """Padded together, a row would be turned by the length of the longest."""
    short, long, options = prompt(4), prompt(20, seed=3), dict(do_sample=False, max_new_tokens=16)
    expected = [llama(rope).generate(ids, **options)[0] for ids in (short, long)]
    target = llama(rope)
    drafter = drafter_for(target, "chain", expected[0])
    ids = torch.cat([torch.nn.functional.pad(short, (16, 0)), long])
    mask = (torch.arange(20) >= torch.tensor([[16], [0]])).long()
    out = target.generate(ids, attention_mask=mask, assistant_model=drafter, **options)
    assert torch.equal(out[0, 16:], expected[0]) and torch.equal(out[1], expected[1])


@pytest.mark.parametrize("length", [10, 25])
def test_a_target_that_starts_its_cache_anew_writes_its_own_text_up_to_there_and_beyond(length):
    torch.manual_seed(0)
    target = made("phi3", **SMALL, original_max_position_embeddings=24).eval()
    drafter, options = drafter_for(target, "lookup", None), dict(do_sample=False, max_new_tokens=14)
    expected = target.generate(prompt(length), **options)
    assert torch.equal(target.generate(prompt(length), assistant_model=drafter, **options), expected)


def test_how_many_drafts_there_may_be():
    once, always = RopeSwitch(8, is_at_every_token=False), RopeSwitch(8, is_at_every_token=True)
    assert [once.max_drafts(seen) for seen in (1, 7, 8, 9, 20)] == [7, 1, 0, math.inf, math.inf]
    assert [always.max_drafts(seen) for seen in (1, 7, 8, 9, 20)] == [7, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (None, None),
        ({"rope_type": "default"}, None),
        ({"rope_type": "yarn", "original_max_position_embeddings": 8}, None),
        ({"rope_type": "dynamic", "factor": 2.0}, RopeSwitch(32, True)),
        (LONG, RopeSwitch(24, False)),
        ({"sliding_attention": {"rope_type": "default"}, "full_attention": LONG}, RopeSwitch(24, False)),
        ({"sliding_attention": {"rope_type": "dynamic"}, "full_attention": None}, RopeSwitch(32, True)),
    ],
)
def test_what_a_configuration_says(rope, expected):
    assert rope_switch_of(SimpleNamespace(rope_parameters=rope, max_position_embeddings=32)) == expected
