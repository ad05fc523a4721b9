"""Others' drafters were refused by name where a part of each head turns (`partial_rotary_factor`), where logits are
capped as their target's (`final_logit_softcapping`), and where they read its embeddings. Ours with such fields were
drafted with as if they had none, while their exports asked for them. That others' drafts are right: tests/contracts.
"""

import json
from functools import partial

import pytest
import torch
from transformers import CompileConfig

from hf_hyperdflash import Eagle3Drafter, HyperDFlashDrafter, SpecBlockDrafter, capture_residual, load_drafter
from hf_hyperdflash.benchmark.doctor.config_variants import draft_every_round, variants
from hf_hyperdflash.hub.formats import export_dflash
from hf_hyperdflash.serving.sglang.config import SGLangConfig
from hf_hyperdflash.serving.vllm.config import VLLMConfig
from hf_hyperdflash.training.features.store import FeatureCache

from ..conftest import prompt, tiny_drafter
from ..helpers.families import DELTA_NET, FULL, LINEAR, made, qwen3
from ..helpers.refusals import Refusal
from ..helpers.released_layouts import EMBEDDINGS, LAYOUTS, PART, capped, check_rounds
from ..helpers.training import trainer_for

READ = dict(reducer="fc", target_layer_ids=[0, 2], num_draft_tokens=4, sliding_window=None)
CAP = ("final_logit_softcapping", "2.0")


def seeded(family):
    torch.manual_seed(0)
    return family().eval()


def qwen3_5():
    """With heads of 256, of which a quarter turns, and positions of three axes."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [16, 8, 8]}
    return made(
        "qwen3_5_text", **{**DELTA_NET, "head_dim": 256}, num_hidden_layers=4, intermediate_size=48,
        rope_parameters={**rope, "mrope_interleaved": True}, layer_types=[LINEAR, FULL, LINEAR, FULL],
    )  # fmt: skip


# Of ours: the target, the fields, what exports and vLLM are told, and the words with which SGLang is refused them.
OURS = {
    "a part of Qwen3.5's": (qwen3_5, None, '"partial_rotary_factor": 0.25', ("SGLang", "whole")),
    "a cap": (capped, {}, '"final_logit_softcapping": 2.0', None),
    "embeddings": (
        qwen3, {"target_layer_ids": [EMBEDDINGS, 2]}, '"target_layer_ids": [-1, 2]',
        ("`target_layer_ids`", "[-1000000, 2]"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OURS)
def test_ours_draft_what_their_exports_say_and_engines_are_told_so_or_refuse(name, tmp_path):
    family, fields, said, refusal = OURS[name]
    target = seeded(family)
    rope = target.config.rope_parameters
    before = dict(rope)
    drafter = tiny_drafter(target, **READ | ({"rope_parameters": rope} if fields is None else fields)).float()
    assert rope == before and drafter.config.rope_parameters is not rope
    for format in ("z-lab", "speculators"):
        told = export_dflash(drafter, tmp_path / format, format)
        assert ("--speculative-draft-model-path" in told) == (format == "z-lab" and "a part" not in name)
        check_rounds(drafter, target, tmp_path / format, (0.7,))
    drafter.save_pretrained(tmp_path / "ours")
    exported = json.loads((tmp_path / "z-lab" / "config.json").read_text())
    for told in (json.dumps(exported), json.dumps(VLLMConfig.from_pretrained(tmp_path / "ours").to_dict())):
        assert said in told and "mrope" not in told  # which is plain RoPE for text
    if refusal is not None:
        Refusal(SGLangConfig.from_pretrained, refusal).check(tmp_path / "ours")


ROPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {"factor": 4.0, "short_factor": [1.5] * 4, "long_factor": [4.0] * 4,
                 "original_max_position_embeddings": 64},
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "rope"),
    [*((HyperDFlashDrafter, rope) for rope in ROPES), (Eagle3Drafter, None), (SpecBlockDrafter, None)],
)
@torch.no_grad()
def test_keys_turn_by_the_part(kind, rope):
    """Pairs of channels turn as complex numbers, those after them pass, whatever the `rope_type`."""
    target = seeded(qwen3_5 if rope is None else qwen3)
    if rope is None:
        drafter = kind.from_target(target, rope_parameters=target.config.rope_parameters).float()
    else:
        drafter = tiny_drafter(target, **READ, rope_parameters={**PART, "rope_type": rope, **ROPES[rope]})
    config, layer, rotary = drafter.config, drafter.layers[-1].self_attn, drafter.rotary_emb
    half = int(config.head_dim * config.rope_parameters["partial_rotary_factor"]) // 2
    turns = rotary.inv_freq.double()
    if rope in (None, "default", "linear"):
        plain = config.rope_parameters["rope_theta"] ** -(torch.arange(half) / half) / (4.0 if rope == "linear" else 1)
        torch.testing.assert_close(turns, plain.double(), check_dtype=False)
    positions, hidden = torch.tensor([[0, 1, 2, 17]]), torch.randn(1, 4, layer.k_proj.in_features)
    found, _ = layer.keys_values(hidden, rotary(hidden, positions))
    keys = layer.k_norm(layer.k_proj(hidden).unflatten(-1, (-1, config.head_dim))).transpose(1, 2).double()
    pairs = torch.complex(keys[..., :half], keys[..., half : 2 * half])
    angles = positions[0, :, None].double() * turns
    pairs = pairs * torch.polar(torch.full_like(angles, rotary.attention_scaling), angles)
    expected = torch.cat([pairs.real, pairs.imag, keys[..., 2 * half :]], dim=-1)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-4)


def test_the_doctor_tries_all_of_a_head_and_other_layers_than_embeddings():
    """speculators wrote the factor of a target into drafters that it trained with all of a head (its issue 613)."""
    target = seeded(qwen3)
    drafter = tiny_drafter(target, **READ | {"target_layer_ids": [EMBEDDINGS, 1], "rope_parameters": dict(PART)})
    tried = variants(drafter.config, target)
    whole = [name for name in tried if "rotary" in name]
    assert [tried[name].rope_parameters["partial_rotary_factor"] for name in whole] == [1]
    ids = [config.target_layer_ids for config in tried.values()]
    assert [each for each in ids if each != [EMBEDDINGS, 1]] == [[EMBEDDINGS, 0], [EMBEDDINGS, 2]]
    settings = [drafter.config, *tried.values()]
    emitted, _ = draft_every_round(target, drafter, prompt(20), 10, settings)
    assert emitted.shape == (len(settings), 9)
    assert not any("rotary" in name for name in variants(tiny_drafter(target, **READ).config, target))


def test_embeddings_are_trained_on_and_cached(tmp_path):
    target = seeded(qwen3)
    drafter = tiny_drafter(target, **READ | {"target_layer_ids": [EMBEDDINGS, 2]})
    others = {"loss_mask": [1] * 18, "position_ids": list(range(18))}
    rows = [{"input_ids": prompt(18, seed)[0].tolist(), **others} for seed in range(2)]
    cache = FeatureCache.write(tmp_path / "cache", rows, target, target_layer_ids=[EMBEDDINGS, 2, -1], dtype="float32")
    with capture_residual(target, [EMBEDDINGS]) as captured, torch.no_grad():
        target(torch.tensor([rows[0]["input_ids"]]))
    assert torch.equal(cache[0]["residual"][:, :1], captured[0][0])
    losses = []
    for data in (rows, cache):
        trainer = trainer_for(tmp_path / "out", target, drafter, data, data, recipe="ours", max_steps=1)
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_compiled_rounds_read_embeddings_and_turn_the_part_too():
    # Up to 6 s: dynamo traces the target's rounds and the drafter's.
    target = seeded(qwen3)
    compiling = CompileConfig(mode=None, fullgraph=True, backend="eager")
    compiling._compile_all_devices = True  # a CPU's, too
    rope = {**PART, "rope_type": "linear", "factor": 2.0}
    drafter = tiny_drafter(target, **READ | {"target_layer_ids": [EMBEDDINGS, 2], "rope_parameters": rope})
    written, draft = [], drafter.draft
    drafter.bind(target)
    for options in ({}, {"cache_implementation": "static", "compile_config": compiling}):
        drafts = []
        drafter.draft = lambda *args, drafts=drafts: drafts.append(draft(*args)) or drafts[-1]
        text = target.generate(prompt(9), max_new_tokens=16, do_sample=False, assistant_model=drafter, **options)
        written.append((text.tolist(), [tree.tokens.tolist() for (tree,) in drafts]))
    torch._dynamo.reset()
    assert written[0] == written[1] and len(written[0][1]) > 3


def test_the_target_has_to_have_the_same_cap_and_a_capped_head_of_its_own_is_neither_trained_nor_served(tmp_path):
    target = seeded(capped)
    for folder, name in (
        ("block", "z-lab, capped"), ("eagle3", "safeailab, capped"), ("head", "speculators truncated, capped")
    ):  # fmt: skip
        LAYOUTS[name].write(tmp_path / folder, target)
    load_drafter(tmp_path / "head").save_pretrained(tmp_path / "ours")
    assert VLLMConfig.from_pretrained(tmp_path / "ours").final_logit_softcapping == 2.0
    Refusal(SGLangConfig.from_pretrained, (*CAP, "SGLang")).check(tmp_path / "ours")
    drafter = load_drafter(tmp_path / "block")
    target.config.final_logit_softcapping = 30.0
    for other, cap in ((target, "30.0"), (qwen3(), "None")):
        Refusal(drafter.bind, (*CAP, cap)).check(other)
    deeper, own = seeded(partial(qwen3, layers=8)), load_drafter(tmp_path / "eagle3", dtype=torch.float32)
    data = [{"input_ids": list(range(2, 20)), "loss_mask": [1] * 18}]
    Refusal(trainer_for, CAP).check(tmp_path / "out", deeper, own, data, data, recipe="ours", max_steps=1)


@pytest.mark.parametrize("kind", [Eagle3Drafter, HyperDFlashDrafter])
def test_a_fresh_drafter_has_its_targets_cap_unless_its_head_is_its_own(kind):
    fields = {} if kind is Eagle3Drafter else {"mask_token_id": 1, "target_layer_ids": [0]}
    for size, cap in ((None, 2.0), (20, None)):
        made = kind.from_target(seeded(capped), **({} if size is None else {"draft_vocab_size": size}), **fields)
        assert made.config.final_logit_softcapping == cap
