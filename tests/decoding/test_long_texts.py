"""Nothing in a round grows with the text but attention."""

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.cache_utils import DynamicLayer

from hf_hyperdflash import PromptLookupDrafter
from hf_hyperdflash.drafters.sampling import DraftRequest, DraftSampler
from hf_hyperdflash.targets.caches.round_cache import RoundLayer
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.trees.tree import ANCHOR, DraftTree

from ..conftest import mostly_nightly, prompt, tiny_drafter, tiny_target
from ..helpers import families
from ..helpers.families import made
from ..helpers.growing_work import grown, work_of_rounds
from ..helpers.unrolled import unrolled

SHORT, LONG = 192, 1536  # tokens, multiples of every compression rate
# Masks, which attention reads, and the choice of an indexer, which is a part of its attention.
MASKS = {
    "round_cache.py mask",
    "context.py block_mask",
    "context.py causal_mask",
    "unrolling.py branch",
    "block_attention.py sees_context",
}
INDEXERS = {
    "deepseek_v4.py index_scores",
    "tree_state.py best_visible",
    "deepseek_v4.py _choose",
    "deepseek_v4.py _leave_out",
    "deepseek_v4.py _see_own_path",
}


def dense(**fields):
    return made(
        "qwen3", intermediate_size=48, num_hidden_layers=3, num_key_value_heads=2, max_position_embeddings=2048,
        **fields,
    ).eval()  # fmt: skip


def work(monkeypatch, target, drafter, length, rows=1, **options):
    drafter.bind(target)
    ids = torch.cat([prompt(length, seed=row) for row in range(rows)])
    mask = torch.ones_like(ids)
    for row in range(rows):  # texts of different lengths
        mask[row, :row] = 0
    options = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": 0, "attention_mask": mask, **options}
    return work_of_rounds(monkeypatch, lambda: target.generate(ids, assistant_model=drafter, **options))


# As a target makes them itself; and of Qwen4-Exp copies of three positions a token, which its indexer reads.
STOCK_MASKS = {
    "masking_utils.py sdpa_mask",
    "masking_utils.py causal_mask_function",
    "masking_utils.py eager_mask",
}
POSITIONS = {"cache_utils.py batch_repeat_interleave", "cache_utils.py batch_select_indices"}
# With layers of full attention beside a running state, or an indexer.
HYBRIDS = [
    families.qwen3_next, families.hunyuan_v4, families.falcon_h1, families.qwen3_5, families.granite_hybrid,
    families.bamba, families.nemotron_h, families.glm5_next, *[families.qwen4_exp] * families.REWINDABLE_QWEN4,
]  # fmt: skip
KINDS = {
    "block": lambda target: tiny_drafter(target, num_draft_tokens=4),
    "window": lambda target: tiny_drafter(target, num_draft_tokens=4, sliding_window=24),
    "eagle3": lambda target: unrolled("eagle3", target, target_layer_ids=[0, 1, 2], max_blocks=3),
    "specblock": lambda target: unrolled("specblock", target, target_layer_ids=[0, 1, 2], block_size=2),
}
CASES = {
    "chain": ("block", {}, set()),
    "tree": ("block", {"tree_budget": 9}, set()),
    "sampled": ("block", {"do_sample": True, "temperature": 0.7, "top_k": 20}, set()),
    "sampled tree": ("block", {"do_sample": True, "tree_budget": 9}, set()),
    "batch": ("block", {"rows": 2}, MASKS),
    "batch, window": ("window", {"rows": 2}, {"round_cache.py mask"}),
    "eagle3": ("eagle3", {"tree_budget": 9}, MASKS),
    "specblock": ("specblock", {}, MASKS),
}


@pytest.mark.parametrize("name", CASES)
def test_of_a_dense_target_nothing_grows_but_attention(name, monkeypatch):
    kind, options, masks = CASES[name]
    target = dense()
    drafter = KINDS[kind](target)
    short, long = (work(monkeypatch, target, drafter, length, **options) for length in (SHORT, LONG))
    assert grown(short, long, LONG - SHORT) <= masks
    assert sum(short.values()) > 100  # something is counted


class TwoPaths(PromptLookupDrafter):
    """Drafts the same in each round."""

    def draft(self, target, requests):
        tree = DraftTree(torch.tensor([2, 3, 4, 5]), (ANCHOR, ANCHOR, 0, 1))
        return [tree.first(4 if each.num_drafts > 1 else 2) for each in requests]


@pytest.mark.parametrize("paths", ["chain", "paths"])
@pytest.mark.parametrize("family", mostly_nightly(HYBRIDS, kept=2), ids=lambda family: family.__name__)
def test_of_a_hybrid_target_nothing_grows_but_attention(family, paths, monkeypatch):
    target = family().eval()
    target.generation_config.eos_token_id = None
    drafter = TwoPaths(target) if paths == "paths" else tiny_drafter(target, num_draft_tokens=4)
    short, long = (work(monkeypatch, target, drafter, length) for length in (SHORT, LONG))
    positions = POSITIONS if family is families.qwen4_exp and paths == "paths" else set()
    assert grown(short, long, LONG - SHORT) <= STOCK_MASKS | positions


@pytest.mark.parametrize("options", [{}, {"tree_budget": 9}], ids=["chain", "tree"])
def test_of_a_deepseek_v4_nothing_grows_but_attention(options, monkeypatch):
    target = tiny_target(max_position_embeddings=2048)
    drafter = tiny_drafter(target, num_draft_tokens=4)
    short, long = (work(monkeypatch, target, drafter, length, **options) for length in (SHORT, LONG))
    assert grown(short, long, LONG - SHORT) <= INDEXERS


@pytest.mark.parametrize(
    "fields", [{}, {"window_from": "slot"}, {"causal_layers": "all"}], ids=["anchor", "slot", "causal"]
)
@torch.no_grad()
def test_texts_that_differ_in_length_are_drafted_for_as_each_alone_within_a_window(fields):
    target = dense()
    drafter, seen = tiny_drafter(target, num_draft_tokens=4, sliding_window=9, **fields), target_of(target)
    for weight in drafter.parameters():
        weight.add_(torch.randn_like(weight) / 8)

    def request(length):
        generator, context = torch.Generator().manual_seed(length), drafter.new_context()
        residual, ids = torch.randn(1, length, 1, 64, generator=generator), prompt(length + 1, seed=length)
        drafter.extend(seen, context, residual, torch.arange(length)[None], ids[:, 1:])
        sampler = DraftSampler(LogitsProcessorList(), do_sample=False)
        return DraftRequest(context, ids, torch.arange(length + 1)[None], 4, sampler)

    lengths = 70, 41, 12
    alone = [drafter.draft(seen, [request(length)])[0].tokens.tolist() for length in lengths]
    together = drafter.draft(seen, [request(length) for length in lengths])
    assert [tree.tokens.tolist() for tree in together] == alone


def round_layer(length, **options):
    layer = DynamicLayer()
    layer.update(torch.zeros(1, 1, length, 1), torch.zeros(1, 1, length, 1))
    return RoundLayer(layer, None, [length], torch.tensor([length]), 8, **options)


def test_keys_of_a_text_that_grows_are_seldom_copied():
    layer, copied = round_layer(1000), 0
    for length in range(1000, 9000, 3):
        before = layer.capacity
        layer.make_room(length, 8)
        copied += before if layer.capacity > before else 0
    assert copied < 20 * 9000
    assert layer.capacity < 1.1 * 9000


def test_a_text_whose_end_is_known_has_no_columns_behind_it():
    layer = round_layer(1000, max_columns=1020)
    layer.make_room(1012, 8)
    assert layer.capacity == layer.keys.shape[2] == 1020
    layer.make_room(1012, 12)  # a tree is wider than was to be expected
    assert layer.capacity == 1024
