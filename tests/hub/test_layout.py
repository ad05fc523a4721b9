"""Others' DSpark and DFlash 2 checkpoints against an independent reading of them (`oracle_layouts.py`), round by
round, and ours written in theirs."""

import json
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hf_hyperdflash import HyperDFlashDrafter, load_drafter
from hf_hyperdflash.benchmark.doctor.diagnosis import Examination
from hf_hyperdflash.benchmark.doctor.fit import check_weights
from hf_hyperdflash.cli.app import app
from hf_hyperdflash.drafters.blocks.configuration_hyperdflash import HyperDFlashConfig
from hf_hyperdflash.hub.formats import changed_fields, export_dflash
from hf_hyperdflash.hub.found import check_drafter
from hf_hyperdflash.hub.layouts.lines import ROPE, STREAMS, WINDOWS, layers_read, shape
from hf_hyperdflash.hub.layouts.table import Layout, always, inside, marked, same

from ..conftest import prompt, tiny_drafter, tiny_target
from ..helpers import oracle_layouts as oracle
from ..helpers.families import qwen3
from ..helpers.tokenizers import characters

SHAPE: dict[str, Any] = {"block_size": 5, "mask_token_id": 1}
DEEPSPEC = partial(oracle.write_deepspec, layer_ids=[0, 2], **SHAPE)
SPECULATORS = partial(oracle.write_speculators_dspark, layer_ids=[1, 3], **SHAPE)
SPECFORGE = partial(oracle.write_specforge, layer_ids=[0, 2], **SHAPE)
DFLASH2 = partial(oracle.write_dflash2, layout="z-lab", layer_ids=[0, 2], **SHAPE)
DFLASH2_SPECULATORS = partial(oracle.write_dflash2, layout="speculators", layer_ids=[1, 3], **SHAPE)
WRITERS = {
    "deepspec vanilla": partial(DEEPSPEC, confidence="markov"),
    "deepspec gated": partial(DEEPSPEC, head="gated"),
    "deepspec rnn": partial(DEEPSPEC, head="rnn", confidence="state"),
    "deepspec headless": partial(DEEPSPEC, head=None, confidence="state"),
    "specforge vanilla": partial(SPECFORGE, confidence="markov"),
    "specforge headless": partial(SPECFORGE, head=None),
    "specforge normalized": partial(SPECFORGE, head="gated", confidence="state", normalized=True),
    "speculators vanilla": partial(SPECULATORS, draft_vocab_size=20, confidence="markov"),
    "speculators gated": partial(SPECULATORS, head="gated", sample_from_anchor=False, confidence="markov"),
    "speculators rnn": partial(SPECULATORS, head="rnn", sample_from_anchor=True),
    "z-lab dflash2": DFLASH2,
    "z-lab dflash2 flat": partial(DFLASH2, nested=False, top_k=5),
    "speculators dflash2": partial(DFLASH2_SPECULATORS, taps=3, group=8),
}


class Round(NamedTuple):
    """One call of `propose`: the text, the generator's state before, and what was drafted."""

    ids: torch.Tensor
    state: torch.Tensor
    tree: Any


@pytest.fixture
def target():
    torch.manual_seed(0)
    return qwen3().eval()


def rounds(monkeypatch, drafter: HyperDFlashDrafter, target, ids: torch.Tensor, temperature: float) -> list[Round]:
    """Those of a text, of which greedily there is but one: the target's."""
    seen: list[Round] = []
    propose = type(drafter).propose

    def telling(self, target, context, ids, *rest):
        state = torch.get_rng_state()
        tree = propose(self, target, context, ids, *rest)
        seen.append(Round(ids.clone(), state, tree))
        return tree

    sampling = dict(do_sample=True, temperature=temperature, top_k=0) if temperature else dict(do_sample=False)
    with monkeypatch.context() as patch:
        patch.setattr(type(drafter), "propose", telling)
        drafter.bind(target)
        text = target.generate(ids, max_new_tokens=20, assistant_model=drafter, **sampling)
        drafter.unbind(target)
    if not temperature:
        assert torch.equal(text, target.generate(ids, max_new_tokens=20, do_sample=False))
    return seen


def check(seen: list[Round], folder, target, temperature: float) -> None:
    assert len(seen) > 5
    for ids, state, tree in seen:
        torch.set_rng_state(state)
        expected = oracle.draft(folder, target, ids, len(tree.tokens), temperature)
        assert tree.tokens.tolist() == expected.tokens
        if temperature:
            torch.testing.assert_close(torch.stack(tree.q), expected.q, atol=1e-4, rtol=1e-4)
        if expected.confidence is None:
            assert tree.confidence is None
        else:
            torch.testing.assert_close(tree.confidence, expected.confidence, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("case", WRITERS)
def test_drafts_are_the_oracles_in_every_round(target, tmp_path, monkeypatch, case, temperature):
    """Greedily, and drawn with the same draws from the same distributions."""
    WRITERS[case](tmp_path, target)
    drafter = load_drafter(tmp_path, target=target, dtype="float32")
    assert drafter.config.target_layer_ids == [0, 2]
    anchors = case == "speculators gated" or "dflash2" in case  # whose slot drafts nothing
    assert drafter.num_draft_tokens == (4 if anchors else 5)
    check(rounds(monkeypatch, drafter, target, prompt(12), temperature), tmp_path, target, temperature)


@pytest.mark.parametrize(
    ("case", "format"),
    [
        *((case, "deepspec") for case in WRITERS if case.startswith(("deepspec", "specforge")) or "rnn" in case),
        *((case, "speculators") for case in WRITERS),
        *((case, "z-lab") for case in WRITERS if "dflash2" in case),
    ],
)
def test_written_again_it_drafts_the_same(target, tmp_path, monkeypatch, case, format):
    """Read, written in any layout that has words for it, and read by the oracle and by us."""
    WRITERS[case](tmp_path / "theirs", target)
    drafter = load_drafter(tmp_path / "theirs", target=target)
    given = {name: getattr(drafter.config, name) for name in type(drafter.config).__annotations__}
    export_dflash(drafter, tmp_path / "ours", format, target)
    check(rounds(monkeypatch, drafter, target, prompt(12), 0.7), tmp_path / "ours", target, 0.7)
    again = load_drafter(tmp_path / "ours", target=target)
    assert drafter.state_dict().keys() == again.state_dict().keys()
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in drafter.state_dict().items())
    if format != "speculators":  # whose files do not say it
        assert again.config.target_num_layers == 4
    assert all(getattr(again.config, name) == value for name, value in given.items())


def markov(target) -> HyperDFlashDrafter:
    """One of ours that every layout of DSpark has words for."""
    fields = dict(sequential_head="markov", head_rank=4, sample_from_anchor=True)
    return tiny_drafter(target, reducer="fc", target_layer_ids=[0, 2], **fields)


def test_what_they_are_told_of_serving(target, tmp_path):
    told = {}
    for case, format in (
        ("deepspec vanilla", "deepspec"), ("deepspec rnn", "deepspec"), ("speculators gated", "speculators"),
        ("speculators vanilla", "speculators"), ("z-lab dflash2", "z-lab"), ("z-lab dflash2", "speculators"),
    ):  # fmt: skip
        WRITERS[case](tmp_path / "theirs", target)
        told[case, format] = export_dflash(load_drafter(tmp_path / "theirs"), tmp_path / "ours", format, target)
    deepspec = told["deepspec vanilla", "deepspec"]
    assert '"method": "dspark"' in deepspec and "--speculative-dspark-block-size 5" in deepspec
    assert '"num_speculative_tokens": 5' in deepspec
    assert "'markov' head alone" in told["deepspec rnn", "deepspec"]
    assert "No engine is known to serve a 'gated_markov' head" in told["speculators gated", "speculators"]
    assert '"method": "dspark"' in told["speculators vanilla", "speculators"]
    assert '"method": "dflash"' in told["z-lab dflash2", "z-lab"] and "SGLang" not in told["z-lab dflash2", "z-lab"]
    assert told["z-lab dflash2", "speculators"] == "vLLM reads DFlash 2 in z-lab's layout."


def test_our_own_drafter_says_how_many_layers_its_target_has(target, tmp_path):
    """PyPI's dflash does not load a checkpoint without."""
    drafter = markov(target)
    assert drafter.config.target_num_layers == 4
    export_dflash(drafter, tmp_path / "deepspec", "deepspec", target)
    plain = tiny_drafter(target, reducer="fc", target_layer_ids=[0, 2])
    export_dflash(plain, tmp_path / "z-lab")
    for format in ("deepspec", "z-lab"):
        assert json.loads((tmp_path / format / "config.json").read_text())["num_target_layers"] == 4
        assert load_drafter(tmp_path / format).config.target_num_layers == 4
    plain.config.target_num_layers = 0  # not known
    export_dflash(plain, tmp_path / "z-lab")
    assert "num_target_layers" not in json.loads((tmp_path / "z-lab" / "config.json").read_text())


def test_selectors_as_pypis_dflash_saves_them(target, tmp_path):
    DFLASH2(tmp_path, target)
    first = load_drafter(tmp_path).state_dict()
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("predecessor_codebook", "successor_codebook"):
        tensors[f"candidate_selector.{name}.weight"] = tensors.pop(f"candidate_selector.{name}")
    save_file(tensors, tmp_path / "model.safetensors")
    assert all(torch.equal(value, first[name]) for name, value in load_drafter(tmp_path).state_dict().items())


def test_copies_of_another_target_are_refused(target, tmp_path):
    DEEPSPEC(tmp_path, target)
    torch.manual_seed(1)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight.* not a copy"):
        load_drafter(tmp_path, target=qwen3().eval())


@pytest.mark.parametrize(
    ("writer", "change", "message"),
    [
        (DEEPSPEC, {"architectures": ["Gemma4DSparkModel"]}, "is a Gemma4DSparkModel, whose layers are not Qwen3's"),
        (DEEPSPEC, {"target_layer_ids": [-2, 2]}, r"reads layers \[-2, 2\].*the embeddings"),
        (DEEPSPEC, {"target_layer_ids": [0, 3]}, "last layer's output"),
        (DEEPSPEC, {"markov_head_type": "fir"}, "`markov_head_type` .* is 'fir', expected one of vanilla, gated, rnn"),
        (DEEPSPEC, {"markov_rank": None}, r"2 unexpected \(markov_head"),
        (DEEPSPEC, {"markov_rank": "8"}, "`head_rank` is '8'"),
        (DEEPSPEC, {"markov_rank": 0}, r"2 unexpected \(markov_head"),
        (DEEPSPEC, {"enable_confidence_head": True}, r"2 missing \(confidence_head"),
        (DEEPSPEC, {"layer_types": ["full_attention", "sliding_attention"]}, "sliding attention layers, but its"),
        (DEEPSPEC, {"dspark_bonus_anchor": True, "sample_from_anchor": True}, "are both True, expected one of them"),
        (DEEPSPEC, {"sample_from_anchor": "no"}, "`sample_from_anchor` .* is 'no', expected true, false or none"),
        (DEEPSPEC, {"quantization_config": {"quant_algo": "NVFP4"}}, r"quantized by .* \(NVFP4\), expected"),
        (SPECFORGE, {"dflash_config": {"projector_type": "domino", "gru_hidden_dim": 8}},
         "`projector_type` of .* is 'domino', which is not supported: expected dflash or dspark"),
        (SPECFORGE, {"architectures": ["DominoDraftModel"]}, "`projector_type` of .* is 'domino', which is not"),
        (DEEPSPEC, {"num_target_layers": "4"}, "`num_target_layers` .* is '4', expected an integer"),
        (SPECULATORS, {"speculators_model_type": "peagle"}, r"a drafter of a kind that is not read \(P-EAGLE\)"),
        (SPECULATORS, {"markov_head_type": "rnn"}, r"2 missing \(markov_head\.joint_proj"),
        (partial(SPECULATORS, head="rnn"), {"sample_from_anchor": False}, "an 'rnn' head and .* begins at"),
        (DFLASH2, {"is_causal": "yes"}, "`is_causal` .* is 'yes', expected true, false or none"),
        (DFLASH2, {"final_logit_softcapping": "30"}, "`final_logit_softcapping` is '30', expected a number"),
        (DFLASH2, {"attention_value_scale": 0.5}, "`attention_value_scale` .* is 0.5, which is not supported"),
        (DFLASH2, {"is_neox_style": False}, "`is_neox_style` .* is False, which is not supported: expected True"),
        (DFLASH2, {"target_hidden_size": 128}, "`target_hidden_size` .* is 128 and `hc_mult` 1"),
        (DFLASH2, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.5}},
         "`partial_rotary_factor` 1.5"),
        (DFLASH2, {"eagle_aux_hidden_state_layer_ids": [1, 2]}, r"is \[1, 2\] and `target_layer_ids` \[0, 2\]"),
        (DFLASH2, {"chunked": True}, "`chunked` in the config.json of .* True, and nothing is known here"),
        (DFLASH2, {"chunks": [4]}, r"`chunks` in the config.json of .* \[4\], and nothing is known"),
        (SPECULATORS, {"chunks": {"size": 4}}, "`chunks` in the config.json of .* 4}, and nothing is known"),
        (SPECULATORS, {"residual_multiplier": 0.22}, "`residual_multiplier` .* is 0.22, .* expected 1"),
        (partial(DFLASH2, nested=False), {"selector_top_k": 0}, "lacks selector_top_k"),
        (partial(DFLASH2, nested=False), {"selector_rank": None, "conv_kernel_size": None}, "lacks selector_rank"),
        (partial(DFLASH2, nested=False), {"conv_kernel_size": 9}, "`conv_kernel_size` is 9"),
        (partial(DFLASH2, nested=False), {"selector_top_k": 65}, "`head_candidates` is 65, expected at most the 64"),
        (DFLASH2_SPECULATORS, {"conv_group_size": 7}, "`conv_group_size` is 7"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused(target, tmp_path, writer, change, message):
    writer(tmp_path, target)
    load_drafter(tmp_path)
    fields = {**json.loads((tmp_path / "config.json").read_text()), **change}
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
    with pytest.raises(ValueError, match=message) as caught:
        load_drafter(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("writer", [DEEPSPEC, SPECULATORS, DFLASH2])
def test_numbers_and_texts_that_are_unknown_are_warned_of(target, tmp_path, writer, caplog):
    """Wherever they stand; by loading each time, by a look at it not, and by the doctor."""
    writer(tmp_path, target)
    load_drafter(tmp_path)
    assert "nothing is known" not in caplog.text
    caplog.clear()
    fields = json.loads((tmp_path / "config.json").read_text())
    fields |= {"chunked": 4, "switched": False, "listed": [], "some_token_id": 7, "_comment": "what for"}
    inner = next((name for name in ("dflash_config", "transformer_layer_config") if name in fields), None)
    (fields if inner is None else fields[inner])["rotated"] = "half"
    (tmp_path / "config.json").write_text(json.dumps(fields))
    found = check_drafter(tmp_path)
    assert found.unknown_fields == {"chunked": 4, "rotated": "half"} and not caplog.text
    drafter = load_drafter(found)
    assert caplog.text.count("`chunked` (4), `rotated` ('half')") == 1
    found = check_weights(Examination(target, drafter, characters()))
    assert any("`chunked` (4), `rotated` ('half')" in finding.text for finding in found)


@pytest.mark.parametrize(
    ("fields", "format", "message"),
    [
        ({"sequential_head": "markov"}, "z-lab", "`sequential_head` is 'markov', and there it would be 'none'"),
        ({"confidence_head": True}, "z-lab", "`confidence_head` is True.* False"),
        ({"sequential_head": "state"}, "speculators", "`sequential_head` is 'state', and there it would be 'none'"),
        ({"sequential_head": "selector"}, "speculators", "`sequential_head` is 'selector', .* 'none'"),
        ({"conv_kernel_size": 2}, "z-lab", "`conv_kernel_size` is 2.* 0"),
        ({"conv_kernel_size": 2, "sequential_head": "selector", "confidence_head": True}, "speculators",
         "`confidence_head` is True.* False"),
        ({"conv_kernel_size": 2, "sequential_head": "selector", "draft_vocab_size": 20}, "speculators",
         "`draft_vocab_size` is 20.* 0"),
        ({"conv_kernel_size": 2, "sequential_head": "markov"}, "deepspec", "`conv_kernel_size` is 2.* 0"),
        ({"sequential_head": "markov", "head_candidates": 16}, "speculators", "`head_candidates` is 16.* 64"),
        ({"sequential_head": "markov", "confidence_head": True, "confidence_temperatures": [1.5] * 6}, "speculators",
         r"`confidence_temperatures` is .* None.*`from_pretrained\(\.\.\., confidence_temperatures=None\)`"),
        ({"sequential_head": "recurrent"}, "speculators", "has an 'rnn' head and `sample_from_anchor` is false"),
        ({"sequential_head": "markov", "sample_from_anchor": False}, "deepspec", "_anchor` is False.* True"),
        ({"draft_vocab_size": 20}, "deepspec", "`draft_vocab_size` is 20.* 0"),
        ({"sliding_window": 8}, "deepspec", "`sliding_window` is 8, and there it would be None: load it with"),
    ],
)  # fmt: skip
def test_what_cannot_be_said_is_refused(target, tmp_path, fields, format, message):
    of_format = {"sample_from_anchor": format == "deepspec"}
    drafter = tiny_drafter(target, **{"reducer": "fc", "target_layer_ids": [0], **of_format, **fields})
    with pytest.raises(ValueError, match=f"cannot be written in the {format} layout: .*{message}") as caught:
        export_dflash(drafter, tmp_path / "out", format, target)
    assert str(caught.value).count(";") == 0  # that one reason, and no other
    assert not (tmp_path / "out").exists()


def test_deepspec_needs_the_target_that_it_copies(target, tmp_path):
    drafter = markov(target)
    with pytest.raises(ValueError, match=r"give the target .*`--target`"):
        export_dflash(drafter, tmp_path / "out", "deepspec")
    with pytest.raises(ValueError, match="`hidden_size` 64, but this target's is 32"):
        export_dflash(drafter, tmp_path / "out", "deepspec", tiny_target())
    with torch.device("meta"), pytest.raises(ValueError, match="not in memory"):
        export_dflash(drafter, tmp_path / "out", "deepspec", type(target)(target.config))
    assert not (tmp_path / "out").exists()


def test_the_command(target, tmp_path):
    drafter = markov(target)
    drafter.save_pretrained(tmp_path / "drafter")
    target.save_pretrained(tmp_path / "target")
    command = ["export", str(tmp_path / "drafter"), str(tmp_path / "out"), "--format"]
    result = CliRunner().invoke(app, [*command, "deepspec", "--target", str(tmp_path / "target")])
    assert result.exit_code == 0 and '"method": "dspark"' in result.output, result.output
    assert load_drafter(tmp_path / "out", target=target).config.sequential_head == "markov"
    refused = CliRunner().invoke(app, [*command, "z-lab", "--target", "nowhere"])  # before the target is looked for
    assert refused.exit_code and "`sequential_head` is 'markov'" in str(refused.exception)


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
    config = tiny_drafter(target, reducer="fc", target_layer_ids=[0, 2], sliding_window=None).config
    fields = layout.write(config)
    assert layout.fits(fields) and (fields["width"], fields["hole"], fields["taps"]) == (7, 1, [1, 3])
    again = layout.read(fields, "org/name")
    assert (again.block_size, again.mask_token_id, again.target_layer_ids) == (7, 1, [0, 2])
    assert not changed_fields(config, layout)
    config.final_logit_softcapping = 30.0
    assert changed_fields(config, layout) == ["`final_logit_softcapping` is 30.0, and there it would be None"]
    assert layout.unknown({**fields, "depth": 3}, "org/name") == {"depth": 3}
    with pytest.raises(ValueError, match=r"config\.json of org/name lacks `width`"):
        layout.read({name: value for name, value in fields.items() if name != "width"}, "org/name")
