"""The indexer's choice: against one `topk` per position over the entries of its time, and in generation."""

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4CSACompressor, DeepseekV4IndexerScorer

from hf_hyperdflash import PromptLookupDrafter, bind, load_target
from hf_hyperdflash.portable.target import one_token_entries
from hf_hyperdflash.targets import deepseek_v4
from hf_hyperdflash.targets.caches.name import CACHE, cache_of
from hf_hyperdflash.targets.caches.tree_state import best_visible
from hf_hyperdflash.targets.deepseek_v4 import visible_of_chain

from ..conftest import CSA, HCA, SLIDING, prompt, tiny_drafter, tiny_target
from ..helpers.tree_drafters import RandomChains, RandomTrees

TIES = dict(index_n_heads=1, index_topk=3, layer_types=[CSA, SLIDING, CSA, HCA])


def naive(scores, positions, rate, top_k):
    """As so many forwards of one token."""
    rows = []
    for row, position in zip(scores[0], positions):
        there = row[: (position + 1) // rate]
        found = there.topk(min(top_k, len(there))).indices.tolist()
        rows.append(found + [-1] * (top_k - len(found)))
    return torch.tensor([rows])


@pytest.mark.parametrize("rate", [1, 4])
@pytest.mark.parametrize("end", [8, 40, 41, 42, 43, 203])
@pytest.mark.parametrize("seq", [2, 5, 7])
def test_every_position_chooses_as_if_it_were_the_last(rate, end, seq):
    positions, visible = list(range(end - seq, end)), visible_of_chain(end - seq, seq, rate)
    for top_k in (1, 3, 16):
        scores = torch.randint(0, 3, (1, seq, end // rate)).float()  # nearly all equal
        expected = naive(scores, positions, rate, top_k)
        assert torch.equal(one_token_entries(scores, torch.tensor([positions]), rate, top_k), expected)
        top_k = min(top_k, end // rate)
        assert torch.equal(best_visible(scores[0], visible, top_k), expected[0, :, :top_k])


@settings(deadline=None, max_examples=200)
@given(
    st.integers(0, 40) | st.integers(600, 800),  # of many, torch looks for few in another way
    st.integers(0, 6),
    st.integers(1, 8),
    st.integers(1, 12),
    st.integers(0, 10**6),
)
def test_a_node_of_a_tree_chooses_among_what_it_sees_as_if_there_were_no_more(before, own, rows, top_k, seed):
    torch.manual_seed(seed)
    scores = torch.randint(0, 9, (rows, before + own)).relu().float()  # many alike, as an indexer's zeros are
    seen = torch.rand(rows, own) < 0.5
    top_k = min(top_k, before + own)
    found = best_visible(scores, seen, top_k)
    assert found.shape == (rows, top_k)
    for row in range(rows):
        there = [*range(before), *(before + i for i in range(own) if seen[row, i])]
        count = min(top_k, len(there))
        chosen = scores[row, there].topk(count).indices.tolist()
        assert found[row].tolist() == [there[i] for i in chosen] + [-1] * (top_k - count)


@torch.no_grad()
def test_scores_of_some_entries_at_a_time_are_the_scorers(monkeypatch):
    monkeypatch.setattr(deepseek_v4, "_TERMS_ON_CPU", 200)
    target = tiny_target()
    scorer = next(module for module in target.modules() if isinstance(module, DeepseekV4IndexerScorer))
    config = target.config
    queries = torch.randn(1, 5, config.index_n_heads, config.index_head_dim)
    entries, states = torch.randn(1, 83, config.index_head_dim), torch.randn(1, 5, config.hidden_size)
    found = deepseek_v4.index_scores(scorer, queries[0], entries[0], states[0])
    torch.testing.assert_close(found, scorer(queries, entries, states)[0])


@pytest.mark.parametrize("drafts", [RandomChains, RandomTrees])
def test_attention_of_rounds_reads_what_was_chosen_alone_unless_it_is_shown(drafts):
    target, read = tiny_target(1, hidden_size=64, index_topk=2), []
    plain = target.generate(prompt(240), do_sample=False, max_new_tokens=20, output_logits=True,
                            return_dict_in_generate=True)  # fmt: skip
    drafter = drafts(bind(target), [plain.sequences[0]])
    for module in target.modules():
        if isinstance(module, DeepseekV4CSACompressor):
            module.register_forward_hook(lambda module, args, output: read.append(output[0].shape[2]))
    for is_shown in (False, True):
        read.clear()
        shown = dict(output_logits=True, output_attentions=is_shown, return_dict_in_generate=True)
        out = target.generate(prompt(240), assistant_model=drafter, do_sample=False, max_new_tokens=20, **shown)
        assert torch.equal(out.sequences, plain.sequences)
        torch.testing.assert_close(torch.stack(out.logits), torch.stack(plain.logits), atol=1e-4, rtol=1e-4)
        entries = 240 // target.config.compress_rates[CSA]
        assert all((count >= entries) == is_shown for count in read[1:]) and read[0] == entries


@pytest.mark.parametrize("seed", range(2))
def test_a_next_turns_prompt_is_run_as_stock_runs_it(seed):
    """Over all entries at once, on the cache that an assisted turn left: where scores tie, stock chooses otherwise
    there than for one token at a time."""
    target = tiny_target(seed, **TIES)
    ids = torch.randint(2, 64, (1, 60))
    drafter, options = tiny_drafter(target), dict(do_sample=False, max_new_tokens=30, return_dict_in_generate=True)
    plain = target.generate(ids, **options)
    turn = torch.cat([plain.sequences, torch.randint(2, 64, (1, 40))], dim=1)
    options |= dict(max_new_tokens=1, output_logits=True)
    expected = target.generate(turn, **{CACHE: cache_of(plain)}, **options)
    drafter.bind(target)
    options["assistant_model"] = drafter
    first = target.generate(ids, **{**options, "max_new_tokens": 30})
    assert torch.equal(first.sequences, plain.sequences)
    again = target.generate(turn, **{CACHE: cache_of(first)}, **options)
    torch.testing.assert_close(again.logits[0], expected.logits[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_that_transformers_runs(tmp_path, dtype):
    """Loaded in bfloat16 from transformers 5.20 on; cast by hand, norms and all, in either."""
    tiny_target().to(getattr(torch, dtype)).save_pretrained(tmp_path)
    assert load_target(tmp_path, dtype="float32").dtype == torch.float32
    made = [tiny_target().to(getattr(torch, dtype))]
    if dtype == "bfloat16" and tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 20):
        made += [load_target(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)]
    for target in made:
        drafter = PromptLookupDrafter(bind(target))
        assert target.generate(prompt(9), max_new_tokens=4, assistant_model=drafter).shape[1] == 13
