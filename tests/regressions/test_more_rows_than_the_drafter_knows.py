"""A fine-tuned target with more rows in its embedding keeps the drafter of its original: the ids are the same."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from hf_hyperdflash import HyperDFlashDrafter, PromptLookupDrafter, load_drafter
from hf_hyperdflash.benchmark.doctor.config_variants import draft_every_round
from hf_hyperdflash.decoding import proposals
from hf_hyperdflash.drafters.blocks.modeling_medusa import MedusaConfig, MedusaDrafter
from hf_hyperdflash.drafters.deepseek_v4.configuration_mtp import DeepseekV4MTPConfig
from hf_hyperdflash.drafters.deepseek_v4.modeling_mtp import DeepseekV4MTPDrafter
from hf_hyperdflash.hub.formats import export_dflash
from hf_hyperdflash.hub.loading import check_made_for
from hf_hyperdflash.targets.registry import target_of

from ..conftest import CSA, SLIDING, mostly_nightly, perfect, prompt, tiny_drafter, tiny_target
from ..helpers import families, oracle_dflash
from ..helpers.drawn_tokens import assert_drawn_from
from ..helpers.headed_drafters import headed
from ..helpers.loops import in_transformers_loop
from ..helpers.unrolled import unrolled

KNOWN, ALL, NEW = 64, 72, 24
GREEDY = dict(do_sample=False, max_new_tokens=NEW)


def qwen3():
    torch.manual_seed(1)
    return families.qwen3().eval()


@torch.no_grad()
def fine_tuned(original, rows=ALL):
    """A copy with more tokens, which its texts have: each takes the place of one that the original likes to write."""
    torch.manual_seed(3)
    text = original.generate(prompt(11), **GREEDY)[0, 11:].tolist()
    tuned = copy.deepcopy(original)
    tuned.resize_token_embeddings(rows, mean_resizing=False)
    liked = [token for token, _ in Counter(text).most_common()][1::2]
    for number, row in enumerate(range(KNOWN, rows)):
        tuned.get_input_embeddings().weight[row].normal_(std=0.2)
        head = tuned.get_output_embeddings().weight
        head[row] = 1.2 * head[liked[number]] if number < len(liked) else -head[:KNOWN].mean(0)
    return tuned


def medusa(target):
    torch.manual_seed(0)
    return MedusaDrafter(MedusaConfig(medusa_num_heads=3, hidden_size=64, vocab_size=KNOWN)).eval()


KINDS = {
    "no head": partial(tiny_drafter, num_draft_tokens=4, num_hidden_layers=1),
    "state": partial(headed, kind="state"),
    "markov": partial(headed, kind="markov"),
    "markov, candidates, confidence": partial(headed, kind="markov", head_candidates=8, confidence_head=True),
    "recurrent, draft vocabulary": partial(headed, kind="recurrent", draft_vocab_size=40),
    "selector": partial(headed, kind="selector"),
    "eagle3": partial(unrolled, "eagle3", max_blocks=4),
    "eagle3, whole": partial(unrolled, "eagle3", max_blocks=4, own_embedding=True, draft_vocab_size=40),
    "specblock": partial(unrolled, "specblock", block_size=3, max_blocks=2),
    "medusa": medusa,
    "prompt lookup": PromptLookupDrafter,
}
WAYS = {
    "chain": GREEDY,
    "tree": {**GREEDY, "tree_budget": 9},
    "static": {**GREEDY, "cache_implementation": "static", "disable_compile": True},
    "sampled": dict(do_sample=True, top_k=0, max_new_tokens=NEW),
    "sampled tree": dict(do_sample=True, tree_budget=9, max_new_tokens=NEW, repetition_penalty=1.1),
}


@pytest.fixture
def drafted(monkeypatch):
    """What drafters propose, tree by tree."""
    trees, check = [], proposals.check_proposed
    monkeypatch.setattr(proposals, "check_proposed", lambda *given: (trees.append(given[1]), check(*given)))
    return trees


def check_drafts(trees, rows=ALL):
    """They are of tokens that the drafter knows, and drawn from distributions over all of the target's."""
    assert sum(map(len, trees)) and max(int(tree.tokens.max()) for tree in trees if len(tree)) < KNOWN
    for q in [q for tree in trees for q in tree.q or ()]:
        assert q.shape == (rows,) and not q[KNOWN:].any()
        torch.testing.assert_close(q.sum(), torch.tensor(1.0))


@pytest.mark.parametrize("kind", mostly_nightly(KINDS, kept=4))
def test_the_text_is_the_targets(kind, drafted):
    original = qwen3()
    drafter, target = KINDS[kind](original), fine_tuned(original)
    ids = torch.cat([prompt(11), prompt(11, seed=5)])
    ids[1, -1] = KNOWN + 1  # the first round starts from a token that the drafter does not know
    plain = [target.generate(row, **GREEDY) for row in ids.split(1)]
    assert all(int(text[0, 11:].max()) >= KNOWN for text in plain)
    drafter.bind(target)
    for options in WAYS.values():
        drafted.clear()
        for row, text in zip(ids.split(1), plain):
            found = target.generate(row, **options, assistant_model=drafter)
            assert options["do_sample"] or torch.equal(found, text)
        if kind != "prompt lookup":  # which drafts whatever the text has
            check_drafts(drafted)
    batch = target.generate(ids, **GREEDY, assistant_model=drafter, tree_budget=5)
    assert torch.equal(batch, torch.cat(plain))
    assert torch.equal(in_transformers_loop(target, drafter, ids[1:], **GREEDY), plain[1])


@pytest.mark.parametrize("layer_types", [[SLIDING, CSA]], ids=str)
def test_deepseek_v4s_own_drafter(layer_types, drafted):
    original = tiny_target(layer_types=layer_types, hidden_size=64, mlp_layer_types=["moe", "moe"])
    torch.manual_seed(0)
    drafter = DeepseekV4MTPDrafter(DeepseekV4MTPConfig.from_target_config(original.config)).eval()
    target, ids = fine_tuned(original), prompt(11)
    plain = target.generate(ids, **GREEDY)
    assert int(plain[0, 11:].max()) >= KNOWN
    drafter.bind(target)
    assert torch.equal(target.generate(ids, **GREEDY, assistant_model=drafter), plain)
    target.generate(ids, **WAYS["sampled tree"], assistant_model=drafter)
    check_drafts(drafted)


def test_what_it_knows_is_drafted_as_before():
    original = qwen3()
    target = fine_tuned(original)
    plain = target.generate(prompt(11), **GREEDY)
    drafter = perfect(original, plain[0].clamp(max=KNOWN - 1), num_draft_tokens=4)
    drafter.bind(target)
    assert torch.equal(target.generate(prompt(11), **GREEDY, assistant_model=drafter), plain)
    known, stats = (plain[0, 11:] < KNOWN).long(), drafter.last_stats
    start = 1  # the prompt's forward writes the first token
    for accepted in stats.accepted:
        expected = int(known[start : start + 4].cumprod(0).sum())
        assert accepted == min(expected, NEW - start - 1)
        start += accepted + 1


@pytest.mark.parametrize("kind", ["markov", "eagle3, whole"])
@pytest.mark.parametrize("budget", [None, 5])
def test_sampled_text_has_the_targets_distribution(kind, budget):
    """Pairs of sampled tokens against the target's own joint law; the bound is [`assert_drawn_from`]'s. Takes longer:
    hundreds of texts."""
    torch.manual_seed(5)
    fields = {**families.COMMON, "vocab_size": 6, "intermediate_size": 16, "head_dim": 16}
    original = Qwen3ForCausalLM(Qwen3Config(**fields, num_hidden_layers=1, num_key_value_heads=2)).eval()
    own = {"target_layer_ids": [0], "mask_token_id": None} if kind == "markov" else {"draft_vocab_size": 4}
    drafter = KINDS[kind](original, **{**own, "target_layer_ids": [0]})
    target, ids = copy.deepcopy(original), prompt(6, vocab_size=6)
    target.resize_token_embeddings(8, mean_resizing=False)
    joint = torch.zeros(8, 8)
    with torch.no_grad():
        target.get_output_embeddings().weight[6:].normal_(std=0.2)
        first = (target(ids).logits[0, -1] / 0.8).softmax(-1)
        for token in range(8):
            text = torch.cat([ids, torch.tensor([[token]])], dim=1)
            joint[token] = first[token] * (target(text).logits[0, -1] / 0.8).softmax(-1)
    drafter.bind(target)
    observed, options = Counter(), dict(do_sample=True, temperature=0.8, top_k=0, max_new_tokens=3)
    torch.manual_seed(11)
    for _ in range(12):
        texts = target.generate(ids, **options, num_return_sequences=25, assistant_model=drafter, tree_budget=budget)
        observed.update((8 * texts[:, 6] + texts[:, 7]).tolist())
    assert_drawn_from(joint.flatten(), observed)


@pytest.mark.parametrize(("kind", "rows"), [("markov", ALL), ("eagle3", 3 * KNOWN), ("prompt lookup", ALL)])
def test_a_bound_target_may_get_more_rows(kind, rows, drafted):
    target = qwen3()
    drafter = KINDS[kind](target)
    drafter.bind(target)
    first = target.generate(prompt(11), **GREEDY, assistant_model=drafter)
    target.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        head = target.get_output_embeddings().weight
        head[KNOWN:] = 1.2 * head[first[0, -1]]
    drafted.clear()
    text = target.generate(prompt(11), **GREEDY, assistant_model=drafter)
    assert torch.equal(text, target.generate(prompt(11), **GREEDY)) and int(text.max()) >= KNOWN
    if kind != "prompt lookup":
        target.generate(prompt(11), **WAYS["sampled tree"], assistant_model=drafter)
        check_drafts(drafted, rows)
    target.resize_token_embeddings(KNOWN - 4)
    if kind != "prompt lookup":  # whose configuration is the target's
        with pytest.raises(ValueError, match=f"{KNOWN}.* {KNOWN - 4}"):
            target.generate(prompt(11), **GREEDY, assistant_model=drafter)


def test_a_line_says_so_once(caplog):
    original = qwen3()
    drafter, target = tiny_drafter(original), fine_tuned(original)
    caplog.clear()
    drafter.bind(original)
    assert not caplog.messages
    for _ in range(2):
        drafter.bind(target)
        target.generate(prompt(5), **GREEDY, assistant_model=drafter)
    (line,) = caplog.messages
    assert str(KNOWN) in line and str(ALL) in line


def test_other_ids_are_refused(tmp_path):
    original = qwen3()
    drafter = tiny_drafter(original)
    torch.manual_seed(2)
    for other, values in (
        (families.llama(), "llama"),  # another model, by its kind
        (families.qwen3(8), "8 layers"),
        (original, f"{KNOWN + 5000}"),  # too many to be special tokens
    ):
        other = copy.deepcopy(other)
        other.resize_token_embeddings(KNOWN + 5000 if other.config.num_hidden_layers == 4 else ALL)
        with pytest.raises(ValueError, match=rf"`vocab_size` {KNOWN}, but .*{values}"):
            drafter.bind(other)
    for kind in ("no head", "eagle3", "medusa"):
        few = copy.deepcopy(original)
        few.resize_token_embeddings(KNOWN - 1)
        with pytest.raises(ValueError, match=rf"`vocab_size` {KNOWN}, but this target's is {KNOWN - 1}"):
            KINDS[kind](original).bind(few)


def save_tokenizer(folder, words):
    backend = Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token=words[0]))
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=words[0]).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("added", [8, 5000])
def test_tokenizers_tell_where_they_are_there(tmp_path, added):
    """With as many more tokens at its end one has the same ids, and with them at its beginning others."""
    own, more = [f"word {id}" for id in range(KNOWN)], [f"tool {id}" for id in range(added)]
    original = qwen3()
    original.config._name_or_path = save_tokenizer(tmp_path / "original", own)
    drafter = tiny_drafter(original)
    for name, words in {"tuned": own + more, "other": more + own}.items():
        target = copy.deepcopy(original)
        target.resize_token_embeddings(KNOWN + added)
        target.config._name_or_path = save_tokenizer(tmp_path / name, words)
        if name == "tuned":
            drafter.bind(target)
            continue
        with pytest.raises(ValueError, match=rf"`vocab_size` {KNOWN}, but this target's is {KNOWN + added}"):
            drafter.bind(target)


@pytest.mark.parametrize("changed", [0.0, 0.02, 1.0], ids=["resized", "fine-tuned", "another"])
def test_copies_in_a_file_are_of_the_original(tmp_path, changed):
    """speculators' files hold the original's embedding and head, which fine-tuning changes a little."""
    original = qwen3()
    oracle_dflash.write_speculators(tmp_path, original, layer_ids=[1, 2], layers=1, block_size=4, mask_token_id=1)
    target = fine_tuned(original)
    with torch.no_grad():
        for part in (target.get_input_embeddings(), target.get_output_embeddings()):
            part.weight.add_(changed * torch.randn_like(part.weight))
    if changed == 1:
        with pytest.raises(ValueError, match="not a copy"):
            load_drafter(tmp_path, target=target)
        return
    drafter = load_drafter(tmp_path, target=target, dtype="float32")
    plain = target.generate(prompt(11), **GREEDY)
    drafter.bind(target)
    assert torch.equal(target.generate(prompt(11), **GREEDY, assistant_model=drafter), plain)


def test_commands_take_it_and_training_says_what_it_needs(tmp_path):
    original = qwen3()
    drafter = headed(original, "markov", target_layer_ids=[1], mask_token_id=3, sample_from_anchor=True)
    target = fine_tuned(original)
    target.save_pretrained(tmp_path / "target")
    drafter.save_pretrained(tmp_path / "drafter", with_code=False)
    check_made_for(str(tmp_path / "target"), str(tmp_path / "drafter"))
    export_dflash(drafter, tmp_path / "export", "deepspec", target)
    text = target.generate(prompt(11), **GREEDY)
    assert int(text.max()) >= KNOWN
    emitted, nats = draft_every_round(target, drafter, text, 11, [drafter.config])
    assert emitted.shape == nats.shape == (1, NEW - 1) and nats[0][(text[0, 12:] < KNOWN).numpy()].max() < 0
    with pytest.raises(ValueError, match=rf"`vocab_size` is {KNOWN} and this target's {ALL}"):
        drafter.check_trainable(target_of(target))
    exported = load_drafter(tmp_path / "export", target=original, dtype="float32")
    exported.bind(target)
    assert torch.equal(target.generate(prompt(11), **GREEDY, assistant_model=exported), text)


def test_a_folder_without_a_tokenizer_tells_nothing(tmp_path):
    """For which transformers makes one of a few tokens, of some models."""
    targets = []
    for rows in (KNOWN, 3 * KNOWN):
        torch.manual_seed(1)
        targets.append(families.gemma3().eval())
        targets[-1].resize_token_embeddings(rows)
        targets[-1].save_pretrained(tmp_path / str(rows))
        targets[-1].config._name_or_path = str(tmp_path / str(rows))
    drafter = HyperDFlashDrafter.from_target(targets[0], target_layer_ids=[0], num_hidden_layers=1)
    assert drafter.config.mask_token_id == 0  # padding, and not the first that such a tokenizer does not use
    with pytest.raises(ValueError, match=rf"`vocab_size` {KNOWN}, but this target's is {3 * KNOWN}"):
        drafter.bind(targets[1])
