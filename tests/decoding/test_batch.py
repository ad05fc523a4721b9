"""Several texts in one `generate`: each as if it were alone, whatever the others are."""

from __future__ import annotations

import copy
import gc
import logging
import math
import threading
import weakref
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    Qwen3ForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
    pipeline,
)
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import utils
from transformers.generation.streamers import BaseStreamer

from hf_hyperdflash import HyperDFlashDrafter, Observer, PromptLookupDrafter, bind
from hf_hyperdflash.decoding import sequence
from hf_hyperdflash.decoding.bind import capture_residual
from hf_hyperdflash.decoding.stats import keep_trees
from hf_hyperdflash.drafters.blocks.path import BlockPath
from hf_hyperdflash.drafters.parts.heads import HEADS
from hf_hyperdflash.drafters.sampling import DraftRequest, DraftSampler
from hf_hyperdflash.targets.caches.name import CACHE, cache_of
from hf_hyperdflash.targets.caches.ragged import RaggedCache, RaggedLayer
from hf_hyperdflash.targets.registry import target_of

from ..conftest import mostly_nightly, prompt, tiny_drafter, tiny_target
from ..helpers import families
from ..helpers.drawn_tokens import assert_drawn_from
from ..helpers.headed_drafters import learned
from ..helpers.tree_drafters import KeepsByContext, RandomChains, RandomTrees, is_wide

NEW = 24
LENGTHS = (9, 3, 14, 1)


@pytest.fixture
def qwen3():
    torch.manual_seed(0)
    return bind(families.qwen3().eval())


def padded(lengths=LENGTHS, vocab_size=64):
    """Prompts of several lengths, padded on the left with token 0."""
    longest = max(lengths)
    rows = [prompt(length, seed=10 + row, vocab_size=vocab_size)[0] for row, length in enumerate(lengths)]
    ids = torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0)) for row in rows])
    mask = torch.stack([(torch.arange(longest) >= longest - len(row)).long() for row in rows])
    return ids, mask, rows


def alone(target, rows, **options):
    """Each prompt's text by plain decoding, without padding."""
    return [target.generate(row[None], **{"do_sample": False, "max_new_tokens": NEW, **options})[0] for row in rows]


def assert_rows(out, rows, texts, pad=0):
    """`out` is the prompts with their padding, what was written, and padding."""
    start = max(map(len, rows))
    assert len(out) == len(rows) and out.shape[1] == max(start + len(t) - len(r) for r, t in zip(rows, texts))
    for row, text, of_batch in zip(rows, texts, out):
        written = text[len(row) :]
        assert of_batch[start - len(row) : start].tolist() == row.tolist()
        assert of_batch[start : start + len(written)].tolist() == written.tolist()
        assert set(of_batch[start + len(written) :].tolist()) <= {pad}


@pytest.mark.parametrize("family", families.FAMILIES + families.ALSO_MASKED, ids=lambda family: family.__name__)
def test_every_row_is_its_text_alone(family):
    torch.manual_seed(0)
    target = bind(family().eval())
    ids, mask, rows = padded()
    texts = alone(target, rows)
    is_forkable = target.config.model_type != "remote_v4"
    for kind in (RandomTrees, RandomChains) if is_forkable else (RandomChains,):
        assert_every_row(target, kind, ids, mask, rows, texts)


def assert_every_row(target, kind, ids, mask, rows, texts):
    drafter = kind(target, texts, seed=1)
    out = target.generate(
        ids, attention_mask=mask, assistant_model=drafter, do_sample=False, max_new_tokens=NEW, pad_token_id=0
    )
    assert_rows(out, rows, texts)
    stats = drafter.last_stats
    assert [row.tokens for row in stats.rows] == [len(text) - len(row) for row, text in zip(rows, texts)]
    assert all(row.tau > 1.2 for row in stats.rows) and (kind is RandomChains or any(map(is_wide, drafter.trees)))
    assert stats.tokens == sum(row.tokens for row in stats.rows)
    assert stats.rounds == sum(row.rounds for row in stats.rows)
    for seconds in ("draft_seconds", "verify_seconds", "loop_seconds"):
        of_rows = [getattr(row, seconds) for row in stats.rows]
        assert min(of_rows) > 0 and math.isclose(getattr(stats, seconds), sum(of_rows))
    assert stats.draft_seconds + stats.verify_seconds < stats.loop_seconds


def test_a_batch_of_one_has_one_rows_statistics(qwen3):
    """As many as there are texts, so that a loop over batches needs no case for the last one."""
    ids, mask, rows = padded((9,))
    drafter = RandomChains(qwen3, alone(qwen3, rows), seed=1)
    qwen3.generate(ids, attention_mask=mask, assistant_model=drafter, do_sample=False, max_new_tokens=NEW)
    (row,) = drafter.last_stats.rows
    assert row == drafter.last_stats and row.tokens == NEW and row.rounds
    assert " rows" not in str(drafter.last_stats)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", [families.llama, families.gemma3], ids=lambda family: family.__name__)
def test_in_every_implementation_of_attention_that_takes_masks(family, implementation):
    torch.manual_seed(0)
    target = bind(family().eval())
    target.set_attn_implementation(implementation)
    ids, mask, rows = padded((5, 12))
    texts = alone(target, rows, max_new_tokens=8)
    options = dict(attention_mask=mask, do_sample=False, max_new_tokens=8)
    assert_rows(target.generate(ids, assistant_model=RandomTrees(target, texts), **options), rows, texts)


def test_rows_share_a_forward_where_a_mask_can_tell_them_apart(qwen3, monkeypatch):
    ids, mask, rows = padded()
    texts = alone(qwen3, rows)
    shapes, forward = [], type(qwen3).forward

    def counted(self, input_ids=None, **kwargs):
        shapes.append(tuple(input_ids.shape))
        return forward(self, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(type(qwen3), "forward", counted)
    drafter = RandomChains(qwen3, texts)
    qwen3.generate(ids, attention_mask=mask, assistant_model=drafter, do_sample=False, max_new_tokens=NEW)
    prompts, rounds = shapes[0], shapes[1:]
    assert prompts == (4, max(LENGTHS))
    most = max(row.rounds for row in drafter.last_stats.rows)
    assert len(rounds) == most + 1 or len(rounds) == most  # the last token may come without a draft
    batches = [batch for batch, _ in rounds]
    assert batches[0] == 4 and batches == sorted(batches, reverse=True) and batches[-1] < 4  # who ends leaves


def test_a_target_that_takes_no_masks_writes_row_after_row(qwen3, monkeypatch):
    monkeypatch.setattr(type(target_of(qwen3)), "tree_verification", "fork")
    ids, mask, rows = padded()
    texts = alone(qwen3, rows)
    drafter = RandomChains(qwen3, texts)
    out = qwen3.generate(ids, attention_mask=mask, assistant_model=drafter, do_sample=False, max_new_tokens=NEW)
    assert_rows(out, rows, texts)


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("family", [families.qwen3, families.mistral, families.deepseek_v4])
def test_the_drafter_takes_in_each_rows_own_residual(family, chunk):
    """What it is given of each row, put together, is the residual of the whole text."""

    torch.manual_seed(0)
    target = bind(family().eval())
    ids, mask, rows = padded()
    texts = alone(target, rows)
    drafter = KeepsByContext(target, texts)
    options = dict(do_sample=False, max_new_tokens=NEW, prefill_chunk_size=chunk)
    target.generate(ids, attention_mask=mask, assistant_model=drafter, **options)
    assert len(drafter.contexts) == len(rows)
    for context, text in zip(drafter.contexts, texts):
        residual, positions, following = (torch.cat(parts, dim=1) for parts in zip(*context.seen))
        with torch.no_grad(), capture_residual(target) as captured:
            target(text[None])
        assert positions[0].tolist() == list(range(len(text) - 1))
        assert following[0].tolist() == text[1:].tolist()
        torch.testing.assert_close(residual, captured[0][:, :-1], atol=1e-4, rtol=1e-4)
        assert chunk is None or context.seen[0][1].shape[1] <= chunk  # a prompt's residual is never held whole


def test_what_the_mask_hides_within_a_row_stays_hidden(qwen3):
    ids, mask, rows = padded((9, 6))
    mask[1, 5] = 0
    texts = [
        qwen3.generate(row[None], attention_mask=mask[i : i + 1, -len(row) :], do_sample=False, max_new_tokens=NEW)[0]
        for i, row in enumerate(rows)
    ]
    assert not torch.equal(texts[1], alone(qwen3, rows)[1])
    drafter = RandomChains(qwen3, texts)
    out = qwen3.generate(ids, attention_mask=mask, assistant_model=drafter, do_sample=False, max_new_tokens=NEW)
    assert_rows(out, rows, texts)


# What `generate` offers


@pytest.mark.parametrize("family", [families.qwen3, families.deepseek_v4])
def test_each_row_keeps_its_own_trees(family):
    torch.manual_seed(0)
    target = bind(family().eval())
    ids, mask, rows = padded()
    texts = alone(target, rows)
    drafter = RandomTrees(target, texts)
    with keep_trees():
        target.generate(ids, attention_mask=mask, assistant_model=drafter, do_sample=False, max_new_tokens=NEW)
    for stats, row, text in zip(drafter.last_stats.rows, rows, texts):
        assert len(stats.trees) == stats.rounds
        for tree in stats.trees:
            own = [] if tree.own is None else [tree.own]
            written = [tree.drafts.tokens[node].item() for node in tree.accepted] + own
            start = len(row) + tree.first
            assert text[start - 1 : start + len(written)].tolist() == [tree.anchor, *written]
    assert len(drafter.last_stats.trees) == sum(len(stats.trees) for stats in drafter.last_stats.rows)


def test_texts_that_end_early_are_padded(qwen3):
    ids, mask, rows = padded()
    ends = alone(qwen3, rows)[1][len(rows[1]) + 4].item()
    options = dict(eos_token_id=ends, pad_token_id=7)
    texts = alone(qwen3, rows, **options)
    assert len({len(text) - len(row) for row, text in zip(rows, texts)}) > 1
    drafter = RandomTrees(qwen3, texts)
    out = qwen3.generate(
        ids, attention_mask=mask, assistant_model=drafter, do_sample=False, max_new_tokens=NEW, **options
    )
    assert_rows(out, rows, texts, pad=7)


@pytest.mark.parametrize("new_tokens", [1, 2])
def test_short_texts(qwen3, new_tokens):
    ids, mask, rows = padded()
    texts = alone(qwen3, rows, max_new_tokens=new_tokens)
    options = dict(attention_mask=mask, do_sample=False, max_new_tokens=new_tokens)
    assert_rows(qwen3.generate(ids, assistant_model=RandomChains(qwen3, texts), **options), rows, texts)


def test_scores_and_logits_step_by_step(qwen3):
    ids = torch.cat([prompt(8, seed=seed) for seed in range(3)])
    ends = qwen3.generate(ids[:1], do_sample=False, max_new_tokens=NEW)[0, 13].item()
    options = dict(
        do_sample=False, max_new_tokens=NEW, return_dict_in_generate=True, output_scores=True, output_logits=True,
        repetition_penalty=1.2, eos_token_id=ends, pad_token_id=0,
    )  # fmt: skip
    plain = [qwen3.generate(row[None], **options) for row in ids]
    drafter = RandomTrees(qwen3, [result.sequences[0] for result in plain])
    out = qwen3.generate(ids, assistant_model=drafter, **options)
    lengths = [len(result.scores) for result in plain]
    assert cache_of(out) is None and len(out.scores) == len(out.logits) == max(lengths) > min(lengths)
    for name in ("scores", "logits"):
        for step, of_batch in enumerate(getattr(out, name)):
            assert of_batch.shape == (3, 64)
            for row, result in enumerate(plain):
                own = getattr(result, name)
                expected = own[step][0] if step < len(own) else torch.zeros(64)
                torch.testing.assert_close(of_batch[row], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("do_sample", [False, True])
def test_trees_are_drafted_under_a_repetition_penalty_that_knows_the_padding(qwen3, do_sample):
    """transformers' counts the padding of the rows that it is given, and a tree has more paths than that."""
    ids, mask, _ = padded()
    options = dict(attention_mask=mask, max_new_tokens=NEW, repetition_penalty=1.3, do_sample=do_sample)
    drafter = tiny_drafter(qwen3)
    drafter.bind(qwen3)
    with keep_trees():
        out = qwen3.generate(ids, assistant_model=drafter, tree_budget=8, **options)
    assert any(is_wide(kept.drafts) for row in drafter.last_stats.rows for kept in row.trees)
    if not do_sample:
        assert torch.equal(out, qwen3.generate(ids, assistant_model=drafter, **options))


def test_processors_and_criteria_see_one_row_at_a_time(qwen3):
    class EachPrefixOnce(LogitsProcessor):
        def __call__(self, input_ids, scores):
            seen.append(tuple(input_ids[0].tolist()))
            return scores + 3 * torch.nn.functional.one_hot((input_ids.sum(-1) + len(input_ids[0])) % 60, 64)

    class NoLongerThan(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.tensor([int(input_ids[0, -1]) in (5, 9)])

    ids = torch.cat([prompt(8, seed=seed) for seed in range(3)])
    options = dict(
        do_sample=False, max_new_tokens=NEW, pad_token_id=0, logits_processor=LogitsProcessorList([EachPrefixOnce()]),
        stopping_criteria=StoppingCriteriaList([NoLongerThan()]),
    )  # fmt: skip
    seen: list[tuple[int, ...]] = []
    texts = [qwen3.generate(row[None], **options)[0] for row in ids]
    alone_seen, seen[:] = sorted(seen), []
    out = qwen3.generate(ids, assistant_model=RandomTrees(qwen3, texts), **options)
    assert_rows(out, list(ids), texts)
    assert sorted(seen) == alone_seen


def test_a_criterion_that_looks_up_rows_by_number_ends_each_text_by_itself(qwen3):
    """As lm-eval's does, which keeps for each row whether it has ended, and stops when all have."""

    class AllRows(StoppingCriteria):
        def __init__(self):
            self.ended = [False] * len(LENGTHS)

        def __call__(self, input_ids, scores, **kwargs):
            for row in reversed(range(len(LENGTHS))):
                self.ended[row] = self.ended[row] or int(input_ids[row, -1]) < 24
            return all(self.ended)

    ids, mask, _ = padded()
    options = dict(attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
    expected = qwen3.generate(ids, **options, stopping_criteria=StoppingCriteriaList([AllRows()]))
    out = qwen3.generate(
        ids, assistant_model=RandomChains(qwen3, list(expected)), **options,
        stopping_criteria=StoppingCriteriaList([AllRows()]),
    )  # fmt: skip
    ends = []
    for row, plain in zip(out[:, ids.shape[1] :].tolist(), expected[:, ids.shape[1] :].tolist()):
        ends.append(next((n for n, token in enumerate(plain, 1) if token < 24), len(plain)))
        assert row[: ends[-1]] == plain[: ends[-1]] and not any(row[ends[-1] :])
    assert len(set(ends)) > 1 and max(ends) < 12


def test_allowed_tokens_know_which_prompt_they_are_for(qwen3):
    ids = prompt(8).repeat(2, 1)
    options = dict(do_sample=False, max_new_tokens=6, pad_token_id=0)
    out = qwen3.generate(
        ids, assistant_model=PromptLookupDrafter(qwen3), **options,
        prefix_allowed_tokens_fn=lambda row, text: [[20, 21], [30, 31]][row],
    )  # fmt: skip
    assert set(out[0, 8:].tolist()) <= {20, 21} and set(out[1, 8:].tolist()) <= {30, 31}


def test_several_texts_of_a_prompt_have_a_row_each(qwen3):
    """As in plain decoding; `prefix_allowed_tokens_fn` has a number for each prompt."""

    class ByNumber(LogitsProcessor):
        def __call__(self, input_ids, scores):
            for row, tokens in enumerate([(20, 30), (21, 31), (22, 32), (23, 33)]):
                scores[row] = scores[row].where(torch.isin(torch.arange(64), torch.tensor(tokens)), -torch.inf)
            return scores

    options = dict(do_sample=True, num_return_sequences=2, max_new_tokens=3, pad_token_id=0)
    for drafter in (None, PromptLookupDrafter(qwen3)):
        out = qwen3.generate(
            prompt(8).repeat(2, 1), assistant_model=drafter, **options, logits_processor=[ByNumber()],
            prefix_allowed_tokens_fn=lambda number, text: [range(20, 30), range(30, 40)][number],
        )  # fmt: skip
        assert out[:, 8:].tolist() == [[20] * 3, [21] * 3, [32] * 3, [33] * 3]


def of_eight_tokens(family):
    """A target with so few tokens that the distribution of two of them can be counted, and far from even."""
    torch.manual_seed(0)
    target = family().eval()
    if target.config.vocab_size > 8:
        target.resize_token_embeddings(8)
        target.config.vocab_size = 8
    with torch.no_grad():
        target.get_output_embeddings().weight *= 1.5 / target(prompt(9, vocab_size=8)).logits.std()
    return target


@torch.no_grad()
def law_of_two(target, row):
    """`[8 * 8]`, of the first two tokens after a prompt."""
    first = target(row[None]).logits[0, -1].softmax(-1)
    texts = [torch.cat([row, torch.tensor([token])])[None] for token in range(8)]
    return torch.cat([first[token] * target(text).logits[0, -1].softmax(-1) for token, text in enumerate(texts)])


def small_qwen3():
    return families.qwen3(layers=1)


def small_deepseek_v4():
    """Its compressor's windows of 4 close within the texts."""
    return tiny_target(vocab_size=8, layer_types=["sliding_attention", "compressed_sparse_attention"])


# How many texts are drawn of each prompt: in one forward of all rows, or row after row with a cache of each, which
# takes longer.
DRAWN = [
    (small_qwen3, None, 12 * 50), (small_qwen3, "auto", 12 * 50), (small_deepseek_v4, "auto", 2 * 50),
    (families.granite_hybrid, None, 2 * 50),
]  # fmt: skip


@pytest.mark.parametrize(("family", "drafts", "drawn"), mostly_nightly(DRAWN))
def test_drawn_texts_have_the_targets_distribution_in_every_row(family, drafts, drawn):
    """Two prompts, several texts of each, drafted well for the one and badly for the other. A right sampler fails once
    in 250,000 times at most, whatever its seed: of four counts each once in a million."""
    target = of_eight_tokens(family)
    drafter = HyperDFlashDrafter.from_target(target, num_hidden_layers=1, mask_token_id=1).eval()
    drafter.bind(target)
    ids, mask, rows = padded((5, 2), vocab_size=8)
    texts, neighbours, accepted = (Counter(), Counter()), (Counter(), Counter()), []
    for _ in range(drawn // 50):
        out = target.generate(
            ids, attention_mask=mask, assistant_model=drafter, do_sample=True, num_return_sequences=50, top_k=0,
            max_new_tokens=3, num_assistant_tokens=drafts,
        )  # fmt: skip
        assert out.shape == (100, 8)  # a prompt's texts stand together
        assert torch.equal(out[:, :5], ids.repeat_interleave(50, dim=0))
        for row, (one, other) in enumerate(out[:, 5:7].tolist()):
            texts[row // 50][one * 8 + other] += 1
        for pair, (one, other) in enumerate(out[:, 5].view(50, 2).tolist()):
            neighbours[pair // 25][one * 8 + other] += 1
        stats = drafter.last_stats
        assert [row.tokens for row in stats.rows] == [3] * 100 and stats.tokens == 300
        assert stats.rounds == sum(row.rounds for row in stats.rows) == len(stats.accepted)
        assert all(len(row.accepted) == row.rounds and row.written for row in stats.rows)
        accepted += [sum(row.accepted) for row in stats.rows]
    assert set(accepted) == {0, 1}  # the second token is drafted, the third never
    for row, of_texts, of_neighbours in zip(rows, texts, neighbours):
        law = law_of_two(target, row)
        assert_drawn_from(law, of_texts)
        first = law.view(8, 8).sum(1)  # a prompt's texts know nothing of each other
        assert_drawn_from(torch.outer(first, first).flatten(), of_neighbours)


DRAFTERS = [
    dict(),
    dict(confidence_head=True),
    dict(sliding_window=6),
    dict(sliding_window=6, window_from="slot", causal_layers="all"),
    dict(sliding_window=5, window_from="slot", layer_types=["full_attention", "sliding_attention"]),
    dict(conv_kernel_size=2, conv_group_size=16),
    dict(sample_from_anchor=True),
    dict(draft_vocab_size=20),
    *(dict(sequential_head=kind, confidence_head=True, head_rank=8) for kind in HEADS),
    dict(sequential_head="state", head_rank=8, head_candidates=5),
]


@pytest.mark.parametrize("fields", DRAFTERS, ids=lambda fields: " ".join(f"{k}={v}" for k, v in fields.items()) or "-")
@torch.no_grad()
def test_one_pass_drafts_for_each_text_what_a_pass_of_its_own_would(qwen3, fields):
    """Round by round, whatever was new to each context; also where processors or trees are asked for."""
    drafter = learned(tiny_drafter(qwen3, **fields))
    chance, streams = torch.Generator().manual_seed(2), drafter.config.num_streams
    texts = [prompt(length, seed=length) for length in (4, 17, 9)]
    contexts = [drafter.new_context() for _ in texts]
    banned = LogitsProcessorList([SuppressTokensLogitsProcessor([3, 4, 5, 6])])
    samplers = [
        DraftSampler(LogitsProcessorList(), False),
        DraftSampler(banned, False),
        DraftSampler(LogitsProcessorList(), False, tree_budget=9),
    ]
    most = drafter.max_draft_tokens
    for kind in (0, 1, 0, 2, 0):
        wanted = []
        for row, (text, context) in enumerate(zip(texts, contexts)):
            end = text.shape[1] - 1
            residual = torch.randn(1, end - context.end, streams, 64, generator=chance)
            positions = torch.arange(context.end, end)[None]
            if end > context.end:
                drafter.extend(target_of(qwen3), context, residual, positions, text[:, context.end + 1 :])
                context.end = end
            count = most - row if kind == 0 else most
            everywhere = torch.arange(end + 1)[None]
            wanted.append(DraftRequest(context, text, everywhere, count, samplers[kind]))
        alone = [
            drafter.propose(target_of(qwen3), *each._replace(context=copy.deepcopy(each.context))) for each in wanted
        ]
        trees = drafter.propose_batch(target_of(qwen3), wanted)
        for each, own in zip(trees, alone):
            assert each.tokens.tolist() == own.tokens.tolist() and each.parents == own.parents
            assert (each.confidence is None) == (own.confidence is None)
            if own.confidence is not None:
                torch.testing.assert_close(each.confidence, own.confidence, atol=1e-5, rtol=1e-4)
        for row, tree in enumerate(trees):  # as if so many drafts were accepted
            accepted = tree.tokens[tree.path(len(tree) - 1)][: 1 + (3 * row + kind) % most]
            texts[row] = torch.cat([texts[row], accepted[None], torch.tensor([[7 + row]])], dim=1)
    assert all(context.pending is None for context in contexts)


@torch.no_grad()
def test_a_draft_is_drawn_from_what_its_tree_says(qwen3):
    drafter = learned(tiny_drafter(qwen3, sequential_head="state", head_rank=8))
    ids = torch.cat([prompt(6), prompt(6, seed=1)])
    contexts = [drafter.new_context() for _ in ids]
    sampler = DraftSampler(LogitsProcessorList(), True)
    for context in contexts:
        drafter.extend(target_of(qwen3), context, torch.zeros(1, 5, 1, 64), torch.arange(5)[None], ids[:1, 1:])
    wanted = [
        DraftRequest(context, row[None], torch.arange(6)[None], 3, sampler) for context, row in zip(contexts, ids)
    ]
    observed, trees = Counter(), []
    for _ in range(600):
        trees = drafter.propose_batch(target_of(qwen3), wanted)
        observed[int(trees[1].tokens[0])] += 1
        assert all(len(tree.q) == 3 for tree in trees)
    assert_drawn_from(trees[1].q[0], observed)
    # What follows knows what was drawn: the step's own distribution after that token.
    for each, tree in zip(wanted, trees):
        hidden = drafter(
            qwen3.get_input_embeddings()(torch.tensor([[int(each.ids[0, -1])] + [drafter.config.mask_token_id] * 6])),
            torch.arange(5, 12)[None],
            copy.deepcopy(each.context),
        )[:, drafter.config.first_slot :]
        path = BlockPath(drafter, target_of(qwen3), hidden)
        token = each.ids[:, -1]
        for k in range(3):
            q = path(k, token, torch.zeros(1, dtype=torch.long)).logits.float().softmax(-1)[0]
            torch.testing.assert_close(q, tree.q[k], atol=1e-5, rtol=1e-4)
            token = tree.tokens[k : k + 1]


def test_every_row_teaches_a_drafter_that_learns():
    target = families.qwen3().eval()
    drafter = HyperDFlashDrafter.from_target(target, num_hidden_layers=1).eval()
    drafter.bind(target)
    ids, mask, _ = padded()
    with drafter.adapt(target, policy="never") as adaptation:
        target.generate(ids, attention_mask=mask, assistant_model=drafter, do_sample=False, max_new_tokens=NEW)
    assert [decision.new_tokens for decision in adaptation.log] == [row.tokens for row in drafter.last_stats.rows]
    assert len(adaptation.replay) == 4


class Row(Observer):
    """Hears of one row."""

    target_layer_ids = (-1, 0)

    def __init__(self):
        self.tokens, self.rounds, self.stats = [], [], None

    def add_tokens(self, *told):
        self.tokens.append(told)

    def add_round(self, context, tree, logits, accepted):
        self.rounds.append((logits, accepted))

    def end(self, stats):
        self.stats = stats


class SomeRows(Observer):
    """Hears of all rows but the first."""

    def __init__(self):
        self.rows = []

    def begin(self, target, do_sample):
        self.rows.append(Row() if self.rows else None)
        return self.rows[-1]


def test_who_hears_of_a_row_hears_of_that_one_alone(qwen3):
    """Also of more layers than drafting reads, where nobody hears of the first row."""
    ids, mask, rows = padded()
    texts = alone(qwen3, rows)
    drafter = RandomTrees(qwen3, texts)
    drafter.observer = observer = SomeRows()
    qwen3.generate(ids, attention_mask=mask, assistant_model=drafter, do_sample=False, max_new_tokens=NEW)
    assert len(observer.rows) == len(rows) and observer.rows[0] is None
    for heard, stats, row, text in list(zip(observer.rows, drafter.last_stats.rows, rows, texts))[1:]:
        residual, positions, following, _ = zip(*heard.tokens)
        with torch.no_grad(), capture_residual(qwen3, (-1, 0)) as captured:
            qwen3(text[None])
        torch.testing.assert_close(torch.cat(residual, dim=1), captured[0][:, :-1], atol=1e-4, rtol=1e-4)
        assert torch.cat(positions, dim=1)[0].tolist() == list(range(len(text) - 1))
        assert torch.cat(following, dim=1)[0].tolist() == text[1:].tolist()
        assert all(is_written == (of[0, 0] >= len(row)) for _, of, _, is_written in heard.tokens)
        at = len(row)
        for logits, accepted in heard.rounds:
            written = [logits[node + 1].argmax().item() for node in (-1, *accepted)]
            assert text[at : at + len(written)].tolist() == written[: len(text) - at]
            at += len(written)
        assert at >= len(text) and heard.stats is stats


class Clocked(RandomChains):
    """Its drafts take a second, and what it takes in two, by a clock of its own.

    Attributes:
        time: What the clock says.
        spent: Seconds in the drafter.
    """

    time = spent = 0

    def _spend(self, seconds):
        self.time, self.spent = self.time + seconds, self.spent + seconds

    def extend(self, *args):
        self._spend(2)

    def propose(self, *args):
        self._spend(1)
        return super().propose(*args)


def test_seconds_that_rows_share_count_in_equal_parts_and_the_prompts_not_at_all(qwen3, monkeypatch):
    ids, mask, rows = padded((9, 3))
    texts = alone(qwen3, rows)
    drafter, forwards = Clocked(qwen3, texts), []
    monkeypatch.setattr(sequence, "clock", lambda device: lambda: drafter.time)

    def takes_four(*_):
        forwards.append(drafter.spent)
        drafter.time += 4

    handle = qwen3.register_forward_hook(takes_four)
    qwen3.generate(ids, attention_mask=mask, assistant_model=drafter, do_sample=False, max_new_tokens=NEW)
    handle.remove()
    stats, in_prompt = drafter.last_stats, 2 * len(rows)
    assert forwards[0] == 0 and forwards[1] == in_prompt + 2  # which has two drafts
    assert stats.draft_seconds == pytest.approx(drafter.spent - in_prompt)
    assert stats.verify_seconds == pytest.approx(4 * (len(forwards) - 1))
    assert stats.loop_seconds == pytest.approx(drafter.time - 4 - in_prompt)
    for row in stats.rows:
        assert 0 < row.draft_seconds + row.verify_seconds == pytest.approx(row.loop_seconds, rel=0.2)


def test_a_row_that_is_written_is_given_up_before_the_next_fills_a_cache(qwen3, monkeypatch):
    monkeypatch.setattr(type(target_of(qwen3)), "tree_verification", "fork")  # row after row
    ids, mask, rows = padded()
    caches, alive = weakref.WeakSet(), []

    def look(module, args, kwargs):
        gc.collect()
        caches.add(kwargs[CACHE])
        alive.append(len(caches))

    drafter = RandomChains(qwen3, alone(qwen3, rows))
    handle = qwen3.register_forward_pre_hook(look, with_kwargs=True)
    qwen3.generate(ids, attention_mask=mask, assistant_model=drafter, do_sample=False, max_new_tokens=4)
    handle.remove()
    assert len(alive) > len(rows) and set(alive) == {1}


class Steered(Qwen3ForCausalLM):
    """A target with an argument of its own for each text, `[batch, config.vocab_size]`."""

    def forward(self, *args, steer=None, **kwargs):
        outputs = super().forward(*args, **kwargs)
        assert len(steer) == len(outputs.logits)
        outputs.logits = outputs.logits + steer[:, None]
        return outputs


@pytest.mark.parametrize("how", ["mask", "fork"])
def test_each_row_has_its_own_of_the_targets_arguments(how, monkeypatch):
    """In the rows' shared forwards, and on every path of a tree that is forked."""
    target = families.qwen3().eval()
    target.__class__ = Steered
    ids, mask, rows = padded()
    steer = 2 * torch.randn(len(rows), 64)
    texts = [alone(target, [row], steer=steer[at : at + 1])[0] for at, row in enumerate(rows)]
    assert not torch.equal(texts[1], alone(target, rows[1:2], steer=steer[:1])[0])
    drafter = RandomTrees(bind(target), texts)
    monkeypatch.setattr(type(target_of(target)), "tree_verification", how)
    options = dict(attention_mask=mask, do_sample=False, max_new_tokens=NEW)
    assert_rows(target.generate(ids, steer=steer, assistant_model=drafter, **options), rows, texts)


def test_threads_may_write_batches_at_once(qwen3):
    ids, mask, rows = padded()
    texts = alone(qwen3, rows)
    outputs = {}

    def work(seed):
        drafter = RandomTrees(qwen3, texts, seed=seed)
        outputs[seed] = qwen3.generate(
            ids, attention_mask=mask, assistant_model=drafter, do_sample=False, max_new_tokens=NEW
        )

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(3):
        assert_rows(outputs[seed], rows, texts)


def test_auto_is_no_reason_to_fail(qwen3):
    ids, mask, rows = padded()
    texts = alone(qwen3, rows)
    drafter = HyperDFlashDrafter.from_target(qwen3).eval()
    options = dict(attention_mask=mask, do_sample=False, max_new_tokens=NEW)
    for asked in (dict(num_assistant_tokens="auto"), dict(tree_budget="auto"), dict(tree_budget=9)):
        out = qwen3.generate(ids, assistant_model=drafter, **options, **asked)
        assert_rows(out, rows, texts)
        assert drafter.last_stats.nodes <= 9 * drafter.last_stats.rounds


def test_a_pipeline_batches(qwen3):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel({chr(65 + i): i for i in range(64)}, unk_token="A"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="A", padding_side="left")
    drafter = HyperDFlashDrafter.from_target(qwen3).eval()
    pipe = pipeline("text-generation", model=qwen3, tokenizer=tokenizer)
    texts = ["CDEFG", "HIJ", "KLMNOPQ"]
    options = dict(do_sample=False, max_new_tokens=12)
    expected = [pipe(text, **options) for text in texts]
    assert pipe(texts, batch_size=3, assistant_model=drafter, **options) == expected
    assert len(drafter.last_stats.rows) == 3
    drawn = pipe(
        texts, batch_size=3, assistant_model=drafter, do_sample=True, num_return_sequences=2, max_new_tokens=5
    )
    assert [len(of) for of in drawn] == [2, 2, 2] and len(drafter.last_stats.rows) == 6
    assert all(one["generated_text"].startswith(text) for text, of in zip(texts, drawn) for one in of)
    drafter.bind(qwen3, as_default=True)
    drafter.remember(None)
    assert pipe(texts, batch_size=3, **options) == expected and len(drafter.last_stats.rows) == 3


@pytest.mark.parametrize(
    "asked, expected",
    [
        (dict(num_return_sequences=2, do_sample=False), "`num_return_sequences` is 2 and `do_sample` False"),
        (dict(num_return_sequences=-1), "`num_return_sequences` is -1, expected a whole number"),
        (dict(num_return_sequences=0), "`num_return_sequences` is 0, expected a whole number"),
        ({CACHE: DynamicCache()}, f"`{CACHE}` was passed for 4 texts"),
        (dict(streamer=BaseStreamer()), "`streamer` was passed for 4 texts"),
        (dict(output_hidden_states=True), "`output_hidden_states` was asked for of 4 texts"),
        (dict(output_attentions=True), "`output_attentions` was asked for of 4 texts"),
        (dict(attention_mask=torch.tensor([[1] * 14] * 2 + [[1] * 13 + [0]] * 2)), "ends in padding in row 2"),
    ],
)
def test_what_cannot_be_done_for_several_texts_is_refused_before_any_work(qwen3, monkeypatch, asked, expected):
    monkeypatch.setattr(type(qwen3), "forward", lambda *a, **k: pytest.fail("the target ran"))
    ids, mask, _ = padded()
    drafter = RandomChains(qwen3, [])
    with pytest.raises(ValueError, match=expected):
        qwen3.generate(ids, **{"attention_mask": mask, "max_new_tokens": 3, **asked}, assistant_model=drafter)


def test_a_configuration_is_not_doubled_by_arguments(qwen3):
    """Which transformers warns of, and means to refuse."""
    ids, mask, _ = padded()
    config = GenerationConfig(do_sample=True, num_return_sequences=2, max_new_tokens=3)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    utils.logger.addHandler(handler)
    type(utils.logger).warning_once.cache_clear()
    try:
        out = qwen3.generate(
            ids, attention_mask=mask, assistant_model=RandomChains(qwen3, []), generation_config=config
        )
    finally:
        utils.logger.removeHandler(handler)
    assert len(out) == 2 * len(ids) and config.num_return_sequences == 2
    assert [text for text in said if "num_return_sequences" in text] == []


@pytest.mark.parametrize("returned", [1, 2])
def test_beams_are_searched_without_the_drafter(qwen3, returned):
    """As of one text: transformers has no beams with drafts, and warns."""
    ids, mask, _ = padded()
    options = dict(attention_mask=mask, num_beams=2, num_return_sequences=returned, do_sample=False, max_new_tokens=4)
    drafter = RandomChains(qwen3, [])
    out = qwen3.generate(ids, assistant_model=drafter, **options)
    assert torch.equal(out, qwen3.generate(ids, **options)) and len(out) == returned * len(ids)
    assert drafter.last_stats is None


def test_a_default_drafts_for_batches(qwen3):
    ids, mask, rows = padded()
    texts = alone(qwen3, rows)
    drafter = RandomChains(qwen3, texts)
    drafter.bind(qwen3, as_default=True)
    options = dict(attention_mask=mask, do_sample=False, max_new_tokens=NEW)
    assert_rows(qwen3.generate(input_ids=ids, **options), rows, texts)
    assert len(drafter.last_stats.rows) == len(rows) and drafter.last_stats.tau > 1.2


def test_plain_generation_of_a_bound_target_is_transformers_own(qwen3):
    ids, mask, _ = padded()
    options = dict(attention_mask=mask, do_sample=False, max_new_tokens=6)
    bound = qwen3.generate(ids, **options)
    torch.manual_seed(0)
    assert torch.equal(bound, families.qwen3().eval().generate(ids, **options))


# The cache


def padded_cache(lengths, windows=(None, 3)):
    """A cache of all rows, padded on the left, whose keys tell row, token and layer."""
    cache, longest = DynamicCache(), max(lengths)
    for layer, window in enumerate(windows):
        keys = torch.cat([keys_of(row, range(length - longest, length)) for row, length in enumerate(lengths)])
        keys = keys[:, :, -(window or longest) :]
        cache.update(keys, -keys, layer)
    return cache


def keys_of(row, tokens):
    """`[1, 2, tokens, 4]`."""
    return torch.tensor([100.0 * row + token for token in tokens]).view(1, 1, -1, 1).expand(1, 2, -1, 4).clone()


@given(st.data())
def test_a_ragged_cache_holds_what_each_rows_own_would(data):
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    cache, windows = RaggedCache(padded_cache(lengths), lengths), (None, 3)
    # By row and layer, the tokens that should be there.
    held = [
        [list(range(length - (length if w is None else min(length, w)), length)) for w in windows]
        for length in lengths
    ]
    names, fresh = list(range(len(lengths))), 20
    for _ in range(data.draw(st.integers(1, 5))):
        width = data.draw(st.integers(1, 4))
        new = [list(range(fresh, fresh + width)) for _ in names]
        fresh += width
        states = torch.cat([keys_of(row, tokens) for row, tokens in zip(names, new)])
        for index, layer in enumerate(cache.layers):
            keys, values = cache.update(states, -states, index)
            assert torch.equal(keys, -values) and keys.shape[2] == layer.get_seq_length() + width
            for place, row in enumerate(names):
                columns = keys[place, 0, : layer.lengths[place], 0].tolist()
                assert columns == [100.0 * row + token for token in held[place][index]]
            assert torch.equal(keys[:, :, -width:], states)
        paths = st.lists(st.integers(1, width - 1), unique=True).map(sorted) if width > 1 else st.just([])
        kept = [[0, *data.draw(paths)] for _ in names]
        cache.accept(kept)
        for place, positions in enumerate(kept):
            for of_layer in held[place]:
                of_layer += [new[place][position] for position in positions]
        left = data.draw(st.lists(st.sampled_from(range(len(names))), min_size=1, unique=True).map(sorted))
        cache.batch_select_indices(torch.tensor(left))
        names, held = [names[place] for place in left], [held[place] for place in left]


def test_a_layer_of_ours_is_not_what_transformers_makes_caches_of():
    assert Cache(layers=[RaggedLayer(layer, [2]) for layer in padded_cache([2]).layers]).get_seq_length() == 2
    target = families.llama().eval()
    cache = cache_of(target.generate(prompt(4), do_sample=False, max_new_tokens=2, return_dict_in_generate=True))
    assert not any(isinstance(layer, RaggedLayer) for layer in cache.layers)


def test_deepseek_v4_writes_row_after_row_with_its_gate():
    target = tiny_target(hidden_size=64)
    ids, mask, rows = padded()
    texts = alone(target, rows)
    drafter = HyperDFlashDrafter.from_target(target).eval()
    drafter.bind(target)
    out = target.generate(ids, attention_mask=mask, assistant_model=drafter, do_sample=False, max_new_tokens=NEW)
    assert_rows(out, rows, texts)
    assert not target_of(target).can_join_sequences
