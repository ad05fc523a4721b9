"""A tokenizer from GGUF names no special token that its file has not: Gemma's class brings a `<mask>` along, which had
the id of the unknown token, and so was taken for the mask token of a drafter."""

import gguf
import pytest
import torch
from huggingface_hub import constants

from hf_hyperdflash import load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
TOKENS = {
    "<pad>": CONTROL, "<eos>": CONTROL, "<bos>": CONTROL, "<unk>": UNKNOWN, "  ": USER_DEFINED,
    **dict.fromkeys(["\u2581", "a", "b", "c", "ab", "\u2581a", "\u2581ab", "abc", "\u2581abc"], NORMAL),
    "<start_of_turn>": CONTROL, "<end_of_turn>": CONTROL, **dict.fromkeys([f"<0x{i:02X}>" for i in range(256)], BYTE),
}  # fmt: skip


@pytest.fixture
def path(tmp_path):
    """Gemma's tokenizer, small, and as much of a model as makes a configuration."""
    writer = gguf.GGUFWriter(str(tmp_path / "gemma.gguf"), "gemma3")
    sizes = {"context_length": 128, "block_count": 2, "feed_forward_length": 32, "embedding_length": 16,
             "head_count": 2, "head_count_kv": 1, "key_length": 8, "value_length": 8, "sliding_window": 16,
             "layer_norm_rms_eps": 1e-6, "rope_freq_base": 1e4}  # fmt: skip
    for name, value in sizes.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*TOKENS])
    writer.add_token_scores([-float(i) for i in range(len(TOKENS))])
    writer.add_token_types([*TOKENS.values()])
    for name, token in {"pad": "<pad>", "eos": "<eos>", "bos": "<bos>", "unk": "<unk>"}.items():
        getattr(writer, f"add_{name}_token_id")([*TOKENS].index(token))
    writer.add_add_bos_token(True)
    writer.add_tensor("token_embd.weight", torch.zeros(len(TOKENS), 16).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "gemma.gguf"


def test_every_special_token_has_a_row(path, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HYPERDFLASH_GGUF_CACHE", "1")
    first, again = load_tokenizer(path), load_tokenizer(path)
    for tokenizer in (first, again):
        assert len(tokenizer) == len(TOKENS) and tokenizer.mask_token_id is None
        for name in ("pad", "eos", "bos", "unk"):
            assert getattr(tokenizer, f"{name}_token_id") == [*TOKENS].index(f"<{name}>")
        assert tokenizer.padding_side == first.padding_side
        for text in ("abc ab  a", "  abc<end_of_turn>é", ""):
            assert tokenizer(text)["input_ids"] == first(text)["input_ids"]
    assert again("a")["input_ids"][0] == again.bos_token_id
    assert again.backend_tokenizer.to_str() == first.backend_tokenizer.to_str()
