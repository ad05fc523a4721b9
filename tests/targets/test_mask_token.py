"""Which token masks: one that no text has, and the user is told which."""

import logging

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hf_hyperdflash import HyperDFlashDrafter
from hf_hyperdflash.targets.mask_token import find_mask_token

from ..conftest import tiny_target
from ..helpers import families


def tokenizer_of(
    size: int, added: tuple[str, ...] = (), are_special: bool = True, **special: str
) -> PreTrainedTokenizerFast:
    """With `size` tokens "t0", "t1", ..., and those that are added."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({f"t{i}": i for i in range(size)}))
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(added) if are_special else [], **special})
    tokenizer.add_tokens([] if are_special else list(added))
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "expected", "told"),
    [
        (tokenizer_of(50, mask_token="t7", pad_token="t3"), 7, "the tokenizer's 't7'"),
        (tokenizer_of(50, pad_token="t3"), 50, "the first that the tokenizer does not use"),
        (tokenizer_of(63, ("<|reserved_0|>",), pad_token="t3"), 63, "'<|reserved_0|>', which the tokenizer reserves"),
        (tokenizer_of(64, pad_token="t3"), 3, "the padding token"),
    ],
)
def test_the_best_there_is(target, caplog, tokenizer, expected, told):
    with caplog.at_level(logging.WARNING):
        drafter = HyperDFlashDrafter.from_target(target, tokenizer=tokenizer, num_hidden_layers=1)
    assert drafter.config.mask_token_id == expected
    assert f"mask token is {expected}, {told}" in caplog.text and "`mask_token_id` chooses another" in caplog.text
    assert find_mask_token(target, tokenizer) == expected
    chosen = HyperDFlashDrafter.from_target(target, tokenizer=tokenizer, mask_token_id=9, num_hidden_layers=1)
    assert chosen.config.mask_token_id == 9


DOCUMENTS = ("<repo_name>", "<gh_stars>", "<empty_output>")


@pytest.mark.parametrize(
    ("added", "are_special", "template", "expected"),
    [
        (DOCUMENTS, True, "<im_start>{{ messages }}", 63),  # SmolLM2's, which its chats have no use for
        (DOCUMENTS, True, "{{ messages }}<empty_output>", 62),
        (DOCUMENTS, True, None, None),  # a base model's text may be a repository
        (DOCUMENTS, False, "{{ messages }}", None),  # as `<tool_call>` of Qwen3, which text may have
        (("<think>", "[TOOL]", "<fim_prefix>"), True, "{{ messages }}", None),  # chats may well have them
        (("[control_8]", "<SPECIAL_10>", "<|extra_id_3|>"), True, "<SPECIAL_10>[control_8]", 63),
        (("[control_8]", "<SPECIAL_10>", "<|extra_id_3|>"), True, None, 61),
    ],
)
def test_what_a_tokenizer_reserves(added, are_special, template, expected):
    target, tokenizer = families.qwen3(), tokenizer_of(61, added, are_special)
    target.config.pad_token_id, tokenizer.chat_template = None, template
    assert find_mask_token(target, tokenizer) == expected


@pytest.mark.parametrize("ending", ["eos_token", "bos_token", "unk_token"])
def test_padding_that_ends_texts_is_no_mask(target, ending, caplog):
    tokenizer = tokenizer_of(64, pad_token="t3", **{ending: "t3"})
    assert find_mask_token(target, tokenizer) is None
    (told,) = caplog.messages
    assert "64 tokens" in told and "`--mask_token_id`" in told and "\n" not in told


def test_padding_that_generation_stops_at_is_no_mask(target):
    target.generation_config.eos_token_id = [5, 3]
    assert find_mask_token(target, tokenizer_of(64, pad_token="t3")) is None


def test_the_tokenizer_beside_the_weights_is_found(target, tmp_path):
    target.config._name_or_path = str(tmp_path)
    tokenizer_of(50).save_pretrained(tmp_path)
    assert find_mask_token(target) == 50


def test_without_a_tokenizer_the_configurations_padding(target, caplog):
    assert find_mask_token(target) == 0  # `tiny_config` pads with 0 and ends with nothing
    target.config.pad_token_id = None
    assert find_mask_token(target) is None
    assert "whose tokenizer is not known (pass `tokenizer`)" in caplog.text


@pytest.mark.parametrize(
    ("family", "size", "own"), [(tiny_target, 129280, 128799), (families.gpt_oss, 201088, 200000)]
)
def test_families_that_have_one_of_their_own(family, size, own):
    target = family()
    assert find_mask_token(target) == target.config.pad_token_id
    target.config.vocab_size, target.config.pad_token_id = size, size - 1
    assert find_mask_token(target) == own
    conventional = families.qwen3()
    conventional.config.pad_token_id = 2
    assert find_mask_token(conventional) == 2
