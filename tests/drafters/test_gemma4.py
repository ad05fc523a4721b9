"""Gemma 4's assistants: drafts against transformers' own class over keys of its own cache, texts, files, refusals."""

from __future__ import annotations

import json
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from hf_hyperdflash import bind, load_drafter
from hf_hyperdflash.decoding.stats import keep_trees
from hf_hyperdflash.drafters.sampling import DraftRequest
from hf_hyperdflash.hub.found import check_drafter
from hf_hyperdflash.hub.loading import check_made_for
from hf_hyperdflash.targets.caches.name import CACHE
from hf_hyperdflash.trees.growth import SHARPENED

from ..conftest import mostly_nightly, penalty_counts_padding, prompt
from ..fuzz_trees import padded_on_the_left
from ..helpers import families
from ..helpers.draft_trees import noted_drafts
from ..helpers.gemma4_assistants import assistant, assistant_config, can_be_built, stock
from ..helpers.refusals import Refusal

WINDOW = 8
FAMILIES = {
    "experts and keys that are values": families.gemma4,
    "layers that share keys": families.gemma4_e,
    "unified": families.gemma4_unified,
}


CAN_BE_BUILT = can_be_built()
needs_them = pytest.mark.skipif(not CAN_BE_BUILT, reason="this transformers builds no assistant")


def pair(name, clusters=(4, 2)):
    """With eight tokens, so that many drafts are right."""
    torch.manual_seed(0)
    target = FAMILIES[name]().eval()
    target.resize_token_embeddings(8)
    return target, assistant(target, clusters)


def text(length, seed=0):
    """Without padding, which is 0."""
    return prompt(length, seed=seed) % 7 + 1


class Oracle:
    """transformers' class, over what transformers' cache holds of a text's accepted tokens. No round, no cache of
    ours: each text is run anew."""

    def __init__(self, target, assistant):
        self.target, self.assistant = target, assistant

    @torch.no_grad()
    def start(self, ids):
        """The state before the anchor, which is the last of `ids`, and the keys of all before it."""
        cache, config = DynamicCache(config=self.target.config), self.target.config
        self.target(ids[:, :-1], **{CACHE: cache})
        hidden = self.target.model(ids[:, :-1]).last_hidden_state[:, -1:]
        last = {kind: layer for kind, layer in zip(config.layer_types, cache.layers) if layer.keys is not None}
        shared = {kind: (layer.keys, layer.values) for kind, layer in last.items()}
        return hidden, shared, torch.tensor([[ids.shape[1] - 1]])

    @torch.no_grad()
    def after(self, token, state, shared, position):
        """Logits and the next state after a token; minus infinity for those that no chosen cluster has."""
        embeds = torch.cat([self.target.get_input_embeddings()(torch.tensor([[token]])), state], dim=-1)
        out = self.assistant(inputs_embeds=embeds, position_ids=position, shared_kv_states=shared)
        logits = out.logits[0, -1]
        if self.assistant.config.use_ordered_embeddings:  # the others all have the least, less one
            logits = logits.masked_fill(logits == logits.min(), -torch.inf)
        return logits, out.last_hidden_state

    def chain(self, ids, count):
        state, *known = self.start(ids)
        drafts = [int(ids[0, -1])]
        for _ in range(count):
            logits, state = self.after(drafts[-1], state, *known)
            drafts.append(int(logits.argmax()))
        return drafts[1:]

    def tree(self, ids, budget, depth):
        """The paths of the likeliest nodes, level by level."""
        state, *known = self.start(ids)
        values, level = {}, {(): (0.0, int(ids[0, -1]), state)}
        for _ in range(depth):
            found = {}
            for path, (value, token, before) in level.items():
                logits, after = self.after(token, before, *known)
                likely = (logits / SHARPENED).log_softmax(-1)
                for child in likely.topk(budget).indices.tolist():
                    found[(*path, child)] = value + float(likely[child]), child, after
            best = sorted(found, key=lambda path: found[path][0], reverse=True)[:budget]
            level = {path: found[path] for path in best}
            values |= {path: found[path][0] for path in best}
        scored = [path for path, value in values.items() if value > -torch.inf]
        return set(sorted(scored, key=values.__getitem__, reverse=True)[:budget])


@needs_them
@pytest.mark.parametrize("clusters", [(4, 2), None])
@pytest.mark.parametrize("name", FAMILIES)
def test_drafts_are_those_of_transformers_class(name, clusters, tmp_path):
    """Of texts shorter and longer than the window, chains and trees."""
    target, drafter = pair(name, clusters)
    oracle = Oracle(target, stock(drafter, tmp_path))
    accepted_drafts = 0
    for length, budget in ((3, None), (19, None), (5, 6), (17, 6)):
        ids, options = text(length, seed=length), dict(do_sample=False, max_new_tokens=16, num_assistant_tokens=4)
        plain = target.generate(ids, do_sample=False, max_new_tokens=16)
        drafter.bind(target)
        with keep_trees():
            out = target.generate(ids, assistant_model=drafter, tree_budget=budget, **options)
        drafter.unbind(target)
        assert torch.equal(out, plain)
        at, rounds = length + 1, drafter.last_stats.trees
        for kept, accepted in zip(rounds, drafter.last_stats.accepted):
            tree, tokens, before = kept.drafts, kept.drafts.tokens.tolist(), plain[:, :at]
            if budget is None:
                assert tokens == oracle.chain(before, len(tokens))
            elif len(tree):
                paths = {tuple(tokens[node] for node in tree.path(i)) for i in range(len(tree))}
                assert paths == oracle.tree(before, budget, max(1, min(4, length + 16 - at - 1)))
            at += accepted + 1
        accepted_drafts += sum(drafter.last_stats.accepted)
    assert accepted_drafts > 0


def fuzzed(seed):
    """A case: what is asked for, and what plain decoding writes."""
    chance = random.Random(seed)
    target, drafter = pair(chance.choice(list(FAMILIES)), chance.choice([(4, 2), None]))
    count, new = chance.choice([1, 1, 1, 2, 4]), chance.randint(2, 20)
    texts = [text(chance.randint(1, 3 * WINDOW), seed=seed + i)[0] for i in range(count)]
    ids, mask = padded_on_the_left(texts)
    options = dict(do_sample=False, max_new_tokens=new, **chance.choice([{}, {}, {"repetition_penalty": 1.3}]))
    way = chance.choice([
        {}, {"num_assistant_tokens": chance.randint(1, 9)}, {"tree_budget": chance.randint(1, 14)},
        {"num_assistant_tokens": "auto"}, {"tree_budget": "auto"}, {"prefill_chunk_size": chance.randint(1, 9)},
        {"cache_implementation": "static", "disable_compile": True, "tree_budget": chance.choice([None, 6])},
    ])  # fmt: skip
    if penalty_counts_padding():  # then it is a token of the text, which is counted anyway
        ids = ids.where(mask.bool(), ids[:, -1:])
    alone = [target.generate(text[None], **options)[0, len(text) :] for text in texts]
    drafter.bind(target)
    found = target.generate(ids, attention_mask=mask, assistant_model=drafter, **options, **way)
    return found[:, ids.shape[1] :], torch.stack(alone), (seed, way, options)


@needs_them
@pytest.mark.parametrize("seeds", mostly_nightly([range(24), range(24, 112), range(112, 200)]))
def test_fuzzed_texts_are_the_targets(seeds):
    for seed in seeds:
        found, expected, about = fuzzed(seed)
        assert torch.equal(found, expected), about


@needs_them
@pytest.mark.parametrize("budget", [None, 5])
def test_a_batch_is_drafted_as_each_text_alone(budget, monkeypatch):
    """Texts of a padded batch, over keys in the columns of a common cache: the same drafts, round by round."""
    target, drafter = pair("layers that share keys")
    texts, drafted = [text(length, seed=length)[0] for length in (4, 23, 11)], noted_drafts(monkeypatch)
    options = dict(do_sample=False, max_new_tokens=20, num_assistant_tokens=4, tree_budget=budget)
    drafter.bind(target)
    for one in texts:
        target.generate(one[None], assistant_model=drafter, **options)
    assert {len(found) for found in drafted.values()} == {1}
    ids, mask = padded_on_the_left(texts)
    target.generate(ids, attention_mask=mask, assistant_model=drafter, **options)
    assert all(len(found) == 2 and found[0] == found[1] for found in drafted.values())
    assert len(drafted) > 12 and sum(drafter.last_stats.accepted) > 3


@needs_them
@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_own_call_works_on_a_bound_target(name, tmp_path):
    target, drafter = pair(name)
    theirs, ids = stock(drafter, tmp_path), text(13)
    theirs.generation_config.num_assistant_tokens = 3
    options = dict(do_sample=False, max_new_tokens=16, assistant_model=theirs)
    sampled = options | dict(do_sample=True, top_k=0)
    written = []
    for is_bound in (False, True):
        if is_bound:
            bind(target)
        torch.manual_seed(5)
        written.append([target.generate(ids, **options), target.generate(ids, **sampled)])
    plain = target.generate(ids, do_sample=False, max_new_tokens=16)
    assert all(torch.equal(one, other) for one, other in zip(*written)) and torch.equal(written[0][0], plain)


@needs_them
def test_files_are_those_of_its_publisher(tmp_path):
    """Read as published, before weights first by its config.json; what is saved, transformers reads."""
    target, _ = pair("unified")
    target.save_pretrained(tmp_path / "target")
    config = assistant_config(target, (4, 2))
    torch.manual_seed(3)
    published = AutoModelForCausalLM.from_config(config)
    published.masked_embedding.token_ordering.copy_(torch.randperm(8))
    published.generation_config.num_assistant_tokens = 6
    published.save_pretrained(tmp_path / "published")
    assert str(check_drafter(tmp_path / "published").kind) == "a Gemma 4 Unified assistant drafter"
    check_made_for(str(tmp_path / "target"), str(tmp_path / "published"), 7)
    read = load_drafter(tmp_path / "published", target=target, dtype=torch.float32)
    assert read.num_draft_tokens == 6 and load_drafter(tmp_path / "published").num_draft_tokens == 6
    read.save_pretrained(tmp_path / "saved")
    fields = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert fields["architectures"] == [type(published).__name__] and "auto_map" not in fields
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert type(again) is type(published)
    for name, tensor in published.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]) and torch.equal(tensor, read.state_dict()[name])


@needs_them
def test_without_a_cache_nothing_is_drafted():
    """In a loop that does not say where the text's keys are."""
    target, drafter = pair("unified")
    context, ids = drafter.new_context(), prompt(5)
    drafter.extend(target, context, torch.randn(1, 4, 1, 64), torch.arange(4)[None], ids[:, 1:])
    request = DraftRequest(context, ids, torch.arange(5)[None], 3, None)
    (tree,) = drafter.draft(target, [request])
    assert len(tree) == 0


WRONG = {
    "Gemma 3n": (lambda: assistant(families.gemma4_e()).bind(families.gemma3n()), ("gemma3n_text", "gemma4_text")),
    "another family": (lambda: assistant(families.gemma4_e()).bind(families.qwen3()), ("qwen3", "gemma4_text")),
    "another width": (
        lambda: assistant(families.gemma4_e()).bind(families.gemma4_e(hidden_size=32)),
        ("hidden_size", "64", "32"),
    ),
    "keys of another width": (
        lambda: assistant(families.gemma4_e()).bind(families.gemma4_e(head_dim=8)),
        ("sliding_attention", "(2, 16)", "(2, 8)"),
    ),
    "other heads of keys": (
        lambda: assistant(families.gemma4_e()).bind(families.gemma4()),
        ("full_attention", "(2, 32)", "(1, 32)"),
    ),
    "learning": (
        lambda: assistant(families.gemma4_e()).adapt(families.gemma4_e()),
        ("Gemma4AssistantDrafter", "learn"),
    ),
    "a number of drafts": (lambda: setattr(assistant(families.gemma4_e()), "num_draft_tokens", 0), ("0", "1")),
}


@needs_them
@pytest.mark.parametrize("name", WRONG)
def test_refusals(name):
    call, words = WRONG[name]
    Refusal(call, words).check()


@needs_them
def test_a_target_of_another_kind_is_refused_before_weights_are_read(tmp_path):
    assistant(families.gemma4_e()).save_pretrained(tmp_path / "drafter")
    families.gemma3n().save_pretrained(tmp_path / "target")
    (tmp_path / "drafter" / "model.safetensors").write_bytes(b"")
    call = lambda: check_made_for(str(tmp_path / "target"), str(tmp_path / "drafter"))  # noqa: E731
    Refusal(call, ("gemma3n_text", "gemma4_text")).check()


@pytest.mark.skipif(CAN_BE_BUILT, reason="this transformers builds assistants")
def test_where_transformers_builds_none_one_line_says_so():
    Refusal(lambda: assistant(families.gemma4_e()), ("transformers 5.", "gemma4_assistant", "5.24")).check()
