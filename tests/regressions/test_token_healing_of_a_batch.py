"""Token healing reads rows anew from their text, and of a row alone its padding would be lost."""

import copy
from itertools import pairwise

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from hf_hyperdflash import PromptLookupDrafter, bind

from ..helpers import families


@pytest.fixture
def tokenizer():
    tokens = [chr(65 + i) for i in range(32)]
    tokens += [one + other for one, other in pairwise(tokens)]  # which may take the place of a text's last one
    raw = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="A"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="A", padding_side="left", bos_token="B")


@pytest.mark.parametrize("name", ["inputs", "input_ids"])
@pytest.mark.parametrize("by_config", [True, False])
@pytest.mark.parametrize("family", [families.qwen3, families.qwen3_5])
def test_a_padded_batch_is_healed_as_one(family, by_config, name, tokenizer):
    own = family().eval()
    target = bind(copy.deepcopy(own))
    texts = tokenizer(["CDEFG", "HIJ", "KLMNOPQ"], padding=True, return_tensors="pt")
    settings = dict(do_sample=False, max_new_tokens=6, pad_token_id=0, token_healing=True)
    asked = dict(generation_config=GenerationConfig(**settings)) if by_config else settings
    asked |= {name: texts.input_ids, "attention_mask": texts.attention_mask, "tokenizer": tokenizer}
    expected = own.generate(**asked)
    assert not torch.equal(expected[:, :7], texts.input_ids)
    drafter = PromptLookupDrafter(target)
    assert torch.equal(target.generate(**asked, assistant_model=drafter), expected)
    assert len(drafter.last_stats.rows) == 3 and texts.input_ids.shape == (3, 7)
