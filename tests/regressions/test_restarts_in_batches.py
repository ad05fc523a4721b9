"""A target that starts its cache anew at some length counts the tokens of a row that it sees, not its padding."""

import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM

from hf_hyperdflash import PromptLookupDrafter, bind

from ..conftest import prompt
from ..helpers.families import COMMON

LENGTHS, MASK = (26, 13), (torch.arange(26) >= torch.tensor([[0], [13]])).long()
ROWS = [prompt(length, seed=length) for length in LENGTHS]
IDS = torch.cat([torch.nn.functional.pad(row, (26 - row.shape[1], 0)) for row in ROWS])


@pytest.fixture
def phi3():
    rope = dict(
        rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 8, long_factor=[4.0] * 8, factor=4.0,
        original_max_position_embeddings=24,
    )  # fmt: skip
    small = dict(intermediate_size=48, num_hidden_layers=2, num_key_value_heads=2, max_position_embeddings=96)
    config = Phi3Config(**{**COMMON, **small}, rope_parameters=rope, original_max_position_embeddings=24)
    return bind(Phi3ForCausalLM(config).eval())


def generate(target, new):
    drafter = PromptLookupDrafter(target, max_matching_ngram_size=1)
    return target.generate(IDS, attention_mask=MASK, assistant_model=drafter, do_sample=False, max_new_tokens=new)


def test_a_short_row_of_a_wide_batch_is_refused_before_any_row_is_written(phi3, monkeypatch):
    monkeypatch.setattr(type(phi3), "forward", lambda *a, **k: pytest.fail("the target ran"))
    with pytest.raises(ValueError, match=r"anew at 25 tokens.* one of 13 may have 29.* Set `max_length=37`"):
        generate(phi3, 16)


def test_up_to_the_restart_each_row_is_its_text_alone(phi3):
    for row, written in zip(ROWS, generate(phi3, 11)):  # 24 tokens, as many as `max_length=37` leaves it
        alone = phi3.generate(row, do_sample=False, max_new_tokens=11)[0]
        assert written[26:].tolist() == alone[row.shape[1] :].tolist()
