"""Generation with SpecBlock and EAGLE-3: the target's own text, with all that a drafter has to stand."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessorList

from hf_hyperdflash import (
    Eagle3Drafter,
    SpecBlockDrafter,
    capture_residual,
)
from hf_hyperdflash.drafters import reading as reading_drafter
from hf_hyperdflash.drafters.sampling import DraftSampler
from hf_hyperdflash.drafters.unrolled import drafter as unrolled_drafter
from hf_hyperdflash.drafters.unrolled.unrolling import Unrolling
from hf_hyperdflash.targets.registry import target_of

from ..conftest import CSA, SLIDING, mostly_nightly, prompt
from ..helpers import families
from ..helpers.device_pairs import assert_same_text, small_qwen3, small_target
from ..helpers.schedules import Asked
from ..helpers.unrolled import unrolled

NONE = LogitsProcessorList()
KINDS = {"specblock": {"block_size": 3, "max_blocks": 2}, "eagle3": {"max_blocks": 5}}


@pytest.mark.parametrize("kind", KINDS)
def test_a_gate_is_inherited(kind):
    target = small_target([CSA])
    made = SpecBlockDrafter if kind == "specblock" else Eagle3Drafter
    drafter = made.from_target(target, reducer="hc_gate", dtype=torch.bfloat16)
    assert torch.equal(drafter.hc_gate.hc_fn, target.model.hc_head.hc_fn) and drafter.dtype == torch.bfloat16
    assert drafter.hc_gate.hc_fn.dtype == torch.float32
    assert drafter.target_layer_ids == [-1] and drafter.config.num_streams == 4
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


def ready(kind, ids, **fields):
    """A target, a drafter, a context of all of `ids` but the last, and a function that adds these to another one."""
    torch.manual_seed(0)
    target = families.qwen3().eval()
    drafter, seen = unrolled(kind, target, **{**KINDS[kind], **fields}), target_of(target)
    with capture_residual(target, drafter.target_layer_ids) as captured:
        target(ids[:, :-1])

    def filled():
        context = drafter.new_context()
        drafter.extend(seen, context, captured[0], torch.arange(ids.shape[1] - 1)[None], ids[:, 1:])
        return context

    return seen, drafter, filled


def test_a_chain_of_blocks_is_drawn_block_by_block():
    """Each draft from what its own slot says; and no further block where nothing more is admitted."""
    ids, positions = prompt(20), torch.arange(20)[None]
    target, drafter, filled = ready("specblock", ids, max_blocks=3)
    context = filled()

    def drafted(count, schedule=None):
        sampler = Listening(schedule)
        torch.manual_seed(1)
        return drafter.propose(target, context, ids, positions, count, sampler), sampler.seen

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
    ids, positions, found = prompt(33), torch.arange(33)[None], []
    target, drafter, filled = ready(kind, ids)
    for at_once in (256, 7):
        monkeypatch.setattr(unrolled_drafter, "_ENTRIES_AT_ONCE", at_once)
        context = filled()
        before = [[part.clone() for part in layer] for layer in context.layers]
        for budget in (None, 8):
            sampler = DraftSampler(NONE, False, budget)
            found.append(drafter.propose(target, context, ids, positions, 5, sampler))
        with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
            broken.setattr(drafter, "drafted_logits", once(drafter.drafted_logits))
            drafter.propose(target, context, ids, positions, 5, DraftSampler(NONE, False))
        for layer, kept in zip(context.layers, before):
            assert all(torch.equal(part, other) for part, other in zip(layer, kept))
    for one, other in zip(found[:2], found[2:]):
        assert one.parents == other.parents and torch.equal(one.tokens, other.tokens)
    assert len(found[0]) == 5 and len(found[1]) == 8


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_chain_goes_on_as_a_tree_of_one_path(kind, moves):
    target, drafter, filled = ready(kind, prompt(12))
    drafter.moves_positions, size = moves, drafter.config.block_size
    context, found = filled(), []
    for is_chain in (True, False):
        unrolling, states = Unrolling(drafter, target, [context]), []
        for number, token in enumerate(torch.tensor([[5], [7], [11]])):
            if is_chain:
                states.append(unrolling.extend_chain(token))
            else:
                states.append(unrolling.branch(torch.tensor([number]), torch.tensor([size - 1]), token))
        found.append(torch.cat(states))
    assert found[0].shape == (3, size, drafter.config.hidden_size)
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_buffer_may_grow_between_the_blocks_of_a_round(kind):
    """The blocks that are there are still seen."""
    target, drafter, filled = ready(kind, prompt(10))
    states = []
    for blocks in (9, 1):  # that there is room for
        context = filled()
        drafter.flush_pending(target, [context])
        columns = context.length + blocks * drafter.config.block_size
        context.buffer = [tuple(part[:, :, :columns].clone() for part in own) for own in context.buffer]
        unrolling = Unrolling(drafter, target, [context])
        states.append(torch.cat([unrolling.extend_chain(torch.tensor([token])) for token in (5, 9, 33)]))
        assert (context.buffer[0][0].shape[2] > columns) == (blocks == 1)
    torch.testing.assert_close(states[1], states[0])


@pytest.mark.parametrize("options", mostly_nightly([{"tree_budget": 8}, {"do_sample": True}]), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_on_other_devices(kind, options):
    target = small_qwen3()
    drafter = unrolled(kind, target, **KINDS[kind], target_layer_ids=[0])
    drafter.bind(target)
    assert_same_text(target, drafter, **options)


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
