"""Others' drafters with a `final_logit_softcapping` were refused by name, although it is what their target does with
its logits."""

import json
from functools import partial

import pytest
import torch

from hf_hyperdflash import Eagle3Drafter, load_drafter
from hf_hyperdflash.hub.formats import export_dflash
from hf_hyperdflash.serving.sglang.config import SGLangConfig
from hf_hyperdflash.serving.vllm.config import VLLMConfig
from hf_hyperdflash.targets.registry import target_of

from ..conftest import prompt, tiny_drafter
from ..helpers.families import gemma2, qwen3
from ..helpers.oracle_dflash import read_speculators, read_zlab, states, write_speculators, write_zlab
from ..helpers.refusals import Refusal
from ..helpers.released_layouts import LAYER, check_eagle3, drafted, eagle3_tensors, safeailab, speculators
from ..helpers.released_layouts import check_logits as check
from ..helpers.training import trainer_for

SHAPE = {"block_size": 5, "mask_token_id": 1}
CAP = 0.5  # of logits of about 1, so that it shows


@pytest.fixture
def target():
    torch.manual_seed(0)
    model = gemma2().eval()
    model.config.final_logit_softcapping = CAP
    return model


@torch.no_grad()
def expected(drafter, target, ids, head=None):
    """Logits that the oracle's states have with the target's own embeddings, head and cap."""
    embedding = target.get_input_embeddings()
    table = embedding(torch.arange(target.config.vocab_size)).float()  # as its first layer reads them
    hidden = states(drafter, target, table, ids, 4, 5)
    logits = hidden @ (target.get_output_embeddings().weight.float() if head is None else head).T
    return torch.tanh(logits / CAP) * CAP


@pytest.mark.parametrize("place", ["inner", "outer"])
def test_others_over_the_targets_head(target, tmp_path, place):
    write_zlab(tmp_path, target, nested=True, layer_ids=[0, 2], **{place: {"final_logit_softcapping": CAP}}, **SHAPE)
    ids = prompt(14)
    drafter = load_drafter(tmp_path, target=target, dtype=torch.float32)
    logits = expected(read_zlab(tmp_path), target, ids)
    assert logits.abs().max() > 0.9 * CAP  # it matters
    check(drafter, target, logits, ids)
    export_dflash(drafter, tmp_path / "again")
    assert json.loads((tmp_path / "again/config.json").read_text())["dflash_config"]["final_logit_softcapping"] == CAP
    check(load_drafter(tmp_path / "again", target=target, dtype=torch.float32), target, logits, ids)
    drafter.save_pretrained(tmp_path / "ours")
    check(load_drafter(tmp_path / "ours", target=target, dtype=torch.float32), target, logits, ids)


@pytest.mark.parametrize("place", ["outer", "layer"])
def test_others_with_a_head_of_their_own(target, tmp_path, place):
    write_speculators(tmp_path, target, layer_ids=[1, 3], draft_vocab_size=20, verifier_weights="omitted", **SHAPE)
    fields = json.loads((tmp_path / "config.json").read_text())
    (fields if place == "outer" else fields["transformer_layer_config"])["final_logit_softcapping"] = CAP
    (tmp_path / "config.json").write_text(json.dumps(fields))
    drafter, read, ids = load_drafter(tmp_path, dtype=torch.float32), read_speculators(tmp_path), prompt(14)
    kept = torch.arange(20) + read.weights["d2t"]
    logits = expected(read, target, ids, read.weights["lm_head.weight"])
    check(drafter, target, torch.full((4, 64), -torch.inf).index_copy(1, kept, logits), ids)
    export_dflash(drafter, tmp_path / "again", "speculators")
    again = load_drafter(tmp_path / "again", dtype=torch.float32)
    torch.testing.assert_close(drafted(again, target, ids, [2] * 3), drafted(drafter, target, ids, [2] * 3))
    again.save_pretrained(tmp_path / "ours")
    assert VLLMConfig.from_pretrained(tmp_path / "ours").final_logit_softcapping == CAP
    call = partial(SGLangConfig.from_pretrained, tmp_path / "ours")
    Refusal(call, ("final_logit_softcapping", "0.5", "SGLang")).check()


@pytest.mark.parametrize("layout", [safeailab, speculators])
def test_others_eagle3(tmp_path, layout):
    torch.manual_seed(0)
    target, tensors = qwen3(layers=8).eval(), eagle3_tensors()
    drafter = load_drafter(layout(tmp_path, tensors, final_logit_softcapping=CAP), dtype=torch.float32)
    check_eagle3(drafter, target, tensors, cap=CAP)
    with pytest.raises(AssertionError):
        check_eagle3(drafter, target, tensors)
    if layout is speculators:
        layer = {**LAYER, "final_logit_softcapping": CAP}
        drafter = load_drafter(layout(tmp_path, tensors, transformer_layer_config=layer), dtype=torch.float32)
        check_eagle3(drafter, target, tensors, cap=CAP)


def test_the_target_has_to_have_the_same_cap(target, tmp_path):
    write_zlab(tmp_path, target, nested=True, layer_ids=[0, 2], inner={"final_logit_softcapping": CAP}, **SHAPE)
    target.config.final_logit_softcapping = 30.0
    drafter = load_drafter(tmp_path)
    for other, cap in ((target, "30.0"), (qwen3(), "None")):
        Refusal(partial(drafter.bind, other), ("final_logit_softcapping", str(CAP), cap)).check()


def test_exports_of_ours_name_the_cap_of_their_target(target, tmp_path):
    drafter = tiny_drafter(target, reducer="fc", target_layer_ids=[0, 2], num_draft_tokens=4).float()
    ids = prompt(14)
    export_dflash(drafter, tmp_path)
    check(drafter, target, expected(read_zlab(tmp_path), target, ids), ids)
    assert read_zlab(tmp_path).config["dflash_config"]["final_logit_softcapping"] == CAP
    assert Eagle3Drafter.from_target(target).config.final_logit_softcapping == CAP
    for kind in (Eagle3Drafter, type(drafter)):  # with a head of its own, whose logits are its own
        fields = {} if kind is Eagle3Drafter else {"mask_token_id": 1, "target_layer_ids": [0]}
        assert kind.from_target(target, draft_vocab_size=20, **fields).config.final_logit_softcapping is None


def test_a_capped_head_of_its_own_is_not_trained_without_its_cap(tmp_path):
    torch.manual_seed(0)
    target = qwen3(layers=8).eval()
    drafter = load_drafter(safeailab(tmp_path, eagle3_tensors(), final_logit_softcapping=CAP), dtype=torch.float32)
    cap = "final_logit_softcapping", "0.5"
    Refusal(partial(drafter.check_trainable, target_of(target)), cap).check()
    data = [{"input_ids": list(range(2, 20)), "loss_mask": [1] * 18}]
    Refusal(
        partial(trainer_for, tmp_path / "out", target, drafter, data, data, recipe="ours", max_steps=1), cap
    ).check()
