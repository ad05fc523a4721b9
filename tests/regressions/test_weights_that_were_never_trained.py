"""Exports whose embedding, head or norms were never trained loaded in silence: loading and the doctor say which, and
what engines do with them."""

from __future__ import annotations

import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from hf_hyperdflash import load_drafter
from hf_hyperdflash.benchmark.doctor.diagnosis import Examination
from hf_hyperdflash.benchmark.doctor.fit import check_weights

from ..conftest import tiny_drafter
from ..helpers import families
from ..helpers.released_layouts import LAYOUTS, VOCABULARY, WIDTH
from ..helpers.tokenizers import characters
from ..helpers.unrolled import unrolled


def learned(rows, columns):
    """As training leaves a table: rows and columns of different sizes, around a mean that is not 0."""
    generator = torch.Generator().manual_seed(7)
    sizes = [torch.randn(count, generator=generator).exp() for count in (rows, columns)]
    noise = torch.randn(rows, columns, generator=generator)
    return 0.05 * (noise * sizes[0][:, None] * sizes[1] + torch.randn(columns, generator=generator))


UNTRAINED = {
    "zeros": torch.zeros_like,
    "normal": lambda table: 0.02 * torch.randn_like(table),
    "large normal": torch.randn_like,  # torch's, of an embedding
    "uniform": lambda table: (2 * torch.rand_like(table) - 1) / table.shape[1] ** 0.5,  # torch's, of a linear layer
    "alike": lambda table: torch.randn_like(table[:1]).expand_as(table).clone(),
}


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    return families.qwen3(layers=8).eval()


def loaded(caplog, folder, name, **options):
    """The drafter, and the lines that name one of its weights."""
    caplog.clear()
    drafter = load_drafter(folder, **options)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return drafter, [line for line in said if name in line]


def trained(kind, target, **fields):
    drafter = unrolled(kind, target, own_embedding=True, draft_vocab_size=40, **fields)
    with torch.no_grad():
        for table in (drafter.embed_tokens.weight, drafter.lm_head.weight):
            table.copy_(learned(*table.shape))
    return drafter


@pytest.mark.parametrize("how", UNTRAINED)
@pytest.mark.parametrize(
    ("kind", "name"),
    [("eagle3", "embed_tokens.weight"), ("eagle3", "lm_head.weight"), ("specblock", "lm_head.weight")],
)
def test_a_table_that_was_never_trained_is_named(kind, name, how, target, tmp_path, caplog):
    """And is used as it is."""
    trained(kind, target).save_pretrained(tmp_path, with_code=False)
    assert not loaded(caplog, tmp_path, name)[1]
    tensors = load_file(tmp_path / "model.safetensors")
    torch.manual_seed(0)
    tensors[name] = UNTRAINED[how](tensors[name])
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    drafter, (line,) = loaded(caplog, tmp_path, name)
    assert str(tmp_path) in line and "vLLM" in line and "SGLang" in line and "\n" not in line
    assert torch.equal(drafter.state_dict()[name], tensors[name])  # it is used as it is
    (problem,) = check_weights(Examination(target, drafter, characters()))
    assert problem[0] == "untrained weights" and name in problem[1]


def test_norms_at_zero_are_named(target, tmp_path, caplog):
    """But not a reducer's, which is zero before it is trained and then adds nothing."""
    drafter = trained("eagle3", target, reducer="hybrid", target_layer_ids=[1, 3])
    with torch.no_grad():
        drafter.layers[0].input_layernorm.weight.zero_()
        drafter.fc_norm.weight.zero_()
    drafter.save_pretrained(tmp_path, with_code=False)
    _, (line,) = loaded(caplog, tmp_path, "norm")
    assert "layers.0.input_layernorm.weight" in line and "fc_norm" not in line


@pytest.mark.parametrize("how", UNTRAINED)
@pytest.mark.parametrize("layout", ["safeailab", "z-lab"])
def test_an_export_that_left_the_embedding_as_it_was_made(layout, how, target, tmp_path, caplog):
    """A drafter of blocks does without it: its target's takes its place, unless somebody compares the two."""
    LAYOUTS[layout].write(tmp_path, target)
    tensors, table = load_file(tmp_path / "model.safetensors"), learned(VOCABULARY, WIDTH)
    torch.manual_seed(2)
    for embedding, count in ((table, 0), (UNTRAINED[how](table), 1)):
        save_file({**tensors, "embed_tokens.weight": embedding}, tmp_path / "model.safetensors")
        for given in (None, target) if layout == "safeailab" else (None,):
            drafter, lines = loaded(caplog, tmp_path, "embed_tokens.weight", target=given)
            assert len(lines) == count
    assert ("embed_tokens.weight" in drafter.state_dict()) == (layout == "safeailab")


def test_a_few_steps_of_training_are_told_from_none(tmp_path, caplog):
    """Of a real training loop: 20 steps over text of a few tokens, at a usual learning rate."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, head_dim=32,
        num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    drafter = tiny_drafter(model.eval(), target_layer_ids=[0], draft_vocab_size=512)  # its head is the target's
    drafter.save_pretrained(tmp_path / "before", with_code=False)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3)
    for _ in range(20):
        ids = torch.randint(0, 64, (4, 32)) ** 2 % 512
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    drafter = tiny_drafter(model.eval(), target_layer_ids=[0], draft_vocab_size=512)
    drafter.save_pretrained(tmp_path / "after", with_code=False)
    for folder, count in (("before", 1), ("after", 0)):
        assert len(loaded(caplog, tmp_path / folder, "lm_head.weight")[1]) == count
