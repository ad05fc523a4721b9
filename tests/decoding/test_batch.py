"""Several texts in one call: what they share, and what each has of its own. Their texts are in `test_requests`."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    SuppressTokensLogitsProcessor,
    pipeline,
)
from transformers.cache_utils import DynamicCache
from transformers.generation import stopping_criteria, utils

from hf_hyperdflash import HyperDFlashDrafter, Observer, PromptLookupDrafter, bind, capture_residual
from hf_hyperdflash.decoding import sequence
from hf_hyperdflash.decoding.stats import keep_trees
from hf_hyperdflash.drafters.blocks.path import BlockPath
from hf_hyperdflash.drafters.parts.heads import HEADS
from hf_hyperdflash.drafters.sampling import DraftRequest, DraftSampler
from hf_hyperdflash.targets.caches.name import CACHE
from hf_hyperdflash.targets.caches.ragged import RaggedCache
from hf_hyperdflash.targets.registry import target_of

from ..conftest import prompt, tiny_drafter
from ..helpers import families
from ..helpers.drawn_tokens import assert_drawn_from
from ..helpers.headed_drafters import learned
from ..helpers.tree_drafters import RandomChains, RandomTrees, is_wide
from ..refusals.test_decoding import restarting
from .test_requests import letters

NEW = 24
LENGTHS = (9, 3, 14, 1)
GREEDILY = {"do_sample": False, "pad_token_id": 0}


@pytest.fixture
def qwen3():
    torch.manual_seed(0)
    return bind(families.qwen3().eval())


@pytest.fixture(params=[families.qwen3, families.deepseek_v4])
def target(request):
    """One whose rows share a forward, and one whose rows are written one after the other."""
    torch.manual_seed(0)
    return bind(request.param().eval())


def padded(lengths=LENGTHS, vocab_size=64):
    """Prompts of several lengths, padded on the left with token 0."""
    longest = max(lengths)
    rows = [prompt(length, seed=10 + row, vocab_size=vocab_size)[0] for row, length in enumerate(lengths)]
    ids = torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0)) for row in rows])
    mask = torch.stack([(torch.arange(longest) >= longest - len(row)).long() for row in rows])
    return ids, mask, rows


def prompts(rows):
    return torch.cat([prompt(8, seed=seed) for seed in range(rows)])


def alone(target, rows, **options):
    """Each prompt's text by plain decoding, without padding."""
    return [target.generate(row[None], **{"do_sample": False, "max_new_tokens": NEW, **options})[0] for row in rows]


def rows_of(out, length=8):
    """What was written in each row, up to the padding."""
    return [[token for token in row[length:].tolist() if token] for row in out]


# Rows of processors, criteria and arguments


class ByNumber(LogitsProcessor):
    """One grammar a row: row 0 writes even tokens, row 1 odd ones. It looks a grammar up by its row's number."""

    def __call__(self, input_ids, scores):
        for row, parity in enumerate([0, 1, 0, 1]):
            scores[row, 1 - parity :: 2] = -torch.inf
        return scores


class Longest(StoppingCriteria):
    """Each row its own length, `[rows]`."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= 8 + torch.tensor([3, 9, 5, 12])


class AllRows(StoppingCriteria):
    """As lm-eval's, which keeps for each row whether it has ended, and stops when all have."""

    def __init__(self):
        self.ended = [False] * 4

    def __call__(self, input_ids, scores, **kwargs):
        for row in reversed(range(4)):
            self.ended[row] = self.ended[row] or int(input_ids[row, -1]) < 16
        return all(self.ended)


@pytest.mark.parametrize("criterion", [Longest, AllRows])
@pytest.mark.parametrize("kind", [RandomChains, RandomTrees])
def test_each_row_is_asked_about_in_its_place(target, kind, criterion):
    """Plain decoding writes on in all rows until all have ended; with drafts each ends by itself."""

    def asked():
        return dict(**GREEDILY, max_new_tokens=20, logits_processor=[ByNumber()], stopping_criteria=[criterion()])

    ids = prompts(4)
    expected = target.generate(ids, **asked())
    out = target.generate(ids, assistant_model=kind(target, list(expected)), **asked())
    lengths = [3, 9, 5, 12]
    if criterion is AllRows:
        lengths = [next((n for n, token in enumerate(row, 1) if token < 16), 20) for row in expected[:, 8:].tolist()]
    assert len({*lengths}) > 2
    for row, plain, length in zip(out[:, 8:].tolist(), expected[:, 8:].tolist(), lengths):
        assert row[:length] == plain[:length] and not any(row[length:])


def test_several_texts_of_a_prompt_have_a_row_each(qwen3):
    """For processors, as in plain decoding; `prefix_allowed_tokens_fn` gets the number of the prompt, which it gets in
    plain decoding, too, from some transformers 5 on."""

    class OfRow(LogitsProcessor):
        def __call__(self, input_ids, scores):
            for row, tokens in enumerate([(20, 30), (21, 31), (22, 32), (23, 33)]):
                scores[row] = scores[row].where(torch.isin(torch.arange(64), torch.tensor(tokens)), -torch.inf)
            return scores

    options = dict(do_sample=True, num_return_sequences=2, max_new_tokens=3, logits_processor=[OfRow()])
    allowed = dict(prefix_allowed_tokens_fn=lambda number, text: [range(20, 30), range(30, 40)][number])
    for asked, first, second in (({}, (0, 10), (0, 10)), (allowed, (0,), (10,))):
        drafter = PromptLookupDrafter(qwen3)
        out = qwen3.generate(prompt(8).repeat(2, 1), assistant_model=drafter, pad_token_id=0, **options, **asked)
        for row, tokens in enumerate(out[:, 8:].tolist()):
            assert set(tokens) <= {20 + row + by for by in (first if row < 2 else second)}


class ThinkingBudget(LogitsProcessor):
    """After so many calls a text goes on with its answer, the token 7 and then what follows."""

    def __init__(self, calls):
        self.calls, self.made = calls, 0

    def __call__(self, input_ids, scores):
        self.made += 1
        return scores.scatter(1, torch.full_like(input_ids[:, :1], 7), 100.0) if self.made == self.calls else scores


class Answered(StoppingCriteria):
    def __init__(self, budget):
        self.budget = budget

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), self.budget.made >= 6)


class Cancelled(StoppingCriteria):
    """Stops all texts when somebody says so; here it does after some calls."""

    def __init__(self):
        self.event, self.calls = threading.Event(), 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        if self.calls == 6:
            self.event.set()
        return torch.full((len(input_ids),), self.event.is_set())


@pytest.mark.parametrize("do_sample", [False, True])
def test_processor_and_criterion_share_in_each_row_what_they_share(target, do_sample):
    """The caller's stay as they are; what a criterion hears of other threads reaches every text."""
    budget, cancelled = ThinkingBudget(4), Cancelled()
    several = dict(num_return_sequences=3) if do_sample else {}
    for criterion in (Answered(budget), cancelled):
        out = target.generate(
            prompts(2), assistant_model=PromptLookupDrafter(target), do_sample=do_sample, max_new_tokens=20,
            pad_token_id=0, logits_processor=[budget], stopping_criteria=[criterion], **several,
        )  # fmt: skip
        rows = len(out) if criterion is not cancelled else 1  # later rows may not have begun
        assert out.shape == (6 if do_sample else 2, 8 + 6) and (out[:rows, 8 + 3] == 7).all()
    assert budget.made == 0 and cancelled.event.is_set()
    # One text needs no copy: what cannot be copied is the caller's own.
    held = dict(stopping_criteria=[Holding()], **GREEDILY, max_new_tokens=6)
    expected = target.generate(prompt(8), **held)
    assert torch.equal(target.generate(prompt(8), assistant_model=PromptLookupDrafter(target), **held), expected)


class Holding(StoppingCriteria):
    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_models_and_their_weights_are_shared_by_the_copies(target):
    class Judge(LogitsProcessor):
        def __init__(self, model):
            self.models, self.weight, self.calls = {"judge": [model]}, 0.5 * model.weight, []

        def __call__(self, input_ids, scores):
            self.calls.append(len(input_ids[0]))
            used.append((id(self), self.models["judge"][0], self.weight))
            return scores + self.models["judge"][0](scores.float())

    judge, used = Judge(torch.nn.Linear(64, 64)), []  # with a weight that `copy.deepcopy` refuses
    asked = dict(**GREEDILY, max_new_tokens=20, logits_processor=[judge])
    expected = target.generate(prompts(2), **asked)
    judge.calls.clear()
    used.clear()
    out = target.generate(prompts(2), assistant_model=RandomChains(target, list(expected)), **asked)
    assert torch.equal(out, expected) and judge.calls == []
    assert len({copy for copy, _, _ in used} - {id(judge)}) == 2
    assert all(model is judge.models["judge"][0] and weight is judge.weight for _, model, weight in used)


@pytest.mark.parametrize("rows", [2, 3])  # also as many as there are axes
def test_each_row_gets_its_own_positions_of_several_axes(rows):
    own = families.qwen3_5().eval()
    target, mask = bind(copy.deepcopy(own)), torch.ones(rows, 8, dtype=torch.long)
    mask[0, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0).repeat(3, 1, 1)
    options = dict(attention_mask=mask, position_ids=positions, max_new_tokens=8, **GREEDILY)
    written = target.generate(prompts(rows), assistant_model=PromptLookupDrafter(target), **options)
    assert torch.equal(written, own.generate(prompts(rows), **options))


@pytest.mark.parametrize("family", [families.qwen3_5, families.qwen3])  # row after row, and in shared forwards
def test_rows_share_the_time_of_a_call(family, monkeypatch):
    target, seconds = bind(family().eval()), [0]
    target.register_forward_hook(lambda *_: seconds.append(seconds[-1] + 1))  # a forward is a second
    monkeypatch.setattr(stopping_criteria, "time", SimpleNamespace(time=lambda: seconds[-1]))
    drafter = PromptLookupDrafter(target)
    target.generate(prompts(3), assistant_model=drafter, max_new_tokens=60, do_sample=False, max_time=4)
    # The forward that is running then is brought to its end, as is the prompt's of each text that is still to begin.
    assert 4 < seconds[-1] <= 5 + 2
    assert all(row.tokens for row in drafter.last_stats.rows)


@pytest.mark.parametrize("name", ["inputs", "input_ids"])
@pytest.mark.parametrize("by_config", [True, False])
@pytest.mark.parametrize("family", [families.qwen3, families.qwen3_5])
def test_a_padded_batch_is_healed_as_one(family, by_config, name):
    """Token healing reads rows anew from their text, and of a row alone its padding would be lost."""
    tokenizer = letters(pairs=True, bos_token="B")  # of which one may take the place of a text's last letter
    own = family().eval()
    target = bind(copy.deepcopy(own))
    texts = tokenizer(["CDEFG", "HIJ", "KLMNOPQ"], padding=True, return_tensors="pt")
    settings = dict(max_new_tokens=6, token_healing=True, **GREEDILY)
    asked = dict(generation_config=GenerationConfig(**settings)) if by_config else settings
    asked |= {name: texts.input_ids, "attention_mask": texts.attention_mask, "tokenizer": tokenizer}
    expected = own.generate(**asked)
    assert not torch.equal(expected[:, :7], texts.input_ids)
    drafter = PromptLookupDrafter(target)
    assert torch.equal(target.generate(**asked, assistant_model=drafter), expected)
    assert len(drafter.last_stats.rows) == 3 and texts.input_ids.shape == (3, 7)


def test_each_row_is_guided_by_its_own_negative_prompt(target):
    """Its context grows with the text, so each row needs one."""
    ids, negative = prompts(2), torch.stack([prompt(3, seed=5)[0], prompt(3, seed=6)[0]])
    options = dict(**GREEDILY, max_new_tokens=8, guidance_scale=1.5)
    alone = [
        target.generate(ids[row : row + 1], negative_prompt_ids=negative[row : row + 1], **options)[0]
        for row in range(2)
    ]
    written = target.generate(
        ids, negative_prompt_ids=negative, assistant_model=RandomChains(target, alone), **options
    )
    assert written.tolist() == [row.tolist() for row in alone]


def test_what_a_processor_generates_is_no_part_of_the_batch(qwen3):
    drafter, said = PromptLookupDrafter(qwen3), []

    class Asks(LogitsProcessor):
        def __call__(self, input_ids, scores):
            drafts = PromptLookupDrafter(qwen3)
            said.append(
                GenerationMixin.generate(qwen3, prompt(9), assistant_model=drafts, **GREEDILY, max_new_tokens=3)
            )
            return scores

    options = dict(**GREEDILY, max_new_tokens=3)
    out = qwen3.generate(prompts(2), assistant_model=drafter, logits_processor=[Asks()], **options)
    assert torch.equal(out, qwen3.generate(prompts(2), **options))
    assert said and all(torch.equal(each, qwen3.generate(prompt(9), **options)) for each in said)


@pytest.mark.parametrize("count", [1, 3])
def test_texts_may_start_with_the_targets_first_token(target, count):
    """Which transformers puts there where there is no prompt."""
    drafter = PromptLookupDrafter(target)
    options = dict(do_sample=True, top_k=1, bos_token_id=5, pad_token_id=0, max_new_tokens=8)
    out = target.generate(assistant_model=drafter, num_return_sequences=count, **options)
    assert torch.equal(out, target.generate(torch.tensor([[5]] * count), **options))


def test_up_to_where_its_cache_starts_anew_each_row_is_its_text_alone():
    """The target counts the tokens of a row that it sees, not its padding; further it is refused."""
    target = bind(restarting().eval())
    ids, mask, rows = padded((26, 13))
    drafter = PromptLookupDrafter(target, max_matching_ngram_size=1)
    out = target.generate(ids, attention_mask=mask, assistant_model=drafter, do_sample=False, max_new_tokens=11)
    for row, written, text in zip(rows, out, alone(target, rows, max_new_tokens=11)):
        assert written[26:].tolist() == text[len(row) :].tolist()


# Forwards


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


# Who calls a batch


def test_a_pipeline_batches(qwen3):
    """By an argument, several texts of each, and with a drafter that is the target's default."""
    drafter = HyperDFlashDrafter.from_target(qwen3).eval()
    pipe = pipeline("text-generation", model=qwen3, tokenizer=letters())
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


def test_a_configuration_is_not_doubled_by_arguments(qwen3, monkeypatch):
    """Which transformers warns of, and means to refuse."""
    ids, mask, _ = padded()
    config = GenerationConfig(do_sample=True, num_return_sequences=2, max_new_tokens=3)
    said = []
    monkeypatch.setattr(utils.logger, "warning_once", lambda text, *_: said.append(text))
    drafter = RandomChains(qwen3, [])
    out = qwen3.generate(ids, attention_mask=mask, assistant_model=drafter, generation_config=config)
    assert len(out) == 2 * len(ids) and config.num_return_sequences == 2
    assert not any("num_return_sequences" in text for text in said)


@pytest.mark.parametrize("returned", [1, 2])
def test_beams_are_searched_without_the_drafter(qwen3, returned):
    """As of one text: transformers has no beams with drafts, and warns."""
    ids, mask, _ = padded()
    options = dict(attention_mask=mask, num_beams=2, num_return_sequences=returned, do_sample=False, max_new_tokens=4)
    drafter = RandomChains(qwen3, [])
    out = qwen3.generate(ids, assistant_model=drafter, **options)
    assert torch.equal(out, qwen3.generate(ids, **options)) and len(out) == returned * len(ids)
    assert drafter.last_stats is None


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
