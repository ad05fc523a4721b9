"""A target without its decoder layers is what is left of the whole one, and reads little of a checkpoint."""

import ctypes
import json
import mmap
import os
import shutil
import struct
from itertools import product
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from transformers import DeepseekV4Config
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from hf_hyperdflash import load_drafter, load_target
from hf_hyperdflash.hub import partial
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.training.features.fingerprint import target_fingerprint

from ..conftest import tiny_drafter
from ..helpers import families
from ..helpers.families import ALSO_MASKED, FAMILIES, qwen3
from ..helpers.processes import python
from ..helpers.quantization import quantize_fp4, quantize_fp8
from ..helpers.refusals import Refusal

# Whose ends differ from each other: bare gates, embeddings that are scaled, an encoder of images beside the text.
DIFFERENT = ("deepseek_v4", "deepseek_v4_remote_code", "gemma3", "qwen4_exp_multimodal", "qwen3")
EACH = [
    make if make.__name__ in DIFFERENT else pytest.param(make, marks=pytest.mark.nightly)
    for make in (*FAMILIES, *ALSO_MASKED, families.gemma4_e, families.gemma3n)
]


def saved(make, folder):
    torch.manual_seed(0)
    make().save_pretrained(folder)
    if make is families.deepseek_v4_remote_code:
        shutil.copy(Path(families.__file__).parent / "remote_v4" / "modeling_remote_v4.py", folder)
    return str(folder)


def assert_same_ends(part, whole):
    ours, theirs = target_of(part), target_of(whole)
    assert type(ours) is type(theirs) and type(part) is type(whole) and not len(ours.layers)
    ids, streams = torch.arange(10)[None], torch.randn(1, 5, theirs.streams, theirs.config.hidden_size)
    with torch.no_grad():
        states = theirs.collapse(streams.to(theirs.dtype))
        for found, wanted in (
            (ours.embed(ids), theirs.embed(ids)),
            (ours.collapse(streams.to(theirs.dtype)), states),
            (ours.logits(states), theirs.logits(states)),
        ):
            torch.testing.assert_close(found, wanted, atol=0, rtol=0)
    assert all(torch.equal(value, theirs.gate()[name]) for name, value in ours.gate().items())
    assert ours.gate().keys() == theirs.gate().keys()


@pytest.mark.parametrize("make", EACH)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_family_ends_as_the_whole_target_does(tmp_path, make, dtype):
    if make is families.deepseek_v4 and dtype == "bfloat16" and Version(transformers.__version__) < Version("5.20"):
        pytest.skip("transformers cannot run it before 5.20")
    name = saved(make, tmp_path / "target")
    whole = load_target(name, dtype=dtype, trust_remote_code=True)
    part = load_target(name, dtype=dtype, trust_remote_code=True, without_layers=True)
    assert_same_ends(part, whole)
    state = whole.state_dict()
    assert all(
        torch.equal(value, state[key]) and value.dtype == state[key].dtype for key, value in part.state_dict().items()
    )
    assert not any(value.is_meta for value in (*part.parameters(), *part.buffers()))
    prints = target_fingerprint(part), target_fingerprint(whole)
    assert prints[0] == {**prints[1], "body": ""}
    ends = [target_of(each) for each in (part, whole)]
    assert len({each.input_embedding.weight is each.output_head.weight for each in ends}) == 1
    assert part.config._name_or_path == whole.config._name_or_path
    parts = [each.config.get_text_config(decoder=True) for each in (part, whole)]
    assert parts[0].num_hidden_layers == parts[1].num_hidden_layers
    assert part.generation_config.to_dict() == whole.generation_config.to_dict()


def split(folder, of_layers=b"not a file of tensors"):
    """Put the layers of a saved target into a shard of their own, which nothing can read."""
    tensors, named = load_file(folder / "model.safetensors"), {}
    ends = {name: value for name, value in tensors.items() if "layers." not in name}
    for at, name in enumerate(sorted(ends)):
        named[name] = f"model-0000{1 + at % 2}-of-00003.safetensors"
    for file in set(named.values()):
        save_file({name: ends[name] for name in named if named[name] == file}, folder / file)
    (folder / "model-00003-of-00003.safetensors").write_bytes(of_layers)
    index = named | {name: "model-00003-of-00003.safetensors" for name in tensors if name not in ends}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "model.safetensors").unlink()
    return ends


@pytest.mark.parametrize("tied", [False, True])
def test_files_without_what_is_needed_are_not_read(tmp_path, tied):
    name = saved(
        lambda: families.made("qwen3", **{**families.DENSE, "head_dim": 16, "tie_word_embeddings": tied}), tmp_path
    )
    whole = load_target(name, dtype="float32")
    split(tmp_path)
    assert_same_ends(load_target(name, dtype="float32", without_layers=True), whole)
    with pytest.raises(OSError, match="damaged"):
        load_target(name, dtype="float32")


def test_a_pickle_is_read_whole_and_its_layers_dropped(tmp_path, caplog):
    name = saved(qwen3, tmp_path)
    whole = load_target(name, dtype="float32")
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert_same_ends(load_target(name, dtype="float32", without_layers=True), whole)
    assert "loaded whole, and its layers are dropped" in caplog.text


BLOCK = (16, 32)


def fp8_blocks(generator):
    weight, scale, values = quantize_fp8((64, 64), BLOCK, generator)
    return {"weight": weight, "weight_scale_inv": scale}, values


def fp8_of_each_row(generator):
    weight, scale, values = quantize_fp8((64, 64), (1, 64), generator)
    return {"weight": weight, "weight_scale": scale}, values


def fp8_of_all(generator):
    weight, scale, values = quantize_fp8((64, 64), (64, 64), generator)
    return {"weight": weight, "weight_scale": scale.reshape(())}, values


def fp4_of_v4(generator):
    weight, scale, values = quantize_fp4((64, 64), generator)
    return {"weight": weight, "scale": (scale.log2() + 127).to(torch.uint8)}, values


def nvfp4(inverse):
    def make(generator):
        weight, scale, values = quantize_fp4((64, 64), generator)
        scale = scale.repeat_interleave(2, 1)  # of 16 columns each
        scale[:, 1::2] *= 0.5
        values = values * torch.tensor([1.0, 0.5]).repeat_interleave(16).repeat(2)
        parts = {"weight_scale": scale.to(torch.float8_e4m3fn)}
        if inverse:
            return {
                "weight_packed": weight.view(torch.uint8),
                **parts,
                "weight_global_scale": torch.tensor([4.0]),
            }, values / 4
        return {"weight": weight.view(torch.uint8), **parts, "weight_scale_2": torch.tensor(0.25)}, values / 4

    return make


@pytest.mark.parametrize(
    "make", [fp8_blocks, fp8_of_each_row, fp8_of_all, fp4_of_v4, nvfp4(False), nvfp4(True)],
    ids=["blocks", "rows", "tensor", "V4's FP4", "ModelOpt's NVFP4", "compressed-tensors' NVFP4"],
)  # fmt: skip
def test_quantized_ends_are_dequantized(tmp_path, monkeypatch, make):
    """Also where they are read in several parts."""
    monkeypatch.setattr(partial, "_ELEMENTS", 16 * 64)
    name = saved(qwen3, tmp_path)
    ends, wanted, generator = split(tmp_path), {}, torch.Generator().manual_seed(0)
    files = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    stored = {"model.norm.weight": ends["model.norm.weight"]}
    for module in ("model.embed_tokens", "lm_head"):
        tensors, wanted[module] = make(generator)
        stored |= {f"{module}.{kind}": value for kind, value in tensors.items()}
    save_file(stored, tmp_path / "model-00001-of-00003.safetensors")
    files["weight_map"] = {
        **{key: file for key, file in files["weight_map"].items() if key not in ends},
        **dict.fromkeys(stored, "model-00001-of-00003.safetensors"),
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(files))
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": BLOCK}
    (tmp_path / "config.json").write_text(json.dumps(config))
    part = load_target(name, dtype="float32", without_layers=True)
    for module, values in wanted.items():
        torch.testing.assert_close(part.get_submodule(module).weight, values)
    bare = load_target(name, dtype="bfloat16", without_layers=True)
    torch.testing.assert_close(bare.lm_head.weight, wanted["lm_head"].bfloat16())


def test_what_does_not_fit_is_named(tmp_path):
    name = saved(qwen3, tmp_path)
    ends = split(tmp_path)
    shape = ends["lm_head.weight"].shape
    file = (
        tmp_path / json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]["lm_head.weight"]
    )
    rest = {key: value for key, value in load_file(file).items() if key != "lm_head.weight"}

    def load(**tensors):
        save_file({**rest, **tensors}, file)
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        index["weight_map"] = {key: value for key, value in index["weight_map"].items() if key != "lm_head.weight"}
        index["weight_map"] |= dict.fromkeys(tensors, file.name)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        return lambda: load_target(name, dtype="float32", without_layers=True)

    Refusal(load(), ("1 missing", "lm_head.weight")).check()
    Refusal(load(**{"lm_head.weight": torch.zeros(shape[0], 8)}), ("lm_head.weight", "[8]", str([shape[1]]))).check()
    Refusal(load(**{"lm_head.weight": torch.full(shape, torch.nan)}), ("not finite", "lm_head.weight")).check()
    float8 = torch.zeros(shape).to(torch.float8_e4m3fn)
    Refusal(load(**{"lm_head.weight": float8}), ("lm_head.weight", "float8_e4m3fn", "without a scale")).check()


def test_zero3_shards_no_target_and_no_drafter_that_is_loaded(tmp_path):
    """It is for the drafter that is trained; transformers would shard every model that it loads."""

    class Zero3:
        config: ClassVar = {}

        def is_zero3(self):
            return True

    name, asked = saved(qwen3, tmp_path / "target"), Zero3()
    tiny_drafter(qwen3()).save_pretrained(tmp_path / "drafter")
    set_hf_deepspeed_config(asked)
    try:
        assert all(value.numel() for value in load_target(name).parameters())
        assert all(value.numel() for value in load_drafter(tmp_path / "drafter").parameters())
        assert is_deepspeed_zero3_enabled()
    finally:
        unset_hf_deepspeed_config()


# How much is read


def sparse_file(path, tensors):
    """Write a file of tensors whose values are zeros that take no space on the disk: `tensors` are dtype and shape of
    each."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = {"F8_E4M3": 1, "BF16": 2, "F32": 4}[dtype]
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return 8 + len(text) + end


def fabricate(folder, shards, **fields):
    """A DeepSeek-V4 in DeepSeek's own names and shards, its experts in FP8 blocks. Return the bytes of each file."""
    config = DeepseekV4Config(**fields)
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config.save_pretrained(folder)
    hidden, inner, streams = config.hidden_size, config.moe_intermediate_size, config.hc_mult
    first = {"embed.weight": ("BF16", (config.vocab_size, hidden))}
    last = {
        "norm.weight": ("BF16", (hidden,)),
        "head.weight": ("BF16", (config.vocab_size, hidden)),
        "hc_head_fn": ("F32", (streams, streams * hidden)),
        "hc_head_base": ("F32", (streams,)),
        "hc_head_scale": ("F32", (1,)),
    }
    experts = {}
    for layer, expert in product(range(config.num_hidden_layers), range(config.n_routed_experts)):
        for part, shape in (("w1", (inner, hidden)), ("w2", (hidden, inner)), ("w3", (inner, hidden))):
            name = f"layers.{layer}.ffn.experts.{expert}.{part}"
            experts[f"{name}.weight"] = "F8_E4M3", shape
            experts[f"{name}.scale"] = "F32", tuple(-(-size // 128) for size in shape)
    each = -(-len(experts) // shards)
    parts = [dict(list(experts.items())[at : at + each]) for at in range(0, len(experts), each)]
    parts[0], parts[-1] = first | parts[0], parts[-1] | last  # as released: beside the first and the last layers
    named, sizes = {}, {}
    for number, tensors in enumerate(parts, start=1):
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        sizes[folder / file] = sparse_file(folder / file, tensors)
        named |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": named}))
    return sizes


def in_memory(path):
    """How many bytes of a file the system holds, all of which somebody read since [`forget`]."""
    libc, size = ctypes.CDLL(None, use_errno=True), os.path.getsize(path)
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as there,
    ):
        start = ctypes.addressof(ctypes.c_char.from_buffer(there))
        assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), pages) == 0
    return mmap.PAGESIZE * sum(page & 1 for page in bytes(pages))


def forget(path):
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


STARTS = """
import resource, sys, torch
from hf_hyperdflash import HyperDFlashDrafter, HyperDFlashTrainer, HyperDFlashTrainingArguments, load_target
target = load_target(sys.argv[1], dtype="bfloat16", without_layers=True)
how = dict(num_hidden_layers=1, intermediate_size=256, mask_token_id=1)
drafter = HyperDFlashDrafter.from_target(target, dtype=torch.float32, **how)
arguments = HyperDFlashTrainingArguments(sys.argv[2], use_cpu=True, report_to="none", feature_source="cached")
trainer = HyperDFlashTrainer(drafter, target, arguments)
assert drafter.config.reducer == "hc_gate" and trainer.target_fingerprint.split()[1] == "-"
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.parametrize(
    "of_v4_flash, fields",
    [
        (False, dict(hidden_size=256, vocab_size=4096, moe_intermediate_size=512, n_routed_experts=64)),
        pytest.param(True, dict(n_routed_experts=192), marks=pytest.mark.nightly),  # 208 GB
    ],
    ids=["small", "200 GB"],
)  # fmt: skip
def test_a_trainers_start_reads_a_small_part_of_a_large_target(tmp_path, of_v4_flash, fields):
    """What of the files is in the page cache afterwards was read, by whatever means."""
    probe = tmp_path / "probe"
    with open(probe, "wb") as file:
        file.truncate(2**20)
    if os.stat(probe).st_blocks or not hasattr(os, "posix_fadvise"):
        pytest.skip(f"{tmp_path} is on a file system where empty parts of a file take space")
    target = tmp_path / "target"
    target.mkdir()
    sizes = fabricate(target, 46, **fields)
    for path in sizes:
        forget(path)
    if any(map(in_memory, sizes)):
        pytest.skip("the system keeps files in memory that nobody reads")
    root = Path(__file__).parents[2]
    done = python("-c", STARTS, target, tmp_path / "out", env={**os.environ, "PYTHONPATH": str(root)})
    assert done.returncode == 0, done.stderr[-3000:]
    reads, whole, held = list(map(in_memory, sizes)), sum(sizes.values()), int(done.stdout.split()[-1])
    read, needed = sum(reads), 2 * 2 * fields.get("vocab_size", 129280) * fields.get("hidden_size", 4096)
    print(f"{read / 1e9:.3f} of {whole / 1e9:.1f} GB read, {100 * read / whole:.2f} %, {held / 1e9:.2f} GB held")
    assert needed <= read and not any(reads[1:-1])
    if of_v4_flash:  # the system reads megabytes ahead, which in a small file is all of it
        assert whole > 200e9 and read < 0.02 * whole and held < 4e9
