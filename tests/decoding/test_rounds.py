"""Draft trees in one forward, against the target run from scratch over each node's own path."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CLIPVisionConfig, DynamicCache, LlavaConfig, LlavaForConditionalGeneration

from hf_hyperdflash import PromptLookupDrafter, bind
from hf_hyperdflash.decoding.rounds import CausalRound, ForkedRound, MaskedRound, verification_of
from hf_hyperdflash.decoding.tokens import TokenBuffer
from hf_hyperdflash.targets.attention_masks import CausalMasks
from hf_hyperdflash.targets.caches.name import CACHE
from hf_hyperdflash.targets.registry import FAMILIES as KNOWN
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.targets.target import Target
from hf_hyperdflash.trees.tree import DraftTree

from ..conftest import CSA, HCA, SLIDING, mostly_nightly, prompt, tiny_target
from ..helpers import families
from ..helpers.draft_trees import parents_and_tokens
from ..helpers.families import ALSO_MASKED, FAMILIES, LATER, MASKED, gpt_oss, mistral, qwen3


def filled_cache(target, ids):
    """As a generation has it after a prompt."""
    cache = DynamicCache(config=target.config.get_text_config(decoder=True))
    binding = target.hyperdflash_binding
    binding.target.make_rewindable(cache, 16)
    target(ids, **{CACHE: cache})
    cache.activate_past_recording()
    cache.crop(0)
    return cache


def verified(target, kind, cache, row, tree):
    """A round, and its logits `[rows, vocabulary]`."""
    binding = target.hyperdflash_binding
    round_ = kind(binding.target, [row], [tree])
    capture = binding.residual.new_capture([-1])
    with binding.capturing_forward(capture, is_round=True):
        outputs = target(**round_.inputs({CACHE: cache, "use_cache": True}), return_dict=True)
    return round_, round_.logits(outputs, 0)[0], capture.pop()[0]


def from_scratch(target, ids):
    return target(ids).logits[0, -1]


def check_rounds(target, kind, ids, trees, chance, atol=2e-4):
    """Several rounds in a row: each node's logits, and what the cache goes on with."""
    bind(target)
    cache = filled_cache(target, ids[:, :-1])
    row = TokenBuffer(ids, 0, None, None)
    for tree in trees:
        round_, logits, residual = verified(target, kind, cache, row, tree)
        for node in range(-1, len(tree)):
            path = tree.tokens[tree.path(node)][None]
            expected = from_scratch(target, torch.cat([row.ids, path], dim=1))
            torch.testing.assert_close(logits[node + 1], expected, atol=atol, rtol=1e-3)
        kept = [0, *(node + 1 for node in tree.path(chance.randrange(-1, len(tree))))]
        kept = kept[: chance.randint(1, len(kept))]
        round_.accept(cache, [kept])
        residual = round_.residual(residual, 0, kept)
        for row_ in kept[1:]:
            row.append(int(tree.tokens[row_ - 1]))
        assert cache.get_seq_length() == row.ids.shape[1] and residual.shape[:2] == (1, len(kept))
        states = target_of(target).collapse(residual)
        torch.testing.assert_close(target_of(target).logits(states)[0], logits[kept], atol=atol, rtol=1e-3)
        row.append(chance.randrange(2, 60))
    return cache, row


def trees_of(draw_from: random.Random, count: int, most: int = 14, vocabulary: int = 60):
    trees = []
    for _ in range(count):
        parents, tokens = [], []
        for node in range(draw_from.randint(2, most)):
            parents.append(draw_from.randint(-1, node - 1))
            tokens.append(draw_from.randint(2, vocabulary))
        trees.append(DraftTree(torch.tensor(tokens), tuple(parents)))
    return trees


@pytest.mark.parametrize("family", [*FAMILIES, *ALSO_MASKED], ids=lambda family: family.__name__)
@pytest.mark.parametrize("length", mostly_nightly([21, 2]))
@torch.no_grad()
def test_every_node_is_judged_on_its_own_path(family, length):
    torch.manual_seed(0)
    target, chance = family().eval(), random.Random(length)
    bind(target)
    cache = filled_cache(target, prompt(4)) if target.config.model_type != "remote_v4" else SimpleNamespace()
    how = verification_of(target_of(target), cache)
    if target.config.model_type == "remote_v4":
        assert how == "chain"
        return
    assert how == ("mask" if family in MASKED or target.config.model_type == "deepseek_v4" else "fork")
    kinds = [MaskedRound, ForkedRound] if how == "mask" else [ForkedRound]
    trees = trees_of(chance, 4)
    for kind in kinds:
        check_rounds(target, kind, prompt(length), trees, chance, atol=1e-3)


def test_what_is_listed_is_what_is_tested():
    tested = [target_of(made()) for made in [*FAMILIES, *ALSO_MASKED]]
    listed = set().union(*(family.masked_types | family.forked_types for family in KNOWN))
    assert listed - LATER <= {family.config.model_type for family in tested}
    # A family with a file of its own says it there.
    plain = {family.config.model_type for family in tested if type(family) is Target}
    assert plain == Target.masked_types | Target.forked_types


def test_a_multimodal_class_around_gpt_oss_is_masked():
    vision = CLIPVisionConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                              image_size=8, patch_size=4)  # fmt: skip
    target = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=gpt_oss().config)).eval()
    assert target_of(target).tree_verification == "mask"
    check_rounds(target, MaskedRound, prompt(9), trees_of(random.Random(0), 2), random.Random(0))


LAYERS = [[SLIDING, CSA, HCA], [HCA, CSA, CSA], [CSA, SLIDING, HCA], [HCA, HCA, CSA]]
TARGETS = {(layers, window, topk): None for layers, window, topk in [(0, 8, 512), (1, 4, 3), (2, 5, 2), (3, 12, 1)]}


def v4(number: int):
    layers, window, topk = list(TARGETS)[number]
    rates = {CSA: (4, 2, 3, 4)[number], HCA: (8, 4, 6, 5)[number]}
    target = tiny_target(
        layer_types=LAYERS[layers], sliding_window=window, index_topk=topk, compress_rates=rates, index_n_heads=32
    )
    return bind(target)


V4S = [v4(number) for number in range(len(TARGETS))]
KEPT_STATES = ("buffer_kv", "buffer_gate", "compressed_kv", "overlap_kv", "overlap_gate")


# Takes seconds: each of 40 examples is many rounds of a DeepSeek-V4.
@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(range(len(V4S))),
    st.integers(2, 30),
    st.lists(parents_and_tokens(60, most=14), min_size=1, max_size=3),
    st.integers(0, 10**6),
)
@torch.no_grad()
def test_v4s_caches_are_what_the_accepted_path_alone_would_have_left(number, length, drawn, seed):
    target, chance = V4S[number], random.Random(seed)
    # Without padding, whose scores are all zero: of equals a prompt chooses others than one token at a time.
    trees = [DraftTree(torch.tensor(tokens) + 2, tuple(parents)) for parents, tokens in drawn if parents]
    cache, row = check_rounds(target, MaskedRound, prompt(length), trees, chance)
    alone = filled_cache(target, row.ids[:, :-1])
    for layer, expected in zip(cache.layers, alone.layers):
        assert layer.tree_state is None and layer.cumulative_length == expected.cumulative_length
        torch.testing.assert_close(layer.keys, expected.keys, atol=2e-5, rtol=1e-4)
        assert getattr(layer, "entry_count", None) == getattr(expected, "entry_count", None)
        for state in KEPT_STATES:
            torch.testing.assert_close(getattr(layer, state, {}), getattr(expected, state, {}), atol=2e-5, rtol=1e-4)
    back = min(layer.undoable_tokens for layer in cache.layers)
    assert back == cache.layers[0].undoable_tokens
    again = copy.deepcopy(cache)
    again.crop(-back)  # records of what was accepted are whole, too
    before = filled_cache(target, row.ids[:, : row.ids.shape[1] - 1 - back])
    more = prompt(6, seed=5)
    torch.testing.assert_close(
        target(more, **{CACHE: again}).logits, target(more, **{CACHE: before}).logits, atol=2e-4, rtol=1e-3
    )


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 12)), min_size=1, max_size=6))
def test_masks_of_a_chain_show_all_that_is_before(asked):
    """In any order: the mask that is made once grows."""
    masks = CausalMasks(torch.device("cpu"))
    for past, queries in asked:
        expected = [[key <= past + query for key in range(past + queries)] for query in range(queries)]
        assert masks(past, queries).tolist() == [[expected]]


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


def of_kind(kind):
    target = qwen3()
    target.__class__ = kind
    return target


def eager():
    target = qwen3()
    target.set_attn_implementation("eager")
    return target


PADDED = {"attention_mask": (torch.arange(18) >= 3).long()[None]}
CHAINS = {
    "layers that see all": (qwen3, {}, True),
    "windows": (mistral, {}, False),
    "padding": (qwen3, PADDED, False),
    "own preparation": (lambda: of_kind(OwnPreparation), {}, False),
    "eager attention": (eager, {}, False),
    "own argument": (lambda: of_kind(OwnArgument), {"token_type_ids": torch.zeros(1, 18, dtype=torch.long)}, False),
}


@pytest.mark.parametrize(("made", "options", "is_ours"), CHAINS.values(), ids=CHAINS)
def test_a_chains_mask_is_ours_only_where_layers_see_all(made, options, is_ours, monkeypatch):
    """Transformers makes those of windows and padding, and where more is asked for."""
    widths, inputs = [], CausalRound.inputs

    def recorded(round_, kwargs):
        own = inputs(round_, kwargs)
        assert ("attention_mask" in own) == (round_.width > 1)
        widths.append(round_.width)
        return own

    monkeypatch.setattr(CausalRound, "inputs", recorded)
    target, ids = made().eval(), prompt(9).repeat(1, 2)
    options = dict(do_sample=False, max_new_tokens=12, **options)
    expected = target.generate(ids, **options)
    text = bind(target).generate(ids, assistant_model=PromptLookupDrafter(target), **options)
    assert torch.equal(text, expected)
    assert bool(widths) == is_ours and (not is_ours or (1 in widths and max(widths) > 1))
