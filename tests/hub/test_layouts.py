"""What is particular to some layouts of others, and what is done with their drafters; the rest is in
`tests/contracts/test_layouts.py`."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LogitsProcessorList, MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator
from typer.testing import CliRunner

from hf_hyperdflash import HyperDFlashDrafter, capture_residual, load_drafter
from hf_hyperdflash.cli.app import app
from hf_hyperdflash.drafters.blocks.configuration_hyperdflash import HyperDFlashConfig
from hf_hyperdflash.drafters.sampling import DraftRequest, DraftSampler
from hf_hyperdflash.hub.formats import changed_fields, export_dflash
from hf_hyperdflash.hub.found import check_drafter
from hf_hyperdflash.hub.layouts.lines import ROPE, STREAMS, WINDOWS, layers_read, shape
from hf_hyperdflash.hub.layouts.table import Entry, Layout, always, inside, marked, same
from hf_hyperdflash.hub.publish import planned_push
from hf_hyperdflash.targets.registry import target_of

from ..conftest import prompt, tiny_drafter, tiny_target
from ..helpers import oracle_eagle3
from ..helpers.families import qwen3
from ..helpers.refusals import Refusal
from ..helpers.released_layouts import (
    DRAFTED,
    IDS,
    LAYERS,
    LAYOUTS,
    VOCABULARY,
    WIDTH,
    check_specblock,
    deepspec,
    eagle3_tensors,
    read,
    safeailab,
    specblock,
    specblock_tensors,
    speculators,
    whole_vocabulary,
)
from ..helpers.training import trainer_for


@pytest.fixture
def target():
    torch.manual_seed(0)
    return qwen3().eval()


@pytest.fixture(scope="module")
def deeper():
    torch.manual_seed(0)
    return qwen3(layers=8).eval()


def plain_drafter(target, **fields):
    return tiny_drafter(target, **{"reducer": "fc", "target_layer_ids": [0, 2], "sliding_window": None, **fields})


def test_a_new_layout_is_a_table(target):
    """Each line is read and written, what it has no line for is named with both values, and so is what is unknown."""
    layout = Layout(
        fits=marked("drafter_v9"),
        config=HyperDFlashConfig,
        table=(
            always("drafter_v9", lambda config: True),
            *inside("layers", shape(), ROPE),
            WINDOWS,
            STREAMS,
            same("block_size", "width", is_needed=True),
            same("mask_token_id", "hole", is_needed=True),
            layers_read("taps", 1),
        ),
        layers_in="layers",
        ignores=("drafter_v9",),
    )
    config = plain_drafter(target).config
    fields = layout.write(config)
    assert layout.fits(fields) and (fields["width"], fields["hole"], fields["taps"]) == (7, 1, [1, 3])
    again = layout.read(fields, "org/name")
    assert (again.block_size, again.mask_token_id, again.target_layer_ids) == (7, 1, [0, 2])
    assert not changed_fields(config, layout)
    config.final_logit_softcapping = 30.0
    assert changed_fields(config, layout) == ["`final_logit_softcapping` is 30.0, and there it would be None"]
    assert layout.unknown({**fields, "depth": 3}, "org/name") == {"depth": 3}
    del fields["width"]
    Refusal(layout.read, ("org/name", "`width`")).check(fields, "org/name")


@pytest.mark.parametrize(
    ("fields", "width"),
    [
        ({}, 3), ({"width": None}, None), ({"width": 4}, 4), ({"width": 4, "first": {"width": None}}, 4),
        ({"width": 4, "first": {"width": 5}}, 5), ({"first": {"width": 5}, "last": {"width": 6}}, 6),
        ({"last": {"width": 6}, "v9_width": 7}, 7), ({"last": {"width": 6}, "v9_width": None}, 6),
        ({"last": None, "first": {"width": 5}}, 5), ({"first": {"height": 1}, "width": 4}, 4),
    ],
)  # fmt: skip
def test_which_of_several_places_counts(fields, width):
    """The later section more than the earlier one, a prefix most, a default least, and what is empty not at all."""
    seen = []
    layout = Layout(
        fits=lambda fields: True, config=lambda: None, sections={"first": None, "last": ("width",)}, prefix="v9_",
        table=(Entry(("width", "height"), lambda given: seen.append(given("width")) or {}),),
        defaults=lambda fields: {"width": 3},
    )  # fmt: skip
    layout.read(fields, "org/name")
    assert seen == [width]


@pytest.mark.parametrize(
    ("name", "fields", "ours"),
    [
        ("specforge", {"dspark_bonus_anchor": True}, {"sample_from_anchor": False}),
        ("specforge", {"dspark_bonus_anchor": False}, {"sample_from_anchor": True}),
        ("z-lab", {"dspark_bonus_anchor": False}, {"sample_from_anchor": True, "window_from": "anchor"}),
        ("z-lab", {"draft_vocab_size": 64}, {"draft_vocab_size": 0}),
        ("z-lab", {"sliding_window": 6, "use_sliding_window": True}, {"sliding_window": None}),
        ("z-lab", {"is_causal": None}, {"causal_layers": "none"}),
        ("z-lab window", {"is_causal": None}, {"causal_layers": "sliding", "window_from": "slot"}),
        ("deepspec", {"enable_confidence_head": None}, {"confidence_head": False}),
        ("deepspec", {"enable_confidence_head": None, "confidence_head_alpha": 1.0}, {"confidence_head": True}),
        ("deepspec", {"confidence_head_with_markov": False}, {"confidence_reads_token": False}),
        ("speculators dspark", {"sample_from_anchor": None}, {"sample_from_anchor": True}),
        ("speculators", {"sample_from_anchor": None}, {"sample_from_anchor": False}),
        ("speculators", {"target_hidden_size": 64}, {"reducer": "stream_mean", "any_streams": True}),
        ("z-lab", {IDS: "1"}, {"target_layer_ids": [1, 2]}),
        ("safeailab", {"norm_before_residual": 1, "fc_norm": 0}, {"norm_before_residual": True, "fc_norm": False}),
        ("speculators eagle3", {"norm_before_fc": 1, "norm_output": 1}, {"norm_before_fc": True, "norm_output": True}),
        ("safeailab", {"norm_output": True}, {"norm_output": False}),
        ("safeailab", {"norm_output": True, "num_aux_hidden_states": 3}, {"norm_output": True}),
        ("safeailab", {"target_hidden_size": 64}, {"own_embedding": False, "usual_layers": False}),
        ("safeailab", {"target_hidden_size": 32}, {"own_embedding": True, "target_hidden_size": 32}),
        ("safeailab", {"eagle_config": None}, {"usual_layers": True, "target_layer_ids": [1, 2, 3]}),
        ("specblock", {"draft_vocab_size": None, "vocab_size": 32001}, {"draft_vocab_size": 32000, "block_size": 3}),
    ],
)  # fmt: skip
def test_what_fields_of_others_mean(name, fields, ours, tmp_path):
    torch.manual_seed(0)
    LAYOUTS[name].write(tmp_path, LAYOUTS[name].target())
    given = {**json.loads((tmp_path / "config.json").read_text()), **fields}
    (tmp_path / "config.json").write_text(json.dumps({key: it for key, it in given.items() if it is not None}))
    config = check_drafter(tmp_path).config
    assert {field: getattr(config, field) for field in ours} == ours


@pytest.mark.parametrize("off", [("shift",), ("broadcast",), ("shift", "broadcast")], ids=str)
def test_specblock_without_its_parts(deeper, tmp_path, off):
    drafter = load_drafter(specblock(tmp_path, specblock_tensors()), dtype=torch.float32)
    check_specblock(drafter, deeper, tmp_path, off)
    Refusal(drafter.bind, ("at least 8 layers",)).check(qwen3())


@torch.no_grad()
def test_eagle3s_dynamic_tree(tmp_path, deeper, monkeypatch):
    """At SHARPENED = 1 ours is theirs: the sharpening changes which nodes are held to be the best."""
    monkeypatch.setattr("hf_hyperdflash.trees.growth.SHARPENED", 1.0)
    target, tensors = deeper, eagle3_tensors()
    drafter = load_drafter(safeailab(tmp_path, tensors), dtype=torch.float32)
    drafter.config.tree_width, ids = 3, prompt(12)
    shape = oracle_eagle3.Shape(4, 2, 16, 1e-6, 5000.0)
    features, embeds = read(target, ids)
    known = oracle_eagle3.entries(tensors, shape, features[:-1], embeds)
    table = target.get_input_embeddings()
    with capture_residual(target, LAYERS) as captured:
        target(ids[:, :-1])
    context, positions = drafter.new_context(), torch.arange(ids.shape[1])[None]
    drafter.extend(target_of(target), context, captured[0], positions[:, :-1], ids[:, 1:])
    for budget in (4, 14, 21):
        expected = oracle_eagle3.dynamic_tree(
            tensors, shape, known, lambda token: table(torch.tensor(token)), VOCABULARY, 3, 3, budget
        )
        sampler = DraftSampler(LogitsProcessorList(), False, budget)
        (tree,) = drafter.draft(target_of(target), [DraftRequest(context, ids, positions, 3, sampler)])
        assert {tuple(tree.tokens[tree.path(node)].tolist()) for node in range(len(tree))} == expected, budget


def test_drafts_are_those_of_transformers_own_dflash_path(target, monkeypatch):
    """The same weights in transformers' reference drafter: the same drafts in every round, the same text."""
    fields = dict(num_hidden_layers=2, intermediate_size=48, head_dim=8, num_attention_heads=4, num_key_value_heads=2)
    drafter = plain_drafter(target, **fields)
    assistant = MuseGlimmerAssistantModel(
        MuseGlimmerAssistantConfig(
            **fields, hidden_size=64, target_layer_ids=[0, 2], block_size=7, mask_token_id=1, rms_norm_eps=1e-6,
            sliding_window=4096, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    ).eval()  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for parameter in drafter.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    names = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
    weights = {
        next((new + name.removeprefix(old) for old, new in names.items() if name.startswith(old)), name): value
        for name, value in drafter.state_dict().items()
    }
    assistant.load_state_dict(weights)
    theirs, ours = [], []
    get_candidates, draft = DFlashTokenCandidateGenerator.get_candidates, type(drafter).draft

    def listening(self, input_ids, *args, **kwargs):
        candidates = get_candidates(self, input_ids, *args, **kwargs)
        if candidates[0].shape[1] > input_ids.shape[1]:
            theirs.append(candidates[0][0, input_ids.shape[1] :].tolist())
        return candidates

    def telling(self, *args):
        (tree,) = draft(self, *args)
        ours.append(tree.tokens.tolist())
        return [tree]

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", listening)
    monkeypatch.setattr(type(drafter), "draft", telling)
    ids = prompt(13)
    options = dict(do_sample=False, max_new_tokens=24)
    expected = target.generate(ids, assistant_model=assistant, speculation_type="dflash", **options)
    drafter.bind(target)
    assert torch.equal(target.generate(ids, assistant_model=drafter, **options), expected)
    assert len(ours) > 5
    for mine, their in zip(ours, theirs):  # at the end of the text transformers drafts more than fit
        assert mine == their[: len(mine)]


# What is in their files


def test_selectors_as_pypis_dflash_saves_them(target, tmp_path):
    LAYOUTS["z-lab dflash2"].write(tmp_path, target)
    first = load_drafter(tmp_path).state_dict()
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("predecessor_codebook", "successor_codebook"):
        tensors[f"candidate_selector.{name}.weight"] = tensors.pop(f"candidate_selector.{name}")
    save_file(tensors, tmp_path / "model.safetensors")
    assert all(torch.equal(value, first[name]) for name, value in load_drafter(tmp_path).state_dict().items())


def test_pickles_of_eagle3_are_read_without_running_code_and_those_of_others_are_not(target, tmp_path):
    tensors = eagle3_tensors()
    safeailab(tmp_path / "eagle3", tensors)
    LAYOUTS["z-lab"].write(tmp_path / "z-lab", target)
    save_file({"fc.weight": torch.zeros(1)}, tmp_path / "z-lab" / "z-other.safetensors")
    load_drafter(tmp_path / "z-lab")
    for name in ("eagle3", "z-lab"):
        torch.save(load_file(tmp_path / name / "model.safetensors"), tmp_path / name / "pytorch_model.bin")
        (tmp_path / name / "model.safetensors").unlink()
    drafter = load_drafter(tmp_path / "eagle3", dtype=torch.float32)
    assert torch.equal(drafter.state_dict()["norm.weight"], tensors["norm.weight"])
    Refusal(load_drafter, (str(tmp_path), "model.safetensors", "pickle"), OSError).check(tmp_path / "z-lab")
    torch.save({"norm.weight": [1.0]}, tmp_path / "eagle3" / "pytorch_model.bin")
    Refusal(load_drafter, ("pytorch_model.bin", "tensors"), OSError).check(tmp_path / "eagle3")


def test_key_heads_are_llamas_where_nothing_is_said(tmp_path):
    tensors = eagle3_tensors()
    for part in "kv":
        tensors[f"midlayer.self_attn.{part}_proj.weight"] = torch.randn(64, 2 * WIDTH)
    assert load_drafter(safeailab(tmp_path, tensors, num_key_value_heads=None)).config.num_key_value_heads == 4


@pytest.mark.parametrize("of", ["embedding", "head"])
def test_copies_of_the_targets_are_shared_and_others_kept(tmp_path, deeper, of):
    embedding, head = (
        module.weight.detach() for module in (deeper.get_input_embeddings(), deeper.get_output_embeddings())
    )
    for is_own in (False, True):
        copies = {
            "embed_tokens": embedding + (is_own and of == "embedding"),
            "lm_head": head + (is_own and of == "head"),
        }
        deepspec(tmp_path, whole_vocabulary(eagle3_tensors(qk_norm=True, reads=5), **copies))
        drafter = load_drafter(tmp_path, target=deeper, dtype=torch.float32)
        assert drafter.config.own_embedding == (is_own and of == "embedding")
        assert drafter.config.draft_vocab_size == (VOCABULARY if is_own and of == "head" else 0)
        found = drafter.embed(target_of(deeper), torch.tensor([[5]]))[0, 0]
        assert torch.equal(found, copies["embed_tokens"][5])
    with torch.device("meta"):
        unloaded = type(deeper)(deeper.config)
    for target in (None, unloaded):  # nothing to compare with
        assert load_drafter(tmp_path, target=target).config.own_embedding
    assert drafter.config.target_name_or_path == "Qwen/Qwen3-4B"


# What is done with them


MAKERS = {"safeailab": safeailab, "speculators": speculators, "specblock": specblock}


@pytest.mark.parametrize("layout", MAKERS)
def test_others_drafters_are_trained_on(tmp_path, deeper, layout):
    """For a target that was fine-tuned: what was read is trained, its vocabulary stays, and it is saved."""
    tensors = specblock_tensors() if layout == "specblock" else eagle3_tensors()
    tensors["embed_tokens.weight"] = deeper.get_input_embeddings().weight.detach().clone()
    drafter = load_drafter(MAKERS[layout](tmp_path, tensors), dtype=torch.float32)
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    assert drafter.config.own_embedding and drafter.config.draft_vocab_size == DRAFTED
    assert drafter.config.target_model_type == "" and drafter.config.target_num_layers == 0  # until it is trained
    words = ("at least 8 layers",) if layout == "specblock" else ("64", "32")
    Refusal(drafter.check_target, words).check(target_of(tiny_target()))
    texts = deeper.generate(prompt(9).repeat(3, 1), max_new_tokens=20, do_sample=True, pad_token_id=0)
    data = [{"input_ids": text, "loss_mask": [int(i > 8) for i in range(29)]} for text in texts.tolist()]
    trainer = trainer_for(tmp_path / "out", deeper, drafter, data, data, recipe="ours", max_steps=20)
    start = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.9 * start
    trainer.save_model()
    trained = load_drafter(tmp_path / "out", dtype=torch.float32)
    same = {name for name, value in trained.state_dict().items() if torch.equal(value, before[name])}
    assert same == {"embed_tokens.weight", "draft_ids"}


@pytest.mark.parametrize("layout", ["safeailab", "specblock"])
def test_others_drafters_are_carded_pushed_and_exported_once_they_are_saved(tmp_path, layout):
    """Each command says so before; afterwards card and push are of ours, not their file's, and know no target yet."""
    theirs, run = tmp_path / "theirs", CliRunner()
    if layout == "safeailab":
        safeailab(theirs, eagle3_tensors(), eagle_config=None)
    else:
        specblock(theirs, specblock_tensors())
    (theirs / "README.md").write_text("Serve it with SGLang.")
    drafter = load_drafter(theirs)
    for command in (["card", theirs], ["push", theirs, "org/drafter", "--dry-run"]):
        told = str(run.invoke(app, [str(word) for word in command]).exception)
        assert f"load_drafter('{theirs}').save_pretrained(FOLDER)" in told
    assert "README.md (a new one" in planned_push(drafter, "org/drafter")
    drafter.save_pretrained(tmp_path / "ours")
    result = run.invoke(app, ["card", str(tmp_path / "ours"), "--target", "org/target", "--repo-id", "org/drafter"])
    card = (tmp_path / "ours" / "README.md").read_text()
    assert result.exit_code == 0 and "deepseek" not in card and 'from_pretrained("org/target"' in card
    assert "after layer 1, one in the middle and the fourth from the end" in card
    assert run.invoke(app, ["push", str(tmp_path / "ours"), "org/drafter", "--dry-run"]).exit_code == 0
    told = str(run.invoke(app, ["export", str(theirs), str(tmp_path / "export")]).exception)
    assert "expected a HyperDFlash drafter" in told


# What is written


def test_scaled_rope_is_written_and_read(target, tmp_path):
    scaled = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 256}
    drafter = plain_drafter(target, rope_parameters=scaled)
    for format in ("z-lab", "speculators"):
        export_dflash(drafter, tmp_path / format, format)
        again = load_drafter(tmp_path / format, dtype="bfloat16")
        assert {name: again.config.rope_parameters[name] for name in scaled} == scaled
        assert torch.equal(again.rotary_emb.inv_freq, drafter.rotary_emb.inv_freq)
        assert again.dtype == torch.bfloat16
    fields = json.loads((tmp_path / "z-lab" / "config.json").read_text())
    assert fields["rope_theta"] == 5e5 and fields["rope_scaling"]["factor"] == 4.0  # vLLM and SGLang look there


WINDOWED = "vLLM counts the window of 6 from each slot, not the anchor: drafts may differ."
SERVED = [  # a drafter, the layout that it is written in, what vLLM is told, and the other line
    ("deepspec", "deepspec", ("dspark", 5), "DSPARK {} --speculative-dspark-block-size 5"),
    ("deepspec", "speculators", ("dspark", 5), ""), ("z-lab dflash2", "z-lab", ("dflash", 4), ""),
    ("z-lab", "z-lab", ("dflash", 4), "DFLASH {} --speculative-num-draft-tokens 5"),
    ("speculators", "speculators", ("dflash", 4), ""), ("speculators window", "speculators", ("dflash", 4), WINDOWED),
    ("deepspec rnn", "deepspec", None, "'markov'"), ("speculators rnn", "speculators", None, "'recurrent'"),
    ("speculators gated", "speculators", None, "'gated_markov'"), ("z-lab dflash2", "speculators", None, "z-lab"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "format", "of_vllm", "more"), SERVED)
def test_how_engines_serve_what_is_written(target, tmp_path, name, format, of_vllm, more):
    LAYOUTS[name].write(tmp_path / "theirs", target)
    folder = tmp_path / "ours"
    said = export_dflash(load_drafter(tmp_path / "theirs"), folder, format, target)
    if of_vllm is None:
        assert more in said and "--speculative" not in said
        return
    first, *rest = said.split("\n")
    options = dict(zip(("method", "num_speculative_tokens"), of_vllm)) | {"model": str(folder)}
    assert json.loads(first.removeprefix("vLLM: --speculative-config ").strip("'")) == options
    place = f"--speculative-draft-model-path {folder}"
    sglang = "SGLang: --speculative-algorithm " + more.format(place)
    assert rest == ([sglang if "{}" in more else more] if more else [])


def test_how_many_layers_a_target_has_is_left_out_where_it_is_not_known(target, tmp_path):
    drafter = plain_drafter(target)
    drafter.config.target_num_layers = 0
    export_dflash(drafter, tmp_path)
    assert "num_target_layers" not in json.loads((tmp_path / "config.json").read_text())
    export_dflash(drafter, tmp_path, target=target)
    assert json.loads((tmp_path / "config.json").read_text())["num_target_layers"] == 4


@pytest.mark.parametrize("unnamed", [False, True])
def test_an_export_replaces_no_other_model(target, tmp_path, unnamed):
    """Its own drafter's folder least of all: what it was trained for and how it goes on would be lost."""
    drafter = plain_drafter(target)
    drafter.save_pretrained(tmp_path)
    if unnamed:
        (tmp_path / "config.json").unlink()
    there = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    words = (str(tmp_path), "no config.json" if unnamed else "hyperdflash")
    Refusal(export_dflash, words).check(drafter, tmp_path, "speculators")
    assert there == {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    for format in ("speculators", "z-lab"):  # one export replaces another
        export_dflash(drafter, tmp_path / "out", format)
    assert load_drafter(tmp_path / "out").config.target_layer_ids == [0, 2]


def test_a_window_that_no_layout_has_words_for_can_be_left_off(target, tmp_path):
    export_dflash(tiny_drafter(target, reducer="fc", target_layer_ids=[0, 2]), tmp_path / "out")  # the default is none
    plain_drafter(target, sliding_window=8).save_pretrained(tmp_path / "windowed")
    export_dflash(HyperDFlashDrafter.from_pretrained(tmp_path / "windowed", sliding_window=None), tmp_path / "out")


def test_weights_that_cannot_be_written_are_told(target, tmp_path):
    """safetensors has an error of its own for a full disk, as for a folder in its way."""
    drafter = plain_drafter(target)
    export_dflash(drafter, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    Refusal(export_dflash, (str(tmp_path), "os error 21", "room"), OSError).check(drafter, tmp_path)


def test_the_command(target, tmp_path):
    heads = dict(sequential_head="markov", head_rank=4, sample_from_anchor=True)
    plain_drafter(target, **heads).save_pretrained(tmp_path / "drafter")
    target.save_pretrained(tmp_path / "target")
    command = ["export", str(tmp_path / "drafter"), str(tmp_path / "out"), "--format"]
    result = CliRunner().invoke(app, [*command, "deepspec", "--target", str(tmp_path / "target")])
    assert result.exit_code == 0 and '"method": "dspark"' in result.output, result.output
    assert load_drafter(tmp_path / "out", target=target).config.sequential_head == "markov"
    refused = CliRunner().invoke(app, [*command, "z-lab", "--target", "nowhere"])  # before the target is looked for
    assert refused.exit_code and "`sequential_head`" in str(refused.exception)
