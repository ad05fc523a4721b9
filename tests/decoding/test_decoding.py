import copy
import math
import pickle
from collections import Counter

import pytest
import torch
from transformers import (
    BitsAndBytesConfig,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from hf_hyperdflash import PromptLookupDrafter, bind, unbind
from hf_hyperdflash.decoding import continuation
from hf_hyperdflash.decoding.stats import SpeculationStats
from hf_hyperdflash.targets.caches.name import CACHE, cache_of
from hf_hyperdflash.trees.tree import DraftTree

from ..conftest import CSA, HCA, MIXES, half_right, half_right_about, perfect, prompt, tiny_drafter, tiny_target
from ..helpers.drawn_tokens import assert_drawn_from
from ..helpers.families import mistral, qwen3
from ..helpers.greedy_options import GREEDY_OPTIONS

# Of the first mix, whose windows are of 4 and 8 tokens, about where they close; of each other one from none to many.
LENGTHS = [(1, 2, 7, 8, 9, 31, 130, 300), (1, 8, 31, 300), (2, 9, 130), (1, 7, 31), (2, 8, 130)]


@pytest.mark.parametrize(
    ("mix", "length"), [(mix, length) for mix, lengths in enumerate(LENGTHS) for length in lengths]
)
def test_greedy_is_lossless(mix, length):
    window, rates = [4, 8, 16, 7, 5][mix], [{CSA: 4, HCA: 8}, {CSA: 2, HCA: 4}, {CSA: 3, HCA: 6}][mix % 3]
    target = tiny_target(mix, layer_types=MIXES[mix], sliding_window=window, compress_rates=rates, hidden_size=64)
    ids = prompt(length, seed=mix)
    expected = target.generate(ids, do_sample=False, max_new_tokens=30)
    for drafter in (tiny_drafter(target), perfect(target, expected[0])):
        drafter.bind(target)
        assert torch.equal(target.generate(ids, do_sample=False, max_new_tokens=30, assistant_model=drafter), expected)
    stats = drafter.last_stats
    assert stats.accepted[:-1] == [6] * (stats.rounds - 1) and stats.emitted[:-1] == [7] * (stats.rounds - 1)
    assert stats.tokens == 30


@pytest.fixture
def pair(target, drafter):
    """A bound target and a drafter that is right about half of the time, so that rounds end everywhere."""
    drafter.bind(target)
    return target, drafter


@pytest.fixture
def wide():
    """A target whose LM head has full row rank (hidden = vocabulary), bound; its drafters can be told what to say."""
    return bind(tiny_target(3, hidden_size=64))


@pytest.mark.parametrize("name", GREEDY_OPTIONS)
def test_greedy_options(wide, name):
    options, ids = GREEDY_OPTIONS[name], prompt(20)
    expected = wide.generate(ids, **options)
    drafter = half_right_about(wide, expected[0])
    assert torch.equal(wide.generate(ids, assistant_model=drafter, **options), expected)


def test_end_tokens_and_stopping_criteria_inside_a_block(wide):
    ids = prompt(20)
    text = wide.generate(ids, do_sample=False, max_new_tokens=40)[0, 20:].tolist()

    class StopAfter(StoppingCriteria):
        """A criterion with a memory: it must see every prefix once, as in plain decoding."""

        def __init__(self, count):
            self.count, self.lengths = count, []

        def __call__(self, input_ids, scores, **kwargs):
            self.lengths.append(input_ids.shape[1])
            return torch.tensor([len(self.lengths) >= self.count])

    for position in range(2, 16):
        options = dict(max_new_tokens=40, do_sample=False, eos_token_id=[text[position], 1])
        expected = wide.generate(ids, **options)
        drafter = perfect(wide, torch.cat([ids[0], torch.tensor(text)]))
        assert torch.equal(wide.generate(ids, assistant_model=drafter, **options), expected)
        plain, assisted = StopAfter(position), StopAfter(position)
        options = dict(max_new_tokens=40, do_sample=False)
        expected = wide.generate(ids, stopping_criteria=StoppingCriteriaList([plain]), **options)
        out = wide.generate(
            ids, stopping_criteria=StoppingCriteriaList([assisted]), assistant_model=drafter, **options
        )
        assert torch.equal(out, expected) and assisted.lengths == plain.lengths


def test_stop_strings_do_not_run_over(wide):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {chr(65 + i): i for i in range(64)}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="A"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    ids = prompt(20)
    sequence = wide.generate(ids, do_sample=False, max_new_tokens=40)[0]
    for position in (23, 26, 30):
        stop = "".join(chr(65 + t) for t in sequence[position : position + 2].tolist())
        options = dict(max_new_tokens=40, do_sample=False, stop_strings=[stop], tokenizer=tokenizer)
        expected = wide.generate(ids, **options)
        assert torch.equal(wide.generate(ids, assistant_model=perfect(wide, sequence), **options), expected)


def test_streamer_gets_the_same_puts(wide):
    class Recorder(BaseStreamer):
        def __init__(self):
            self.events = []

        def put(self, value):
            self.events.append(value.tolist())

        def end(self):
            self.events.append("end")

    ids, plain, assisted = prompt(12), Recorder(), Recorder()
    wide.generate(ids, do_sample=False, max_new_tokens=20, streamer=plain)
    drafter = half_right(wide, ids, max_new_tokens=20)
    wide.generate(ids, do_sample=False, max_new_tokens=20, streamer=assisted, assistant_model=drafter)
    assert assisted.events == plain.events


def test_dictionary_output_equals_plain_decoding(wide):
    ids = prompt(20)
    options = dict(
        do_sample=False, max_new_tokens=18, return_dict_in_generate=True, output_scores=True, output_logits=True,
        output_hidden_states=True, repetition_penalty=1.2,
    )  # fmt: skip
    plain = wide.generate(ids, **options)
    drafter = half_right(wide, ids, max_new_tokens=18, repetition_penalty=1.2)
    assisted = wide.generate(ids, assistant_model=drafter, **options)
    assert torch.equal(plain.sequences, assisted.sequences) and max(drafter.last_stats.accepted) > 1
    close = dict(atol=1e-4, rtol=1e-4)
    assert len(plain.scores) == len(assisted.scores) == 18
    for a, b in zip(plain.scores + plain.logits, assisted.scores + assisted.logits):
        torch.testing.assert_close(a, b, **close)
    assert len(plain.hidden_states) == len(assisted.hidden_states)
    for step, (a, b) in enumerate(zip(plain.hidden_states, assisted.hidden_states)):
        assert [x.shape for x in a] == [x.shape for x in b], step
        for x, y in zip(a, b):
            torch.testing.assert_close(x, y, **close)
    assert cache_of(assisted).get_seq_length() == cache_of(plain).get_seq_length()


@pytest.mark.parametrize("copied", [False, True])
def test_continuing_a_chat_from_the_returned_cache(wide, copied):
    first, options = prompt(14), dict(do_sample=False, max_new_tokens=15, return_dict_in_generate=True)
    out = wide.generate(first, assistant_model=half_right(wide, first, max_new_tokens=15), **options)
    second = torch.cat([out.sequences, prompt(7, seed=5)], dim=1)
    expected = wide.generate(second, do_sample=False, max_new_tokens=15)
    drafter = half_right(wide, second, max_new_tokens=15)
    cache = copy.deepcopy(cache_of(out)) if copied else cache_of(out)
    again = wide.generate(second, **{CACHE: cache}, assistant_model=drafter, **options)
    assert torch.equal(again.sequences, expected)


def test_the_drafters_context_continues_with_the_cache(pair):
    """A second turn must draft from the whole conversation: the same drafts as from a fresh start."""
    target, drafter = pair
    options = dict(do_sample=False, max_new_tokens=12, return_dict_in_generate=True)
    out = target.generate(prompt(14), assistant_model=drafter, **options)
    second = torch.cat([out.sequences, prompt(7, seed=5)], dim=1)
    continued = target.generate(second, **{CACHE: cache_of(out)}, assistant_model=drafter, **options)
    fresh = target.generate(second, assistant_model=drafter, **options)
    assert torch.equal(continued.sequences, fresh.sequences)
    a, b = (cache_of(out)._hyperdflash_context.context for out in (continued, fresh))
    assert a.end == b.end == continued.sequences.shape[1] - 1 == len(a)
    for context in (a, b):
        drafter.flush_pending(context)  # what waits for the next block
    for x, y in zip(a.layers, b.layers):
        torch.testing.assert_close(x[0], y[0], atol=1e-4, rtol=1e-4)


def test_a_copied_cache_has_a_context_of_its_own(pair):
    target, drafter = pair
    options = dict(do_sample=False, max_new_tokens=8, return_dict_in_generate=True, assistant_model=drafter)
    out = target.generate(prompt(14), **options)
    copied, context = copy.deepcopy(cache_of(out)), cache_of(out)._hyperdflash_context.context
    turn = torch.cat([out.sequences, prompt(4, seed=5)], dim=1)
    again = target.generate(turn, **{CACHE: copied}, **options)
    assert copied._hyperdflash_context.context.end == len(copied._hyperdflash_context.context)
    assert copied._hyperdflash_context.context.end == again.sequences.shape[1] - 1
    assert context.end == len(context) == out.sequences.shape[1] - 1


def test_a_context_is_its_drafters_own_whatever_ids_are_given_again(pair, monkeypatch):
    """Two drafters in turn on one cache: each drafts as if it were alone."""
    target, first = pair
    second = tiny_drafter(target, num_hidden_layers=1)
    options = dict(do_sample=False, max_new_tokens=8, return_dict_in_generate=True)
    out = target.generate(prompt(14), assistant_model=first, **options)
    monkeypatch.setattr(continuation, "id", lambda thing: 7, raising=False)  # as if `second` stood where `first` did
    turn = torch.cat([out.sequences, prompt(4, seed=5)], dim=1)
    again = target.generate(turn, **{CACHE: cache_of(out)}, assistant_model=second, **options)
    kept = cache_of(again)._hyperdflash_context
    assert kept.is_of(second) and not kept.is_of(first)
    assert len(kept.context.layers) == 1 and len(kept.context) == again.sequences.shape[1] - out.sequences.shape[1]
    assert pickle.loads(pickle.dumps(cache_of(again)))._hyperdflash_context is None


def test_a_context_that_is_not_the_caches_any_more_is_left(pair):
    """The caller takes tokens back and goes on with others: what the drafter knows of them is no context."""
    target, drafter = pair
    options = dict(do_sample=False, max_new_tokens=8, return_dict_in_generate=True, assistant_model=drafter)
    out = target.generate(prompt(14), **options)
    cache = cache_of(out)
    cache.crop(-4)
    kept = cache.get_seq_length()
    changed = torch.cat([out.sequences[:, :kept], prompt(9, seed=5)], dim=1)
    again = target.generate(changed, **{CACHE: cache}, **options)
    context = cache_of(again)._hyperdflash_context.context
    assert context.end == again.sequences.shape[1] - 1 and len(context) == context.end - kept


def test_continuing_from_the_users_own_cache(wide):
    ids = prompt(21)
    expected = wide.generate(ids, do_sample=False, max_new_tokens=15)
    cache = DynamicCache(config=wide.config)
    with torch.no_grad():
        wide(ids[:, :13], **{CACHE: cache})
    drafter = half_right(wide, ids, max_new_tokens=15)
    options = dict(do_sample=False, max_new_tokens=15, **{CACHE: cache})
    assert torch.equal(wide.generate(ids, assistant_model=drafter, **options), expected)


def test_other_assisted_modes_work_once_bound(wide):
    ids = torch.cat([prompt(12), prompt(12)], dim=1)  # repeats, so that prompt lookup finds something
    expected = wide.generate(ids, do_sample=False, max_new_tokens=30)
    assert torch.equal(wide.generate(ids, do_sample=False, max_new_tokens=30, prompt_lookup_num_tokens=5), expected)
    assistant = tiny_target(4)
    with pytest.raises(ValueError, match=r"hf_hyperdflash\.bind\(assistant_model\)"):
        wide.generate(ids, do_sample=False, max_new_tokens=30, assistant_model=assistant)
    for helper in (bind(assistant), bind(copy.deepcopy(wide))):
        out = wide.generate(ids, do_sample=False, max_new_tokens=30, assistant_model=helper)
        assert torch.equal(out, expected)


def test_requests_that_cannot_work_are_refused_before_any_work(pair, monkeypatch):
    target, drafter = pair
    monkeypatch.setattr(type(target), "forward", lambda *a, **k: pytest.fail("the target ran"))
    with pytest.raises(ValueError, match="pass `input_ids`, not `inputs_embeds`"):
        target.generate(inputs_embeds=torch.zeros(2, 5, 32), assistant_model=drafter, max_new_tokens=3)
    empty = torch.empty(1, 0, dtype=torch.long)
    with pytest.raises(ValueError, match=r"The prompt is empty: `input_ids` has the shape \[1, 0\], expected"):
        target.generate(empty, assistant_model=drafter, max_new_tokens=3)
    with pytest.raises(ValueError, match="`assistant_model` is 'a/drafter', expected a drafter: load it with"):
        target.generate(prompt(5), assistant_model="a/drafter", max_new_tokens=3)
    with pytest.raises(ValueError, match="cache"):
        target.generate(prompt(5), assistant_model=drafter, max_new_tokens=3, use_cache=False)
    for asked in (7, "3", 2.5):
        with pytest.raises(ValueError, match=f"cannot draft {asked!r} tokens a round: expected a whole number from 1"):
            target.generate(prompt(5), assistant_model=drafter, max_new_tokens=3, num_assistant_tokens=asked)
    with pytest.raises(ValueError, match="lossless"):
        target.generate(prompt(5), assistant_model=drafter, max_new_tokens=3, assistant_ensemble_weight=0.5)
    for chunk in (0, -5, "a", 2.5):
        with pytest.raises(ValueError, match=f"`prefill_chunk_size` is {chunk!r}, expected a whole number"):
            target.generate(prompt(5), assistant_model=drafter, max_new_tokens=3, prefill_chunk_size=chunk)
    for name, value in (("prompt_lookup_num_tokens", 4), ("dola_layers", "high")):
        with pytest.raises(ValueError, match=f"`{name}` is {value!r} beside a drafter"):
            target.generate(prompt(5), assistant_model=drafter, max_new_tokens=3, **{name: value})


@pytest.mark.parametrize(
    ("rows", "given", "expected"),
    [
        (1, dict(attention_mask=torch.ones(1, 3).long()), r"`attention_mask` has the shape \[1, 3\] and .* \[1, 9\]"),
        (1, dict(attention_mask=torch.ones(2, 9).long()), r"`attention_mask` has the shape \[2, 9\] and .* \[1, 9\]"),
        (
            1,
            dict(attention_mask=torch.ones(1, 12).long()),
            r"`attention_mask` has the shape \[1, 12\] and",
        ),
        (2, dict(attention_mask=torch.ones(1, 9).long()), r"`attention_mask` has the shape \[1, 9\] and .* \[2, 9\]"),
        (1, dict(position_ids=torch.arange(4)[None]), r"`position_ids` has the shape \[1, 4\], .* the 9 tokens"),
        (1, dict(position_ids=torch.arange(10)[None]), r"`position_ids` has the shape \[1, 10\], .* the 9 tokens"),
    ],
)
def test_masks_and_positions_are_those_of_the_tokens(pair, monkeypatch, rows, given, expected):
    """Some others pass through transformers and through a target, which writes another text then."""
    target, drafter = pair
    options = dict(do_sample=False, max_new_tokens=6)
    plain = target.generate(prompt(9), **options)
    fine = dict(position_ids=torch.arange(9)[None], attention_mask=torch.ones(1, 9).long())
    assert torch.equal(target.generate(prompt(9), assistant_model=drafter, **options, **fine), plain)
    monkeypatch.setattr(type(target), "forward", lambda *a, **k: pytest.fail("the target ran"))
    with pytest.raises(ValueError, match=expected):
        target.generate(prompt(9).repeat(rows, 1), assistant_model=drafter, **options, **given)


def test_a_mask_of_the_new_turn_alone_is_told_from_ids_of_it(pair):
    target, drafter = pair
    options = dict(do_sample=False, max_new_tokens=5, assistant_model=drafter, return_dict_in_generate=True)
    out = target.generate(prompt(9), **options)
    whole = torch.cat([out.sequences, prompt(2)], dim=1)
    with pytest.raises(ValueError, match=r"`attention_mask` has the shape .* what is in the cache included"):
        mask = torch.ones(1, 2).long()
        target.generate(whole, attention_mask=mask, **{CACHE: cache_of(out)}, **options)
    with pytest.raises(ValueError, match=rf"`{CACHE}` holds .* expected the whole sequence"):
        mask = torch.ones(1, whole.shape[1]).long()
        target.generate(prompt(2), attention_mask=mask, **{CACHE: cache_of(out)}, **options)


def test_a_tree_budget_that_is_none_is_refused_without_a_drafter_too(pair):
    for budget in (-5, "x"):
        with pytest.raises(ValueError, match=f"`tree_budget` is {budget!r}, expected the most nodes"):
            pair[0].generate(prompt(5), max_new_tokens=3, tree_budget=budget)


@pytest.mark.parametrize("options", [{}, {"tree_budget": 8}, {"do_sample": True}], ids=["chain", "tree", "sampled"])
def test_what_is_shown_keeps_nothing_of_rejected_drafts(pair, options):
    target, drafter = pair
    asked = dict(output_logits=True, output_scores=True, output_hidden_states=True, return_dict_in_generate=True)
    out = target.generate(
        prompt(9), assistant_model=drafter, max_new_tokens=12, **{"do_sample": False, **options}, **asked
    )
    shown = [*out.logits[1:], *out.scores[1:], *(state for step in out.hidden_states[1:] for state in step)]
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in shown)


def test_a_cache_that_drafts_have_filled_keeps_no_more_than_its_window_of_plain_text():
    target, ids = mistral().eval(), prompt(9)
    options = dict(do_sample=False, max_new_tokens=30, return_dict_in_generate=True)
    plain = target.generate(ids, **options)
    further = target.generate(plain.sequences, **{CACHE: cache_of(plain)}, **options)
    drafter = half_right_about(target, plain.sequences[0])
    drafter.bind(target)
    out = target.generate(ids, assistant_model=drafter, **options)
    again = target.generate(out.sequences, **{CACHE: cache_of(out)}, **options)
    assert torch.equal(again.sequences, further.sequences)
    windows = [layer for layer in cache_of(again).layers if getattr(layer, "sliding_window", None)]
    assert windows and all(layer.keys.shape[-2] < layer.sliding_window for layer in windows)


def test_a_cache_that_transformers_own_loop_has_filled_records_no_more():
    target, ids = bind(mistral().eval()), prompt(9)
    options = dict(do_sample=False, max_new_tokens=12, return_dict_in_generate=True)
    cache = cache_of(target.generate(ids, prompt_lookup_num_tokens=3, **options))
    with torch.no_grad():
        for token in prompt(24, seed=5)[0]:
            target(token[None, None], **{CACHE: cache})
    windows = [layer for layer in cache.layers if getattr(layer, "sliding_window", None)]
    assert windows and all(layer.keys.shape[-2] < layer.sliding_window for layer in windows)


def test_unbinding_while_it_generates_is_told_in_one_line(pair):
    target, drafter = pair
    ids, options = prompt(9), dict(do_sample=False, max_new_tokens=30)

    class Unbinds(BaseStreamer):
        tokens = 0

        def put(self, value):
            self.tokens += 1
            if self.tokens == 5:
                drafter.unbind(target)

        def end(self): ...

    with pytest.raises(ValueError, match="The target was unbound while it was generating"):
        target.generate(ids, assistant_model=drafter, streamer=Unbinds(), **options)
    expected = target.generate(ids, **options)
    drafter.bind(target)
    assert torch.equal(target.generate(ids, assistant_model=drafter, **options), expected)


def test_a_continuation_needs_the_whole_sequence(pair):
    target, drafter = pair
    options = dict(do_sample=False, max_new_tokens=5, assistant_model=drafter, return_dict_in_generate=True)
    out = target.generate(prompt(9), **options)
    for ids in (prompt(3), out.sequences[:, :-1]):
        with pytest.raises(ValueError, match="whole sequence"):
            target.generate(ids, **{CACHE: cache_of(out)}, **options)


def test_fewer_drafts_on_request(wide):
    ids = prompt(10)
    expected = wide.generate(ids, do_sample=False, max_new_tokens=25)
    drafter = perfect(wide, expected[0])
    wide.generate(ids, do_sample=False, max_new_tokens=25, assistant_model=drafter, num_assistant_tokens=2)
    assert drafter.last_stats.emitted == [3] * 8
    drafter.num_draft_tokens = 4
    out = wide.generate(ids, do_sample=False, max_new_tokens=25, assistant_model=drafter)
    assert torch.equal(out, expected) and drafter.last_stats.emitted == [5, 5, 5, 5, 4]


@pytest.mark.parametrize("chunk", [None, 6])
def test_left_padding_changes_nothing(wide, chunk):
    """Stock V4 pools padding with text, and its text depends on both; ours is that of the prompt alone."""
    ids = prompt(17)
    padded, mask = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], dim=1), torch.ones(1, 21).long()
    mask[:, :4] = 0
    options = dict(do_sample=False, max_new_tokens=12, repetition_penalty=1.2, prefill_chunk_size=chunk)
    expected = wide.generate(ids, **options)
    drafter = half_right(wide, ids, max_new_tokens=12, repetition_penalty=1.2)
    out = wide.generate(padded, attention_mask=mask, assistant_model=drafter, return_dict_in_generate=True, **options)
    assert torch.equal(out.sequences[:, :4], padded[:, :4]) and torch.equal(out.sequences[:, 4:], expected)
    context = cache_of(out)._hyperdflash_context.context
    assert len(context) == expected.shape[1] - 1
    # The next turn on the same cache.
    turn = prompt(5, seed=7)
    options["repetition_penalty"] = None
    plain = wide.generate(torch.cat([expected, turn], dim=1), **options)
    again = torch.cat([out.sequences, turn], dim=1)
    mask = (torch.arange(again.shape[1]) >= 4).long()[None]
    out = wide.generate(again, attention_mask=mask, **{CACHE: cache_of(out)}, assistant_model=drafter, **options)
    assert torch.equal(out[:, 4:], plain)


def test_padding_that_the_cache_has_seen_stays(wide):
    """The caller has run the padded prompt himself: the positions of what follows count the padding."""
    padded, mask = torch.cat([torch.zeros(1, 4, dtype=torch.long), prompt(17)], dim=1), torch.ones(1, 21).long()
    mask[:, :4] = 0
    cache = DynamicCache(config=wide.config)
    with torch.no_grad():
        wide(padded[:, :13], attention_mask=mask[:, :13], **{CACHE: cache})
    options = dict(do_sample=False, max_new_tokens=12, attention_mask=mask)
    expected = wide.generate(padded, **{CACHE: copy.deepcopy(cache)}, **options)
    drafter = half_right(wide, padded, max_new_tokens=12)
    assert torch.equal(wide.generate(padded, **{CACHE: cache}, assistant_model=drafter, **options), expected)


def test_padding_is_no_context():
    """Of a target that masks padding instead of leaving it out."""
    torch.manual_seed(0)
    target = bind(qwen3().eval())
    drafter = tiny_drafter(target)
    padded, mask = torch.cat([torch.zeros(1, 4, dtype=torch.long), prompt(9)], dim=1), torch.ones(1, 13).long()
    mask[:, :4] = 0
    out = target.generate(
        padded, attention_mask=mask, do_sample=False, max_new_tokens=12, assistant_model=drafter,
        return_dict_in_generate=True,
    )  # fmt: skip
    context = cache_of(out)._hyperdflash_context.context
    assert context.end == 13 + 12 - 1 and len(context) == 9 + 12 - 1


def test_a_round_is_drafted_from_all_that_came_before(wide):
    ids = prompt(10)
    drafter, seen = half_right(wide, ids, max_new_tokens=12), []
    propose = drafter.propose

    def looking(target, context, so_far, *rest):
        seen.append((len(context), context.end, so_far.shape[1] - 1))
        return propose(target, context, so_far, *rest)

    drafter.propose = looking
    wide.generate(ids, do_sample=False, max_new_tokens=12, assistant_model=drafter)
    assert len(seen) > 1 and seen[0][0] == 10 and all(len(set(lengths)) == 1 for lengths in seen)


def test_drafts_obey_the_requests_processors(wide):
    ids, options = prompt(10), dict(do_sample=False, max_new_tokens=15, suppress_tokens=[5])
    expected = wide.generate(ids, **options)
    drafter = perfect(wide, expected[0])
    drafter.states = drafter.states + 2 * drafter.states[5]  # would rather say what may not be said
    assert torch.equal(wide.generate(ids, assistant_model=drafter, **options), expected)
    assert drafter.last_stats.accepted == [6, 6]


def test_no_more_is_drafted_than_fits(wide):
    ids = prompt(10)
    for new_tokens, drafted in ((2, []), (3, [1]), (6, [4]), (9, [6])):
        sequence = wide.generate(ids, do_sample=False, max_new_tokens=new_tokens)[0]
        drafter = perfect(wide, sequence)
        wide.generate(ids, do_sample=False, max_new_tokens=new_tokens, assistant_model=drafter)
        assert drafter.last_stats.accepted == drafted
        assert drafter.last_stats.draft_positions == max(drafted, default=0)


def test_a_draft_that_ends_the_text_is_an_accepted_one(wide):
    ids = prompt(20)
    text = wide.generate(ids, do_sample=False, max_new_tokens=30)[0]
    last = next(i for i in range(22, 50) if text[i] not in text[20:i])
    drafter = perfect(wide, text)
    out = wide.generate(
        ids, do_sample=False, max_new_tokens=30, eos_token_id=text[last].item(), assistant_model=drafter
    )
    assert out.shape[1] == last + 1
    whole, rest = divmod(last - 20, 7)
    assert drafter.last_stats.accepted == [6] * whole + [rest] * bool(rest)


def test_a_text_that_ended_with_a_draft_goes_on(wide):
    """Its last token is in no cache yet, like any other's."""
    ids = prompt(20)
    text = wide.generate(ids, do_sample=False, max_new_tokens=30)[0]
    last = next(i for i in range(22, 26) if text[i] not in text[20:i])
    drafter, options = perfect(wide, text), dict(do_sample=False, return_dict_in_generate=True)
    out = wide.generate(ids, assistant_model=drafter, max_new_tokens=30, eos_token_id=text[last].item(), **options)
    assert out.sequences.shape[1] == last + 1 and cache_of(out).get_seq_length() == last
    context = cache_of(out)._hyperdflash_context.context
    assert context.end == last == len(context)
    again = wide.generate(out.sequences, **{CACHE: cache_of(out)}, assistant_model=drafter, max_length=50, **options)
    assert torch.equal(again.sequences[0], text) and drafter.last_stats.tau > 4


def test_logits_are_shown_as_they_were_before_processors(wide):
    class NoFives(LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores[:, 5] = -math.inf  # in place
            return scores

    options = dict(do_sample=False, max_new_tokens=10, return_dict_in_generate=True, output_logits=True)
    options["logits_processor"] = LogitsProcessorList([NoFives()])
    ids = prompt(9)
    drafter = half_right(wide, ids, max_new_tokens=10, logits_processor=options["logits_processor"])
    out = wide.generate(ids, assistant_model=drafter, **options)
    assert len(out.logits) == 10 and all(logits.isfinite().all() for logits in out.logits)


def test_what_the_caller_sets_counts(wide):
    """Also where it is transformers' own default, 20, and also through a configuration."""
    ids = prompt(10)
    expected = wide.generate(ids, do_sample=False, max_new_tokens=60)
    drafter = perfect(wide, expected[0])
    for asked in (19, 20):
        with pytest.raises(ValueError, match=f"cannot draft {asked} tokens"):
            wide.generate(ids, max_new_tokens=60, assistant_model=drafter, num_assistant_tokens=asked)
        lookup = PromptLookupDrafter(wide, num_draft_tokens=2)
        counts = []

        def counting(target, context, ids, position_ids, count, sampler, counts=counts):
            counts.append(count)
            return DraftTree.chain(ids.new_empty(0))

        lookup.propose = counting
        for given in (
            dict(num_assistant_tokens=asked),
            dict(generation_config=GenerationConfig(num_assistant_tokens=asked, do_sample=False)),
        ):
            wide.generate(ids, assistant_model=lookup, max_new_tokens=30, **given)
            assert counts[0] == asked
            counts.clear()
    wide.generation_config.num_assistant_tokens = 3
    wide.generate(ids, do_sample=False, max_new_tokens=60, assistant_model=drafter)
    assert max(drafter.last_stats.accepted) == 3


def test_a_configuration_with_all_defaults_filled_in_asks_for_nothing(wide):
    """As a pipeline of transformers 5.17 prepares one, before the target is bound, too."""
    ids = prompt(10)
    filled, _ = unbind(wide)._prepare_generation_config(GenerationConfig(max_new_tokens=20, do_sample=False))
    assert filled.num_assistant_tokens == 20
    drafter = perfect(bind(wide), wide.generate(ids, max_new_tokens=20)[0])
    wide.generate(ids, assistant_model=drafter, generation_config=filled)
    assert drafter.last_stats.draft_positions == 6


class Echo(PromptLookupDrafter):
    """Drafts a given text, however long."""

    def __init__(self, target, sequence, count):
        super().__init__(target, count)
        self.sequence = sequence

    def propose(self, target, context, ids, position_ids, count, sampler):
        return DraftTree.chain(self.sequence[ids.shape[1] : ids.shape[1] + count])


def test_more_drafts_than_a_cache_takes_back_by_default(wide):
    ids = prompt(10)
    expected = wide.generate(ids, do_sample=False, max_new_tokens=160)
    wrong = expected[0].clone()
    wrong[13:] = (wrong[13:] + 1) % 64
    drafter = Echo(wide, wrong, 150)
    out = wide.generate(ids, do_sample=False, max_new_tokens=160, assistant_model=drafter)
    assert torch.equal(out, expected) and drafter.last_stats.draft_positions > 128


def test_a_drafter_that_drafts_more_than_it_was_asked_for_is_told(wide):
    class Eager(PromptLookupDrafter):
        def propose(self, target, context, ids, position_ids, count, sampler):
            return DraftTree.chain(ids.new_full((count + 1,), 5))

    with pytest.raises(ValueError, match="The drafter made 4 drafts, one after the other, expected at most 3"):
        wide.generate(prompt(10), max_new_tokens=20, assistant_model=Eager(wide, 3))


def test_a_round_of_many_drafts_is_taken_back_whole(wide):
    """Where the caller's own code raises before the round has a token, the anchor is taken back as well."""

    class Failing(LogitsProcessor):
        calls = 0

        def __call__(self, input_ids, scores):
            self.calls += 1
            if self.calls == 2:
                raise ArithmeticError
            return scores

    cache, ids = DynamicCache(config=wide.config), prompt(10)
    drafter = Echo(wide, torch.full((160,), 5), 140)
    options = dict(do_sample=False, max_new_tokens=160, assistant_model=drafter, **{CACHE: cache})
    with pytest.raises(ArithmeticError):
        wide.generate(ids, logits_processor=LogitsProcessorList([Failing()]), **options)
    assert cache.get_seq_length() == 10


class Remembering(LogitsProcessor):
    """As a grammar is, which forbids what came three calls before: it must see every prefix of the text once."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids[0].tolist())
        scores = scores.clone()
        scores[:, [len(ids) % 64 for ids in self.seen[-3:]]] = -torch.inf
        scores[:, len(self.seen) % 64] += 5  # what it has seen changes the text
        return scores


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_processor_with_a_state_sees_the_text_alone(wide, do_sample):
    ids, plain, assisted = prompt(20), Remembering(), Remembering()
    options = dict(max_new_tokens=24, do_sample=False, repetition_penalty=1.2)
    expected = wide.generate(ids, logits_processor=LogitsProcessorList([plain]), **options)
    options["do_sample"] = do_sample
    if do_sample:
        options["top_k"] = 1  # one text, through the code that samples
    drafter = perfect(wide, expected[0])
    out = wide.generate(ids, logits_processor=LogitsProcessorList([assisted]), assistant_model=drafter, **options)
    assert torch.equal(out, expected) and assisted.seen == plain.seen
    assert max(drafter.last_stats.accepted) > 0


@pytest.mark.parametrize("kind", ["drafter", "lookup"])
def test_guidance_runs_the_target_on_its_own(wide, kind):
    """Whatever else calls the target meanwhile is none of our forwards."""
    ids, options = prompt(20), dict(do_sample=False, max_new_tokens=16, guidance_scale=1.5)
    expected = wide.generate(ids, **options)
    drafter = perfect(wide, expected[0]) if kind == "drafter" else PromptLookupDrafter(wide)
    assert torch.equal(wide.generate(ids, assistant_model=drafter, **options), expected)


class StopAt(BaseStreamer):
    """Raises at the n-th token, as a closed connection does."""

    def __init__(self, count):
        self.count, self.tokens = count, []

    def put(self, value):
        self.tokens += value.flatten().tolist()
        self.count -= 1
        if self.count < 0:  # the first put is the prompt
            raise ConnectionError("closed")

    def end(self):
        pass


@pytest.mark.parametrize("kind", ["echo", "block"])
def test_after_an_interruption_the_cache_is_that_of_the_text_so_far(wide, kind):
    ids = prompt(12)
    whole = wide.generate(ids, do_sample=False, max_new_tokens=40)
    for count in range(1, 13):
        drafter = Echo(wide, whole[0], 7) if kind == "echo" else perfect(wide, whole[0])
        cache, streamer = DynamicCache(config=wide.config), StopAt(count)
        options = dict(do_sample=False, **{CACHE: cache}, assistant_model=drafter)
        with pytest.raises(ConnectionError):
            wide.generate(ids, max_new_tokens=40, streamer=streamer, **options)
        seen = torch.tensor([streamer.tokens])
        assert cache.get_seq_length() == seen.shape[1] - 1, count
        options["attention_mask"] = torch.ones_like(seen)  # a padding token among them is text here
        assert torch.equal(wide.generate(seen, max_length=52, **options), whole), count
        assert cache._hyperdflash_context.is_of(drafter) and drafter.last_stats.tau > 4  # it goes on, too


def test_a_criterion_that_raises_before_the_first_token_leaves_the_prompt(wide):
    def broken(input_ids, scores):
        raise RuntimeError("broken")

    ids, cache = prompt(12), DynamicCache(config=wide.config)
    options = dict(do_sample=False, max_new_tokens=9, **{CACHE: cache})
    drafter = PromptLookupDrafter(wide)
    with pytest.raises(RuntimeError, match="broken"):
        wide.generate(ids, assistant_model=drafter, logits_processor=LogitsProcessorList([broken]), **options)
    assert cache.get_seq_length() == 12
    longer = torch.cat([ids, prompt(3, seed=2)], dim=1)
    expected = wide.generate(longer, do_sample=False, max_new_tokens=9)
    assert torch.equal(wide.generate(longer, assistant_model=drafter, **options), expected)


@pytest.mark.parametrize("kind", ["static", "offloaded_static", "quantized"])
def test_caches_that_cannot_be_rewound_are_refused_by_name(pair, kind):
    target, drafter = pair
    with pytest.raises(ValueError, match=f"`cache_implementation` is '{kind}'.*leave it out"):
        target.generate(prompt(8), assistant_model=drafter, max_new_tokens=3, cache_implementation=kind)


@pytest.mark.nightly  # thousands of texts are drawn
@pytest.mark.parametrize("temperature", [0.8])
def test_sampled_text_has_the_targets_distribution(temperature):
    """End to end: pairs of sampled tokens against the target's own joint distribution, top-k included."""
    target = tiny_target(5, vocab_size=8, layer_types=[CSA], sliding_window=4, hc_sinkhorn_iters=1)
    ids, k = prompt(6, vocab_size=8), 5

    def distribution(context):
        with torch.no_grad():
            logits = target(context).logits[0, -1] / temperature
        return logits.masked_fill(logits < logits.topk(k).values[-1], -torch.inf).softmax(-1)

    # The first token comes from the prefill; the next two pass through drafting and verification.
    first = distribution(ids)
    joint = torch.zeros(8, 8, 8)
    for a in range(8):
        after_a = distribution(torch.cat([ids, torch.tensor([[a]])], dim=1))
        for b in range(8):
            joint[a, b] = first[a] * after_a[b] * distribution(torch.cat([ids, torch.tensor([[a, b]])], dim=1))
    # Sure of another token at each position: one position's distribution taken for another's would show.
    second, third = joint.sum((0, 2)).argsort()[[-2, -3]].tolist()
    drafter = perfect(target, torch.tensor([0] * 7 + [second, third]))
    drafter.states *= 3
    drafter.bind(target)
    draws, observed = 900, Counter()
    for _ in range(draws):
        out = target.generate(ids, assistant_model=drafter, do_sample=True, temperature=temperature, top_k=k,
                              max_new_tokens=4)  # fmt: skip
        a, b, c = out[0, 6:9].tolist()
        observed[a * 64 + b * 8 + c] += 1
    assert_drawn_from(joint.flatten(), observed)
    for axis in range(3):  # single tokens are drawn more often, so that less hides
        alone = Counter()
        for outcome, count in observed.items():
            alone[outcome // 8 ** (2 - axis) % 8] += count
        assert_drawn_from(joint.transpose(0, axis).sum((1, 2)), alone)


def test_statistics():
    stats = SpeculationStats(rounds=4, tokens=12, draft_positions=4, emitted=[1, 3, 4, 3], accepted=[0, 2, 3, 2])
    assert stats.tau == 11 / 4 and stats.mean_accepted_drafts == 7 / 4
    assert stats.acceptance == [3 / 4, 3 / 4, 1 / 4, 0]
    assert stats.conditional_acceptance == pytest.approx([3 / 4, 1, 1 / 3, 0])
    assert SpeculationStats().tau == 0 and SpeculationStats().acceptance == []


def test_statistics_of_a_run_add_up(wide):
    ids = prompt(10)
    drafter = half_right(wide, ids, max_new_tokens=40)
    wide.generate(ids, do_sample=False, max_new_tokens=40, assistant_model=drafter)
    stats = drafter.last_stats
    assert stats.tokens == 40 and sum(stats.emitted) + 1 in (39, 40)
    assert 1 < stats.tau < 7 and stats.draft_seconds > 0 and stats.verify_seconds > 0
    assert stats.acceptance == sorted(stats.acceptance, reverse=True)


def test_a_target_whose_forwards_depend_on_their_width_says_so_once(caplog):
    target = qwen3().eval()
    unbind(bind(target))
    target.config.quantization_config = BitsAndBytesConfig(load_in_4bit=True)
    unbind(bind(target))
    assert not caplog.messages
    target.config.quantization_config = BitsAndBytesConfig(load_in_8bit=True)
    for _ in range(2):
        unbind(bind(target))
    assert len(caplog.messages) == 1 and "logits depend on how many tokens a forward takes" in caplog.messages[0]
