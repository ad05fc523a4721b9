"""A target in GGUF: the text is that of the same weights, in whatever way the file is named."""

import logging
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from hf_hyperdflash import load_drafter, load_target, load_tokenizer
from hf_hyperdflash.hub.gguf import name_in_gguf
from hf_hyperdflash.hub.loading import check_made_for
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.targets.vocabulary import find_mask_token

from ..conftest import tiny_drafter
from ..helpers.commands import run
from ..helpers.families import llama
from ..helpers.gguf_files import chatting_llama, write_gguf

IDS = torch.arange(2, 12)[None]


@pytest.fixture
def chatting(tmp_path):
    """A file with a tokenizer, `</s>` at the end of texts and `<|assistant|>` at the end of turns; the target and the
    tokenizer that it was written from."""
    target, tokenizer = chatting_llama()
    turn = tokenizer.convert_tokens_to_ids("<|assistant|>")
    write_gguf(tmp_path / "chat.gguf", target, tokenizer, eot_token_id=turn)
    return tmp_path / "chat.gguf", target, tokenizer


def test_it_is_loaded_however_the_file_is_named(tmp_path, monkeypatch):
    target = llama().eval()
    write_gguf(tmp_path / "model.gguf", target)
    loaded = load_target(str(tmp_path), gguf_file="model.gguf", dtype=torch.float32)
    torch.testing.assert_close(loaded(IDS).logits, target(IDS).logits)
    drafter = tiny_drafter(loaded)
    assert drafter.config.target_name_or_path == str(tmp_path / "model.gguf")
    drafter.bind(loaded)
    drafted = loaded.generate(IDS, assistant_model=drafter, max_new_tokens=8, do_sample=False)
    assert torch.equal(drafted, target.generate(IDS, max_new_tokens=8, do_sample=False))
    monkeypatch.chdir(tmp_path)
    for name, options in (
        (tmp_path / "model.gguf", {}),
        ("model.gguf", {}),
        (str(tmp_path.parent), {"subfolder": tmp_path.name, "gguf_file": "model.gguf"}),
    ):
        again = load_target(str(name), dtype="float32", **options)
        assert torch.equal(again(IDS).logits, loaded(IDS).logits)
        assert Path(again.config._name_or_path).name == "model.gguf"


def test_a_configuration_is_the_files_and_nobody_elses(tmp_path):
    """It is read once, and what one target does with its own is not seen by the next."""
    write_gguf(tmp_path / "model.gguf", llama().eval())
    first = load_target(tmp_path / "model.gguf")
    first.config.max_position_embeddings = 7
    assert load_target(tmp_path / "model.gguf").config.max_position_embeddings != 7
    assert load_target(tmp_path / "model.gguf", max_position_embeddings=9).config.max_position_embeddings == 9
    first.config.max_position_embeddings = 77
    write_gguf(tmp_path / "model.gguf", first)
    assert load_target(tmp_path / "model.gguf").config.max_position_embeddings == 77, "another file of that name"


def test_a_name_is_split_at_its_file(tmp_path):
    (tmp_path / "a folder.gguf").mkdir()
    for name in ("org/name", str(tmp_path), str(tmp_path / "a folder.gguf")):
        assert name_in_gguf(name, {}) == (name, {})
    assert name_in_gguf("org/name/model.gguf", {}) == ("org/name", {"gguf_file": "model.gguf"})
    assert name_in_gguf("org/name/q4/model.gguf", {}) == ("org/name", {"gguf_file": "q4/model.gguf"})
    assert name_in_gguf("model.gguf", {"token": "t"}) == (".", {"token": "t", "gguf_file": "model.gguf"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_dequantized_to_the_dtype_that_is_asked_for(tmp_path, dtype):
    target = llama().eval()
    write_gguf(tmp_path / "model.gguf", target, quantized="Q8_0")
    loaded = load_target(tmp_path / "model.gguf", dtype=dtype)
    assert {weight.dtype for weight in loaded.parameters()} == {dtype}
    differing = 0
    for name, given in target.named_parameters():
        kept = loaded.get_parameter(name)
        blocks = given.detach().flatten().float().unflatten(0, (-1, 16)).abs().amax()
        step = blocks / 127 + given.abs().max() * torch.finfo(dtype).eps  # 8 bits of a block's largest value
        assert (kept.float() - given).abs().max() <= step, name
        differing += not torch.equal(kept.float(), given)
    assert differing > 10  # the file does hold 8 bits
    assert not getattr(loaded, "is_quantized", False) and not hasattr(loaded.config, "quantization_config")
    loaded.save_pretrained(tmp_path / "saved")
    saved = load_target(str(tmp_path / "saved"), dtype=dtype)
    assert torch.equal(saved(IDS).logits, loaded(IDS).logits)


def test_the_tokenizer_is_the_files_own(chatting):
    path, _, tokenizer = chatting
    read = load_tokenizer(path)
    assert len(read) == len(tokenizer)
    for text in ("Hello there", "<s>What is<|user|> the sum?</s>"):
        assert read(text)["input_ids"] == tokenizer(text)["input_ids"]
    read.save_pretrained(path.parent / "saved")
    assert "padding_side" not in (path.parent / "saved" / "tokenizer_config.json").read_text()
    for name in ("bos_token", "eos_token", "chat_template"):
        assert getattr(read, name) == getattr(tokenizer, name)


def test_texts_end_where_the_file_says(chatting):
    path, target, tokenizer = chatting
    loaded = load_target(path, dtype="float32")
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|assistant|>")]
    assert loaded.generation_config.eos_token_id == ends and loaded.config.bos_token_id == tokenizer.bos_token_id
    target.generation_config.eos_token_id = ends
    plain = target.generate(IDS, max_new_tokens=20, do_sample=False)
    assert torch.equal(loaded.generate(IDS, max_new_tokens=20, do_sample=False), plain)


def test_what_transformers_reads_otherwise_is_corrected_and_told(chatting, monkeypatch, caplog):
    """As 5.17 does with every Llama: the beginning for the end."""
    path, *_ = chatting
    stock = PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)
    stock.eos_token, stock.add_bos_token = "<s>", False
    monkeypatch.setattr(PreTrainedTokenizerFast, "from_pretrained", lambda *args, **kwargs: stock)
    with caplog.at_level(logging.WARNING):
        read = load_tokenizer(path)
    assert (read.eos_token, read.bos_token) == ("</s>", "<s>")
    assert "takes '<s>' for the `eos_token` of chat.gguf, and the file says '</s>'" in caplog.text


def test_whether_texts_begin_with_a_token_is_the_files_to_say(tmp_path):
    target, tokenizer = chatting_llama()
    for adds in (True, False):
        path = tmp_path / f"{adds}.gguf"
        write_gguf(path, target, tokenizer, add_bos_token=adds)
        ids = load_tokenizer(path)("Hello")["input_ids"]
        assert (ids[0] == tokenizer.bos_token_id) == adds
        assert ids[adds:] == tokenizer("Hello")["input_ids"]


def test_a_mask_token_is_found_in_the_files_vocabulary(tmp_path, caplog):
    target, tokenizer = chatting_llama()
    tokenizer.chat_template = "{{ messages }}"
    write_gguf(tmp_path / "chat.gguf", target, tokenizer)
    loaded = target_of(load_target(tmp_path / "chat.gguf", dtype="float32"))
    assert find_mask_token(loaded) == find_mask_token(loaded, load_tokenizer(tmp_path / "chat.gguf"))


def test_commands_take_the_file(chatting, tmp_path):
    """Its answers are written and trained on, and what is trained for it drafts for it."""
    from hf_hyperdflash.training.script import main

    path, *_ = chatting
    (tmp_path / "asked.jsonl").write_text(
        "".join(f'{{"messages": [{{"role": "user", "content": "What is {i}?"}}]}}\n' for i in range(6))
    )
    written = tmp_path / "answers.jsonl"
    arguments = ["answers", "--target", path, "--data", tmp_path / "asked.jsonl", "--output", written,
                 "--max-new-tokens", 12]  # fmt: skip
    run(*arguments)
    assert len(written.read_text().splitlines()) == 6
    flags = {"target": path, "dataset": written, "output_dir": tmp_path / "trained", "max_steps": 1, "layers": 1,
             "eval_rows": 1, "eval_prompts": 0, "num_anchors": 2, "report_to": "none"}  # fmt: skip
    main([part for name, value in flags.items() for part in (f"--{name}", str(value))])
    pair = {"target": path, "drafter": tmp_path / "trained"}
    check_made_for(*map(str, pair.values()))
    assert load_drafter(pair["drafter"], target=load_target(path)).config.target_name_or_path == path.name
    asked = [part for name, value in pair.items() for part in (f"--{name}", value)]
    assert "verification round" in run("generate", *asked, "--max-new-tokens", 8, "Hello")
