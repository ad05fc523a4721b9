"""Every kind of drafter against every promise that holds for all of them. A new kind is one more row of `KINDS`."""

from __future__ import annotations

import copy
import random
import threading
from collections import Counter
from contextlib import suppress

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import logits_process as stock

from hf_hyperdflash import (
    Conversation,
    DeepseekV4DSparkDrafter,
    DeepseekV4MTPDrafter,
    MTPConfig,
    MTPDrafter,
    load_drafter,
)
from hf_hyperdflash.decoding.request import Pair
from hf_hyperdflash.decoding.stats import keep_trees
from hf_hyperdflash.drafters.sampling import DraftRequest, DraftSampler
from hf_hyperdflash.drafters.without_weights.prompt_lookup import PromptLookupDrafter
from hf_hyperdflash.targets.caches.name import CACHE, cache_of
from hf_hyperdflash.targets.registry import target_of

from ..conftest import mostly_nightly, prompt, tiny_config, tiny_drafter, tiny_target
from ..fuzz_trees import padded_on_the_left
from ..helpers import families, gemma4_assistants, mtp_targets
from ..helpers.deepseek_checkpoints import dspark_fields, dspark_shapes, mtp_shapes, random_tensors, write
from ..helpers.families import FULL, SLIDING
from ..helpers.headed_drafters import headed
from ..helpers.loops import in_transformers_loop
from ..helpers.medusa import medusa
from ..helpers.released_layouts import assistant
from ..helpers.saved_folder import furthest_from_the_law
from ..helpers.unrolled import unrolled

READ = {"target_layer_ids": [0, -1]}


def of_checkpoint(kind, shapes, **fields):
    """A drafter out of a checkpoint of DeepSeek-V4's, and that checkpoint's target."""

    def made(folder):
        config = tiny_config(**fields)
        drafter = kind.from_target(write(folder, config, random_tensors(shapes(config))), dtype=torch.float32)
        return tiny_target(), drafter

    return made


def of_own_checkpoint(family):
    """A target of a family of `tests.helpers.mtp_targets`, and the heads that its checkpoint has."""

    def made(folder):
        target = mtp_targets.loaded(family, folder / "target")
        return target, load_drafter(folder / "target", target=target)

    return made


def of_family(family, drafter):
    def made(folder):
        torch.manual_seed(0)
        target = family().eval()
        return target, drafter(target)

    return made


def muse_glimmer(folder):
    """Its assistant, which transformers' own loop drafts with."""
    torch.manual_seed(0)
    target = families.muse_glimmer().eval()
    assistant(folder)
    return target, load_drafter(folder, target=target)


def without_padding():
    """A target whose drafter has a mask vector of its own."""
    target = families.qwen3()
    target.config.pad_token_id = None
    return target


def sharing_gemma4():
    """Whose last layers have keys of earlier ones. A Gemma 4 with an input of its own to each layer has none of tokens
    that it got later."""
    return families.gemma4_unified(layer_types=[SLIDING, FULL, SLIDING, FULL], num_kv_shared_layers=2)


KINDS = {
    "hyperdflash": of_family(tiny_target, tiny_drafter),
    "dflash": of_family(families.qwen3, lambda target: tiny_drafter(target, **READ)),
    "dspark": of_family(families.qwen3, lambda target: headed(target, "markov", **READ)),
    "state head": of_family(families.llama, lambda target: headed(target, "state", confidence_head=True, **READ)),
    "dflash2": of_family(families.gemma3, lambda target: headed(target, "selector", head_candidates=5, **READ)),
    "domino": of_family(families.qwen3, lambda target: headed(target, "gru", sample_from_anchor=True, **READ)),
    "jetspec": of_family(families.llama, lambda target: tiny_drafter(target, causal_layers="all", **READ)),
    "eagle3": of_family(families.qwen3, lambda target: unrolled("eagle3", target, max_blocks=5)),
    "peagle": of_family(families.qwen3, lambda target: unrolled("peagle", target, max_blocks=5, num_hidden_layers=2)),
    "specblock": of_family(families.qwen3, lambda target: unrolled("specblock", target, block_size=3, max_blocks=2)),
    "muse glimmer": muse_glimmer,
    "medusa": of_family(families.qwen3, lambda _: medusa()),
    "v4 dspark": of_checkpoint(DeepseekV4DSparkDrafter, dspark_shapes, **dspark_fields()),
    "v4 mtp": of_checkpoint(DeepseekV4MTPDrafter, mtp_shapes),
    "mtp head": of_own_checkpoint("deepseek_v3"),
    "gemma4 assistant": of_family(sharing_gemma4, gemma4_assistants.assistant),
    "prompt lookup": of_family(families.qwen3_next, PromptLookupDrafter),
}
# As KINDS, in what only drafting asks about: other targets, heads, gates, vocabularies, windows.
MORE = {
    "gated head": of_family(
        families.granite_hybrid, lambda target: headed(target, "gated_markov", draft_vocab_size=40)
    ),
    "recurrent head": of_family(families.gemma2, lambda target: headed(target, "recurrent", sample_from_anchor=True)),
    "all of a drafter's own": of_family(
        families.granite_hybrid,
        lambda target: unrolled("eagle3", target, max_blocks=4, own_embedding=True, draft_vocab_size=40),
    ),
    "masks of a drafter's own": of_family(
        families.granite_hybrid,
        lambda target: unrolled("peagle", target, max_blocks=4, own_embedding=True, draft_vocab_size=40),
    ),
    "masks over streams": of_family(
        lambda: tiny_target(layer_types=["sliding_attention"] * 2),
        lambda target: unrolled("peagle", target, reducer="hybrid", num_hidden_layers=1, **READ),
    ),
    "gated blocks": of_family(
        lambda: tiny_target(layer_types=["sliding_attention"] * 2),
        lambda target: unrolled("specblock", target, block_size=3, reducer="hybrid", rank_head=False, **READ),
    ),
    "mtp heads": of_own_checkpoint("step3p5"),
    "mtp head beside linear attention": of_own_checkpoint("qwen3_next"),
    "mtp head of two layers": of_own_checkpoint("nemotron_h"),
    "mtp head of half a layer": of_own_checkpoint("longcat_flash"),
    "mtp head with the target's norm": of_own_checkpoint("ernie4_5_moe"),
    "windows": of_family(
        without_padding,
        lambda target: tiny_drafter(
            target, layer_types=["sliding_attention", "full_attention"], sliding_window=6, causal_layers="all",
            window_from="slot", conv_kernel_size=2, mask_token_id=None,
        ),
    ),
}  # fmt: skip
if not gemma4_assistants.can_be_built():
    del KINDS["gemma4 assistant"]
WITHOUT_WEIGHTS = {"prompt lookup"}
READ_KEYS = {"gemma4 assistant"}  # of the target's cache
SAVED = sorted(KINDS.keys() - WITHOUT_WEIGHTS)
TRAINED = sorted(KINDS.keys() - WITHOUT_WEIGHTS - READ_KEYS - {"medusa"})
WAYS = [{}, {"tree_budget": 7}, {"num_assistant_tokens": "auto"}, {"tree_budget": "auto"}, {"num_assistant_tokens": 2}]
KNOWN, ALL = 64, 72  # tokens of a target, and of a fine-tuned one


@pytest.fixture(params=[*KINDS, *mostly_nightly(MORE, kept=0)])
def pair(request, tmp_path):
    return (KINDS | MORE)[request.param](tmp_path)


def test_the_text_is_the_targets(pair):
    target, drafter = pair
    ids, options = prompt(19), dict(do_sample=False, max_new_tokens=20)
    plain = target.generate(ids, **options)
    drafter.bind(target)
    for way in WAYS:
        assert torch.equal(target.generate(ids, assistant_model=drafter, **options, **way), plain), way
        stats = drafter.last_stats
        # "auto" has copies of the whole text, too.
        most = 20 if "auto" in way.values() else drafter.max_draft_tokens or 20
        assert stats.rounds > 0 and stats.draft_positions <= most
        assert way.get("num_assistant_tokens") != 2 or stats.draft_positions <= 2
    assert torch.equal(in_transformers_loop(target, drafter, ids, **options), plain)
    drafter.unbind(target)
    assert torch.equal(target.generate(ids, **options), plain)


def test_a_batch_writes_for_each_text_what_it_would_alone(pair):
    target, drafter = pair
    texts = [prompt(length, seed=length)[0] for length in (5, 12, 9)]
    ids, mask = padded_on_the_left(texts)
    options = dict(do_sample=False, max_new_tokens=12)
    alone = [target.generate(text[None], **options)[0, len(text) :] for text in texts]
    drafter.bind(target)
    for way in ({}, {"tree_budget": 5}):
        found = target.generate(ids, attention_mask=mask, assistant_model=drafter, **options, **way)
        assert torch.equal(found[:, ids.shape[1] :], torch.stack(alone)), way


NONE = LogitsProcessorList()
BANNED = LogitsProcessorList([stock.SuppressTokensLogitsProcessor([3, 4, 5, 6])])
PENALTY = LogitsProcessorList([stock.RepetitionPenaltyLogitsProcessor(1.7)])


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS | MORE)
def test_texts_get_the_same_drafts_together_alone_and_again(kind, tmp_path, monkeypatch):
    """Over rounds in which texts come late and leave, take in none, a few or many tokens, at once or in parts, and are
    asked for more or fewer drafts, chains and trees, also where the first try was broken off. One text has a token
    alone, so that its context is empty."""
    target, drafter = (KINDS | MORE)[kind](tmp_path)
    chance, seen = random.Random(1), target_of(target)
    texts = [prompt(length, seed=length) for length in (5, 1, 300, 9, 14)]
    together, alone = ([drafter.new_context() for _ in texts] for _ in range(2))
    most, layers = drafter.max_draft_tokens or 5, drafter.layers_read(seen)
    keys = gemma4_assistants.RandomKeys(target, len(texts)) if kind in READ_KEYS else None

    def take_in(row):
        start, end = together[row].end, texts[row].shape[1] - 1
        residual = torch.randn(1, end - start, len(layers) * seen.streams, seen.config.hidden_size)
        for context, at_once in ((together[row], 500), (alone[row], 60)):
            for first in range(start, max(end, start + 1), at_once):
                last = min(first + at_once, end)
                part, positions = residual[:, first - start : last - start], torch.arange(first, last)[None]
                drafter.extend(seen, context, part if layers else None, positions, texts[row][:, first + 1 : last + 1])
                context.end = last

    def breaking_off(*args):
        raise KeyboardInterrupt

    widest = 0
    for budget, processors in [(None, NONE), (9, NONE), (9, [NONE, BANNED]), (None, [PENALTY]), (16, [PENALTY])] * 2:
        rows = sorted(chance.sample(range(5), chance.randint(2, 5)))
        for row in rows:
            take_in(row)
        samplers = [DraftSampler(chance.choice(processors or [NONE]), False, budget) for _ in rows]
        positions = [torch.arange(texts[row].shape[1])[None] for row in rows]
        counts = [chance.randint(1, most) for _ in rows]
        places = [[None] * len(rows)] * 2
        if keys is not None:
            lengths = [texts[row].shape[1] - 1 for row in rows]
            places = [keys.together(rows, lengths), list(map(keys.alone, rows, lengths))]
        joint, single = (
            [
                DraftRequest(contexts[row], texts[row], *rest)
                for row, *rest in zip(rows, positions, counts, samplers, cached)
            ]
            for contexts, cached in zip((together, alone), places)
        )
        if PENALTY in processors:  # a round that is broken off leaves no trace
            with monkeypatch.context() as broken, suppress(KeyboardInterrupt):
                broken.setattr(type(PENALTY[0]), "__call__", breaking_off)
                drafter.draft(seen, joint)
        trees = drafter.draft(seen, joint)
        for row, tree, request in zip(rows, trees, single):
            for own in drafter.draft(seen, [request]) + drafter.draft(seen, [request]):
                assert torch.equal(tree.tokens, own.tokens)
                assert (tree.parents, tree.passes) == (own.parents, own.passes)
                assert (tree.confidence is None) == (own.confidence is None)
                if tree.confidence is not None:
                    torch.testing.assert_close(tree.confidence, own.confidence, atol=1e-4, rtol=1e-3)
            assert len(tree) or texts[row].shape[1] == 1 or kind in WITHOUT_WEIGHTS
            assert len(tree) <= (budget or request.num_drafts) and max(tree.depths, default=0) <= request.num_drafts
            widest = max(widest, len(tree.paths))
            accepted = tree.tokens[tree.paths[0]][: chance.randint(0, most)] if len(tree) else tree.tokens
            texts[row] = torch.cat([texts[row], accepted[None], prompt(1, seed=row)], dim=1)
    assert widest > 3 or kind in WITHOUT_WEIGHTS


@pytest.mark.parametrize("kind", mostly_nightly(KINDS, kept=2))
def test_a_chat_goes_on(kind, tmp_path):
    """Its second turn on the cache of the first, with what a processor reads."""
    target, drafter = KINDS[kind](tmp_path)
    options = dict(do_sample=False, max_new_tokens=14, repetition_penalty=1.7, return_dict_in_generate=True)
    turn, texts = prompt(5, seed=4), []
    for way in ({}, {"assistant_model": drafter}, {"assistant_model": drafter, "tree_budget": 8}):
        if way:
            drafter.bind(target)
        first = target.generate(prompt(12), **options, **way)
        longer = torch.cat([first.sequences, turn], dim=1)
        known = {CACHE: cache_of(first)} if way else {}
        whole = dict(attention_mask=torch.ones_like(longer), **options, **known, **way)
        texts.append(target.generate(longer, **whole).sequences)
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])


@pytest.mark.parametrize("kind", mostly_nightly(KINDS, kept=2))
def test_threads_may_draft_with_one(kind, tmp_path):
    target, drafter = KINDS[kind](tmp_path)
    prompts, options = [prompt(9, seed=seed) for seed in range(2)], dict(do_sample=False, max_new_tokens=20)
    expected = [target.generate(ids, **options) for ids in prompts]
    drafter.bind(target)
    found: list[list[torch.Tensor]] = [[], []]

    def write(i):
        for way in WAYS[:3]:
            found[i].append(target.generate(prompts[i], assistant_model=drafter, **options, **way))

    threads = [threading.Thread(target=write, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(texts) == 3 and all(torch.equal(t, plain) for t in texts) for texts, plain in zip(found, expected))


def test_a_seed_gives_the_sampled_text_again(pair):
    target, drafter = pair
    drafter.bind(target)
    for way in ({}, {"tree_budget": 6}):
        texts = []
        for _ in range(2):
            torch.manual_seed(1)
            texts.append(target.generate(prompt(7), do_sample=True, max_new_tokens=10, assistant_model=drafter, **way))
        assert torch.equal(*texts) and texts[0].shape == (1, 17)


def of_eight(family, made):
    """A pair with a vocabulary of eight tokens."""

    def pair():
        torch.manual_seed(0)
        target = family().eval()
        if target.config.get_text_config().vocab_size != 8:
            target.resize_token_embeddings(8)
        return target, made(target)

    return pair


LAWS = {
    "dflash": of_eight(families.qwen3, lambda target: headed(target, "gated_markov", **READ)),
    "eagle3": of_eight(families.qwen3, lambda target: unrolled("eagle3", target, max_blocks=5)),
    "peagle": of_eight(families.qwen3, lambda target: unrolled("peagle", target, max_blocks=5, num_hidden_layers=1)),
    "specblock": of_eight(
        families.llama, lambda target: unrolled("specblock", target, block_size=2, rank_head=False, branching=[2])
    ),
    "hyperdflash": of_eight(lambda: tiny_target(vocab_size=8), tiny_drafter),
    "running state": of_eight(families.qwen3_next, tiny_drafter),
}
MORE_LAWS = {
    "selector": of_eight(families.llama, lambda target: headed(target, "selector", head_candidates=3, **READ)),
    "domino": of_eight(families.qwen3, lambda target: headed(target, "gru", **READ)),
    "jetspec": of_eight(families.llama, lambda target: tiny_drafter(target, causal_layers="all", **READ)),
    "medusa": of_eight(families.qwen3, lambda target: medusa(vocab_size=8)),
    "normed embedding": of_eight(
        lambda: families.muse_glimmer(vocab_size=8), lambda target: tiny_drafter(target, **READ)
    ),
    "few tokens": of_eight(families.qwen3, lambda target: headed(target, "state", draft_vocab_size=5, **READ)),
    "mtp head": of_eight(
        families.deepseek_v3, lambda target: MTPDrafter(MTPConfig.from_target_config(target.config)).eval()
    ),
    "v4 mtp": of_eight(lambda: tiny_target(vocab_size=8), lambda target: DeepseekV4MTPDrafter(target.config).eval()),
    "gemma4 assistant": of_eight(
        lambda: families.gemma4_e(vocab_size=8),
        lambda target: gemma4_assistants.assistant(target, clusters=(4, 2)),
    ),
}

if not gemma4_assistants.can_be_built():
    del MORE_LAWS["gemma4 assistant"]


@pytest.mark.parametrize("budget", [None, 3])
@pytest.mark.parametrize("kind", mostly_nightly(LAWS | MORE_LAWS, kept=2))
def test_sampled_text_has_the_targets_law(kind, budget):
    """By every way that the draws can go, which takes seconds."""
    told = furthest_from_the_law(*(LAWS | MORE_LAWS)[kind](), tree_budget=budget)
    # Linear attention rounds in another way over several tokens than over one.
    assert told["furthest"] < (1e-3 if kind == "running state" else 1e-5) and told["accepted"] > 0


@pytest.mark.parametrize("kind", [*SAVED, *MORE])
def test_what_is_saved_drafts_alike(kind, tmp_path):
    target, drafter = (KINDS | MORE)[kind](tmp_path / "checkpoint")
    drafter.save_pretrained(tmp_path / "saved")
    data = {path.name for path in (tmp_path / "saved").iterdir() if path.is_file() and path.suffix != ".py"}
    data -= {"generation_config.json"} if kind == "gemma4 assistant" else set()  # which transformers' class saves
    assert data == {"config.json", "model.safetensors"} | ({"README.md"} if drafter.carries_code else set())
    again = load_drafter(tmp_path / "saved", target=target, dtype=torch.float32)
    assert type(again) is type(drafter)
    tensors = again.state_dict() | dict(again.named_buffers())  # of which RoPE's are never rounded
    before = drafter.state_dict() | dict(drafter.named_buffers())
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in before.items())
    ids, found = prompt(15), []
    for one in (drafter, again):
        one.bind(target)
        target.generate(ids, do_sample=False, max_new_tokens=12, assistant_model=one)
        found.append(one.last_stats.accepted)
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", mostly_nightly(["v4 dspark", *(kind for kind in TRAINED if kind != "v4 dspark")]))
def test_the_text_stays_the_targets_while_it_learns(kind, tmp_path):
    """What it learns is measured in tests/training/test_adaptation.py."""
    target, drafter = KINDS[kind](tmp_path)
    options = dict(do_sample=False, max_new_tokens=20)
    plain = target.generate(prompt(9), **options)
    drafter.bind(target)
    with drafter.adapt(target, policy="always", every=1, steps=4, rows=2, learning_rate=3e-3) as learning:
        for _ in range(3):
            assert torch.equal(target.generate(prompt(9), assistant_model=drafter, **options), plain)
    assert [update.gain is None for update in learning.log if update.arm] == [True, False, False]


def test_nothing_that_is_passed_is_written_to(pair):
    target, drafter = pair
    own = target.config.get_text_config()
    own.eos_token_id, own.pad_token_id = [60], 1
    settings = GenerationConfig(max_new_tokens=8, do_sample=False)
    asked = dict(generation_config=settings, tree_budget=4, num_assistant_tokens=2)
    configs = [settings, drafter.config, target.config, target.generation_config]
    before, given = [config.to_dict() for config in configs], dict(asked)
    drafter.bind(target, as_default=True)
    target.generate(prompt(9), **asked)
    assert [config.to_dict() for config in configs] == before and asked == given


# A target that got more rows than its drafter knows: a fine-tuned one, whose first ids are the same


@torch.no_grad()
def fine_tuned(original, rows=ALL):
    """A copy with more tokens, which its texts have: each takes the place of one that the original likes to write."""
    torch.manual_seed(3)
    text = original.generate(prompt(11), do_sample=False, max_new_tokens=24)[0, 11:].tolist()
    tuned = copy.deepcopy(original)
    tuned.resize_token_embeddings(rows, mean_resizing=False)
    for module in tuned.modules():
        if hasattr(module, "tid2eid"):  # the experts of each token
            module.tid2eid = torch.cat([module.tid2eid, module.tid2eid[: rows - KNOWN]])
    liked = [token for token, _ in Counter(text).most_common()][::2]
    for number, row in enumerate(range(KNOWN, rows)):
        tuned.get_input_embeddings().weight[row].normal_(std=0.2)
        head = tuned.get_output_embeddings().weight
        head[row] = 1.2 * head[liked[number]] if number < len(liked) else -head[:KNOWN].mean(0)
    return tuned


@pytest.fixture
def drafted(monkeypatch):
    """What drafters draft, tree by tree."""
    trees, draft = [], Pair.draft

    def noted(pair, requests):
        drafts = draft(pair, requests)
        trees.extend(drafts)
        return drafts

    monkeypatch.setattr(Pair, "draft", noted)
    return trees


ROWS = ["dspark", "eagle3", "prompt lookup"]  # of each change


@pytest.mark.parametrize("kind", mostly_nightly([*ROWS, *(kind for kind in KINDS | MORE if kind not in ROWS)], kept=3))
def test_of_a_target_with_more_rows_the_known_ones_are_drafted(kind, drafted, tmp_path):
    original, drafter = (KINDS | MORE)[kind](tmp_path)
    target = fine_tuned(original)
    ids = torch.cat([prompt(11), prompt(11, seed=5)])
    ids[1, -1] = KNOWN + 1  # the first round starts from a token that the drafter does not know
    greedy, sampled = dict(do_sample=False, max_new_tokens=20), dict(do_sample=True, top_k=0, max_new_tokens=20)
    plain = [target.generate(row, **greedy) for row in ids.split(1)]
    assert max(int(text[0, 11:].max()) for text in plain) >= KNOWN
    drafter.bind(target)
    ways = [greedy, greedy | {"tree_budget": 9}, sampled, sampled | {"tree_budget": 9, "repetition_penalty": 1.1}]
    if target_of(target).tree_verification == "mask":
        ways.append(greedy | {"cache_implementation": "static", "disable_compile": True})
    for options in ways:
        for row, text in zip(ids.split(1), plain):
            found = target.generate(row, **options, assistant_model=drafter)
            assert options["do_sample"] or torch.equal(found, text)
    if kind not in WITHOUT_WEIGHTS:  # which draft whatever the text has
        assert max(int(tree.tokens.max()) for tree in drafted if len(tree)) < KNOWN
        for q in [q for tree in drafted for q in tree.q or ()]:
            assert q.shape == (ALL,) and not q[KNOWN:].any()
            torch.testing.assert_close(q.sum(), torch.tensor(1.0))
    assert torch.equal(target.generate(ids, **greedy, assistant_model=drafter, tree_budget=5), torch.cat(plain))
    assert torch.equal(in_transformers_loop(target, drafter, ids[1:], **greedy), plain[1])


def test_a_conversation_drafts_as_from_the_whole_text(pair):
    """After prompts that repeat the answer, leave it out, or are others from their middle on."""
    target, drafter = pair
    conversation, options = Conversation(target, drafter), dict(do_sample=False, max_new_tokens=12)
    ids = prompt(70)
    text = conversation.generate(ids, **options)
    other = text.clone()
    other[0, 60:] = prompt(other.shape[1] - 60, seed=8)
    for following in (torch.cat([text, prompt(9, seed=5)], dim=1), torch.cat([ids, prompt(30, seed=6)], dim=1), other):
        trees = []
        for generate in (target.generate, conversation.generate):
            mask = torch.ones_like(following)
            with keep_trees():
                text = generate(following, attention_mask=mask, assistant_model=drafter, **options)
            trees.append((text.tolist(), [kept.drafts.tokens.tolist() for kept in drafter.last_stats.trees]))
        # Of several heads each reads what the one before made of the token before: of the first new token nothing.
        count = 1 if getattr(drafter.config, "num_heads", 1) > 1 else 2
        assert trees[0][:count] == trees[1][:count]
        assert conversation.cached_tokens >= 40
