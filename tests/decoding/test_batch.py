"""Several texts in one call: what they share, and what each has of its own. Their texts are in `test_requests`."""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor, StoppingCriteria, pipeline
from transformers.generation import stopping_criteria

from hf_hyperdflash import HyperDFlashDrafter, PromptLookupDrafter, bind
from hf_hyperdflash.decoding.stats import keep_trees
from hf_hyperdflash.targets.caches.name import CACHE

from ..conftest import penalty_counts_padding, prompt, tiny_drafter
from ..fuzz_trees import padded_on_the_left
from ..helpers import families
from ..helpers.draft_trees import noted_drafts
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


def padded(lengths=LENGTHS):
    """Prompts of several lengths, as arguments of `generate`, and one by one."""
    rows = [prompt(length, seed=10 + row)[0] for row, length in enumerate(lengths)]
    ids, mask = padded_on_the_left(rows)
    return {"input_ids": ids, "attention_mask": mask}, rows


def prompts(rows):
    return torch.cat([prompt(8, seed=seed) for seed in range(rows)])


def alone(target, rows, new=NEW):
    """Each prompt's text by plain decoding, without padding."""
    return [target.generate(row[None], do_sample=False, max_new_tokens=new)[0] for row in rows]


@pytest.mark.skipif(penalty_counts_padding(), reason="this transformers penalizes padding of a batch")
@pytest.mark.parametrize("budget", [None, 6])
def test_what_reads_the_text_reads_the_same_of_a_padded_row(budget, qwen3, monkeypatch):
    """A repetition penalty and a shortest length: the drafts of each text alone, round by round."""
    drafter, drafted = tiny_drafter(qwen3), noted_drafts(monkeypatch)
    drafter.bind(qwen3)
    inputs, rows = padded((9, 3, 14))
    options = dict(do_sample=False, max_new_tokens=12, tree_budget=budget, repetition_penalty=1.3)

    for row in rows:
        qwen3.generate(row[None], assistant_model=drafter, min_length=len(row) + 6, **options)
    shortest = inputs["input_ids"].shape[1] + 6
    qwen3.generate(**inputs, assistant_model=drafter, min_length=shortest, pad_token_id=0, **options)
    assert len(drafted) > 12 and all(len(found) == 2 and found[0] == found[1] for found in drafted.values())


# Rows of processors and criteria


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


class OfRow(LogitsProcessor):
    def __call__(self, input_ids, scores):
        for row, tokens in enumerate([(20, 30), (21, 31), (22, 32), (23, 33)]):
            scores[row] = scores[row].where(torch.isin(torch.arange(64), torch.tensor(tokens)), -torch.inf)
        return scores


def test_several_texts_of_a_prompt_have_a_row_each(qwen3):
    """For processors, as in plain decoding; `prefix_allowed_tokens_fn` gets the number of the prompt, as there
    from some transformers 5 on. A configuration's number of texts is the same as an argument's."""
    config = GenerationConfig(do_sample=True, num_return_sequences=2, max_new_tokens=3, pad_token_id=0)
    allowed = dict(prefix_allowed_tokens_fn=lambda number, text: [range(20, 30), range(30, 40)][number])
    for asked, first, second in (({}, (0, 10), (0, 10)), (allowed, (0,), (10,))):
        for settings in (dict(generation_config=config), config.to_diff_dict()):
            drafter = PromptLookupDrafter(qwen3)
            ids = prompt(8).repeat(2, 1)
            out = qwen3.generate(ids, assistant_model=drafter, logits_processor=[OfRow()], **settings, **asked)
            assert out.shape == (4, 11) and config.num_return_sequences == 2
            for row, tokens in enumerate(out[:, 8:].tolist()):
                assert set(tokens) <= {20 + row + by for by in (first if row < 2 else second)}


class Cancelled(StoppingCriteria):
    """Stops all texts when somebody says so; here it does after some calls."""

    def __init__(self):
        self.event, self.calls = threading.Event(), 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        if self.calls == 6:
            self.event.set()
        return torch.full((len(input_ids),), self.event.is_set())


def test_copies_share_events_models_and_weights(target):
    """What one hears of other threads reaches every text; what is large is not copied."""

    class Judge(LogitsProcessor):
        def __init__(self, model):
            self.models, self.weight, self.calls = {"judge": [model]}, 0.5 * model.weight, []

        def __call__(self, input_ids, scores):
            self.calls.append(len(input_ids[0]))
            used.append((id(self), self.models["judge"][0], self.weight))
            return scores + self.models["judge"][0](scores.float())

    cancelled, lookup, options = Cancelled(), PromptLookupDrafter(target), GREEDILY | {"max_new_tokens": 20}
    out = target.generate(prompts(2), assistant_model=lookup, stopping_criteria=[cancelled], **options)
    assert out.shape == (2, 8 + 6) and cancelled.event.is_set() and cancelled.calls == 0
    judge, used = Judge(torch.nn.Linear(64, 64)), []  # with a weight that `copy.deepcopy` refuses
    expected = target.generate(prompts(2), logits_processor=[judge], **options)
    judge.calls.clear()
    used.clear()
    drafter = RandomChains(target, list(expected))
    assert torch.equal(
        target.generate(prompts(2), assistant_model=drafter, logits_processor=[judge], **options), expected
    )
    assert judge.calls == [] and len({of for of, _, _ in used} - {id(judge)}) == 2
    assert all(model is judge.models["judge"][0] and weight is judge.weight for _, model, weight in used)


class Holding(StoppingCriteria):
    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_what_cannot_be_copied_is_the_callers_own_for_one_text(qwen3):
    held = dict(stopping_criteria=[Holding()], **GREEDILY, max_new_tokens=6)
    expected = qwen3.generate(prompt(8), **held)
    assert torch.equal(qwen3.generate(prompt(8), assistant_model=PromptLookupDrafter(qwen3), **held), expected)


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
    batch, rows = padded((26, 13))
    drafter = PromptLookupDrafter(target, max_matching_ngram_size=1)
    out = target.generate(**batch, assistant_model=drafter, do_sample=False, max_new_tokens=11)
    for row, written, text in zip(rows, out, alone(target, rows, 11)):
        assert written[26:].tolist() == text[len(row) :].tolist()


@pytest.mark.parametrize("do_sample", [False, True])
def test_trees_are_drafted_under_a_repetition_penalty_that_knows_the_padding(qwen3, do_sample):
    """transformers' counts the padding of the rows that it is given, and a tree has more paths than that."""
    options = dict(**padded()[0], max_new_tokens=NEW, repetition_penalty=1.3, do_sample=do_sample)
    drafter = tiny_drafter(qwen3)
    drafter.bind(qwen3)
    with keep_trees():
        out = qwen3.generate(assistant_model=drafter, tree_budget=8, **options)
    assert any(is_wide(kept.drafts) for row in drafter.last_stats.rows for kept in row.trees)
    assert do_sample or torch.equal(out, qwen3.generate(assistant_model=drafter, **options))


# Forwards, seconds and memory


def test_rows_share_a_forward_where_a_mask_can_tell_them_apart(qwen3):
    batch, rows = padded()
    drafter, sizes = RandomChains(qwen3, alone(qwen3, rows)), []
    handle = qwen3.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    qwen3.generate(**batch, assistant_model=drafter, do_sample=False, max_new_tokens=NEW)
    handle.remove()
    rounds = max(row.rounds for row in drafter.last_stats.rows)
    assert len(sizes) - 1 - rounds in (0, 1)  # the prompts'; the last token may come without a draft
    assert sizes[0] == sizes[1] == 4 > sizes[-1] and sizes == sorted(sizes, reverse=True)  # who ends leaves


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
    batch, rows = padded((9, 3))
    drafter, forwards = Clocked(qwen3, alone(qwen3, rows)), []
    monkeypatch.setattr(time, "perf_counter", lambda: drafter.time)

    def takes_four(*_):
        forwards.append(drafter.spent)
        drafter.time += 4

    qwen3.register_forward_hook(takes_four)
    qwen3.generate(**batch, assistant_model=drafter, do_sample=False, max_new_tokens=NEW)
    stats, in_prompt = drafter.last_stats, 2 * len(rows)
    assert forwards[0] == 0 and forwards[1] == in_prompt + 2  # which has two drafts
    assert stats.draft_seconds == pytest.approx(drafter.spent - in_prompt)
    assert stats.verify_seconds == pytest.approx(4 * (len(forwards) - 1))
    assert stats.loop_seconds == pytest.approx(drafter.time - 4 - in_prompt)
    for row in stats.rows:
        assert 0 < row.draft_seconds + row.verify_seconds == pytest.approx(row.loop_seconds, rel=0.2)


def test_a_row_that_is_written_is_given_up_before_the_next_fills_a_cache():
    target = bind(families.qwen3_next().eval())  # row after row
    batch, rows = padded()
    caches, alive = weakref.WeakSet(), []

    def look(module, args, kwargs):
        gc.collect()
        caches.add(kwargs[CACHE])
        alive.append(len(caches))

    drafter = RandomChains(target, alone(target, rows, 4))
    target.register_forward_pre_hook(look, with_kwargs=True)
    target.generate(**batch, assistant_model=drafter, do_sample=False, max_new_tokens=4)
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
    drafter._remember(None)
    assert pipe(texts, batch_size=3, **options) == expected and len(drafter.last_stats.rows) == 3


@pytest.mark.parametrize("returned", [1, 2])
def test_beams_are_searched_without_the_drafter(qwen3, returned):
    """As of one text: transformers has no beams with drafts, and warns."""
    options = dict(**padded()[0], num_beams=2, num_return_sequences=returned, do_sample=False, max_new_tokens=4)
    drafter = RandomChains(qwen3, [])
    out = qwen3.generate(assistant_model=drafter, **options)
    assert torch.equal(out, qwen3.generate(**options)) and len(out) == returned * 4
    assert drafter.last_stats is None
