"""Our drafters in loops that are not ours: the tokens are those of our own."""

import gc

import pytest
import torch
from transformers import LogitsProcessor

from hf_hyperdflash import DeepseekV4MTPDrafter, PromptLookupDrafter, bind
from hf_hyperdflash.decoding.candidates import DraftCandidateGenerator

from ..conftest import half_right, half_right_about, mostly_nightly, prompt, tiny_drafter, tiny_target
from ..helpers.families import FAMILIES, qwen3
from ..helpers.loops import in_transformers_loop, proposed_by


@pytest.fixture
def told(monkeypatch):
    """What transformers' loop is told round by round: drafts, and the logits that they were drawn from."""
    rounds, get_candidates = [], DraftCandidateGenerator.get_candidates

    def listening(self, input_ids, **kwargs):
        candidates, logits = get_candidates(self, input_ids, **kwargs)
        if candidates.shape[1] > input_ids.shape[1]:
            rounds.append((candidates[0, input_ids.shape[1] :].tolist(), logits))
        return candidates, logits

    monkeypatch.setattr(DraftCandidateGenerator, "get_candidates", listening)
    return rounds


def drafters_for(target, text):
    own = [DeepseekV4MTPDrafter(target.config).eval()] if target.config.model_type == "deepseek_v4" else []
    return [half_right_about(target, text), tiny_drafter(target), PromptLookupDrafter(target, 4), *own]


@pytest.mark.parametrize("family", mostly_nightly(FAMILIES, kept=9), ids=lambda family: family.__name__)
def test_every_family_in_transformers_loop(family, told):
    torch.manual_seed(0)
    target = family().eval()
    ids, options = torch.cat([prompt(9)] * 2, dim=1), dict(do_sample=False, max_new_tokens=24)
    expected = target.generate(ids, **options)
    for drafter in drafters_for(target, expected[0]):
        drafter.bind(target)
        ours, trees = proposed_by(drafter, target, ids, **options)
        theirs = in_transformers_loop(target, drafter, ids, **options)
        assert torch.equal(theirs, expected) and torch.equal(ours, expected)
        assert [drafts for drafts, _ in told] == trees  # the same drafts in the same rounds
        told.clear()


@pytest.mark.parametrize("family", [lambda: tiny_target(hidden_size=64), qwen3], ids=["deepseek_v4", "qwen3"])
def test_sampled_drafts_come_with_what_they_were_drawn_from(family, told):
    torch.manual_seed(0)
    target = family().eval()
    drafter = tiny_drafter(target)
    drafter.bind(target)
    out = in_transformers_loop(target, drafter, prompt(12), do_sample=True, top_k=5, max_new_tokens=30)
    assert out.shape[1] == 42 and len(told) > 3
    for drafts, logits in told:
        q = logits[0].softmax(-1)
        assert q.shape == (len(drafts), 64) and (q > 0).sum(-1).max() <= 5  # after the request's processors
        assert (q.gather(1, torch.tensor(drafts)[:, None]) > 0).all()


def test_padding_and_other_forwards_of_the_target_change_no_draft(told):
    """Those of a processor that runs the target, as guidance does, are not taken for the loop's."""
    target = bind(qwen3().eval())
    ids, options = prompt(12), dict(do_sample=False, max_new_tokens=16)
    drafter = half_right(target, ids, max_new_tokens=16)

    class Asking(LogitsProcessor):
        def __call__(self, input_ids, scores):
            with torch.no_grad():
                target(input_ids[:, -3:], use_cache=False)
            return scores

    def in_loop(padding=0, **asked):
        told.clear()
        padded, mask = torch.nn.functional.pad(ids, (padding, 0)), (torch.arange(12 + padding) >= padding).long()
        text = in_transformers_loop(target, drafter, padded, attention_mask=mask[None], **options, **asked)
        return text[:, padding:].tolist(), [drafts for drafts, _ in told]

    assert in_loop() == in_loop(padding=4) == in_loop(logits_processor=[Asking()])
    gc.collect()
    binding = target.hyperdflash_binding  # in which nothing is read once the loop is over
    assert not binding.residual.captures and not binding.target.rounds


@pytest.mark.parametrize("by", [3, 4, 9])
def test_a_deepseek_v4_that_has_seen_padding(by):
    """It holds entries that positions do not count. Behind 4 columns of it, the order of equal scores decides."""
    target = tiny_target(0, hidden_size=64, index_topk=2)
    ids, mask = torch.nn.functional.pad(prompt(12), (by, 0)), (torch.arange(12 + by) >= by).long()[None]
    options = dict(do_sample=False, max_new_tokens=24, attention_mask=mask)
    expected = target.generate(ids, **options)
    drafter = half_right_about(target, expected[0, by:])
    drafter.bind(target)
    assert torch.equal(in_transformers_loop(target, drafter, ids, **options), expected)


def test_our_loop_in_a_loop_of_somebodys_own():
    """Which names a drafter that the call of `generate` does not know, and has one text."""
    target, ids = bind(qwen3().eval()), prompt(9)
    options = dict(do_sample=False, max_new_tokens=16)
    expected = target.generate(ids, **options)
    drafter = half_right_about(target, expected[0])

    def loop(model, input_ids, **kwargs):
        return model._assisted_decoding(input_ids, assistant_model=drafter, **kwargs)

    assert torch.equal(target.generate(ids, custom_generate=loop, num_assistant_tokens=2, **options), expected)
    assert drafter.last_stats.draft_positions == 2
    with pytest.raises(ValueError, match="given 2 texts"):
        target.generate(ids.repeat(2, 1), custom_generate=loop, **options)
