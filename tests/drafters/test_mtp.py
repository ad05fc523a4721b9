"""MTP heads in their targets' own checkpoints, beside transformers' model of them, or, where transformers drops them,
beside their publishers' definition, written out entry by entry."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import LogitsProcessorList
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from hf_hyperdflash import MTPDrafter, load_drafter, load_target
from hf_hyperdflash.drafters.mtp.families import FAMILIES
from hf_hyperdflash.drafters.sampling import DraftRequest, DraftSampler
from hf_hyperdflash.targets.registry import target_of

from ..conftest import mostly_nightly, prompt
from ..helpers.dropped_mtp import PUBLISHED
from ..helpers.mtp_targets import CARRIERS, loaded


@pytest.fixture(params=CARRIERS)
def pair(request, tmp_path):
    target = loaded(request.param, tmp_path)
    return target, load_drafter(tmp_path, target=target)


def test_each_family_has_a_tiny_target():
    assert CARRIERS.keys() == FAMILIES.keys()


@torch.no_grad()
def states_after(target, ids):
    """The target's states after its final norm."""
    return target.base_model(ids).last_hidden_state


class StockHeads:
    """transformers' model of a target's heads, which drafts a chain for one text from its whole prefix. A single head
    is run again over its own state, which transformers does not do."""

    def __init__(self, target):
        self.target, self.model = target, MtpModel.from_pretrained(target, device_map={"": "cpu"}).eval()

    @torch.no_grad()
    def logits(self, ids, path):
        """The logits after each token of a path that follows a text, `[1 + tokens, vocabulary]`."""
        model, count = self.model, len(self.model.layers)
        states, cache = states_after(self.target, ids[:, :-1]), MtpCache(config=self.target.config.get_mtp_config())
        whole = torch.cat([ids, torch.tensor(path, dtype=torch.long)[None]], dim=1)
        positions, made = torch.arange(1, ids.shape[1])[None], []
        for depth in range(len(path) + 1):
            if depth < count:
                read = whole[:, depth + 1 : depth + ids.shape[1]]
                states = model.forward_layer(depth, states, positions + depth, cache, input_ids=read)
            else:
                last = whole[:, depth + ids.shape[1] - 1 :][:, :1]
                states = model.forward_layer(
                    count - 1, states[:, -1:], positions[:, -1:] + depth, cache, input_ids=last
                )
            made.append(model._project_to_logits(states[0, -1]))
        return torch.stack(made)


class NaiveHeads:
    """The oracle of a head that transformers drops, of the tensors in its checkpoint."""

    def __init__(self, target, family, folder):
        (naive, config), self.target = (PUBLISHED[family][1], target.config.get_text_config()), target
        self.naive = naive(stored_in(folder), config, target)

    def logits(self, ids, path):
        return self.naive.logits(states_after(self.target, ids[:, :-1])[0], ids[0].tolist(), path).float()


def stored_in(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return {name: value for shard in set(index.values()) for name, value in load_file(folder / shard).items()}


def oracle_for(target, folder):
    family = target.config.get_text_config().model_type
    return NaiveHeads(target, family, folder) if family in PUBLISHED else StockHeads(target)


def request_for(target, drafter, ids, count, budget=None, do_sample=False):
    seen, context = target_of(target), drafter.new_context()
    residual = torch.zeros(1, ids.shape[1] - 1, 1, seen.config.hidden_size)
    from hf_hyperdflash import capture_residual

    with torch.no_grad(), capture_residual(target, [-1]) as captured:
        target(ids[:, :-1])
    residual = captured[0]
    positions = torch.arange(ids.shape[1])[None]
    cut = max(1, ids.shape[1] // 2)  # a prompt and what followed
    for part in (slice(0, cut), slice(cut, ids.shape[1] - 1)):
        drafter.extend(seen, context, residual[:, part], positions[:, :-1][:, part], ids[:, 1:][:, part])
        context.end = min(part.stop, ids.shape[1] - 1)
    return DraftRequest(context, ids, positions, count, DraftSampler(LogitsProcessorList(), do_sample, budget))


@pytest.mark.parametrize("budget", [None, 9])
@pytest.mark.parametrize("length", mostly_nightly([17, 2, 3, 4, 40], kept=2))
def test_drafts_are_those_of_transformers_own_heads_or_their_publishers(pair, length, budget, tmp_path):
    """Each draft, and the distribution that it is drawn from, after the path before it."""
    target, drafter = pair
    oracle, ids, depth = oracle_for(target, tmp_path), prompt(length, seed=length), drafter.max_draft_tokens
    for do_sample in (False, True):
        torch.manual_seed(0)
        (tree,) = drafter.draft(target_of(target), [request_for(target, drafter, ids, depth, budget, do_sample)])
        assert len(tree) == (budget or depth) and max(tree.depths) <= depth
        for parent in sorted(set(tree.parents)):
            path = [int(tree.tokens[at]) for at in (tree.path(parent) if parent >= 0 else ())]
            logits = oracle.logits(ids, path)[-1]
            children = [node for node in range(len(tree)) if tree.parents[node] == parent]
            tokens = [int(tree.tokens[node]) for node in children]
            for rank, node in enumerate(children if do_sample else ()):  # drawn without those before
                expected = logits.softmax(-1).index_fill(0, torch.tensor(tokens[:rank], dtype=torch.long), 0.0)
                torch.testing.assert_close(tree.q[node], expected / expected.sum(), atol=1e-5, rtol=1e-3)
            assert do_sample or tokens == logits.topk(len(tokens)).indices.tolist()


def test_a_saved_drafter_is_in_its_publishers_layout(pair, tmp_path):
    """What the target's checkpoint has of the heads, and no code; and it is one again."""
    target, drafter = pair
    stored = stored_in(tmp_path)
    drafter.save_pretrained(tmp_path / "saved")
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {"config.json", "model.safetensors"}
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved and all(torch.equal(value, stored[name]) for name, value in saved.items())
    again = load_drafter(tmp_path / "saved", target=target)
    assert type(again) is MTPDrafter
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in drafter.state_dict().items())
    with pytest.raises(ValueError, match="MTP"):
        load_target(str(tmp_path / "saved"))


def test_only_the_shards_that_hold_heads_are_read(tmp_path):
    target = loaded("deepseek_v3", tmp_path / "whole")
    index = json.loads((tmp_path / "whole" / "model.safetensors.index.json").read_text())["weight_map"]
    without = {shard for shard in index.values()} - {shard for name, shard in index.items() if "layers.3." in name}
    assert without == {"model-00001-of-00003.safetensors"}
    for shard in without:
        (tmp_path / "whole" / shard).unlink()
    assert load_drafter(tmp_path / "whole", target=target).num_draft_tokens == 4
