"""Any drafter by its name: which kind it is, and what it is loaded as."""

import copy
import itertools

import pytest
import torch

from hf_hyperdflash import DeepseekV4DSparkDrafter, DeepseekV4MTPDrafter, load_drafter, load_target
from hf_hyperdflash.hub.formats import FORMATS, export_dflash
from hf_hyperdflash.hub.found import check_drafter
from hf_hyperdflash.hub.loading import check_made_for, default_dtype

from ..conftest import tiny_config, tiny_drafter, tiny_target
from ..helpers.deepseek_checkpoints import (
    dspark_fields,
    dspark_shapes,
    mtp_shapes,
    random_tensors,
    write,
    write_shards,
)
from ..helpers.families import qwen3
from ..helpers.refusals import Refusal
from ..helpers.unrolled import unrolled

KINDS = ("HyperDFlash", "MTP", "DSpark", "z-lab", "speculators")
UNROLLED = ("SpecBlock", "EAGLE-3")
OF_V4 = {"MTP": DeepseekV4MTPDrafter, "DSpark": DeepseekV4DSparkDrafter}


def written(kind: str, folder):
    """A target and, saved in `folder`, a drafter for it of that kind."""
    if kind in FORMATS:
        target = qwen3()
        drafter = tiny_drafter(target, reducer="fc", target_layer_ids=[0, 2], sliding_window=None)
        export_dflash(drafter, folder, kind)
        return target, drafter
    target = tiny_target(**dspark_fields() if kind in OF_V4 else {})
    if kind in OF_V4:
        drafter = OF_V4[kind](OF_V4[kind].config_class.from_target_config(target.config)).eval()
    else:
        named = kind.lower().replace("-", "")
        drafter = unrolled(named, target) if kind in UNROLLED else tiny_drafter(target)
    drafter.save_pretrained(folder)
    return target, drafter


def assert_same(loaded, drafter):
    assert type(loaded) is type(drafter) and loaded.state_dict().keys() == drafter.state_dict().keys()
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in drafter.state_dict().items())


@pytest.mark.parametrize("kind", [*KINDS, *UNROLLED])
def test_any_drafter_is_loaded_by_its_name_where_and_as_what_it_is_asked_for(tmp_path, kind):
    folder = tmp_path / "all" / "inner"
    target, drafter = written(kind, folder)
    target.save_pretrained(tmp_path / "all" / "target")
    assert type(load_target(str(tmp_path / "all"), subfolder="target", dtype="float32")) is type(target)
    loaded = load_drafter(folder)
    assert_same(loaded, drafter)
    assert loaded.dtype == torch.float32 and loaded.device.type == "cpu" and not loaded.training
    assert_same(load_drafter(tmp_path / "all", subfolder="inner"), drafter)
    if kind not in FORMATS:
        assert_same(type(drafter).from_pretrained(tmp_path / "all", subfolder="inner"), drafter)
    assert load_drafter(folder, target=target, device="meta").device.type == "meta"
    assert load_drafter(str(folder), target=target.to(torch.bfloat16)).dtype == torch.bfloat16
    assert load_drafter(folder, target=target, dtype="float32").dtype == torch.float32
    # For another target, whose size it says.
    config = copy.deepcopy(target.config)
    config.vocab_size *= 2
    words = ("`vocab_size`", str(target.config.vocab_size), str(config.vocab_size))
    words += ("deepseek_v4",) if kind in ("HyperDFlash", *UNROLLED) else ()  # whose configurations know it
    Refusal(load_drafter, words).check(folder, target=type(target)(config))
    # What is offloaded is on no device: then there is no telling where its LM head computes.
    assert load_drafter(folder, target=None if kind in FORMATS else target.to("meta")).device.type == "cpu"


@pytest.mark.parametrize("kind", [*KINDS, *UNROLLED])
def test_a_drafter_of_blocks_is_loaded_with_a_window_of_ones_own(tmp_path, kind):
    target, drafter = written(kind, tmp_path / "own")
    if kind in ("HyperDFlash", *FORMATS):
        loaded = load_drafter(tmp_path / "own", target=target, sliding_window=9)
        assert_same(loaded, drafter)
        loaded.save_pretrained(tmp_path / "again")
        for each in (loaded, load_drafter(tmp_path / "again")):
            assert each.new_context().window == 9 and each.config.kinds == ["sliding_attention"] * 2
    (tmp_path / "own" / "model.safetensors").write_bytes(b"no weights")
    if kind in ("HyperDFlash", *FORMATS):
        Refusal(load_drafter, ("`sliding_window`", "'9'", "integer")).check(tmp_path / "own", sliding_window="9")
        Refusal(load_drafter, ("`sliding_window`", "0", "at least 1")).check(tmp_path / "own", sliding_window=0)
    else:
        Refusal(load_drafter, ("`sliding_window`", "9", "own")).check(tmp_path / "own", sliding_window=9)


def test_layers_of_two_kinds_keep_their_windows(tmp_path):
    mixed = {"layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2, "sliding_window": 5}
    tiny_drafter(qwen3(), **mixed).save_pretrained(tmp_path / "mixed")
    Refusal(load_drafter, ("`sliding_window`", "9", "with a window and without")).check(
        tmp_path / "mixed", sliding_window=9
    )
    full = {"layer_types": ["full_attention"] * 2, "causal_layers": "sliding", "sliding_window": 5}
    tiny_drafter(qwen3(), **full).save_pretrained(tmp_path / "full")
    assert load_drafter(tmp_path / "full", sliding_window=9).config.attention_span("sliding_attention") == (
        9,
        False,
        False,
    )


@pytest.mark.parametrize("kind, shapes", [("MTP", mtp_shapes), ("DSpark", dspark_shapes)])
@pytest.mark.parametrize("writing", [write, write_shards])
def test_a_deepseek_v4_has_its_own(tmp_path, kind, shapes, writing):
    """Which of the two, by the checkpoint's names; of a loaded target, by the checkpoint that it came from."""
    config = tiny_config(**dspark_fields())
    tensors = random_tensors(shapes(config))
    writing(tmp_path / "inner", config, tensors)
    assert type(load_drafter(tmp_path, subfolder="inner")) is OF_V4[kind]
    tmp_path /= "inner"
    target = tiny_target(**dspark_fields())
    target.config._name_or_path = str(tmp_path)
    for loaded in (
        load_drafter(tmp_path, dtype="float32"),
        load_drafter(str(tmp_path), target=target),
        OF_V4[kind].from_target(target),
    ):
        assert type(loaded) is OF_V4[kind] and loaded.dtype == torch.float32 and not loaded.training
        assert all(torch.equal(t, tensors[name]) for name, t in loaded.deepseek_state_dict().items())
    assert load_drafter(tmp_path, target=target, dtype="bfloat16").dtype == torch.bfloat16
    assert load_drafter(tmp_path, device="meta").device.type == "meta"


@pytest.mark.parametrize("kind", [*KINDS, *UNROLLED])
def test_a_drafter_of_another_target_is_refused_before_weights_are_read(tmp_path, kind, caplog):
    target, drafter = written(kind, tmp_path / "drafter")
    target.config.save_pretrained(tmp_path / "target")
    for name in ("drafter", "target"):
        (tmp_path / name / "model.safetensors").write_bytes(b"no weights")
    pair = str(tmp_path / "target"), check_drafter(tmp_path / "drafter")
    check_made_for(pair[0], str(tmp_path / "drafter"))
    (tmp_path / "drafter" / "config.json").unlink()  # what was found is all that is read of it
    check_made_for(*pair)
    if drafter.max_draft_tokens:
        check_made_for(*pair, num_draft_tokens=drafter.max_draft_tokens)
        Refusal(check_made_for, ("99",)).check(*pair, num_draft_tokens=99)
    for field in ("vocab_size", "hidden_size"):
        other = copy.deepcopy(target.config)
        setattr(other, field, 2 * getattr(other, field))
        other.save_pretrained(tmp_path / "target")
        words = (f"`{field}`", str(getattr(target.config, field)), str(getattr(other, field)))
        Refusal(check_made_for, words).check(*pair)
    assert "fewer drafts may be accepted" not in caplog.text  # which binding says, once


def test_a_pair_is_warned_of_once(tmp_path, caplog):
    target, drafter = written("HyperDFlash", tmp_path)
    drafter.config.target_name_or_path, target.config._name_or_path = "org/one", "org/another"
    drafter.save_pretrained(tmp_path)
    load_drafter(tmp_path, target=target).bind(target)
    assert caplog.text.count("fewer drafts may be accepted") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_repository_it_is_the_revision_that_is_asked_for(tmp_path, kind):
    """Where the configuration says which kind of drafter it is, and where its weights are."""
    repository = tmp_path / "cache" / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    for revision, other in (("main", "MTP" if kind == "HyperDFlash" else "HyperDFlash"), ("v2", kind)):
        commit = f"{len(revision):040}"
        _, drafter = written(other, repository / "snapshots" / commit)
        (repository / "refs" / revision).write_text(commit)
    assert_same(load_drafter("org/name", revision="v2", cache_dir=tmp_path / "cache", local_files_only=True), drafter)
    where = {"revision": "v3", "cache_dir": tmp_path / "cache", "local_files_only": True}
    Refusal(load_drafter, ("org/name", "`revision` 'v3'"), OSError).check("org/name", **where)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_text_that_need_not_be_exact_is_in_bfloat16_where_the_cpu_multiplies_that(tmp_path, monkeypatch, dtype):
    qwen3().to(dtype).save_pretrained(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for has_amx, has_avx512 in itertools.product((True, False), repeat=2):
        monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda has=has_amx: has, raising=False)
        monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda has=has_avx512: has, raising=False)
        assert default_dtype(str(tmp_path)) == "float32"
        is_faster = has_amx or has_avx512
        kept = "bfloat16" if is_faster and dtype == torch.bfloat16 else "float32"
        assert default_dtype(str(tmp_path), is_exact=False) == kept
        in_gguf = default_dtype("org/name/model.gguf", is_exact=False)
        assert in_gguf == ("bfloat16" if is_faster else "float32")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert default_dtype(str(tmp_path)) == "auto" and default_dtype("org/name/model.gguf") == "bfloat16"
