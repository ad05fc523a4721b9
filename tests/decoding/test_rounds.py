"""What the target says of each drafted node, against the target run from scratch over the node's own path."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

from hf_hyperdflash import Observer, PromptLookupDrafter, bind
from hf_hyperdflash.targets.caches.name import CACHE, cache_of
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.targets.target import VERIFICATION, Target

from ..conftest import CSA, HCA, SLIDING, prompt, tiny_target
from ..fuzz_trees import padded_on_the_left
from ..helpers import families
from ..helpers.families import ALSO_MASKED, FAMILIES, LATER, MASKED
from ..helpers.tree_drafters import RandomChains, RandomTrees
from .test_requests import GREEDILY, WAYS, assert_heard_all, pair_of, stock


class Row(Observer):
    """Hears of one text, and of more layers than drafting reads."""

    target_layer_ids = (-1, 0)

    def __init__(self):
        self.tokens, self.rounds, self.stats = [], [], None

    def add_tokens(self, *told):
        self.tokens.append(told)

    def add_round(self, context, tree, logits, accepted):
        self.rounds.append((tree, logits, accepted))

    def end(self, stats):
        self.stats = stats


class Rows(Observer):
    """Hears of all texts but the second."""

    def __init__(self):
        self.rows = []

    def begin(self, target, do_sample):
        self.rows.append(None if len(self.rows) == 1 else Row())
        return self.rows[-1]


def gpt_oss_with_images():
    vision = CLIPVisionConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                              image_size=8, patch_size=4)  # fmt: skip
    config = LlavaConfig(vision_config=vision, text_config=families.gpt_oss().config)
    return LlavaForConditionalGeneration(config)


PLACES = [
    *((family, way) for family in (*FAMILIES, *ALSO_MASKED) for way in ("tree", "padded batch")),
    *((family, "padded static batch") for family in MASKED),
    (gpt_oss_with_images, "tree"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "way"), PLACES)
@torch.no_grad()
def test_every_node_is_judged_on_its_own_path(family, way):
    """Who hears of a text hears of that one alone: its tokens with their residual, its rounds, its statistics."""
    way, (own, target) = WAYS[way], pair_of(family)
    texts = [each.sequences[0] for each in stock(family, "", way.lengths, 12)[0]]
    kind = RandomChains if family is families.deepseek_v4_remote_code else way.kind
    drafter = kind(target, texts, seed=2, most=9)
    drafter.observer = observer = Rows()
    ids, mask = padded_on_the_left([text[:length] for text, length in zip(texts, way.lengths)])
    options = GREEDILY | {"max_new_tokens": 12} | way.asked
    target.generate(ids, attention_mask=mask, assistant_model=drafter, **options)
    for heard, stats, text, at in zip(observer.rows, drafter.last_stats.rows, texts, way.lengths, strict=True):
        if heard is None:
            continue
        assert_heard_all(target, [of[:3] for of in heard.tokens], text[None], heard.target_layer_ids)
        assert all(is_written == (of[0, 0] >= at) for _, of, _, is_written in heard.tokens)
        for tree, logits, accepted in heard.rounds:
            for path in tree.paths or [[]]:
                written = torch.cat([text[:at], tree.tokens[path]])
                expected = own(written[None]).logits[0, at - 1 :]
                positions = [0, *(node + 1 for node in path)]
                torch.testing.assert_close(logits[positions], expected, atol=1e-3, rtol=1e-3)
            at += 1 + len(accepted)
        assert at >= len(text) and heard.stats is stats


def test_what_is_listed_is_what_is_tested():
    tested = [target_of(made()) for made in [*FAMILIES, *ALSO_MASKED]]
    assert VERIFICATION.keys() - LATER <= {family.config.model_type for family in tested}
    assert {family.config.model_type for family in tested if type(family) is Target} <= VERIFICATION.keys()
    # Trees of the others are verified row by row.
    masked = {target_of(made()).config.model_type for made in MASKED} | {"deepseek_v4"}
    assert {each.config.model_type for each in tested if each.tree_verification in ("mask", "cache")} == masked


@pytest.mark.parametrize("family", [families.qwen3, families.gemma3])
def test_trees_over_a_cache_that_is_to_stay_as_it_is(family, monkeypatch):
    """As of one that is offloaded layer by layer, which needs an accelerator."""
    monkeypatch.setattr("hf_hyperdflash.decoding.loop.is_of_plain_layers", lambda cache: False)
    target, options = bind(family().eval()), dict(do_sample=False, max_new_tokens=20, return_dict_in_generate=True)
    expected = target.generate(prompt(13), **options).sequences
    drafter = RandomTrees(target, [expected[0]], most=9)
    found = target.generate(prompt(13), assistant_model=drafter, **options)
    assert torch.equal(found.sequences, expected) and drafter.last_stats.tau > 1
    assert target_of(target).cached_lengths(cache_of(found)) == {32}


V4S = [
    bind(tiny_target(layer_types=kinds, sliding_window=size, index_topk=topk, compress_rates=rates, index_n_heads=32))
    for kinds, size, topk, rates in [
        ([SLIDING, CSA, HCA], 8, 512, {CSA: 4, HCA: 8}), ([HCA, CSA, CSA], 4, 3, {CSA: 2, HCA: 4}),
        ([CSA, SLIDING, HCA], 5, 2, {CSA: 3, HCA: 6}), ([HCA, HCA, CSA], 12, 1, {CSA: 4, HCA: 5}),
    ]
]  # fmt: skip
KEPT_STATES = ("buffer_kv", "buffer_gate", "compressed_kv", "overlap_kv", "overlap_gate", "entry_count")


# Takes seconds: each of 40 examples is many rounds of a DeepSeek-V4.
@settings(deadline=None, max_examples=40)
@given(st.sampled_from(V4S), st.integers(2, 30), st.integers(2, 16), st.integers(0, 3), st.integers(0, 10**6))
@torch.no_grad()
def test_v4s_caches_are_what_the_accepted_path_alone_would_have_left(target, length, new, back, seed):
    # Without padding, whose scores are all zero: of equals a prompt chooses others than one token at a time.
    options = dict(do_sample=False, suppress_tokens=[0], return_dict_in_generate=True)
    ids = prompt(length, seed)
    text = target.generate(ids, max_new_tokens=new, **options).sequences
    drafter = RandomTrees(target, [text[0]], seed=seed, most=14)
    out = target.generate(ids, max_new_tokens=new, assistant_model=drafter, **options)
    lookup = PromptLookupDrafter(target)
    alone = target.generate(text[:, :-1], max_new_tokens=1, assistant_model=lookup, **options)
    assert torch.equal(out.sequences, text)
    for layer, expected in zip(cache_of(out).layers, cache_of(alone).layers, strict=True):
        assert layer.get_seq_length() == expected.get_seq_length()
        torch.testing.assert_close(layer.keys, expected.keys, atol=2e-5, rtol=1e-4)
        for state in KEPT_STATES:
            torch.testing.assert_close(getattr(layer, state, {}), getattr(expected, state, {}), atol=2e-5, rtol=1e-4)
    back = min(back, new - 1)
    cache_of(out).crop(-back)  # records of what was accepted are whole, too
    kept, more = text[:, : text.shape[1] - 1 - back], prompt(6, seed=5)
    expected = target(torch.cat([kept, more], dim=1)).logits[:, -6:]
    torch.testing.assert_close(target(more, **{CACHE: cache_of(out)}).logits, expected, atol=2e-4, rtol=1e-3)


class OwnPreparation(families.Qwen3ForCausalLM):
    """Somebody's model that adds to what each forward gets."""

    def prepare_inputs_for_generation(self, *args, **kwargs):
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        inputs["position_ids"] = inputs["position_ids"] // 2
        return inputs


class OwnArgument(families.Qwen3ForCausalLM):
    """Somebody's model whose forward wants more of each token."""

    def forward(self, input_ids=None, token_type_ids=None, **kwargs):
        assert token_type_ids is None or token_type_ids.shape == input_ids.shape
        return super().forward(input_ids, **kwargs)


PADDED = {"attention_mask": (torch.arange(18) >= 3).long()[None]}
OWN = {"token_type_ids": torch.zeros(1, 18, dtype=torch.long)}


@pytest.mark.parametrize(
    ("kind", "options", "attention"),
    [(None, PADDED, "sdpa"), (OwnPreparation, {}, "sdpa"), (OwnArgument, OWN, "sdpa"), (None, {}, "eager")],
)
def test_a_round_gets_what_the_models_own_preparation_makes(kind, options, attention):
    target, ids = families.qwen3().eval(), prompt(9).repeat(1, 2)
    target.__class__ = kind or type(target)
    target.set_attn_implementation(attention)
    options = dict(do_sample=False, max_new_tokens=12, **options)
    expected = target.generate(ids, **options)
    bind(target)
    for drafter in PromptLookupDrafter(target), RandomTrees(target, [expected[0]]):
        assert torch.equal(target.generate(ids, assistant_model=drafter, **options), expected)
