"""A fine-tuned target with more rows in its embedding was refused the drafter of its original, whose ids are the same.
That its text stays its own with every kind of drafter is in tests/contracts."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hf_hyperdflash import HyperDFlashDrafter, load_drafter
from hf_hyperdflash.benchmark.doctor.config_variants import draft_every_round
from hf_hyperdflash.hub.formats import export_dflash
from hf_hyperdflash.hub.loading import check_made_for

from ..conftest import perfect, prompt, tiny_drafter
from ..contracts.test_drafters import ALL, KINDS, KNOWN, fine_tuned
from ..helpers import families, oracle_dflash
from ..helpers.headed_drafters import headed
from ..helpers.refusals import Refusal

NEW = 24
GREEDY = dict(do_sample=False, max_new_tokens=NEW)


def qwen3():
    torch.manual_seed(1)
    return families.qwen3().eval()


def test_what_it_knows_is_drafted_as_before():
    original = qwen3()
    target = fine_tuned(original)
    plain = target.generate(prompt(11), **GREEDY)
    drafter = perfect(original, plain[0].clamp(max=KNOWN - 1), num_draft_tokens=4)
    drafter.bind(target)
    assert torch.equal(target.generate(prompt(11), **GREEDY, assistant_model=drafter), plain)
    known, stats = (plain[0, 11:] < KNOWN).long(), drafter.last_stats
    start = 1  # the prompt's forward writes the first token
    for accepted in stats.accepted:
        expected = int(known[start : start + 4].cumprod(0).sum())
        assert accepted == min(expected, NEW - start - 1)
        start += accepted + 1


@pytest.mark.parametrize(("kind", "rows"), [("dspark", ALL), ("eagle3", 3 * KNOWN), ("prompt lookup", ALL)])
def test_a_bound_target_may_get_more_rows(kind, rows, tmp_path):
    target, drafter = KINDS[kind](tmp_path)
    drafter.bind(target)
    first = target.generate(prompt(11), **GREEDY, assistant_model=drafter)
    target.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        head = target.get_output_embeddings().weight
        head[KNOWN:] = 1.2 * head[first[0, -1]]
    text = target.generate(prompt(11), **GREEDY, assistant_model=drafter)
    assert torch.equal(text, target.generate(prompt(11), **GREEDY)) and int(text.max()) >= KNOWN
    target.resize_token_embeddings(KNOWN - 4)
    if kind != "prompt lookup":  # whose configuration is the target's
        call = partial(target.generate, prompt(11), **GREEDY, assistant_model=drafter)
        Refusal(call, (str(KNOWN), str(KNOWN - 4))).check()


def save_tokenizer(folder, words):
    backend = Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token=words[0]))
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=words[0]).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("added", [8, 5000])
def test_tokenizers_tell_where_they_are_there(tmp_path, added, caplog):
    """With as many more tokens at its end one has the same ids, of which a line is told once; with them at its
    beginning others."""
    own, more = [f"word {id}" for id in range(KNOWN)], [f"tool {id}" for id in range(added)]
    original = qwen3()
    original.config._name_or_path = save_tokenizer(tmp_path / "original", own)
    drafter, tuned = tiny_drafter(original), copy.deepcopy(original)
    tuned.resize_token_embeddings(KNOWN + added)
    tuned.config._name_or_path = save_tokenizer(tmp_path / "tuned", own + more)
    caplog.clear()
    drafter.bind(original)
    assert not caplog.messages
    for _ in range(2):
        drafter.bind(tuned)
        tuned.generate(prompt(5), **GREEDY, assistant_model=drafter)
    told = [line for line in caplog.messages if str(KNOWN + added) in line]
    assert len(told) == 1 and str(KNOWN) in told[0]
    tuned.config._name_or_path = save_tokenizer(tmp_path / "other", more + own)
    Refusal(tiny_drafter(original).bind, ("vocab_size", str(KNOWN), str(KNOWN + added))).check(tuned)


def gemma3_in(folder):
    """For whose folder, without a tokenizer, transformers makes one of a few tokens, which tells nothing."""
    torch.manual_seed(1)
    target = families.gemma3().eval()
    target.save_pretrained(folder)
    target.config._name_or_path = str(folder)
    return target


OTHERS = {  # whose drafter it is, who gets it, with how many rows, and what is said beside both numbers
    "another kind of model": (lambda _: qwen3(), lambda _: families.llama(), ALL, "llama"),
    "another depth": (lambda _: qwen3(), lambda _: families.qwen3(8), ALL, "8 layers"),
    "too many to be special tokens": (lambda _: qwen3(), lambda _: qwen3(), KNOWN + 5000, str(KNOWN + 5000)),
    "a folder without a tokenizer": (gemma3_in, gemma3_in, 3 * KNOWN, str(3 * KNOWN)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_ids_are_refused(name, tmp_path):
    original, other, rows, word = OTHERS[name]
    drafter = HyperDFlashDrafter.from_target(original(tmp_path), target_layer_ids=[0], num_hidden_layers=1)
    assert drafter.config.mask_token_id == 0  # padding, and not the first that such a tokenizer does not use
    target = other(tmp_path)
    target.resize_token_embeddings(rows)
    Refusal(drafter.bind, ("vocab_size", str(KNOWN), word)).check(target)


@pytest.mark.parametrize("changed", [0.0, 0.02, 1.0], ids=["resized", "fine-tuned", "another"])
def test_copies_in_a_file_are_of_the_original(tmp_path, changed):
    """speculators' files hold the original's embedding and head, which fine-tuning changes a little."""
    original = qwen3()
    oracle_dflash.write_speculators(tmp_path, original, layer_ids=[1, 2], layers=1, block_size=4, mask_token_id=1)
    target = fine_tuned(original)
    with torch.no_grad():
        for part in (target.get_input_embeddings(), target.get_output_embeddings()):
            part.weight.add_(changed * torch.randn_like(part.weight))
    if changed == 1:
        Refusal(partial(load_drafter, tmp_path, target=target), ("copy",)).check()
        return
    drafter = load_drafter(tmp_path, target=target, dtype="float32")
    plain = target.generate(prompt(11), **GREEDY)
    drafter.bind(target)
    assert torch.equal(target.generate(prompt(11), **GREEDY, assistant_model=drafter), plain)


def test_commands_take_it(tmp_path):
    original = qwen3()
    drafter = headed(original, "markov", target_layer_ids=[1], mask_token_id=3, sample_from_anchor=True)
    target = fine_tuned(original)
    target.save_pretrained(tmp_path / "target")
    drafter.save_pretrained(tmp_path / "drafter", with_code=False)
    check_made_for(str(tmp_path / "target"), str(tmp_path / "drafter"))
    export_dflash(drafter, tmp_path / "export", "deepspec", target)
    text = target.generate(prompt(11), **GREEDY)
    assert int(text.max()) >= KNOWN
    emitted, nats = draft_every_round(target, drafter, text, 11, [drafter.config])
    assert emitted.shape == nats.shape == (1, NEW - 1) and nats[0][(text[0, 12:] < KNOWN).numpy()].max() < 0
    exported = load_drafter(tmp_path / "export", target=original, dtype="float32")
    exported.bind(target)
    assert torch.equal(target.generate(prompt(11), **GREEDY, assistant_model=exported), text)
