"""Medusa heads: their drafts against naive loops over the paper's equation, the target's own text, their files."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hf_hyperdflash import HyperDFlashTrainer, MedusaConfig, MedusaDrafter, bind, load_drafter, load_target
from hf_hyperdflash.cli.app import app
from hf_hyperdflash.hub.found import check_drafter
from hf_hyperdflash.hub.loading import check_made_for
from hf_hyperdflash.trees.growth import SHARPENED

from ..conftest import mostly_nightly, prompt
from ..helpers import families
from ..helpers.loops import in_transformers_loop, proposed_by

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


def published(folder, tensors, file="medusa_lm_head.safetensors", **fields):
    folder.mkdir(exist_ok=True)
    # As some are published, with fewer heads than there are.
    told = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "org/its-target"}
    (folder / "config.json").write_text(json.dumps({**told, "transformers_version": "4.31.0", **fields}))
    save_file(tensors, folder / file) if file.endswith(".safetensors") else torch.save(tensors, folder / file)
    return folder


def fresh():
    """Three heads of a target of the tests' sizes."""
    return MedusaDrafter(MedusaConfig(medusa_num_heads=3, hidden_size=64, vocab_size=64))


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
    "family", [families.qwen3, families.gemma3, families.deepseek_v4, families.qwen3_next], ids=lambda f: f.__name__
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
    drafter.bind(target)
    for options in ({"tree_budget": 9}, {"num_assistant_tokens": 2}, {"tree_budget": "auto"}):
        out = target.generate(ids, do_sample=False, max_new_tokens=NEW, assistant_model=drafter, **options)
        assert torch.equal(out, plain), options
    assert torch.equal(in_transformers_loop(target, drafter, ids, do_sample=False, max_new_tokens=NEW), plain)


def test_a_tree_is_of_the_likeliest_products():
    target, ids = bind(families.qwen3().eval()), prompt(9)
    drafter = fresh().eval()
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


def test_a_batch_drafts_in_one_pass(tmp_path):
    target = families.qwen3().eval()
    texts = [prompt(5, seed=1), prompt(9, seed=2)]
    drafter = load_drafter(published(tmp_path / "heads", fitted(target, texts[1])), target=target, dtype=torch.float32)
    ids = torch.cat([torch.nn.functional.pad(text, (9 - text.shape[1], 0)) for text in texts])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(text), (9 - text.shape[1], 0)) for text in texts])
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 16, "pad_token_id": 0}
    plain = target.generate(ids, **options)
    drafter.bind(target)
    calls, head = [], drafter.get_submodule("0")
    head.register_forward_hook(lambda _, inputs, __: calls.append(len(inputs[0])))
    for more in ({}, {"tree_budget": 8}):
        calls.clear()
        assert torch.equal(target.generate(ids, assistant_model=drafter, **more, **options), plain)
        assert 2 in calls


@pytest.mark.parametrize("file", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
def test_published_files_are_read_and_saved(file, tmp_path):
    target, ids = families.qwen3().eval(), prompt(7)
    tensors = fitted(target, ids)
    drafter = load_drafter(published(tmp_path / "theirs", tensors, file))
    assert drafter.config.target_name_or_path == "org/its-target"
    drafter.save_pretrained(tmp_path / "drafter")
    assert load_file(tmp_path / "drafter" / "model.safetensors").keys() == tensors.keys()
    again = load_drafter(tmp_path / "drafter", target=target)
    for loaded in (drafter, again):
        assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in tensors.items())


def test_a_saved_folder_says_what_it_was_made_for(tmp_path):
    fresh().save_pretrained(tmp_path / "drafter")
    families.qwen3().save_pretrained(tmp_path / "target")
    check_made_for(str(tmp_path / "target"), str(tmp_path / "drafter"), 3)


def test_sampled_text_runs_and_a_seed_gives_it_again(tmp_path):
    target, ids = families.qwen3().eval(), prompt(7)
    drafter = load_drafter(published(tmp_path / "heads", fitted(target, ids)), target=target, dtype=torch.float32)
    drafter.bind(target)
    for more in ({}, {"tree_budget": 6}):
        texts = []
        for _ in range(2):
            torch.manual_seed(1)
            texts.append(target.generate(ids, do_sample=True, max_new_tokens=12, assistant_model=drafter, **more))
        assert torch.equal(*texts) and texts[0].shape == (1, 19)


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        (lambda t: t.pop("1.0.linear.bias"), ValueError, r"1 missing \(1\.0\.linear\.bias\)"),
        (lambda t: t.update({"1.1.weight": torch.zeros(63, 64)}), ValueError, r"1 of another shape \(1\.1\.weight\)"),
        (lambda t: t.update({"0.1.weight": torch.zeros(64)}), ValueError, "of another shape"),
        (lambda t: t.update({"fc.weight": torch.zeros(2)}), ValueError, r"1 unexpected \(fc\.weight\)"),
        (lambda t: t["2.1.weight"].fill_(torch.nan), ValueError, r"not finite: 1 with NaN .*2\.1\.weight"),
        (lambda t: t.clear(), OSError, r"has no model\.safetensors"),
    ],
)
def test_other_tensors_are_refused(change, error, told, tmp_path):
    tensors = fresh().state_dict()
    change(tensors)
    with pytest.raises(error, match=told) as caught:
        load_drafter(published(tmp_path / "heads", tensors))
    assert "\n" not in str(caught.value)


def test_a_pickle_runs_no_code(tmp_path):
    folder, ran = tmp_path / "heads", tmp_path / "ran"
    for content, told in (({"0.1.weight": Payload(str(ran))}, "holds more than tensors"), ([1], "expected tensors")):
        with pytest.raises(OSError, match=told) as caught:
            load_drafter(published(folder, content, "medusa_lm_head.pt"))
        assert "\n" not in str(caught.value) and not ran.exists()
    (folder / "medusa_lm_head.pt").write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(OSError, match=r"medusa_lm_head\.pt .*damaged"):
        load_drafter(folder)
    os.remove(folder / "medusa_lm_head.pt")
    with pytest.raises(OSError, match="has no weights"):
        load_drafter(folder)


def test_what_it_is_not_for_is_said_in_one_line(tmp_path):
    drafter = fresh()
    folder = published(tmp_path / "heads", drafter.state_dict())
    other = families.qwen3().eval()
    other.config.vocab_size = 63
    with pytest.raises(ValueError, match=r"`vocab_size` 64, but this target's is 63\. .* own target, org/its-target"):
        load_drafter(folder, target=other)
    target = bind(families.qwen3().eval())
    for count in (0, 4):
        with pytest.raises(
            ValueError, match=f"cannot draft {count} tokens a round: expected a whole number from 1 to 3"
        ):
            drafter.num_draft_tokens = count
    with pytest.raises(ValueError, match="is a drafter in another program's layout, expected the target"):
        load_target(str(folder))
    with pytest.raises(ValueError, match="`model` is a MedusaDrafter, expected a HyperDFlashDrafter or another"):
        HyperDFlashTrainer(drafter, target)
    with pytest.raises(ValueError, match="A MedusaDrafter cannot learn while it serves"):
        drafter.adapt(target)
    drafter.save_pretrained(tmp_path / "saved")
    command = ["train", "--target", str(tmp_path), "--output_dir", str(tmp_path / "out"), "--drafter"]
    for each, told in ((folder, "in another program's layout"), (tmp_path / "saved", "is a Medusa drafter")):
        target.config.save_pretrained(tmp_path)
        save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
        result = CliRunner().invoke(app, [*command, str(each)])
        assert f"{told}, expected a HyperDFlash drafter, a SpecBlock drafter, an EAGLE-3 drafter or a DSpark" in str(
            result.exception
        )


def test_it_has_a_card(tmp_path):
    fresh().save_pretrained(tmp_path)
    assert str(check_drafter(tmp_path).kind) == "a Medusa drafter"
    result = CliRunner().invoke(app, ["card", str(tmp_path), "--target", "org/target", "--repo-id", "org/heads"])
    card = (tmp_path / "README.md").read_text()
    assert result.exit_code == 0 and "3 tokens in one pass" in card and "It has Medusa heads" in card
    assert "are shared, not stored here" not in card and "deepseek" not in card
