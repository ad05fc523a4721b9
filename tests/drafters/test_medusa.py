"""Medusa heads: their drafts against naive loops over the paper's equation, the target's own text, their files."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from hf_hyperdflash import MedusaDrafter, bind, load_drafter
from hf_hyperdflash.cli.app import app
from hf_hyperdflash.hub.found import check_drafter
from hf_hyperdflash.hub.loading import check_made_for
from hf_hyperdflash.trees.growth import SHARPENED

from ..conftest import mostly_nightly, prompt
from ..helpers import families
from ..helpers.loops import proposed_by
from ..helpers.medusa import medusa, published

HEADS, NEW = 4, 24


def state_of(target, tokens):
    """What the target's LM head reads of the last of `tokens`, by stock code alone."""
    seen = []
    head = target.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        target(torch.tensor([tokens]))
    handle.remove()
    return seen[0][0, -1].float()


def naive(tensors, k, x, blocks):
    """Logits of head `k`, number for number as in the paper."""
    for j in range(blocks):
        weight, bias = tensors[f"{k}.{j}.linear.weight"], tensors[f"{k}.{j}.linear.bias"]
        inner = [float(weight[i] @ x + bias[i]) for i in range(len(x))]
        x = torch.stack([x[i] + z / (1 + torch.tensor(-z).exp()) for i, z in enumerate(inner)])
    return tensors[f"{k}.{blocks}.weight"] @ x


def fitted(target, ids, heads=HEADS, blocks=1):
    """Published tensors: random blocks, and last layers that by least squares tell most of the target's own text."""
    torch.manual_seed(3)
    text = target.generate(ids, do_sample=False, max_new_tokens=NEW + heads)[0].tolist()
    config = target.config.get_text_config(decoder=True)
    width, vocabulary, tensors = config.hidden_size, config.vocab_size, {}
    places = range(ids.shape[1] - 1, len(text) - heads - 1)
    states = [state_of(target, text[: t + 1]) for t in places]
    for k in range(heads):
        for j in range(blocks):
            tensors[f"{k}.{j}.linear.weight"] = 0.3 * torch.randn(width, width)
            tensors[f"{k}.{j}.linear.bias"] = 0.1 * torch.randn(width)
        tensors[f"{k}.{blocks}.weight"] = torch.eye(vocabulary, width)
        features = torch.stack([naive(tensors, k, x, blocks)[:width] for x in states])
        wanted = torch.eye(vocabulary)[[text[t + 2 + k] for t in places]]
        wanted[1::3] = torch.eye(vocabulary)[5]  # and at some places something else
        tensors[f"{k}.{blocks}.weight"] = 9 * torch.linalg.lstsq(features, wanted).solution.T.contiguous()
    return tensors


def best_nodes(logits, budget):
    """The paths of a tree, by enumeration: the likeliest products of independent drafts."""
    values, level = {}, {(): 0.0}
    for each in logits:
        likely = (each / SHARPENED).log_softmax(-1)
        best = likely.topk(budget).indices.tolist()
        level = {(*path, token): value + float(likely[token]) for path, value in level.items() for token in best}
        values |= level
    return set(sorted(values, key=values.__getitem__, reverse=True)[:budget])


@pytest.mark.parametrize("blocks", mostly_nightly([2, 1]))
@pytest.mark.parametrize(
    "family", [families.qwen3, families.deepseek_v4, families.qwen3_next], ids=lambda f: f.__name__
)
def test_text_is_the_targets_and_drafts_are_those_of_a_naive_loop(family, blocks, tmp_path):
    torch.manual_seed(0)
    target, ids = family().eval(), prompt(11)
    tensors = fitted(target, ids, blocks=blocks)
    plain = target.generate(ids, do_sample=False, max_new_tokens=NEW)
    drafter = load_drafter(published(tmp_path / "heads", tensors), target=target, dtype=torch.float32)
    assert isinstance(drafter, MedusaDrafter) and drafter.max_draft_tokens == HEADS
    drafter.bind(target)
    out, rounds = proposed_by(drafter, target, ids, do_sample=False, max_new_tokens=NEW)
    assert torch.equal(out, plain)
    stats, at = drafter.last_stats, ids.shape[1]
    assert max(stats.accepted) > 1 and min(stats.accepted) < HEADS
    drafter.unbind(target)
    for drafts, accepted in zip(rounds, stats.accepted):
        x = state_of(target, plain[0, :at].tolist())
        assert drafts == [int(naive(tensors, k, x, blocks).argmax()) for k in range(len(drafts))]
        at += accepted + 1


def test_a_tree_is_of_the_likeliest_products():
    target, ids = bind(families.qwen3().eval()), prompt(9)
    drafter = medusa()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(std=0.4)
    trees, propose = [], type(drafter).propose_batch
    drafter.propose_batch = lambda *args: trees.extend(propose(drafter, *args)) or trees[-1:]
    text = target.generate(
        ids, do_sample=False, max_new_tokens=12, assistant_model=drafter, tree_budget=4, num_assistant_tokens=3
    )[0].tolist()
    tree, tensors = trees[0], drafter.state_dict()
    x = state_of(target, text[: ids.shape[1]])
    tokens = tree.tokens.tolist()
    paths = {tuple(tokens[node] for node in tree.path(i)) for i in range(len(tree))}
    assert paths == best_nodes([naive(tensors, k, x, 1) for k in range(3)], 4)


@pytest.mark.parametrize("file", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
def test_published_files_are_read_and_saved(file, tmp_path):
    target, ids = families.qwen3().eval(), prompt(7)
    tensors = fitted(target, ids)
    drafter = load_drafter(published(tmp_path / "theirs", tensors, file))
    assert drafter.config.target_name_or_path == "org/its-target"
    drafter.save_pretrained(tmp_path / "drafter")
    assert load_file(tmp_path / "drafter" / "model.safetensors").keys() == tensors.keys()
    again = load_drafter(tmp_path / "drafter", target=target)
    target.save_pretrained(tmp_path / "target")
    check_made_for(str(tmp_path / "target"), str(tmp_path / "drafter"), 3)  # before its weights are read
    for loaded in (drafter, again):
        assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in tensors.items())


def test_it_has_a_card(tmp_path):
    medusa().save_pretrained(tmp_path)
    assert str(check_drafter(tmp_path).kind) == "a Medusa drafter"
    result = CliRunner().invoke(app, ["card", str(tmp_path), "--target", "org/target", "--repo-id", "org/heads"])
    card = (tmp_path / "README.md").read_text()
    assert result.exit_code == 0 and "3 tokens in one pass" in card and "It has Medusa heads" in card
    assert "are shared, not stored here" not in card and "deepseek" not in card
