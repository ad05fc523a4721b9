"""Others' DFlash checkpoints against an independent reading of them (`oracle_dflash.py`), and ours written in
theirs."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LogitsProcessorList, MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator
from typer.testing import CliRunner

from hf_hyperdflash import HyperDFlashDrafter, load_drafter
from hf_hyperdflash.cli.app import app
from hf_hyperdflash.decoding.bind import capture_residual
from hf_hyperdflash.drafters.sampling import DraftSampler
from hf_hyperdflash.hub.formats import export_dflash
from hf_hyperdflash.targets.registry import target_of

from ..conftest import prompt, tiny_drafter, tiny_target
from ..helpers.families import qwen3
from ..helpers.oracle_dflash import speculators_logits, write_speculators, write_zlab, zlab_logits

SHAPE = {"block_size": 5, "mask_token_id": 1}
ZLAB = [
    {"nested": False, "layer_ids": [0, 2]},
    {"nested": True, "layer_ids": [1, 2]},
    {"nested": True, "layer_ids": [1]},
    {"nested": True, "layer_ids": [1], "is_causal": True},
    # Every layer but the last slides, causal if nothing is said.
    {"nested": False, "layer_ids": [0, 2], "sliding_window": 6},
    {"nested": True, "layer_ids": [1], "sliding_window": 3, "is_causal": False},
    {"nested": True, "layer_ids": [1], "sliding_window": 1, "is_causal": True},
    # MiMo's and NVIDIA's: all layers slide, none is causal, whatever their types say.
    {"nested": True, "layer_ids": [1], "inner": {"use_swa": True, "swa_window_size": 6}},
    {
        "nested": True,
        "layer_ids": [1],
        "inner": {"use_swa": True, "causal": True},
        "outer": {"use_sliding_window": True, "sliding_window": 6},
    },
    # Qwen3's own words for a window, without types of layers.
    {
        "nested": True,
        "layer_ids": [1],
        "outer": {"layer_types": None, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
        "is_causal": False,
    },
    {
        "nested": True,
        "layer_ids": [1],
        "outer": {"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    },
    {
        "nested": False,
        "layer_ids": [1],
        "outer": {
            "rope_theta": 1e4,
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1], "mrope_interleaved": True},
        },
    },
    {"nested": True, "layer_ids": [1], "inner": {"sample_from_anchor": True}},
]
SPECULATORS = [
    {"layer_ids": [1, 3]},
    {"layer_ids": [2, 3], "draft_vocab_size": 20},
    {"layer_ids": [1, 3], "verifier_weights": "omitted"},
    {"layer_ids": [1, 3], "sample_from_anchor": True},
    {"layer_ids": [1], "sliding_window": 6},
    {"layer_ids": [1], "sliding_window": 6, "sliding_window_non_causal": True},
]


@pytest.fixture
def target():
    torch.manual_seed(0)
    return qwen3().eval()


@torch.no_grad()
def drafted(drafter: HyperDFlashDrafter, target, ids: torch.Tensor, count: int) -> torch.Tensor:
    """Logits `[count, vocab]` of the path that generation takes."""
    with capture_residual(target, drafter.target_layer_ids) as captured:
        target(ids[:, :-1])
    seen = []

    class Listening(DraftSampler):
        def blind(self, ids, logits):
            seen.append(logits)
            return super().blind(ids, logits)

    context, positions = drafter.new_context(), torch.arange(ids.shape[1])[None]
    drafter.extend(target_of(target), context, captured[0], positions[:, :-1], ids[:, 1:])
    drafter.propose(target_of(target), context, ids, positions, count, Listening(LogitsProcessorList(), False))
    return seen[0][0]


def check(drafter, target, expected: torch.Tensor, ids: torch.Tensor) -> None:
    found = drafted(drafter, target, ids, len(expected))
    expected = expected.index_fill(1, torch.tensor([drafter.config.mask_token_id]), -torch.inf)  # ours: never drafted
    finite = expected.isfinite()
    assert torch.equal(finite, found.isfinite())
    torch.testing.assert_close(found[finite], expected[finite], atol=1e-4, rtol=1e-4)
    plain = target.generate(ids, max_new_tokens=20, do_sample=False)
    drafter.bind(target)
    assert torch.equal(target.generate(ids, max_new_tokens=20, do_sample=False, assistant_model=drafter), plain)
    assert drafter.last_stats.rounds
    drafter.unbind(target)


def whole(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Logits over the target's vocabulary of a drafter that knows only some tokens."""
    return logits.new_full((len(logits), 64), -torch.inf).index_copy(1, ids, logits)


@pytest.mark.parametrize("options", ZLAB)
def test_zlab(target, tmp_path, options):
    write_zlab(tmp_path, target, **options, **SHAPE)
    ids, count = prompt(14), 5 if "sample_from_anchor" in options.get("inner", ()) else 4
    drafter = load_drafter(tmp_path, dtype=torch.float32)
    assert drafter.config.target_layer_ids == options["layer_ids"] and drafter.num_draft_tokens == count
    check(drafter, target, zlab_logits(tmp_path, target, ids, count, slots=5), ids)


@pytest.mark.parametrize("options", SPECULATORS)
def test_speculators(target, tmp_path, options):
    write_speculators(tmp_path, target, **options, **SHAPE)
    ids, count = prompt(14), 5 if options.get("sample_from_anchor") else 4
    drafter = load_drafter(tmp_path, target=target, dtype=torch.float32)
    assert drafter.config.target_layer_ids == [layer - 1 for layer in options["layer_ids"]]
    assert drafter.num_draft_tokens == count
    check(drafter, target, whole(*speculators_logits(tmp_path, target, ids, count, slots=5)), ids)


@pytest.mark.parametrize("size", [None, 20])
def test_an_embedding_of_its_own_is_refused(target, tmp_path, size):
    write_speculators(tmp_path, target, layer_ids=[1], draft_vocab_size=size, verifier_weights="own", **SHAPE)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight.* not a copy"):
        load_drafter(tmp_path, target=target)


def test_a_layer_or_a_slot_off_is_another_drafter(target, tmp_path):
    """What the formats' two traps would do: the comparison above can fail."""
    write_speculators(tmp_path, target, layer_ids=[1, 2], **SHAPE)
    ids = prompt(14)
    expected = whole(*speculators_logits(tmp_path, target, ids, 4, slots=5))
    for field, value in (("target_layer_ids", [1, 2]), ("sample_from_anchor", True)):
        drafter = load_drafter(tmp_path, dtype=torch.float32)
        setattr(drafter.config, field, value)
        found = drafted(drafter, target, ids, 4)
        assert (found - expected)[found.isfinite()].abs().max() > 0.01


MIXED = {"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]}


@pytest.mark.parametrize(
    ("format", "windows"),
    [
        ("z-lab", {}), ("z-lab", {**MIXED, "window_from": "slot"}), ("z-lab", {"causal_layers": "all"}),
        ("z-lab", {"sliding_window": 4, "window_from": "slot", "causal_layers": "sliding"}), ("speculators", {}),
        ("speculators", {"sliding_window": 6}), ("speculators", {**MIXED, "causal_layers": "sliding"}),
    ],
)  # fmt: skip
def test_export_is_what_the_oracle_reads(target, tmp_path, format, windows):
    windows = {"sliding_window": None, **windows}
    drafter = tiny_drafter(target, reducer="fc", target_layer_ids=[0, 2], num_draft_tokens=4, **windows).float()
    told = export_dflash(drafter, tmp_path, format)
    assert '"num_speculative_tokens": 4' in told and ("SGLang" in told) == (format == "z-lab")
    ids = prompt(14)
    if format == "z-lab":
        check(drafter, target, zlab_logits(tmp_path, target, ids, 4, slots=5), ids)
    else:
        check(drafter, target, whole(*speculators_logits(tmp_path, target, ids, 4, slots=5)), ids)
    again = load_drafter(tmp_path)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in drafter.state_dict().items())
    assert torch.equal(drafted(again, target, ids, 4), drafted(drafter, target, ids, 4))
    assert again.config.kinds == drafter.config.kinds
    assert all(again.config.attention_span(kind) == drafter.config.attention_span(kind) for kind in again.config.kinds)


def test_scaled_rope_is_written_and_read(target, tmp_path):
    scaled = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 256}
    drafter = tiny_drafter(
        target, reducer="fc", target_layer_ids=[0, 2], sliding_window=None, num_draft_tokens=4, rope_parameters=scaled
    )
    for format in ("z-lab", "speculators"):
        export_dflash(drafter, tmp_path / format, format)
        again = load_drafter(tmp_path / format, dtype=torch.bfloat16)
        assert {name: again.config.rope_parameters[name] for name in scaled} == scaled
        assert torch.equal(again.rotary_emb.inv_freq, drafter.rotary_emb.inv_freq)
        assert again.dtype == torch.bfloat16
    fields = json.loads((tmp_path / "z-lab" / "config.json").read_text())
    assert fields["rope_theta"] == 5e5 and fields["rope_scaling"]["factor"] == 4.0  # vLLM and SGLang look there


def test_a_truncated_vocabulary_is_written_back(target, tmp_path):
    write_speculators(tmp_path / "theirs", target, layer_ids=[2, 3], draft_vocab_size=20, **SHAPE)
    first = load_drafter(tmp_path / "theirs")
    export_dflash(first, tmp_path / "ours", "speculators")
    again = load_drafter(tmp_path / "ours")
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in first.state_dict().items())
    first.save_pretrained(tmp_path / "saved")  # and in our own layout
    loaded = HyperDFlashDrafter.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert torch.equal(drafted(loaded, target, prompt(9), 4), drafted(first, target, prompt(9), 4))


def test_what_cannot_be_expressed_is_refused(tmp_path):
    gated = tiny_drafter(tiny_target())
    with pytest.raises(ValueError, match=r"reducer is 'hc_gate'.*4 residual streams.*last layer's residual"):
        export_dflash(gated, tmp_path / "out")
    plain = tiny_drafter(qwen3(), reducer="fc", target_layer_ids=[0], sliding_window=8)
    with pytest.raises(ValueError, match=r"window.*`from_pretrained\(\.\.\., sliding_window=None\)`"):
        export_dflash(plain, tmp_path / "out")
    for fields, why in (
        ({"sliding_window": 8, "window_from": "slot"}, "`window_from` is 'slot', and there it would be 'anchor'"),
        ({"causal_layers": "all"}, "`causal_layers` is 'all', and there it would be 'none'"),
    ):
        causal = tiny_drafter(qwen3(), reducer="fc", target_layer_ids=[0], **fields)
        with pytest.raises(ValueError, match=why):
            export_dflash(causal, tmp_path / "out", "speculators")
    with pytest.raises(ValueError, match="expected one of"):
        export_dflash(plain, tmp_path / "out", "gguf")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dflash_config": None, "architectures": None}, "a kind that is not read"),
        ({"dflash_config": None}, "lacks `mask_token_id`"),
        ({"dflash_config": {"target_layer_ids": [0, 3], "mask_token_id": 1, "block_size": 5}}, "last layer's output"),
        ({"dflash_config": {"target_layer_ids": [2, 0], "mask_token_id": 1, "block_size": 5}}, "ascending"),
        ({"dflash_config": {"target_layer_ids": [0, 2], "block_size": 5}}, "lacks `mask_token_id`"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "but its `sliding_window` is None"),
        (
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "use_sliding_window": False},
            "sliding_window` is 8 and `use_sliding_window` False: expected a number of tokens, in use",
        ),
        (
            {"layer_types": ["sliding_attention"], "sliding_window": 8, "use_sliding_window": True},
            "expected None or 2 of",
        ),
        ({"num_hidden_layers": 1}, r"11 unexpected \(layers\.1"),
        ({"intermediate_size": 47}, r"of another shape \(layers\.0\.mlp"),
        ({"dflash_config": "yes"}, "`dflash_config` .* is 'yes', expected a dictionary"),
        ({"dflash_config": {"target_layer_ids": ["0"], "mask_token_id": 1, "block_size": 5}}, "expected integers"),
        (
            {"dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 64, "block_size": 5}},
            "outside the vocabulary",
        ),
        (
            {"dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 1, "block_size": "5"}},
            "`block_size` is '5'",
        ),
        ({"dflash_config": {"target_layer_ids": [0], "mask_token_id": 1, "block_size": 10**9}}, "at most 4096"),
        ({"num_hidden_layers": 10**9}, "at most 1024"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"vocab_size": None, "head_dim": None}, "lacks vocab_size, head_dim"),
        ({"rope_parameters": None, "rope_scaling": "yarn"}, "`rope_scaling` .* is 'yarn'"),
    ],
)
def test_what_cannot_be_read_is_refused(target, tmp_path, change, message):
    write_zlab(tmp_path, target, nested=True, layer_ids=[0, 2], **SHAPE)
    fields = {**json.loads((tmp_path / "config.json").read_text()), **change}
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transformer_layer_config": None}, "`transformer_layer_config` .* is None, expected a dictionary"),
        ({"speculators_config": 3}, "`speculators_config` .* is 3, expected a dictionary"),
        ({"aux_hidden_state_layer_ids": None}, "lacks `aux_hidden_state_layer_ids`"),
        ({"aux_hidden_state_layer_ids": ["1"]}, "expected integers"),
        ({"block_size": None}, "lacks `block_size`"),
        ({"mask_token_id": None}, "lacks `mask_token_id`"),
        ({"mask_token_id": "1"}, "`mask_token_id` is '1', expected an integer"),
    ],
)
def test_speculators_that_lack_something(target, tmp_path, change, message):
    write_speculators(tmp_path, target, layer_ids=[1, 3], **SHAPE)
    fields = {**json.loads((tmp_path / "config.json").read_text()), **change}
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
    with pytest.raises(ValueError, match=message) as caught:
        load_drafter(tmp_path)
    assert str(tmp_path) in str(caught.value)


def _set(name, change):
    def changed(tensors):
        tensors[name] = change(tensors[name])

    return changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("t2d", lambda kept: kept.roll(1)), "name different tokens"),
        (_set("t2d", lambda kept: kept[:-1]), "name different tokens"),
        (_set("d2t", lambda offsets: offsets.float() + 0.5), "expected 20 different integers"),
        (_set("d2t", lambda offsets: offsets + 64), "expected 20 different integers from 0 to 63"),
        (_set("d2t", lambda offsets: offsets - 64), "expected 20 different integers"),
        (_set("d2t", lambda offsets: -torch.arange(20)), "expected 20 different integers"),
        (_set("d2t", lambda offsets: offsets[:-1]), "expected 20 different integers"),
        (lambda tensors: tensors.pop("d2t"), "has no `d2t`"),
        (_set("norm.weight", lambda weight: weight / 0), r"not finite: .*norm\.weight"),
        (lambda tensors: tensors.pop("norm.weight"), r"1 missing \(norm\.weight\)"),
    ],
)
def test_tensors_that_contradict_each_other(target, tmp_path, change, message):
    write_speculators(tmp_path, target, layer_ids=[2, 3], draft_vocab_size=20, **SHAPE)
    load_drafter(tmp_path, target=target)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path, target=target)


def test_only_its_own_safetensors_are_read(target, tmp_path):
    write_zlab(tmp_path, target, nested=True, layer_ids=[0, 2], **SHAPE)
    save_file({"fc.weight": torch.zeros(1)}, tmp_path / "z-other.safetensors")
    load_drafter(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"no model\.safetensors.*not from pickles"):
        load_drafter(tmp_path)
    with pytest.raises(OSError, match=r"The folder \./none does not exist"):
        load_drafter("./none")


def test_a_dtype_is_given_by_name_too(target, tmp_path):
    write_zlab(tmp_path, target, nested=True, layer_ids=[0, 2], **SHAPE)
    assert load_drafter(tmp_path, dtype="bfloat16").dtype == torch.bfloat16
    with pytest.raises(ValueError, match="`dtype` is 'float7', expected a dtype of weights"):
        load_drafter(tmp_path, dtype="float7")


def test_what_our_own_command_trains_can_be_exported(target, tmp_path):
    """The default window is one that the layouts have words for."""
    drafter = tiny_drafter(target, reducer="fc", target_layer_ids=[0, 2])
    export_dflash(drafter, tmp_path / "out")
    windowed = tiny_drafter(target, reducer="fc", target_layer_ids=[0, 2], sliding_window=8)
    windowed.save_pretrained(tmp_path / "windowed")
    export_dflash(HyperDFlashDrafter.from_pretrained(tmp_path / "windowed", sliding_window=None), tmp_path / "out")


@pytest.mark.parametrize("unnamed", [False, True])
def test_an_export_replaces_no_other_model(target, tmp_path, unnamed):
    """Its own drafter's folder least of all: what it was trained for and how it goes on would be lost."""
    drafter = tiny_drafter(target, reducer="fc", target_layer_ids=[0, 2])
    drafter.save_pretrained(tmp_path)
    if unnamed:
        (tmp_path / "config.json").unlink()
    there = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    told = "no config.json" if unnamed else "hyperdflash"
    with pytest.raises(ValueError, match=f"has a model that is no export .{told}., expected a folder that"):
        export_dflash(drafter, tmp_path, "speculators")
    assert there == {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    for format in ("speculators", "z-lab"):  # one export replaces another
        export_dflash(drafter, tmp_path / "out", format)
    assert load_drafter(tmp_path / "out").config.target_layer_ids == [0, 2]


def test_the_command(target, tmp_path):
    drafter = tiny_drafter(target, reducer="fc", target_layer_ids=[0, 2], sliding_window=None)
    drafter.save_pretrained(tmp_path / "drafter")
    result = CliRunner().invoke(app, ["export", str(tmp_path / "drafter"), str(tmp_path / "out"), "--format", "z-lab"])
    assert result.exit_code == 0 and "--speculative-config" in result.output, result.output
    assert load_drafter(tmp_path / "out").config.target_layer_ids == [0, 2]


def test_weights_that_cannot_be_written_are_told(target, tmp_path):
    """safetensors has an error of its own for a full disk, as for a folder in its way."""
    drafter = tiny_drafter(target, reducer="fc", target_layer_ids=[0, 2])
    export_dflash(drafter, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(OSError, match=r"cannot be written to .*\(os error 21\)\)\. Make room there, or choose"):
        export_dflash(drafter, tmp_path)


def test_what_vllm_does_otherwise_is_said(target, tmp_path):
    fields = dict(reducer="fc", target_layer_ids=[0, 2])
    whole, windowed = (tiny_drafter(target, **fields, sliding_window=window) for window in (None, 8))
    assert "window" not in export_dflash(whole, tmp_path / "whole", "speculators")
    told = export_dflash(windowed, tmp_path / "windowed", "speculators")
    assert "window of 8 from each slot, not the anchor" in told


def test_drafts_are_those_of_transformers_own_dflash_path(target, monkeypatch):
    """The same weights in transformers' reference drafter: the same drafts in every round, the same text."""
    fields = dict(num_hidden_layers=2, intermediate_size=48, head_dim=8, num_attention_heads=4, num_key_value_heads=2)
    drafter = tiny_drafter(target, reducer="fc", target_layer_ids=[0, 2], sliding_window=None, **fields)
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
    get_candidates = DFlashTokenCandidateGenerator.get_candidates

    def listening(self, input_ids, *args, **kwargs):
        candidates = get_candidates(self, input_ids, *args, **kwargs)
        if candidates[0].shape[1] > input_ids.shape[1]:
            theirs.append(candidates[0][0, input_ids.shape[1] :].tolist())
        return candidates

    propose = type(drafter).propose

    def telling(self, *args):
        tree = propose(self, *args)
        ours.append(tree.tokens.tolist())
        return tree

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", listening)
    monkeypatch.setattr(type(drafter), "propose", telling)
    ids = prompt(13)
    options = dict(do_sample=False, max_new_tokens=24)
    expected = target.generate(ids, assistant_model=assistant, speculation_type="dflash", **options)
    drafter.bind(target)
    assert torch.equal(target.generate(ids, assistant_model=drafter, **options), expected)
    assert len(ours) > 5
    for mine, their in zip(ours, theirs):  # at the end of the text transformers drafts more than fit
        assert mine == their[: len(mine)]
