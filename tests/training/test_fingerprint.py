"""Digests of targets and drafters: what they tell apart and what they do not."""

import hashlib

import pytest
import torch
from accelerate import cpu_offload
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from hf_hyperdflash.drafters.blocks.configuration_hyperdflash import HyperDFlashConfig
from hf_hyperdflash.training.features.fingerprint import (
    changed_parts,
    config_fields,
    module_fingerprint,
    short_fingerprint,
    target_fingerprint,
    tensor_digest,
)

from ..conftest import MODELS, tiny_drafter, tiny_target

TINY = MODELS / "tiny-deepseek-v4"


def splitmix_sum(data: bytes) -> int:
    """Oracle, in Python's whole numbers: the words of 64 bits, each scrambled with its place, summed."""
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    total = 0
    for place, word in enumerate(words):
        word ^= place * 0x9E3779B97F4A7C15 % 2**64
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
        total += word ^ word >> 31
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(33, 5).bfloat16(), torch.randn(101), torch.randn(7, 3, dtype=torch.float64).exp(),
        torch.arange(19), torch.randn(9).half() / 1000, torch.randn(5, 8).to(torch.float8_e4m3fn),
        torch.randn(4, 6) > 0,
    ],
    ids=lambda value: str(value.dtype),
)  # fmt: skip
def test_a_tensor_s_digest_is_the_sum_it_says(monkeypatch, value):
    monkeypatch.setattr("hf_hyperdflash.training.features.fingerprint._CHUNK", 16)
    stored = value.float() if value.dtype == torch.float16 else value  # more bits of mantissa than bfloat16 has
    chunks = [chunk.view(torch.uint8).numpy().tobytes() for chunk in stored.flatten().split(16)]
    expected = [(str(stored.dtype), splitmix_sum(chunk)) for chunk in chunks]
    text = f"w {list(value.shape)} {expected}"
    assert tensor_digest("w", value) == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_any_one_value_any_two_signs_and_any_order_change_a_digest(dtype):
    value = torch.randint(1, 100, (24,)).to(dtype)
    plain = tensor_digest("w", value)
    others = {tensor_digest("w", value.reshape(4, 6)), tensor_digest("v", value), tensor_digest("w", value.flip(0))}
    for i in range(len(value)):
        for changed in (value[i] + 1, -value[i], value[i] * 0):
            others.add(tensor_digest("w", value.index_fill(0, torch.tensor([i]), changed.item())))
        for j in range(i):
            pair = torch.tensor([i, j])
            others.add(tensor_digest("w", value.index_copy(0, pair, -value[pair])))
    assert plain not in others and len(others) > 24 * 23 // 2


def test_values_count_not_what_they_are_stored_as_nor_how():
    value = torch.randn(40, 3).bfloat16()
    for same in (value.float(), value.double(), value.t().contiguous().t(), torch.cat([value, value], 1)[:, :3]):
        assert tensor_digest("w", same) == tensor_digest("w", value)
    exact = torch.randn(40, 3)
    assert tensor_digest("w", exact) == tensor_digest("w", exact.double()) != tensor_digest("w", exact.bfloat16())


def test_every_value_of_every_weight_counts(target):
    plain = target_fingerprint(target)
    names = [name for name in target.state_dict() if "inv_freq" not in name]
    for name in names:
        value = target.state_dict()[name].view(-1)
        for place in (len(value) // 3,):
            kept = value[place].clone()
            value[place] += 1
            changed = {part for part, digest in target_fingerprint(target).items() if digest != plain[part]}
            value[place] = kept
            in_head = name.startswith(("model.embed_tokens", "model.norm", "model.hc_head", "lm_head"))
            assert changed == {"head" if in_head else "body"}, name
    assert target_fingerprint(target) == plain


def test_another_load_of_a_checkpoint_is_the_same_target(target):
    exact = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    rounded = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16)
    layerless = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32, num_hidden_layers=0)
    assert exact.lm_head.weight.dtype != rounded.lm_head.weight.dtype
    prints = target_fingerprint(exact)
    assert target_fingerprint(rounded) == prints
    assert target_fingerprint(layerless) == {**prints, "body": ""}
    assert target_fingerprint(cpu_offload(tiny_target())) == target_fingerprint(target)


def test_a_record_names_the_parts_that_changed(target):
    recorded = short_fingerprint(target_fingerprint(target))
    assert [len(word) for word in recorded.split()] == [32, 32, 32] and changed_parts(recorded, target) == []
    target.config.rope_parameters["main"]["rope_theta"] = 3.0
    assert changed_parts(recorded, target) == ["config"]
    target.model.norm.weight.data[0] = 5
    assert changed_parts(recorded, target) == ["head", "config"]
    assert changed_parts("- " + recorded.partition(" ")[2], target) == ["config"]
    assert changed_parts("cf0c3509a12eaff048ee89dc2e54bb97 09f889361886db315b35bc78aca9af2c", target) is None


def test_fields_are_json_flat_and_only_those_that_compute(target):
    fields = config_fields(target.config)
    assert fields["sliding_window"] == 8 and fields["rope_parameters.main.rope_type"] == "default"
    assert not fields.keys() & {"_name_or_path", "architectures", "dtype", "eos_token_id", "transformers_version"}


def test_drafters_differ_by_weights_and_configuration(target):
    drafter = tiny_drafter(target)
    plain = module_fingerprint(drafter)
    drafter.config.sliding_window = 5
    other = module_fingerprint(drafter)
    drafter.norm.weight.data[3] += 0.5
    assert len({plain, other, module_fingerprint(drafter)}) == 3


def test_a_field_of_a_later_release_is_none_of_a_drafter_made_before(target):
    class Later(HyperDFlashConfig):
        invented_later: int = 3

    drafter = tiny_drafter(target)
    plain = module_fingerprint(drafter)
    drafter.config = Later(**drafter.config.to_dict())
    assert drafter.config.to_dict()["invented_later"] == 3 and module_fingerprint(drafter) == plain
    drafter.config.invented_later = 4
    assert module_fingerprint(drafter) != plain


def test_what_has_no_values_or_is_no_target_is_refused(target):
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight are not in this process \(device meta"):
        target_fingerprint(target.to("meta"))
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match="gpt2 model: expected one of DeepSeek-V4"):
        target_fingerprint(gpt2)
