"""Others' drafters that read their target's embeddings, what enters its first layer, were refused: engines call them
layer 0 in `eagle_aux_hidden_state_layer_ids`, and -1 where outputs are counted."""

import pytest
import torch
from transformers import CompileConfig

from hf_hyperdflash import bind, capture_residual, unbind
from hf_hyperdflash.benchmark.doctor.config_variants import draft_every_round, variants
from hf_hyperdflash.serving.sglang.config import SGLangConfig
from hf_hyperdflash.serving.vllm.config import VLLMConfig
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.training.features.store import FeatureCache

from ..conftest import prompt, tiny_drafter, tiny_target
from ..helpers.families import FAMILIES, gemma2, qwen3
from ..helpers.refusals import Refusal
from ..helpers.released_layouts import EMBEDDINGS
from ..helpers.training import trainer_for


@pytest.fixture
def target():
    torch.manual_seed(0)
    return qwen3().eval()


@torch.no_grad()
def test_what_is_captured_is_what_stocks_hidden_states_hold(target):
    """In which 0 is what enters the first layer."""
    ids, layers = prompt(9), [EMBEDDINGS, 0, 2]
    states = target(ids, output_hidden_states=True).hidden_states
    expected = torch.cat([states[i].unsqueeze(2) for i in (0, 1, 3)], dim=2)
    with capture_residual(target, layers) as captured:
        target(ids)
    torch.testing.assert_close(captured[0], expected)


def test_engines_are_told_of_them(target, tmp_path):
    fields = dict(target_layer_ids=[EMBEDDINGS, 2], num_draft_tokens=4)
    tiny_drafter(target, reducer="fc", **fields).save_pretrained(tmp_path)
    assert VLLMConfig.from_pretrained(tmp_path).dflash_config["target_layer_ids"] == [-1, 2]
    Refusal(SGLangConfig.from_pretrained, ("`target_layer_ids`", "[-1000000, 2]")).check(tmp_path)


def test_they_are_trained_on_and_cached(target, tmp_path):
    drafter = tiny_drafter(target, reducer="fc", target_layer_ids=[EMBEDDINGS, 2], num_draft_tokens=4)
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


def test_compiled_rounds_hand_them_out_too(target):
    """And turn as much of a head as eager ones do."""
    # Up to 6 s: dynamo traces the target's rounds and the drafter's.
    compiling = CompileConfig(mode=None, fullgraph=True, backend="eager")
    compiling._compile_all_devices = True  # a CPU's, too
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5}
    fields = dict(target_layer_ids=[EMBEDDINGS, 2], num_draft_tokens=4, sliding_window=None, rope_parameters=rope)
    drafter, written = tiny_drafter(target, reducer="fc", **fields), []
    propose = drafter.propose
    drafter.bind(target)
    for options in ({}, {"cache_implementation": "static", "compile_config": compiling}):
        drafts = []
        drafter.propose = lambda *args, drafts=drafts: drafts.append(propose(*args)) or drafts[-1]
        text = target.generate(prompt(9), max_new_tokens=16, do_sample=False, assistant_model=drafter, **options)
        written.append((text.tolist(), [tree.tokens.tolist() for tree in drafts]))
    drafter.unbind(target)
    torch._dynamo.reset()
    assert written[0] == written[1] and len(written[0][1]) > 3


def test_doctor_moves_the_other_layers(target):
    drafter = tiny_drafter(target, reducer="fc", target_layer_ids=[EMBEDDINGS, 1])
    settings = [drafter.config, *variants(drafter.config, target).values()]
    ids = [config.target_layer_ids for config in settings]
    assert [each for each in ids if each != ids[0]] == [[EMBEDDINGS, 0], [EMBEDDINGS, 2]]
    emitted, _ = draft_every_round(target, drafter, prompt(20), 10, settings)
    assert emitted.shape == (len(settings), 9)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
@torch.no_grad()
def test_every_family_hands_them_out(family):
    torch.manual_seed(0)
    target, entered = family().eval(), []
    first = target_of(target).layers[0]

    def note(module, args, kwargs):
        entered.append((*args, *kwargs.values())[0])

    handle = first.register_forward_pre_hook(note, with_kwargs=True)
    bind(target)
    with capture_residual(target, [EMBEDDINGS, 0]) as captured:
        target(prompt(9))
    unbind(target)
    handle.remove()
    streams = captured[0].shape[2] // 2
    assert torch.equal(captured[0][:, :, :streams].flatten(), entered[0].flatten())


def test_gemmas_are_scaled_and_a_v4_has_streams_of_them():
    torch.manual_seed(0)
    ids = prompt(5)
    for target, streams in ((gemma2().eval(), 1), (tiny_target(), 4)):
        embeds = target.get_input_embeddings()(ids)
        with capture_residual(target, [EMBEDDINGS]) as captured, torch.no_grad():
            target(ids)
        assert captured[0].shape[2] == streams
        assert all(torch.allclose(captured[0][:, :, i], embeds) for i in range(streams))
