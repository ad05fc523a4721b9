"""Which token masks: one that no text has, and the user is told which."""

import logging

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hf_hyperdflash import HyperDFlashDrafter
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.targets.vocabulary import find_mask_token

from ..conftest import tiny_target
from ..helpers.families import gpt_oss


def tokenizer_of(size: int, *added: str, are_special=True, template=None, **special: str) -> PreTrainedTokenizerFast:
    """With `size` tokens "t0", "t1", ..., and those that are added."""
    words = models.WordLevel({f"t{i}": i for i in range(size)})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), chat_template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": list(added) if are_special else [], **special})
    tokenizer.add_tokens([] if are_special else list(added))
    return tokenizer


CHAT = "{{ messages }}"
DOCUMENTS = ("<repo_name>", "<gh_stars>", "<empty_output>")
RESERVED = ("[control_8]", "<SPECIAL_10>", "<|extra_id_3|>")
# Of a target with 64 tokens: the tokenizer, the token, and what is said of it.
FOUND = {
    "a mask token": (tokenizer_of(50, mask_token="t7", pad_token="t3"), 7, "the tokenizer's 't7'"),
    "unused": (tokenizer_of(50, pad_token="t3"), 50, "the tokenizer does not use"),
    "reserved": (tokenizer_of(63, "<|reserved_0|>", pad_token="t3"), 63, "'<|reserved_0|>'"),
    "reserved, of a base model": (tokenizer_of(61, *RESERVED), 61, "'[control_8]'"),
    "reserved, and not in chats": (tokenizer_of(61, *RESERVED, template="<SPECIAL_10>[control_8]"), 63, "extra_id_3"),
    "documents": (tokenizer_of(61, *DOCUMENTS, template=CHAT), 63, "'<empty_output>', which chats"),  # SmolLM2's
    "documents, and chats with one": (tokenizer_of(61, *DOCUMENTS, template=CHAT + DOCUMENTS[2]), 62, "<gh_stars>"),
    "padding": (tokenizer_of(64, pad_token="t3"), 3, "the padding token"),
    **{
        f"padding that is the {name} too": (tokenizer_of(64, pad_token="t3", **{name: "t3"}), None, "")
        for name in ("eos_token", "bos_token", "unk_token")
    },
    "documents, of a base model": (tokenizer_of(61, *DOCUMENTS), None, ""),  # whose text may be a repository
    "tokens of text": (tokenizer_of(61, *DOCUMENTS, are_special=False, template=CHAT), None, ""),  # as `<tool_call>`
    "tokens of chats": (tokenizer_of(61, "<think>", "[TOOL]", "<fim_prefix>", template=CHAT), None, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_the_best_there_is(name, target, caplog):
    tokenizer, expected, word = FOUND[name]
    target.config.pad_token_id = None
    with caplog.at_level(logging.WARNING):
        drafter = HyperDFlashDrafter.from_target(target, tokenizer=tokenizer, num_hidden_layers=1)
    assert drafter.config.mask_token_id == find_mask_token(target_of(target), tokenizer) == expected
    (told,) = [line for line in caplog.messages if "mask" in line][:1]
    assert "\n" not in told and word in told and "mask_token_id" in told
    assert (f"mask token is {expected}," in told) if expected else ("64 tokens" in told)
    chosen = HyperDFlashDrafter.from_target(target, tokenizer=tokenizer, mask_token_id=9, num_hidden_layers=1)
    assert chosen.config.mask_token_id == 9


def test_padding_is_the_last_resort_and_no_mask_where_generation_stops_at_it(target, tmp_path, caplog):
    assert find_mask_token(target_of(target)) == 0  # `tiny_config` pads with 0 and ends with nothing
    target.config.pad_token_id = None
    assert find_mask_token(target_of(target)) is None
    assert "whose tokenizer is not known (pass `tokenizer`)" in caplog.text
    target.generation_config.eos_token_id = [5, 3]
    assert find_mask_token(target_of(target), tokenizer_of(64, pad_token="t3")) is None
    target.config._name_or_path = str(tmp_path)
    tokenizer_of(50).save_pretrained(tmp_path)
    assert find_mask_token(target_of(target)) == 50  # by the tokenizer beside the weights


@pytest.mark.parametrize(("family", "size", "own"), [(tiny_target, 129280, 128799), (gpt_oss, 201088, 200000)])
def test_families_that_have_one_of_their_own(family, size, own):
    target = family()
    assert find_mask_token(target_of(target)) == target.config.pad_token_id
    target.config.vocab_size, target.config.pad_token_id = size, size - 1
    assert find_mask_token(target_of(target)) == own
