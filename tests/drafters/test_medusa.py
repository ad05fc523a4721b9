"""Medusa heads: their drafts against naive loops over the paper's equation, the target's own text, their files."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from hf_hyperdflash import MedusaDrafter, load_drafter
from hf_hyperdflash.cli.app import app
from hf_hyperdflash.decoding.stats import keep_trees
from hf_hyperdflash.hub.found import check_drafter
from hf_hyperdflash.hub.loading import check_made_for
from hf_hyperdflash.trees.growth import SHARPENED

from ..conftest import mostly_nightly, prompt
from ..helpers import families
from ..helpers.medusa import medusa, published

HEADS = 4


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


def random_heads(blocks=1):
    """Published tensors."""
    torch.manual_seed(3)
    drafter = medusa(medusa_num_heads=HEADS, medusa_num_layers=blocks)
    return {name: 0.3 * torch.randn(tensor.shape) for name, tensor in drafter.state_dict().items()}


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
def test_drafts_are_those_of_a_naive_loop(family, blocks, tmp_path):
    """Chains, and trees of the likeliest products."""
    torch.manual_seed(0)
    target, ids, tensors = family().eval(), prompt(11), random_heads(blocks)
    plain = target.generate(ids, do_sample=False, max_new_tokens=16)
    drafter = load_drafter(published(tmp_path / "heads", tensors), target=target, dtype=torch.float32)
    assert isinstance(drafter, MedusaDrafter) and drafter.max_draft_tokens == HEADS
    for budget in (None, 5):
        drafter.bind(target)
        options = dict(do_sample=False, max_new_tokens=16, tree_budget=budget)
        with keep_trees():
            out = target.generate(ids, assistant_model=drafter, **options)
        drafter.unbind(target)
        trees = [kept.drafts for kept in drafter.last_stats.trees]
        assert torch.equal(out, plain) and len(trees) > 3
        at = ids.shape[1]
        for tree, accepted in zip(trees, drafter.last_stats.accepted):
            x, tokens = state_of(target, plain[0, :at].tolist()), tree.tokens.tolist()
            logits = [naive(tensors, k, x, blocks) for k in range(max(tree.depths))]
            if budget is None:
                assert tokens == [int(each.argmax()) for each in logits]
            else:
                paths = {tuple(tokens[node] for node in tree.path(i)) for i in range(len(tree))}
                assert paths == best_nodes(logits, budget)
            at += accepted + 1


@pytest.mark.parametrize("file", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
def test_published_files_are_read_and_saved(file, tmp_path):
    target, tensors = families.qwen3().eval(), random_heads()
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
