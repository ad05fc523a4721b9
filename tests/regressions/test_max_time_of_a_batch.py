"""`max_time` is the time of a call: texts that are written one after the other share it."""

from types import SimpleNamespace

import pytest
import torch
from transformers.generation import stopping_criteria

from hf_hyperdflash import PromptLookupDrafter, bind

from ..conftest import prompt
from ..helpers import families


@pytest.mark.parametrize("family", [families.qwen3_5, families.qwen3])  # row after row, and in shared forwards
def test_rows_share_the_time_of_a_call(family, monkeypatch):
    target, seconds = bind(family().eval()), [0]
    target.register_forward_hook(lambda *_: seconds.append(seconds[-1] + 1))  # a forward is a second
    monkeypatch.setattr(stopping_criteria, "time", SimpleNamespace(time=lambda: seconds[-1]))
    ids, options = torch.cat([prompt(8, seed=seed) for seed in range(3)]), dict(do_sample=False, max_time=4)
    drafter = PromptLookupDrafter(target)
    target.generate(ids, assistant_model=drafter, max_new_tokens=60, **options)
    # The forward that is running then is brought to its end, as is the prompt's of each text that is still to begin.
    assert 4 < seconds[-1] <= 5 + 2
    assert all(row.tokens for row in drafter.last_stats.rows)
