"""A GGUF file is read once: the next time its weights and its tokenizer come from a folder, and are the same."""

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

    def refuse(*args, **kwargs):
        raise AssertionError("the file is read again")

    return lambda: monkeypatch.setattr(gguf, "GGUFReader", refuse)


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


@pytest.mark.parametrize("dtype", ["float32", torch.bfloat16, None])
def test_the_next_target_is_the_same_and_from_a_folder(home, path, monkeypatch, unreadable, dtype):
    monkeypatch.setenv(SWITCH, "0")
    direct = load_target(path, dtype=dtype)
    assert not home.exists()
    monkeypatch.delenv(SWITCH)
    first = load_target(path, dtype=dtype)
    unreadable()
    again = load_target(str(path.parent), gguf_file=path.name, dtype=dtype)
    for loaded in (first, again):
        assert_equal(loaded, direct)
    assert load_target(path, dtype=dtype, max_position_embeddings=9).config.max_position_embeddings == 9
    assert load_target(path, dtype=dtype, attn_implementation="eager").config._attn_implementation == "eager"
    assert not again.training and not hasattr(again.config, "quantization_config")


def test_so_is_the_next_tokenizer(home, path, monkeypatch, unreadable):
    monkeypatch.setenv(SWITCH, "0")
    direct = load_tokenizer(path)
    monkeypatch.delenv(SWITCH)
    read = [load_tokenizer(path)]
    unreadable()
    read += [load_tokenizer(path), load_tokenizer(path, padding_side="left")]
    assert [each.padding_side for each in read] == [direct.padding_side, direct.padding_side, "left"]
    for tokenizer in read:
        assert tokenizer.backend_tokenizer.to_str() == direct.backend_tokenizer.to_str()
        assert tokenizer.special_tokens_map == direct.special_tokens_map
        assert tokenizer.chat_template == direct.chat_template and len(tokenizer) == len(direct)
        for text in TEXTS:
            ids = tokenizer(text)["input_ids"]
            assert ids == direct(text)["input_ids"] and ids[0] == direct.bos_token_id
            assert tokenizer.decode(ids) == direct.decode(ids)


def test_what_was_asked_for_once_is_not_kept(home, path):
    assert load_target(path, max_position_embeddings=9).config.max_position_embeddings == 9
    assert load_tokenizer(path, padding_side="left").padding_side == "left"
    assert load_target(path).config.max_position_embeddings != 9
    assert load_tokenizer(path).padding_side == "right"
    assert load_target(path).config.max_position_embeddings != 9


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
    assert_equal(load_target(path), direct)
    assert load_tokenizer(path).backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    if damage != "a file":  # in place of the folder, somebody else's
        unreadable()
        assert_equal(load_target(path), direct)
        assert load_tokenizer(path).special_tokens_map == tokenizer.special_tokens_map


def test_another_file_of_that_name_takes_its_place(home, path, tmp_path):
    before, facts = load_target(path), path.stat()
    load_target(path, dtype="bfloat16"), load_tokenizer(path)
    target, tokenizer = chatting_llama()
    with torch.no_grad():
        target.model.norm.weight.mul_(2)
    write_gguf(path, target, tokenizer, quantized="Q8_0")
    after = load_target(path)
    assert torch.equal(after.model.norm.weight, 2 * before.model.norm.weight)
    assert path.stat().st_size != facts.st_size or path.stat().st_mtime_ns != facts.st_mtime_ns
    assert {file.stat().st_mtime_ns >= path.stat().st_mtime_ns for file in home.rglob("*.safetensors")} == {True}
    assert len([*home.rglob("*.safetensors")]) == 1, "of the file before, nothing is left"
    shutil.copy(path, tmp_path / "copy.gguf")
    load_target(tmp_path / "copy.gguf")
    assert len([*home.rglob("*.safetensors")]) == 2, "another file has a folder of its own"


def test_a_home_that_cannot_be_written_is_one_line(home, path, caplog):
    home.write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        first, again = load_target(path), load_target(path)
        load_tokenizer(path)
    assert_equal(again, first)
    assert len([said for said in caplog.records if str(home) in said.getMessage()]) == 1


def test_a_full_disk_keeps_nothing(home, path, monkeypatch, caplog):
    size = sum(weight.numel() * weight.itemsize for weight in load_target(path).parameters())
    usage = shutil.disk_usage(path)
    with caplog.at_level(logging.WARNING):
        for free, kept in ((int(1.9 * size), 0), (int(2.1 * size), 1)):
            shutil.rmtree(home)
            monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
            caplog.clear()
            load_target(path)
            assert len([*home.rglob("*.safetensors")]) == kept
            said = [record.getMessage() for record in caplog.records if str(home) in record.getMessage()]
            assert len(said) == 1
    assert SWITCH in said[0] and f"{size / 1e6:,.0f} MB" in said[0]


def test_what_ended_halfway_is_not_taken(home, path, monkeypatch):
    save = PreTrainedModel.save_pretrained

    def stopped(self, folder, **options):
        save(self, folder, **options)
        _cut(Path(folder, "model.safetensors"))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(PreTrainedModel, "save_pretrained", stopped)
        load_target(path)
    assert_equal(load_target(path), load_target(path))
    assert len([*home.rglob("*.safetensors")]) == 1


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
    assert len([*home.rglob("*.safetensors")]) == 1
