"""Prompt lookup against a naive one."""

import pytest
import torch

from hf_hyperdflash import PromptLookupDrafter, bind

from ..conftest import prompt, tiny_target


def looked_up(ids: list[int], count: int, longest: int) -> list[int]:
    """What followed the first earlier occurrence of the longest run of last tokens that occurred before."""
    for size in range(min(longest, len(ids) - 1), 0, -1):
        for start in range(len(ids) - size):
            if ids[start : start + size] == ids[-size:]:
                return ids[start + size : start + size + count]
    return []


@pytest.mark.parametrize(("count", "longest"), [(1, 1), (4, 2), (10, 3)])
def test_text_is_the_targets_and_rounds_are_those_of_a_naive_lookup(count, longest):
    target = tiny_target(4)  # it soon repeats itself
    ids = torch.cat([prompt(9), prompt(9)], dim=1)
    expected = target.generate(ids, do_sample=False, max_new_tokens=40)
    drafter = PromptLookupDrafter(target, count, longest)
    assert torch.equal(
        bind(target).generate(ids, do_sample=False, max_new_tokens=40, assistant_model=drafter), expected
    )
    text, at, accepted, emitted = expected[0].tolist(), ids.shape[1] + 1, [], []
    while at < len(text) - 1:
        drafts = looked_up(text[:at], min(count, len(text) - at - 1), longest)
        right = 0
        while right < len(drafts) and drafts[right] == text[at + right]:
            right += 1
        accepted.append(right)
        emitted.append(right + 1)
        at += right + 1
    assert drafter.last_stats.accepted == accepted and drafter.last_stats.emitted == emitted
    assert max(accepted) > 0 and min(accepted) == 0
    assert drafter.last_stats.rounds == len(accepted)  # rounds without a draft count: they are forwards, too
