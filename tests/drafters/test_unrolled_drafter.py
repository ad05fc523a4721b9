"""Generation with SpecBlock and EAGLE-3: the target's own text, with all that a drafter has to stand."""

from __future__ import annotations

import random
import threading
from collections import Counter

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as stock

from hf_hyperdflash import (
    Eagle3Config,
    Eagle3Drafter,
    HyperDFlashDrafter,
    SpecBlockConfig,
    SpecBlockDrafter,
)
from hf_hyperdflash.decoding.bind import capture_residual
from hf_hyperdflash.drafters import reading as reading_drafter
from hf_hyperdflash.drafters.sampling import DraftRequest, DraftSampler
from hf_hyperdflash.drafters.unrolled import drafter as unrolled_drafter
from hf_hyperdflash.drafters.unrolled.unrolling import Unrolling
from hf_hyperdflash.targets.caches.name import CACHE, cache_of
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.trees.tree import DraftTree

from ..conftest import CSA, SLIDING, mostly_nightly, prompt
from ..helpers import families
from ..helpers.device_pairs import assert_same_text, small_qwen3, small_target
from ..helpers.drawn_tokens import assert_drawn_from
from ..helpers.loops import in_transformers_loop
from ..helpers.schedules import Asked
from ..helpers.unrolled import unrolled

KINDS = {"specblock": {"block_size": 3, "max_blocks": 2}, "eagle3": {"max_blocks": 5}}
FAMILIES = [families.deepseek_v4, families.qwen3, families.gemma3, families.qwen3_next, families.granite_hybrid]


@pytest.mark.parametrize("family", mostly_nightly(FAMILIES, kept=2), ids=lambda family: family.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_the_targets(family, kind):
    torch.manual_seed(0)
    target, ids = family().eval(), prompt(19)
    drafter = unrolled(kind, target, **KINDS[kind])
    plain = target.generate(ids, do_sample=False, max_new_tokens=25)
    drafter.bind(target)
    for options in (
        {},
        {"tree_budget": 9},
        {"tree_budget": 9, "num_assistant_tokens": 2},
        {"num_assistant_tokens": 4},
    ):
        out = target.generate(ids, do_sample=False, max_new_tokens=25, assistant_model=drafter, **options)
        assert torch.equal(out, plain), options
        stats = drafter.last_stats
        assert stats.rounds and stats.draft_positions <= options.get("num_assistant_tokens", drafter.max_draft_tokens)


# Reducing is before all that differs between the kinds, and asks nothing of the target's layers.
# Takes seconds: several texts are written by trees.
@pytest.mark.parametrize(
    ("kind", "fields"),
    [("specblock", {"reducer": "hybrid", "target_layer_ids": [0, -1]}), ("eagle3", {"reducer": "hc_gate"})],
    ids=str,
)
def test_a_reducer_with_a_gate(kind, fields):
    target = small_target([SLIDING, SLIDING])
    drafter = unrolled(kind, target, **KINDS[kind], **fields)
    assert drafter.config.num_streams == len(drafter.target_layer_ids) * 4 and drafter.target_layer_ids[-1] == -1
    drafter.bind(target)
    assert_same_text(target, drafter, tree_budget=7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gate_is_inherited(kind):
    target = small_target([CSA])
    made = SpecBlockDrafter if kind == "specblock" else Eagle3Drafter
    drafter = made.from_target(target, reducer="hc_gate", dtype=torch.bfloat16)
    assert torch.equal(drafter.hc_gate.hc_fn, target.model.hc_head.hc_fn) and drafter.dtype == torch.bfloat16
    assert drafter.hc_gate.hc_fn.dtype == torch.float32
    drafter.bind(target)
    plain = target.generate(prompt(8), do_sample=False, max_new_tokens=12)
    out = target.generate(prompt(8), do_sample=False, max_new_tokens=12, assistant_model=drafter, tree_budget=6)
    assert torch.equal(out, plain)


class Listening(DraftSampler):
    """Keeps what the drafts of a chain are drawn from."""

    def __init__(self, schedule: Asked | None = None) -> None:
        super().__init__(LogitsProcessorList(), True, chain_admission=schedule)
        self.seen = []

    def blind(self, ids, logits):
        self.seen += [(ids, each) for each in logits[0].softmax(-1)]
        return super().blind(ids, logits)


@torch.no_grad()
@pytest.mark.parametrize("shift", [True, False])
def test_a_specblock_drafter_has_a_shift_between_two_layers(shift):
    drafter = unrolled("specblock", small_target([SLIDING]), num_hidden_layers=3, shift=shift)
    saved = {name for name in drafter.state_dict() if name.startswith("shift_proj.")}
    assert saved == ({"shift_proj.0.weight", "shift_proj.1.weight"} if shift else set())


def test_a_chain_of_blocks_is_drawn_block_by_block():
    """Each draft from what its own slot says; and no further block where nothing more is admitted."""
    torch.manual_seed(0)
    target, ids = families.qwen3().eval(), prompt(20)
    drafter = unrolled("specblock", target, block_size=3, max_blocks=3)
    with capture_residual(target, drafter.target_layer_ids) as captured:
        target(ids[:, :-1])
    context, positions = drafter.new_context(), torch.arange(20)[None]
    drafter.extend(target_of(target), context, captured[0], positions[:, :-1], ids[:, 1:])

    def drafted(count, schedule=None):
        sampler = Listening(schedule)
        torch.manual_seed(1)
        return drafter.propose(target_of(target), context, ids, positions, count, sampler), sampler.seen

    tree, seen = drafted(8)
    assert tree.is_chain and tree.passes == (1, 1, 1, 2, 2, 2, 3, 3) and len(seen) == 8
    for k, (text, q) in enumerate(seen):
        assert torch.equal(tree.q[k], q)
        assert text[0].tolist() == [*ids[0].tolist(), *tree.tokens[: k - k % 3].tolist()]
    schedules = {3: Asked(most=3), 4: Asked(refused=4), 5: Asked(most=5), 6: Asked(refused=6)}
    for count, schedule in schedules.items():
        part, asked = drafted(8, schedule)
        assert len(part) == count and part.passes == tree.passes[:count]
        assert len(asked) == {3: 3, 4: 6, 5: 6, 6: 8}[count]  # what a further block says is not known before its pass


def once(function):
    """A function that is interrupted from its second call on."""
    calls = iter([function])

    def called(*given):
        for first in calls:
            return first(*given)
        raise KeyboardInterrupt

    return called


@pytest.mark.parametrize("kind", KINDS)
def test_a_context_is_left_as_it_was(kind, monkeypatch):
    """Whatever is drafted, a long prompt in parts, and when drafting is broken off."""
    torch.manual_seed(0)
    target, ids = families.qwen3().eval(), prompt(33)
    drafter = unrolled(kind, target, **KINDS[kind])
    with capture_residual(target, drafter.target_layer_ids) as captured:
        target(ids[:, :-1])
    positions, found = torch.arange(33)[None], []
    for at_once in (256, 7):
        monkeypatch.setattr(unrolled_drafter, "_ENTRIES_AT_ONCE", at_once)
        context = drafter.new_context()
        assert (
            len(
                drafter.propose(
                    target_of(target), context, ids, positions, 4, DraftSampler(LogitsProcessorList(), False)
                )
            )
            == 0
        )
        drafter.extend(target_of(target), context, captured[0], positions[:, :-1], ids[:, 1:])
        before = [[part.clone() for part in layer] for layer in context.layers]
        for budget in (None, 8):
            sampler = DraftSampler(LogitsProcessorList(), False, budget)
            found.append(drafter.propose(target_of(target), context, ids, positions, 5, sampler))

        with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
            broken.setattr(drafter, "drafted_logits", once(drafter.drafted_logits))
            drafter.propose(target_of(target), context, ids, positions, 5, DraftSampler(LogitsProcessorList(), False))
        for layer, kept in zip(context.layers, before):
            assert all(torch.equal(part, other) for part, other in zip(layer, kept))
    for one, other in zip(found[:2], found[2:]):
        assert isinstance(one, DraftTree) and one.parents == other.parents and torch.equal(one.tokens, other.tokens)
    assert len(found[0]) == 5 and len(found[1]) == 8


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_chain_goes_on_as_a_tree_of_one_path(kind, moves):
    torch.manual_seed(0)
    target, ids = families.qwen3().eval(), prompt(12)
    drafter = unrolled(kind, target, **KINDS[kind])
    drafter.moves_positions, size = moves, drafter.config.block_size
    with capture_residual(target, drafter.target_layer_ids) as captured:
        target(ids[:, :-1])
    context = drafter.new_context()
    drafter.extend(target_of(target), context, captured[0], torch.arange(11)[None], ids[:, 1:])
    found = []
    for is_chain in (True, False):
        unrolling, states = Unrolling(drafter, target_of(target), [context]), []
        for number, token in enumerate(torch.tensor([[5], [7], [11]])):
            if is_chain:
                states.append(unrolling.extend_chain(token))
            else:
                states.append(unrolling.branch(torch.tensor([number]), torch.tensor([size - 1]), token))
        found.append(torch.cat(states))
    assert found[0].shape == (3, size, drafter.config.hidden_size)
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_what_nobody_reads_is_not_computed(kind):
    """Of all entries but the last no more than keys and values of the last layer, and of a block's slots no reading of
    the LM head each."""
    torch.manual_seed(0)
    target, ids = families.qwen3().eval(), prompt(12)
    drafter = unrolled(kind, target, **KINDS[kind])
    with capture_residual(target, drafter.target_layer_ids) as captured:
        target(ids[:, :-1])
    size, rows, positions, context = drafter.config.block_size, [], torch.arange(12)[None], drafter.new_context()
    for layer in drafter.layers:
        layer.mlp.register_forward_hook(lambda module, args, out: rows.append(out.shape[1]))
    drafter.extend(target_of(target), context, captured[0], positions[:, :-1], ids[:, 1:])
    assert rows == [11 * size] * (len(rows) - 1) + [size] and len(rows) == len(drafter.layers)
    read = []
    with target.lm_head.register_forward_hook(lambda module, args, out: read.append(out.shape[:-1].numel())):
        tree = drafter.propose(
            target_of(target), context, ids, positions, 5, DraftSampler(LogitsProcessorList(), False)
        )
    assert len(tree) == 5 and read == ([3, 2] if kind == "specblock" else [1] * 5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_chat_goes_on_with_processors(kind):
    torch.manual_seed(0)
    target, ids = families.qwen3().eval(), prompt(12)
    drafter = unrolled(kind, target, **KINDS[kind])
    processors = LogitsProcessorList([stock.RepetitionPenaltyLogitsProcessor(1.7)])
    options = {
        "do_sample": False,
        "max_new_tokens": 14,
        "logits_processor": processors,
        "return_dict_in_generate": True,
    }
    texts = []
    for assistant in ({}, {"assistant_model": drafter, "tree_budget": 8}, {"assistant_model": drafter}):
        if assistant:
            drafter.bind(target)
        first = target.generate(ids, **options, **assistant)
        longer = torch.cat([first.sequences, prompt(5, seed=4)], dim=1)
        given = {CACHE: cache_of(first)} if assistant else {}
        texts.append(target.generate(longer, **options, **given, **assistant).sequences)
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])


@pytest.mark.parametrize("kind", KINDS)
def test_in_transformers_loop(kind):
    torch.manual_seed(0)
    target, ids = families.qwen3().eval(), prompt(12)
    drafter = unrolled(kind, target, **KINDS[kind])
    plain = target.generate(ids, do_sample=False, max_new_tokens=16)
    drafter.bind(target)
    assert torch.equal(in_transformers_loop(target, drafter, ids, do_sample=False, max_new_tokens=16), plain)


def test_two_threads_draft_with_one():
    torch.manual_seed(0)
    target = families.qwen3().eval()
    drafter = unrolled("specblock", target, **KINDS["specblock"])
    prompts = [prompt(9, seed=seed) for seed in range(2)]
    expected = [target.generate(ids, do_sample=False, max_new_tokens=30) for ids in prompts]
    drafter.bind(target)
    found = {}

    def run(i):
        for _ in range(3):
            found[i] = target.generate(
                prompts[i], do_sample=False, max_new_tokens=30, assistant_model=drafter, tree_budget=10
            )

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[i], expected[i]) for i in range(2))


@pytest.mark.nightly  # thousands of texts are drawn
@pytest.mark.parametrize(("kind", "budget"), mostly_nightly([("eagle3", 9), ("specblock", 9)]))
def test_sampled_text_has_the_targets_distribution(kind, budget):
    """Pairs of sampled tokens against the target's own joint law; the bound is [`assert_drawn_from`]'s."""
    torch.manual_seed(5)
    config = families.Qwen3Config(
        **{**families.COMMON, "vocab_size": 8}, intermediate_size=16, num_hidden_layers=1, num_key_value_heads=2,
        head_dim=16,
    )  # fmt: skip
    target, ids = families.Qwen3ForCausalLM(config).eval(), prompt(6, vocab_size=8)

    @torch.no_grad()
    def distribution(context):
        return (target(context).logits[0, -1] / 0.8).softmax(-1)

    joint, first = torch.zeros(8, 8), distribution(ids)
    for a in range(8):
        start = torch.cat([ids, torch.tensor([[a]])], dim=1)
        second = distribution(start)
        for b in range(8):
            joint[b] += first[a] * second[b] * distribution(torch.cat([start, torch.tensor([[b]])], dim=1))
    fields = {"target_layer_ids": [0], "rank_head": False} if kind == "specblock" else {"target_layer_ids": [0]}
    drafter = unrolled(kind, target, **KINDS[kind], **fields)
    drafter.bind(target)
    observed = Counter()
    torch.manual_seed(11)
    for _ in range(500):
        out = target.generate(
            ids, do_sample=True, temperature=0.8, top_k=0, max_new_tokens=4, assistant_model=drafter,
            tree_budget=budget,
        )[0, 6:].tolist()  # fmt: skip
        observed[out[1] * 8 + out[2]] += 1
    assert_drawn_from(joint.flatten(), observed)


@pytest.mark.parametrize("options", mostly_nightly([{"tree_budget": 8}, {"do_sample": True}]), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_on_other_devices(kind, options):
    target = small_qwen3()
    drafter = unrolled(kind, target, **KINDS[kind], target_layer_ids=[0])
    drafter.bind(target)
    assert_same_text(target, drafter, **options)


SMALL = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


@pytest.mark.parametrize(
    ("made", "fields", "told"),
    [
        (SpecBlockConfig, {"branching": [1, 2]}, "`branching` is \\[1, 2\\], expected 4 whole numbers"),
        (SpecBlockConfig, {"branching": [0, 0, 0, 0]}, "drafts nothing"),
        (SpecBlockConfig, {"rank_head": False, "branching": [2, 4, 10, 0]}, "expected 1 whole numbers"),
        (SpecBlockConfig, {"vocab_size": 12}, "at least 20 for its rank head"),
        (SpecBlockConfig, {"block_size": 0}, "`block_size` is 0, expected at least 1"),
        (SpecBlockConfig, {"max_block": 3}, "did you mean `max_blocks`"),
        (SpecBlockConfig, {"target_hidden_size": 32}, "equal widths"),
        (Eagle3Config, {"block_size": 2}, "`block_size` is 2, expected at least 1 and at most 1"),
        (Eagle3Config, {"fc_norm": True, "norm_before_fc": True}, "both True"),
        (Eagle3Config, {"fc_norm": True, "reducer": "hybrid"}, "expected 'fc' or 'stream_mean'"),
        (Eagle3Config, {"any_streams": True}, "`reducer` is 'fc', expected 'stream_mean' with `any_streams`"),
        (Eagle3Config, {"shift": "yes"}, "no field of `Eagle3Config`"),
    ],
)
def test_what_makes_no_drafter_is_refused(made, fields, told):
    with pytest.raises(ValueError, match=told):
        made(**{**SMALL, **fields})


def test_more_drafts_than_its_blocks_have_are_refused():
    target = families.qwen3()
    drafter = unrolled("specblock", target, **KINDS["specblock"])
    drafter.bind(target)
    with pytest.raises(ValueError, match=r"from 1 to 6, or 'auto'\. Its 2 blocks of 3 .* larger `max_blocks`\."):
        target.generate(prompt(5), assistant_model=drafter, num_assistant_tokens=7)


@pytest.mark.parametrize("family", ["qwen3", "granite_hybrid", "gemma3"])
def test_an_embedding_and_an_lm_head_of_its_own_begin_as_the_targets(family, monkeypatch):
    """With what the target scales, its bias aside, however many states are looked at at once."""
    monkeypatch.setattr(reading_drafter, "_STATES_AT_ONCE", 24)
    torch.manual_seed(0)
    target = getattr(families, family)().eval()
    head = target.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.randn(len(head.weight)))
    drafter = Eagle3Drafter.from_target(target, draft_vocab_size=20, own_embedding=True, dtype=torch.float32)
    assert drafter.draft_ids.tolist() == list(range(20))
    drafter.draft_only(target_of(target), torch.arange(40, 60).flip(0))
    states, ids = torch.randn(5, 64), torch.arange(59, 39, -1)
    whole = target_of(target).logits
    torch.testing.assert_close(
        drafter.lm_head(states), (whole(states) - whole(0 * states))[:, ids], atol=1e-5, rtol=1e-4
    )
    torch.testing.assert_close(drafter.embed(target_of(target), ids[None]), target_of(target).embed(ids[None]))
    for wrong in ([5] * 20, [64] * 20, [1, 2]):
        with pytest.raises(ValueError, match="expected 20 different integers from 0 to 63"):
            drafter.draft_only(target_of(target), torch.tensor(wrong))
    with pytest.raises(ValueError, match="`hidden_size` is 32 and `own_embedding` True, expected 64"):
        Eagle3Drafter.from_target(target, hidden_size=32, draft_vocab_size=20, own_embedding=True)


@pytest.mark.parametrize("family", ["qwen3", "granite_hybrid"])
@pytest.mark.parametrize("most", [20, 33, 9])
def test_a_trained_drafter_may_draft_other_tokens(family, most):
    """Scores of those that it has drafted stay, and training that turns all rows alike turns the others as well."""
    torch.manual_seed(0)
    target = getattr(families, family)().eval()
    drafter = Eagle3Drafter.from_target(target, draft_vocab_size=20, dtype=torch.float32)
    known, weight = torch.arange(20, 60, 2), target.get_output_embeddings().weight
    weight.data[22] = weight.data[20]
    drafter.draft_only(target_of(target), known)
    states, others = torch.randn(5, 64), torch.randperm(64)
    ids = torch.cat([torch.tensor([22]), others[others != 22][: most - 1]])
    rows, turn = drafter.lm_head.weight.detach().clone(), torch.randn(64, 64)
    learned = rows @ turn
    learned[1] += 1  # of a token that is another's twin for the target, which no turn explains
    # As of few tokens: what of the turn they do not show is the least that there can be.
    known_rows = torch.linalg.pinv(rows) @ learned
    drafter.lm_head.weight.data.copy_(learned)
    whole = target_of(target).logits
    expected = (whole(torch.eye(64)) - whole(torch.zeros(1, 64))).T @ known_rows
    drafter.draft_others(target_of(target), ids)
    assert drafter.config.draft_vocab_size == most and torch.equal(drafter.draft_ids, ids)
    found = drafter.lm_head(states)
    for column, token in enumerate(ids.tolist()):
        old = (known == token).nonzero().flatten()
        if len(old):
            assert torch.equal(drafter.lm_head.weight[column], learned[old[0]])
        else:
            torch.testing.assert_close(found[:, column], states @ expected[token], atol=1e-3, rtol=1e-3)
    drafter.bind(target)
    text = dict(max_new_tokens=12, do_sample=False)
    assert torch.equal(target.generate(prompt(5), **text), target.generate(prompt(5), assistant_model=drafter, **text))
    for wrong in ([5, 5], [64, 1]):
        with pytest.raises(ValueError, match="expected 2 different integers from 0 to 63"):
            drafter.draft_others(target_of(target), torch.tensor(wrong))


def test_a_vocabulary_that_cannot_change():
    target = families.qwen3().eval()
    of_all = Eagle3Drafter.from_target(target, dtype=torch.float32)
    fields = dict(
        target_hidden_size=64, vocab_size=64, target_layer_ids=[0, -1], num_hidden_layers=1, target_hc_mult=1
    )
    narrow = Eagle3Drafter(Eagle3Config(hidden_size=32, own_embedding=True, draft_vocab_size=20, **fields))
    table = HyperDFlashDrafter.from_target(
        target, mask_token_id=63, sequential_head="markov", draft_vocab_size=20, dtype=torch.float32
    )
    for drafter, why in (
        (of_all, "drafts all tokens"), (narrow, "for states of width 32, not 64"), (table, "a head with a table"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"{why}.* Train a new drafter, or leave `draft_vocab_size` out"):
            drafter.draft_others(target_of(target), torch.arange(9))


BANNED = LogitsProcessorList([stock.SuppressTokensLogitsProcessor([3, 4, 5, 6])])
PENALTY = LogitsProcessorList([stock.RepetitionPenaltyLogitsProcessor(1.7)])
NONE = LogitsProcessorList()


@pytest.mark.parametrize("fields", [{}, {"draft_vocab_size": 24, "num_hidden_layers": 2}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_batch_drafts_for_each_sequence_what_it_would_alone(kind, fields):
    """Over rounds in which sequences come late and leave, take in more or fewer tokens, and are asked for more or
    fewer drafts, chains and trees."""
    chance, generator = random.Random(1), torch.Generator().manual_seed(2)
    target = families.qwen3().eval()
    seen, drafter = target_of(target), unrolled(kind, target, **KINDS[kind], **fields)
    streams, most = drafter.config.num_streams, drafter.max_draft_tokens
    texts = [prompt(length, seed=length) for length in (5, 1, 23, 9, 14)]
    together, alone = ([drafter.new_context() for _ in texts] for _ in range(2))

    def take_in(row):
        start, end = together[row].end, texts[row].shape[1] - 1
        residual = torch.randn(1, end - start, streams, 64, generator=generator)
        for context in (together[row], alone[row]):
            positions = torch.arange(start, end)[None]
            drafter.extend(seen, context, residual, positions, texts[row][:, start + 1 :])
            context.end = end

    def heard(draft):
        """What a function returns, and the drafter's logits of each pass."""
        passes, logits = [], type(drafter).drafted_logits
        drafter.drafted_logits = lambda *args: passes.append(logits(drafter, *args)) or passes[-1]
        return draft(), passes

    widest = 0
    for budget, processors in [(None, NONE), (9, NONE), (9, [NONE, BANNED]), (None, [PENALTY]), (16, [PENALTY])] * 2:
        rows = sorted(chance.sample(range(5), chance.randint(2, 5)))
        for row in rows:
            take_in(row)
        samplers = [DraftSampler(chance.choice(processors or [NONE]), False, budget) for _ in rows]
        positions = [torch.arange(texts[row].shape[1])[None] for row in rows]
        counts = [chance.randint(1, most) for _ in rows]
        found, expected = (
            [DraftRequest(contexts[row], texts[row], *rest) for row, *rest in zip(rows, positions, counts, samplers)]
            for contexts in (together, alone)
        )
        trees, of_batch = heard(lambda found=found: drafter.propose_batch(seen, found))
        drafting = [row for row in rows if not alone[row].is_empty]
        for row, tree, each in zip(rows, trees, expected):
            own, of_row = heard(lambda each=each: drafter.propose(seen, *each))
            if budget is None:
                for both, (only,) in zip(of_batch, of_row):
                    joint = both[drafting.index(row)]
                    torch.testing.assert_close(joint[: len(only)], only, atol=1e-4, rtol=1e-3)
            assert (tree.tokens.tolist(), tree.parents, tree.passes) == (own.tokens.tolist(), own.parents, own.passes)
            assert len(tree) or texts[row].shape[1] == 1
            widest = max(widest, len(tree.paths))
            for one, other in zip(together[row].layers, alone[row].layers):
                torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
            accepted = tree.tokens[tree.paths[0]][: chance.randint(0, most)] if len(tree) else tree.tokens
            texts[row] = torch.cat([texts[row], accepted[None], prompt(1, seed=row)], dim=1)
    assert widest > 3


@pytest.mark.parametrize("options", [{}, {"tree_budget": 9}, {"tree_budget": 9, "bad_words_ids": [[3, 4]]}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_written_with_as_many_passes_as_its_longest_round(kind, options):
    """Of texts of different length, one of which ends early."""
    torch.manual_seed(0)
    target = families.qwen3().eval()
    drafter = unrolled(kind, target, **KINDS[kind])
    rows = [prompt(length, seed=length) for length in (9, 3, 14, 1)]
    ids = torch.cat([torch.nn.functional.pad(row, (14 - row.shape[1], 0)) for row in rows])
    mask = torch.cat([(torch.arange(14) >= 14 - row.shape[1]).long()[None] for row in rows])
    settings = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0, **options}
    settings.pop("tree_budget", None)
    ends = int(target.generate(rows[1], **settings)[0, 7])
    settings["eos_token_id"] = ends
    texts = [target.generate(row, **settings)[0, row.shape[1] :].tolist() for row in rows]
    drafter.bind(target)
    passes, run = [], drafter.run
    drafter.run = lambda *args, **kwargs: passes.append(args[1].shape[0]) or run(*args, **kwargs)
    out = target.generate(ids, attention_mask=mask, assistant_model=drafter, **{**settings, **options})
    for row, text in zip(out[:, 14:].tolist(), texts):
        assert row[: len(text)] == text and set(row[len(text) :]) <= {0}
    assert len({len(text) for text in texts}) > 1
    rounds = max(row.rounds for row in drafter.last_stats.rows)
    # Two prompts are long, and a text that has one token before the first round is not drafted for in it.
    assert set(passes) > {1, 4} and len(passes) <= 2 + (rounds + 1) * drafter.config.max_blocks


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_buffer_may_grow_between_the_blocks_of_a_round(kind):
    """The blocks that are there are still seen."""
    target, states = families.qwen3().eval(), []
    seen, drafter = target_of(target), unrolled(kind, target, **KINDS[kind])
    residual = torch.randn(1, 9, drafter.config.num_streams, 64)
    for blocks in (9, 1):  # that there is room for
        context = drafter.new_context()
        drafter.extend(seen, context, residual, torch.arange(9)[None], prompt(9))
        drafter.flush_pending(seen, [context])
        columns = context.length + blocks * drafter.config.block_size
        context.buffer = [tuple(part[:, :, :columns].clone() for part in own) for own in context.buffer]
        unrolling = Unrolling(drafter, seen, [context])
        states.append(torch.cat([unrolling.extend_chain(torch.tensor([token])) for token in (5, 9, 33)]))
        assert (context.buffer[0][0].shape[2] > columns) == (blocks == 1)
    torch.testing.assert_close(states[1], states[0])


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_nothing_is_copied_while_the_same_sequences_draft(kind):
    target = families.qwen3().eval()
    seen, drafter = target_of(target), unrolled(kind, target, **KINDS[kind])
    contexts, buffers = [drafter.new_context() for _ in range(3)], set()
    for context in contexts:
        residual = torch.randn(1, 9, drafter.config.num_streams, 64)
        drafter.extend(seen, context, residual, torch.arange(9)[None], prompt(9))
    ids, positions = prompt(10), torch.arange(10)[None]
    for _ in range(4):
        for budget in (None, 9):
            sampler = DraftSampler(NONE, False, budget)
            drafter.propose_batch(seen, [DraftRequest(context, ids, positions, 4, sampler) for context in contexts])
            buffers |= {context.buffer[0][0].data_ptr() for context in contexts}
        for context in contexts:
            residual = torch.randn(1, 1, drafter.config.num_streams, 64)
            drafter.extend(seen, context, residual, positions[:, -1:], ids[:, -1:])
    assert len(buffers) == 1
