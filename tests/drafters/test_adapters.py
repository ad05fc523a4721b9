"""LoRA adapters of one drafter, chosen by request: a text is drafted as with its adapter merged into the weights."""

from __future__ import annotations

import copy
import json
import threading

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from hf_hyperdflash import HyperDFlashDrafter, PromptLookupDrafter, load_drafter
from hf_hyperdflash.decoding.request import CONTEXT, Pair
from hf_hyperdflash.decoding.stats import keep_trees
from hf_hyperdflash.drafters.adapters import linear_layers
from hf_hyperdflash.targets.caches.name import CACHE, cache_of
from hf_hyperdflash.targets.registry import target_of

from ..conftest import mostly_nightly, prompt, tiny_drafter, tiny_target
from ..contracts.test_drafters import KINDS, LAWS
from ..fuzz_trees import padded_on_the_left
from ..helpers import commands, families
from ..helpers.headed_drafters import headed
from ..helpers.loops import in_transformers_loop
from ..helpers.refusals import Refusal
from ..helpers.saved_folder import furthest_from_the_law
from ..helpers.training import rows, trainer_for

NAMES = ("code", "chat")
GREEDILY = {"do_sample": False, "max_new_tokens": 10}
READ = {"target_layer_ids": [0, -1]}


@torch.no_grad()
def adapted(drafter, names=NAMES):
    """The drafter with adapters that change its drafts, each in its own way."""
    for seed, name in enumerate(names):
        drafter.add_adapter(LoraConfig(r=3, lora_alpha=6), name)
        torch.manual_seed(seed)
        for path, weight in drafter.named_parameters():
            if f".{name}." in path:
                weight.normal_(std=0.4)
    drafter.disable_adapters()
    return drafter


@torch.no_grad()
def merged(plain, drafter, name):
    """`plain`, a copy of the drafter from before, with what an adapter adds."""
    for path in linear_layers(plain):
        layer = drafter.get_submodule(path)
        plain.get_submodule(path).weight += 2 * layer.lora_B[name].weight @ layer.lora_A[name].weight
    return plain


def drafts(target, drafter, ids, **options):
    """What is written, and of each text what was drafted round by round."""
    torch.manual_seed(0)
    with keep_trees():
        out = target.generate(ids, assistant_model=drafter, **{**GREEDILY, "pad_token_id": 0, **options})
    rows = drafter.last_stats.rows
    return out, [[kept.drafts.tokens.tolist() for kept in row.trees] for row in rows]


def dense(drafter_of=lambda target: tiny_drafter(target, **READ)):
    torch.manual_seed(0)
    target = families.qwen3().eval()
    drafter = adapted(drafter_of(target))
    drafter.bind(target)
    return target, drafter


@pytest.mark.parametrize("kind", mostly_nightly([kind for kind in KINDS if kind != "prompt lookup"], kept=7))
def test_drafts_are_those_of_the_adapter_merged_into_the_weights(kind, tmp_path):
    target, drafter = KINDS[kind](tmp_path)
    plain = copy.deepcopy(drafter)
    adapted(drafter)
    drafter.bind(target)
    ids, ways = prompt(13), ({}, {"tree_budget": 5}, {"do_sample": True})
    expected = target.generate(ids, **GREEDILY)
    seen = []
    for name in (*NAMES, None):
        alone = plain if name is None else merged(copy.deepcopy(plain), drafter, name)
        alone.bind(target)
        for way in ways:
            text, chosen = drafts(target, drafter, ids, adapter=name, **way)
            assert (text, chosen) == (text, drafts(target, alone, ids, **way)[1])
            assert way == {"do_sample": True} or torch.equal(text, expected)
            seen += [chosen] if not way else []
    assert seen[0] != seen[1] != seen[2] != seen[0]  # else nothing was asked


FIRST = ["dspark", "eagle3", "specblock", "medusa", "prompt lookup"]  # the last one has no weights


@pytest.mark.parametrize("kind", mostly_nightly([*FIRST[:4], *(kind for kind in KINDS if kind not in FIRST)], kept=4))
def test_a_batch_with_a_mixture_is_each_text_alone(kind, tmp_path, monkeypatch):
    """All drafted for in one pass, where its rows are the texts."""
    target, drafter = KINDS[kind](tmp_path)
    adapted(drafter).bind(target)
    names = ["code", None, "chat", "code", "chat"]
    texts = [prompt(1 + 4 * seed, seed) for seed in range(len(names))]
    ids, mask = padded_on_the_left([text[0] for text in texts])
    asked, draft = [], Pair.draft
    monkeypatch.setattr(Pair, "draft", lambda pair, requests: asked.append(len(requests)) or draft(pair, requests))
    for way in ({}, {"tree_budget": 5}):
        asked.clear()
        together, of_rows = drafts(target, drafter, ids, attention_mask=mask, adapter=names, **way)
        if target_of(target).can_join_sequences:
            assert asked[0] == (len(names) if drafter.rows_are_texts else 2)
        for row, (text, name) in enumerate(zip(texts, names)):
            alone, (own,) = drafts(target, drafter, text, adapter=name, **way)
            assert of_rows[row] == own
            assert torch.equal(together[row, -len(alone[0]) :], alone[0])


def test_texts_of_one_prompt_share_its_adapter():
    target, drafter = dense()
    ids, sampled = prompt(9).repeat(2, 1), {"do_sample": True, "num_return_sequences": 2}
    for names in (["code", "chat"], ["chat", "code"]):
        _, rows = drafts(target, drafter, ids, adapter=names, top_k=1, **sampled)
        assert rows == [drafts(target, drafter, ids[:1], adapter=name)[1][0] for name in names for _ in range(2)]


def test_what_is_set_is_for_calls_that_name_none():
    target, drafter = dense()
    base, code, chat = (drafts(target, drafter, prompt(9), adapter=name)[1] for name in (None, *NAMES))
    assert drafter.adapters == NAMES and drafter.active_adapters() == []
    assert drafts(target, drafter, prompt(9))[1] == base
    drafter.set_adapter("chat")
    assert drafts(target, drafter, prompt(9))[1] == chat and drafter.active_adapters() == ["chat"]
    assert drafts(target, drafter, prompt(9), adapter=None)[1] == base
    assert drafts(target, drafter, prompt(9), adapter="code")[1] == code
    drafter.disable_adapters()
    assert drafts(target, drafter, prompt(9))[1] == base
    drafter.set_adapter("code")
    theirs = in_transformers_loop(target, drafter, prompt(9), **GREEDILY)
    assert torch.equal(theirs, target.generate(prompt(9), **GREEDILY))


def test_a_text_keeps_its_adapter_in_its_next_turn():
    """Named or not: the keys in its context are the adapter's. Another one begins with what is new."""
    target, drafter = dense()
    first = {"return_dict_in_generate": True, "adapter": "code"}
    out, _ = drafts(target, drafter, prompt(14), **{CACHE: DynamicCache(config=target.config)}, **first)
    second = torch.cat([out.sequences, prompt(7, seed=5)], dim=1)
    _, whole = drafts(target, drafter, second, adapter="code")
    unlike = drafts(target, drafter, second, adapter="chat")[1], drafts(target, drafter, second)[1]
    assert whole not in unlike
    before = cache_of(out).get_seq_length()
    for options in ({}, {"adapter": "code"}):
        cache = copy.deepcopy(cache_of(out))
        assert drafts(target, drafter, second, **{CACHE: cache}, **options)[1] == whole
        context = getattr(cache, CONTEXT).context
        assert context.length + context.new_count == context.end
    text, _ = drafts(target, drafter, second, **{CACHE: cache_of(out)}, adapter="chat")
    context = getattr(cache_of(out), CONTEXT).context
    assert context.length + context.new_count == context.end - before  # the keys of another adapter are not read
    assert torch.equal(text, target.generate(second, **GREEDILY))


def test_threads_with_different_adapters_share_a_drafter():
    target, drafter = dense()
    names = [*NAMES, None] * 2
    expected = [drafts(target, drafter, prompt(9), adapter=name) for name in names]
    found, start = {}, threading.Barrier(len(names))

    def serve(index, name):
        start.wait()
        for _ in range(4):
            out = target.generate(prompt(9), assistant_model=drafter, adapter=name, **GREEDILY)
            found.setdefault(index, []).append((out, drafter.last_stats.accepted))

    accepted = []
    for name in names:
        target.generate(prompt(9), assistant_model=drafter, adapter=name, **GREEDILY)
        accepted.append(drafter.last_stats.accepted)
    threads = [threading.Thread(target=serve, args=each) for each in enumerate(names)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, (text, _) in enumerate(expected):
        assert len(found[index]) == 4
        assert all(torch.equal(out, text) and own == accepted[index] for out, own in found[index])


def test_auto_knows_each_adapter_apart():
    target, drafter = dense()
    for name in (*NAMES, None):
        target.generate(prompt(9), assistant_model=drafter, adapter=name, num_assistant_tokens="auto", **GREEDILY)
    known = target.hyperdflash_binding.pairs[drafter].stats
    assert set(known) == {(False, "code"), (False, "chat"), (False, "__base__")}


def test_static_caches_compiled_or_not():
    """A compiled round of the target with drafts that are made eagerly: of a graph nobody would see the adapter."""
    from ..decoding.test_static_caches import compiling

    target, drafter = dense()
    torch._dynamo.reset()
    for name in (*NAMES, None):
        expected = drafts(target, drafter, prompt(9), adapter=name)
        static = dict(cache_implementation="static", max_cache_len=256, compile_config=compiling())
        text, own = drafts(target, drafter, prompt(9), adapter=name, **static)
        assert torch.equal(text, expected[0]) and own == expected[1]


@pytest.mark.parametrize("budget", [None, 3])
def test_sampled_text_has_the_targets_law(budget):
    """By every way that the draws can go, which takes seconds."""
    target, drafter = LAWS["dflash"]()
    adapted(drafter, ["code"]).set_adapter("code")
    told = furthest_from_the_law(target, drafter, tree_budget=budget)
    assert told["furthest"] < 1e-5 and told["accepted"] > 0


# Files


def test_an_adapter_is_saved_and_loaded_alone(tmp_path, caplog):
    """In PEFT's layout, which PEFT reads; and the drafter without it, as it was."""
    target = families.qwen3().eval()
    plain = tiny_drafter(target, **READ)
    plain.save_pretrained(tmp_path / "drafter")
    drafter = adapted(load_drafter(tmp_path / "drafter", target=target))
    drafter.bind(target)
    for name in NAMES:
        drafter.set_adapter(name)
        drafter.save_pretrained(tmp_path / name)
        files = {file.name for file in (tmp_path / name).iterdir()}
        assert files == {"adapter_config.json", "adapter_model.safetensors"}
    drafter.disable_adapters()
    drafter.save_pretrained(tmp_path / "again")
    kept, was = (load_file(tmp_path / name / "model.safetensors") for name in ("again", "drafter"))
    assert kept.keys() == was.keys() and all(torch.equal(kept[key], was[key]) for key in was)
    loaded = load_drafter(tmp_path / "again", target=target)
    loaded.load_adapter(tmp_path / "chat", "talk")
    assert "trained for" in caplog.text  # by another name, "drafter"
    loaded.load_adapter(tmp_path, "code", subfolder="code")
    loaded.bind(target)
    for name, ours in (("code", "code"), ("talk", "chat"), (None, None)):
        expected = drafts(target, drafter, prompt(11), adapter=ours)[1]
        assert drafts(target, loaded, prompt(11), adapter=name)[1] == expected
    wrapped = PeftModel.from_pretrained(load_drafter(tmp_path / "drafter", target=target), tmp_path / "code").eval()
    assert drafts(target, wrapped, prompt(11))[1] == drafts(target, drafter, prompt(11), adapter="code")[1]
    same = HyperDFlashDrafter.from_pretrained(tmp_path / "code")  # with the drafter that its configuration names
    same.bind(target)
    assert same.adapters == ("default",)
    same.save_pretrained(tmp_path / "same")
    saved = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("same", "code")]
    assert saved[0] == saved[1]
    assert drafts(target, same, prompt(11))[1] == drafts(target, drafter, prompt(11), adapter="code")[1]


def test_without_its_last_adapter_a_drafter_is_as_before():
    target, drafter = dense()
    names = [name for name, _ in tiny_drafter(target, **READ).named_modules()]
    drafter.set_adapter("code")
    drafter.delete_adapter("code")
    assert drafter.adapters == ("chat",) and drafter.active_adapters() == []
    drafter.delete_adapter(["chat"])
    assert drafter.adapters == () and [name for name, _ in drafter.named_modules()] == names
    assert all(weight.requires_grad for weight in drafter.parameters())
    adapted(drafter, ["again"])
    assert drafter.adapters == ("again",)


def test_an_adapter_is_merged_into_the_weights(tmp_path):
    """Into the drafter's alone, whose other adapters stay."""
    target, drafter = dense(lambda target: tiny_drafter(target, target_layer_ids=[0, 2]))
    drafter.set_adapter("chat")
    drafter.save_pretrained(tmp_path)
    chat, code = (drafts(target, drafter, prompt(9), adapter=name)[1] for name in ("chat", "code"))
    drafter.delete_adapter("chat")
    plain = copy.deepcopy(drafter.state_dict())
    drafter.merge_adapter(tmp_path)
    assert drafter.adapters == ("code",) and drafter.active_adapters() == []
    assert drafts(target, drafter, prompt(9), adapter=None)[1] == chat
    changed = [name for name, value in drafter.state_dict().items() if not torch.equal(value, plain[name])]
    assert changed and all(name.endswith("base_layer.weight") for name in changed)
    drafter.delete_adapter("code")
    assert drafts(target, drafter, prompt(9))[1] == chat != code
    drafter.save_pretrained(tmp_path / "base")
    drafter.merge_adapter(tmp_path)  # without others
    assert drafter.adapters == () and drafts(target, drafter, prompt(9))[1] != chat
    commands.run("export", tmp_path / "base", tmp_path / "theirs", "--adapter", tmp_path)
    theirs = load_drafter(tmp_path / "theirs", target=target).state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in drafter.state_dict().items())


def test_an_adapter_has_the_drafters_dtype():
    target = families.qwen3().eval().to(torch.bfloat16)
    drafter = adapted(tiny_drafter(target, **READ))
    drafter.bind(target)
    weights = [weight for path, weight in drafter.named_parameters() if ".lora_" in path]
    assert weights and {weight.dtype for weight in weights} == {torch.bfloat16}
    assert drafts(target, drafter, prompt(9), adapter="code")[1] != drafts(target, drafter, prompt(9))[1]


# What is refused

GENERATED = {
    "wrong": (dict(adapter="cod"), ("'cod'", "'code', 'chat'", "load_adapter")),
    "wrong in a batch": (dict(adapter=["code", "maths"]), ("'maths'", "'code', 'chat'")),
    "too few": (dict(adapter=["code"]), ("1 names", "2 prompts")),
    "a number": (dict(adapter=3), ("3", "'code', 'chat'")),
}


@pytest.mark.parametrize("case", GENERATED)
def test_a_wrong_name_is_refused_before_the_target_runs(case, monkeypatch):
    options, words = GENERATED[case]
    target, drafter = dense()
    monkeypatch.setattr(target.model, "forward", lambda *a, **k: pytest.fail("the target ran"))
    ids = prompt(9).repeat(2, 1)
    Refusal(lambda: target.generate(ids, assistant_model=drafter, **options, **GREEDILY), words).check()


def test_a_drafter_without_adapters_says_so():
    target = families.qwen3().eval()
    for drafter in (tiny_drafter(target, **READ), PromptLookupDrafter(target)):
        drafter.bind(target)
        call = lambda: target.generate(prompt(9), assistant_model=drafter, adapter="code", **GREEDILY)  # noqa: B023, E731
        Refusal(call, ("'code'", "no adapters")).check()
        assert torch.equal(
            target.generate(prompt(9), assistant_model=drafter, adapter=None, **GREEDILY),
            target.generate(prompt(9), **GREEDILY),
        )


ADDED = {
    "DoRA": (dict(use_dora=True), "x", ("`use_dora` True", "merge_and_unload")),
    "whole modules": (dict(modules_to_save=["markov_head"]), "x", ("`modules_to_save`", "markov_head")),
    "biases": (dict(bias="all"), "x", ("`bias` 'all'", "'none'")),
    "a start that changes the base": (dict(init_lora_weights="pissa"), "x", ("'pissa'", "own weights")),
    "of a head": (dict(target_modules=["markov_w2"]), "x", ("markov_head.markov_w2", "heads")),
    "of nothing": (dict(target_modules=["query"]), "x", ("query", "does not have")),
    "a name twice": ({}, "code", ("'code'", "new name")),
    "a dot": ({}, "v1.5", ("'v1.5'", "dot")),
    "PEFT's own": ({}, "__base__", ("'__base__'", "new name")),
    "a module's": ({}, "layers", ("'layers'", "new name")),
}


@pytest.mark.parametrize("case", ADDED)
def test_what_cannot_be_an_adapter_is_refused_and_leaves_the_drafter(case):
    fields, name, words = ADDED[case]
    _, drafter = dense(lambda target: headed(target, "markov", **READ))
    before = {key: value.clone() for key, value in drafter.state_dict().items()}
    Refusal(lambda: drafter.add_adapter(LoraConfig(**fields), name), words).check()
    after = drafter.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[key], before[key]) for key in before)
    assert drafter.adapters == NAMES


def test_files_that_are_no_adapter_of_the_drafter_are_refused(tmp_path):
    target, drafter = dense()
    drafter.set_adapter("code")
    drafter.save_pretrained(tmp_path / "code")
    config = json.loads((tmp_path / "code" / "adapter_config.json").read_text())
    weights = load_file(tmp_path / "code" / "adapter_model.safetensors")
    first = next(iter(weights))

    def folder(name, fields=None, tensors=None):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({**config, **(fields or {})}))
        if tensors is not None:
            save_file(tensors, tmp_path / name / "adapter_model.safetensors")
        return tmp_path / name

    cases = {
        folder("other", {"peft_type": "IA3", "target_modules": []}, weights): (
            ("IA3Config", "LoraConfig"),
            ValueError,
        ),
        folder("rank", {"r": 5}, weights): (("another shape",), ValueError),
        folder("part", {}, {first: weights[first]}): (("missing",), ValueError),
        folder("more", {}, {**weights, "x": torch.ones(2)}): (("1 unexpected (x)",), ValueError),
        folder("nan", {}, {**weights, first: weights[first] * float("nan")}): (("not finite", first), ValueError),
        folder("bare"): (("adapter_model.safetensors", "safetensors"), OSError),
        tmp_path / "nowhere": (("nowhere", "adapter_config.json"), OSError),
    }
    for name, text, words in (("empty", "{}", "LoraConfig"), ("text", "{", "adapter_config.json")):
        (folder(name, tensors=weights) / "adapter_config.json").write_text(text)
        cases[tmp_path / name] = ((name, words), ValueError)
    (folder("cut") / "adapter_model.safetensors").write_bytes(b"x")
    cases[tmp_path / "cut"] = (("cut", "damaged"), OSError)
    for path, (words, error) in cases.items():
        Refusal(lambda path=path: drafter.load_adapter(path, "new"), words, error).check()
        assert drafter.adapters == NAMES
    fresh = tiny_drafter(target, **READ)
    names = [name for name, _ in fresh.named_modules()]
    Refusal(lambda: fresh.load_adapter(tmp_path / "rank"), ("another shape",)).check()
    assert fresh.adapters == () and [name for name, _ in fresh.named_modules()] == names


def test_the_trainer_takes_a_drafter_without_adapters_or_a_wrapped_one(tmp_path):
    target, drafter = dense()
    Refusal(lambda: trainer_for(tmp_path, target, drafter, rows(2)), ("code, chat", "get_peft_model")).check()


def test_a_wrapped_drafter_stays_pefts(tmp_path):
    from peft import get_peft_model

    target = tiny_target()
    wrapped = get_peft_model(tiny_drafter(target), LoraConfig(target_modules=["q_proj"]))
    own = wrapped.get_base_model()
    assert own.adapters == ()
    Refusal(lambda: own.add_adapter(LoraConfig(), "code"), ("wrapped by PEFT", "anew")).check()
