"""Each start with a GGUF file took as long as the first: it is read once, and the next time its weights and tokenizer
come from a folder, and are the same."""

import logging
import shutil
import threading
from pathlib import Path

import gguf
import pytest
import torch
from huggingface_hub import constants
from transformers import PreTrainedModel

from hf_hyperdflash import load_target, load_tokenizer
from hf_hyperdflash.hub import gguf as our_gguf

from ..helpers.gguf_files import chatting_llama, write_gguf

IDS = torch.arange(2, 12)[None]
SWITCH = "HF_HYPERDFLASH_GGUF_CACHE"
TEXTS = ("Hello there", "<s>What is<|user|> the  sum?</s>", " 12 + 7 = ?\n\n", "Grüße, 你好 🙂")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The user's HF_HOME."""
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def path(tmp_path):
    target, tokenizer = chatting_llama()
    ends = {"eot_token_id": tokenizer.convert_tokens_to_ids("<|assistant|>"), "add_bos_token": True}
    write_gguf(tmp_path / "chat.gguf", target, tokenizer, quantized="Q8_0", **ends)
    return tmp_path / "chat.gguf"


@pytest.fixture
def unreadable(monkeypatch):
    """Calling it, nothing but a header can be read of a GGUF file any more."""
    return lambda: monkeypatch.setattr(gguf, "GGUFReader", lambda *_, **__: pytest.fail("the file is read again"))


def kept(home):
    return [*home.rglob("*.safetensors")]


def assert_equal(one, other):
    assert one.dtype == other.dtype and one.config._name_or_path == other.config._name_or_path
    tensors, others = one.state_dict(), other.state_dict()
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensors[name], others[name]) for name in tensors)
    said, also = (each.config.to_dict() | {"architectures": None} for each in (one, other))
    assert said == also
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(one.generation_config, token) == getattr(other.generation_config, token)
    options = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(one.generate(IDS, **options), other.generate(IDS, **options))


def assert_same_tokenizer(tokenizer, direct):
    assert tokenizer.backend_tokenizer.to_str() == direct.backend_tokenizer.to_str()
    assert tokenizer.special_tokens_map == direct.special_tokens_map
    assert tokenizer.chat_template == direct.chat_template and len(tokenizer) == len(direct)
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert ids == direct(text)["input_ids"] and ids[0] == direct.bos_token_id
        assert tokenizer.decode(ids) == direct.decode(ids)


@pytest.mark.parametrize("dtype", ["float32", torch.bfloat16, None])
def test_the_next_target_and_tokenizer_are_the_same_and_from_a_folder(home, path, monkeypatch, unreadable, dtype):
    """What was asked for once beside the file is not kept."""
    monkeypatch.setenv(SWITCH, "0")
    direct, tokenizer = load_target(path, dtype=dtype), load_tokenizer(path)
    assert not home.exists()
    monkeypatch.delenv(SWITCH)
    asked = load_target(path, dtype=dtype, max_position_embeddings=9), load_tokenizer(path, padding_side="left")
    first = load_target(path, dtype=dtype), load_tokenizer(path)
    unreadable()
    again = load_target(str(path.parent), gguf_file=path.name, dtype=dtype), load_tokenizer(path)
    for loaded, read in (first, again):
        assert_equal(loaded, direct)
        assert_same_tokenizer(read, tokenizer)
        assert read.padding_side == tokenizer.padding_side == "right"
    assert not again[0].training and not hasattr(again[0].config, "quantization_config")
    once = load_target(path, dtype=dtype, max_position_embeddings=9), load_tokenizer(path, padding_side="left")
    for target, read in (asked, once):
        assert target.config.max_position_embeddings == 9 and read.padding_side == "left"
    assert load_target(path, dtype=dtype, attn_implementation="eager").config._attn_implementation == "eager"


def test_weights_are_in_memory_and_not_in_the_files_pages(home, path):
    load_target(path)
    loaded = load_target(path)
    before = {name: tensor.clone() for name, tensor in loaded.state_dict().items()}
    (file,) = kept(home)
    with file.open("rb+") as written:  # in place: a mapped page would show it
        written.write(b"\xff" * file.stat().st_size)
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.state_dict().items())


def _cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _damages(file):
    """Ways to damage a file, or the folder that it is in."""
    return {
        "cut": lambda: _cut(file),
        "zeros": lambda: file.write_bytes(bytes(file.stat().st_size)),
        "no text": lambda: file.write_bytes(b"\xff\xfe{"),
        "empty": lambda: file.write_bytes(b""),
        "gone": file.unlink,
        "all gone": lambda: [each.unlink() for each in file.parent.iterdir()],
        "a file": lambda: (shutil.rmtree(file.parent), file.parent.write_bytes(b"")),
    }


EACH = ("model.safetensors", "config.json", "tokenizer.json")


@pytest.mark.parametrize(
    ("damage", "names"), [*((damage, EACH) for damage in _damages(Path())), *(("cut", (name,)) for name in EACH)]
)
def test_a_damaged_folder_is_read_again(home, path, unreadable, damage, names):
    direct, tokenizer = load_target(path), load_tokenizer(path)
    for file in [file for name in names for file in home.rglob(name)]:
        if file.exists():
            _damages(file)[damage]()
    our_gguf._config_of.cache_clear()  # as in another process
    for _ in range(1 if damage == "a file" else 2):  # in place of the folder, somebody else's stays
        assert_equal(load_target(path), direct)
        assert_same_tokenizer(load_tokenizer(path), tokenizer)
        if damage != "a file":
            unreadable()


def test_another_file_of_that_name_takes_its_place(home, path, tmp_path):
    before = load_target(path)
    load_target(path, dtype="bfloat16"), load_tokenizer(path)
    target, tokenizer = chatting_llama()
    with torch.no_grad():
        target.model.norm.weight.mul_(2)
    write_gguf(path, target, tokenizer, quantized="Q8_0")
    assert torch.equal(load_target(path).model.norm.weight, 2 * before.model.norm.weight)
    assert len(kept(home)) == 1, "of the file before, nothing is left"
    shutil.copy(path, tmp_path / "copy.gguf")
    load_target(tmp_path / "copy.gguf")
    assert len(kept(home)) == 2, "another file has a folder of its own"


def test_where_it_cannot_be_kept_one_line_says_so(home, path, monkeypatch, caplog):
    """Because the home is no folder, or has not twice the room."""
    home.write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        first, again = load_target(path), load_target(path)
        load_tokenizer(path)
    assert_equal(again, first)
    assert len([line for line in caplog.messages if str(home) in line]) == 1
    size, usage = sum(weight.numel() * weight.itemsize for weight in first.parameters()), shutil.disk_usage(path)
    home.unlink()
    for free, count in ((int(1.9 * size), 0), (int(2.1 * size), 1)):
        shutil.rmtree(home, ignore_errors=True)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            load_target(path)
        assert len(kept(home)) == count
        (said,) = [line for line in caplog.messages if str(home) in line]
    assert SWITCH in said and f"{size / 1e6:,.0f} MB" in said


def test_what_ended_halfway_is_not_taken(home, path, monkeypatch):
    save = PreTrainedModel.save_pretrained

    def stopped(self, folder, **options):
        save(self, folder, **options)
        _cut(Path(folder, "model.safetensors"))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(PreTrainedModel, "save_pretrained", stopped)
        load_target(path)
    assert not list(home.rglob("unfinished")), "a part of a target takes room"
    assert_equal(load_target(path), load_target(path))
    assert len(kept(home)) == 1


def test_threads_may_want_it_at_once(home, path, unreadable):
    loaded: list[PreTrainedModel] = []
    threads = [threading.Thread(target=lambda: loaded.append(load_target(path))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    unreadable()
    assert len(loaded) == 3
    for each in loaded:
        assert_equal(load_target(path), each)
    assert len(kept(home)) == 1


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
GEMMAS = {
    "<pad>": CONTROL, "<eos>": CONTROL, "<bos>": CONTROL, "<unk>": UNKNOWN, "  ": USER_DEFINED,
    **dict.fromkeys(["\u2581", "a", "b", "c", "ab", "\u2581a", "\u2581ab", "abc", "\u2581abc"], NORMAL),
    "<start_of_turn>": CONTROL, "<end_of_turn>": CONTROL, **dict.fromkeys([f"<0x{i:02X}>" for i in range(256)], BYTE),
}  # fmt: skip


def test_every_special_token_of_gemmas_has_a_row(home, tmp_path):
    """Its class brings a `<mask>` along that the file has not: it had the id of the unknown token, and so was taken
    for the mask token of a drafter."""
    path, tokens = tmp_path / "gemma.gguf", [*GEMMAS]
    writer = gguf.GGUFWriter(str(path), "gemma3")  # its tokenizer, small, and as much as makes a configuration
    sizes = {"context_length": 128, "block_count": 2, "feed_forward_length": 32, "embedding_length": 16,
             "head_count": 2, "head_count_kv": 1, "key_length": 8, "value_length": 8, "sliding_window": 16,
             "layer_norm_rms_eps": 1e-6, "rope_freq_base": 1e4}  # fmt: skip
    for name, value in sizes.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_token_types([*GEMMAS.values()])
    specials = ("pad", "eos", "bos", "unk")
    for name in specials:
        getattr(writer, f"add_{name}_token_id")(tokens.index(f"<{name}>"))
    writer.add_add_bos_token(True)
    writer.add_tensor("token_embd.weight", torch.zeros(len(tokens), 16).numpy())
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file()
    writer.close()
    first, again = load_tokenizer(path), load_tokenizer(path)
    for tokenizer in (first, again):
        assert len(tokenizer) == len(tokens) and tokenizer.mask_token_id is None
        assert [getattr(tokenizer, f"{name}_token_id") for name in specials] == [0, 1, 2, 3]
        assert [tokenizer.decode(tokenizer(text)["input_ids"][1:]) for text in ("abc ab  a", "")] == ["abc ab  a", ""]
    assert_same_tokenizer(again, first)
