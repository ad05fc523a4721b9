"""MTP heads in their targets' own checkpoints, beside transformers' model of them, or, where transformers drops them,
beside their publishers' definition, written out entry by entry."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, LogitsProcessorList
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from hf_hyperdflash import MTPDrafter, capture_residual, load_drafter, load_target
from hf_hyperdflash.drafters.mtp.families import FAMILIES
from hf_hyperdflash.drafters.sampling import DraftRequest, DraftSampler
from hf_hyperdflash.drafters.unrolled.drafter import UnrolledDrafter
from hf_hyperdflash.targets.registry import target_of

from ..conftest import mostly_nightly, prompt
from ..helpers import families
from ..helpers.dropped_mtp import KIMI, PUBLISHED
from ..helpers.mtp_targets import CARRIERS, loaded
from ..helpers.quantization import quantize_fp8

IS_LATER = hasattr(MtpModel, "forward_layer")

# Earlier transformers lack some families, or what they say of their heads.
RUN = [family for family in CARRIERS if family in CONFIG_MAPPING and (family != "mellum" or IS_LATER)]


@pytest.fixture(params=CARRIERS)
def pair(request, tmp_path):
    if request.param not in RUN:
        pytest.skip(f"this transformers has no heads of {request.param}")
    target = loaded(request.param, tmp_path)
    return target, load_drafter(tmp_path, target=target)


def test_each_family_has_a_tiny_target():
    assert CARRIERS.keys() - {KIMI} == FAMILIES.keys()


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
    family = KIMI if target.config.model_type == KIMI else target.config.get_text_config().model_type
    if family not in PUBLISHED and not IS_LATER:
        pytest.skip("transformers' own model does not run one head alone")
    return NaiveHeads(target, family, folder) if family in PUBLISHED else StockHeads(target)


def request_for(target, drafter, ids, count, budget=None, do_sample=False):
    seen, context = target_of(target), drafter.new_context()
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
    before = "language_model." if target.config.model_type == KIMI else ""  # which is the target's
    assert saved and all(torch.equal(value, stored[before + name]) for name, value in saved.items())
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


def rewritten(folder, change):
    """A checkpoint's files, changed: its config.json's fields and its tensors by name."""
    target = loaded("deepseek_v3", folder)
    fields, tensors = json.loads((folder / "config.json").read_text()), {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(shard)
        shard.unlink()
    (folder / "model.safetensors.index.json").unlink()
    change(fields, tensors)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return target


def test_quantized_heads_are_dequantized(tmp_path):
    """In FP8 with a scale of each block, as DeepSeek-V3 is released."""
    values = {}

    def quantize(fields, tensors):
        generator = torch.Generator().manual_seed(0)
        fields["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
        for name in [name for name in tensors if ("layers.3." in name and ".experts." in name) or "eh_proj" in name]:
            stored, scale, values[name] = quantize_fp8(tensors[name].shape, (16, 16), generator)
            tensors |= {name: stored, name.replace("weight", "weight_scale_inv"): scale}

    rewritten(tmp_path, quantize)
    drafter = load_drafter(tmp_path, dtype=torch.float32)
    published = drafter.published(drafter.state_dict())
    assert len(values) == 13 and all(torch.equal(published[name], value) for name, value in values.items())


def without(part):
    def change(fields, tensors):
        for name in [name for name in tensors if part in name]:
            del tensors[name]

    return change


WRONG = {
    "no heads": (without("layers.3."), "no tensors of MTP heads, .* original checkpoint"),
    "no heads by its configuration": (
        lambda fields, tensors: fields.update(num_nextn_predict_layers=0), "says in its config.json that it has none"),
    "a tensor too few": (without("layers.3.mlp.experts.2.up_proj"), "1 missing .model.layers.3.mlp.experts.2.up_proj"),
    "a tensor too many": (
        lambda fields, tensors: tensors.update({"model.layers.3.bias": torch.ones(2)}),
        "1 unexpected .model.layers.3.bias"),
    "another shape": (
        lambda fields, tensors: tensors.update({"model.layers.3.enorm.weight": torch.ones(32)}),
        "enorm.* .32., .* .64."),
    "NaN": (
        lambda fields, tensors: tensors["model.layers.3.eh_proj.weight"].fill_(torch.nan), "not finite"),
}  # fmt: skip


@pytest.mark.parametrize("change, said", WRONG.values(), ids=WRONG)
def test_a_wrong_checkpoint_is_refused_in_one_line(change, said, tmp_path):
    rewritten(tmp_path, change)
    with pytest.raises(ValueError, match=said) as refused:
        load_drafter(tmp_path)
    assert "\n" not in str(refused.value)


def test_heads_are_refused_that_are_not_there(tmp_path):
    target = loaded("step3p5", tmp_path)
    with pytest.raises(ValueError, match=r"4.* from 1 to 3: the target has 3 MTP heads"):
        MTPDrafter.from_target(target, num_draft_tokens=4)
    drafter = MTPDrafter.from_target(target, num_draft_tokens=2)
    drafter.bind(target)
    with pytest.raises(ValueError, match="It has 3 heads"):
        target.generate(prompt(5), assistant_model=drafter, num_assistant_tokens=3)
    with pytest.raises(ValueError, match="expected a target with MTP heads"):
        MTPDrafter.from_target(qwen3_folder(tmp_path / "qwen3"))


def qwen3_folder(folder):
    families.qwen3().save_pretrained(folder)
    return folder


class AdmitsOne:
    """Who admits the first draft of a chain alone."""

    def __init__(self):
        self.open = True

    def is_open(self):
        return self.open

    def admits(self, signal):
        self.open = False
        return True


@torch.no_grad()
@pytest.mark.parametrize("counts, admission", [((3,), None), ((2, 3, 1), None), ((3,), AdmitsOne)], ids=str)
def test_one_pass_of_each_head_drafts_what_entries_and_then_drafts_do(counts, admission, tmp_path):
    """Texts of several lengths, with one to three pending tokens each, round by round, also after a chain that ended
    before the last head."""
    target = loaded("step3p5", tmp_path)
    drafter, seen, chance = MTPDrafter.from_target(target), target_of(target), torch.Generator().manual_seed(0)
    whole = [prompt(40, seed=seed) for seed in range(len(counts))]
    contexts = [[drafter.new_context() for _ in whole] for _ in range(2)]
    with capture_residual(target, [-1]) as captured:
        target(torch.cat(whole))
    ends, drafted = [9 + 3 * row for row in range(len(whole))], set()
    for _ in range(5):
        trees = []
        for side, draft in enumerate((type(drafter)._draft_known, UnrolledDrafter._draft_known)):
            requests = []
            for row, (ids, end, count) in enumerate(zip(whole, ends, counts)):
                context, positions = contexts[side][row], torch.arange(40)[None]
                new = slice(context.end, end)
                drafter.extend(seen, context, captured[0][row : row + 1, new], positions[:, new], ids[:, 1:][:, new])
                context.end = end
                sampler = DraftSampler(
                    LogitsProcessorList(), False, chain_admission=None if admission is None else admission()
                )
                requests.append(
                    DraftRequest(context, ids[:, : end + 1], positions[:, : end + 1], min(count, 3), sampler)
                )
            trees.append([tree.tokens.tolist() for tree in draft(drafter, seen, requests)])
        assert trees[0] == trees[1] and all(trees[0])
        drafted.update(map(str, trees[0]))
        for mine, its in zip(*contexts):
            torch.testing.assert_close(mine.states, its.states, atol=1e-5, rtol=1e-4)
            assert mine.length == its.length and mine.pending is None
        ends = [end + int(torch.randint(1, 4, (1,), generator=chance)) for end in ends]
    assert len(drafted) > 3
