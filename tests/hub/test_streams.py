"""Others' drafters for targets with several residual streams, as they are published, on random weights, beside the
oracles: GLM-5.3-Flash (`glm5_next`) and DeepSeek-V4-Flash.

Engines hand a drafter the mean over the streams of each layer; RedHatAI's DFlash for DeepSeek-V4-Flash alone reads
them side by side.
"""

from functools import partial
from typing import Any

import pytest
import torch

from hf_hyperdflash import HyperDFlashDrafter, load_drafter
from hf_hyperdflash.hub.formats import export_dflash

from ..conftest import CSA, HCA, SLIDING, prompt, tiny_target
from ..helpers import oracle_dflash, oracle_layouts
from ..helpers.families import deepseek_v4, glm5_next, qwen3
from .test_layout import check, rounds
from .test_unrolled_layouts import FLAT, check_eagle3, eagle3_tensors, saved

SHAPE: dict[str, Any] = {"block_size": 5, "mask_token_id": 1, "sliding_window": 6}
SIDE_BY_SIDE: dict[str, Any] = {**SHAPE, "streams": 4, "draft_vocab_size": 20, "all_slide": True}
# By the Hub's name: a target of the kind that it is for, and what writes a random one in its layout.
PUBLISHED = {
    "RedHatAI/GLM-5.3-Flash-speculator.dspark-preview": (
        glm5_next, partial(oracle_layouts.write_speculators_dspark, layer_ids=[1, 2, 3], confidence="markov", **SHAPE),
    ),
    "modal-labs/GLM-5.3-Flash-DFlash, incoai/GLM-5.3-Flash-DFlash2": (
        glm5_next, partial(oracle_layouts.write_dflash2, layout="z-lab", layer_ids=[0, 2], **SHAPE),
    ),
    "RedHatAI/DeepSeek-V4-Flash-speculator.dflash": (
        deepseek_v4,
        partial(oracle_dflash.write_speculators, layer_ids=[1, 2], **SIDE_BY_SIDE),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_drafts_are_the_oracles_in_every_round(tmp_path, monkeypatch, name, temperature):
    make, write = PUBLISHED[name]
    torch.manual_seed(0)
    target = make().eval()
    write(tmp_path, target)
    drafter = load_drafter(tmp_path, target=target, dtype="float32")
    assert drafter.config.reducer == ("fc" if "V4" in name else "stream_mean")
    check(rounds(monkeypatch, drafter, target, prompt(12), temperature), tmp_path, target, temperature)


def test_how_many_streams_there_are_is_a_matter_of_the_target(tmp_path, monkeypatch):
    """It is not in the file, and neither has it to be when the drafter is saved as ours or written again."""
    torch.manual_seed(0)
    target = glm5_next().eval()
    PUBLISHED["modal-labs/GLM-5.3-Flash-DFlash, incoai/GLM-5.3-Flash-DFlash2"][1](tmp_path / "theirs", target)
    drafter = load_drafter(tmp_path / "theirs")
    drafter.bind(target)
    drafter.unbind(target)
    drafter.save_pretrained(tmp_path / "saved")
    export_dflash(drafter, tmp_path / "again", "z-lab")
    of_one = qwen3().eval()
    for folder in ("saved", "again"):
        again = load_drafter(tmp_path / folder)
        assert isinstance(again, HyperDFlashDrafter)
        check(rounds(monkeypatch, again, target, prompt(12), 0.0), tmp_path / "theirs", target, 0.0)
        check(rounds(monkeypatch, again, of_one, prompt(12), 0.0), tmp_path / "theirs", of_one, 0.0)


@pytest.mark.parametrize("norms", [False, True], ids=["AQ-MedAI's", "EAGLE-3.1"])
def test_eagle3_reads_the_mean_of_deepseek_v4s_streams(tmp_path, norms):
    """AQ-MedAI/DeepSeek-V4-Flash-0731-eagle3; SyzygyResearch/DeepSeek-V4-Flash-EAGLE3.1, which norms each layer's
    mean, goes on from normed states, and says how many layers it reads."""
    target = tiny_target(hidden_size=64, layer_types=[SLIDING, CSA, HCA, SLIDING, CSA])
    fields = {**FLAT, "architectures": ["LlamaForCausalLMEagle3"], "target_hidden_size": 64}
    fields["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 3], "use_aux_hidden_state": True}
    if norms:
        fields |= {"fc_norm": True, "norm_output": True, "num_aux_hidden_states": 3}
    tensors = eagle3_tensors(fc_norm=norms)
    drafter = load_drafter(saved(tmp_path, fields, tensors), dtype=torch.float32)
    check_eagle3(drafter, target, tensors, [0, 1, 3], fc_norm=norms, norm_output=norms)
    ids = prompt(12)
    plain = target.generate(ids, max_new_tokens=12, do_sample=False)
    drafter.bind(target)
    assert torch.equal(target.generate(ids, max_new_tokens=12, do_sample=False, assistant_model=drafter), plain)
    assert drafter.last_stats.rounds
