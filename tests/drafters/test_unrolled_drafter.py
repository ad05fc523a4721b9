"""Generation with SpecBlock and EAGLE-3: the target's own text, with all that a drafter has to stand."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessorList

from hf_hyperdflash import Eagle3Drafter, SpecBlockConfig, SpecBlockDrafter, capture_residual
from hf_hyperdflash.drafters import reading as reading_drafter
from hf_hyperdflash.drafters.sampling import DraftRequest, DraftSampler
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.trees.tree import ANCHOR

from ..conftest import mostly_nightly, prompt
from ..helpers import families, oracle_specblock
from ..helpers.device_pairs import assert_same_text, small_qwen3
from ..helpers.schedules import Asked
from ..helpers.unrolled import specblock_oracle, unrolled

KINDS = {"specblock": {"block_size": 3, "max_blocks": 2}, "eagle3": {"max_blocks": 5}, "peagle": {"max_blocks": 5}}


@torch.no_grad()
@pytest.mark.parametrize(("length", "budget"), [(20, None), *((length, 14) for length in (18, 19, 20))])
def test_a_draft_of_a_block_is_drawn_from_what_its_slot_says(length, budget):
    """Chains and trees, block by block as the oracle makes them: the first child of each node is drawn from all that
    the slot says, and later children and last slots begin blocks of their own. Buffers grow between the blocks of
    some rounds, and no block is run where nothing more is admitted."""
    torch.manual_seed(0)
    ids, target = prompt(length), families.qwen3().eval()
    drafter, seen, slots = unrolled("specblock", target, block_size=3, max_blocks=3), target_of(target), 3
    with capture_residual(target, drafter.target_layer_ids) as captured:
        target(ids[:, :-1])
    context, positions = drafter.new_context(), torch.arange(length)[None]
    for part in (slice(0, 1), slice(1, length - 1)):
        following = ids[:, part.start + 1 : part.stop + 1]
        drafter.extend(seen, context, captured[0][:, part], positions[:, part], following)
    request = DraftRequest(context, ids, positions, 8, DraftSampler(LogitsProcessorList(), True, budget))
    (tree,) = drafter.draft(seen, [request])
    tensors, shape = specblock_oracle(drafter, target)
    known = oracle_specblock.blocks(tensors, shape, drafter.condition(captured[0])[0], seen.embed(ids[:, 1:])[0])
    places = {ANCHOR: (known[-1], 0, [])}  # of a node's children: block, slot, and the blocks and slots before
    for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens)):
        block, slot, path = places[parent]
        is_first = parent not in tree.parents[:node]
        if is_first:
            logits = oracle_specblock.logits(tensors, shape, block.hidden[slot])
            torch.testing.assert_close(tree.q[node], logits.softmax(-1), atol=1e-5, rtol=1e-3)
        assert tree.passes[node] == len(path) + 1
        places[node] = block, slot + 1, path
        if not is_first or slot == slots - 1:
            path = [*path, (block, slot)]
            embed = seen.embed(token.view(1, 1))[0, 0]
            places[node] = oracle_specblock.later_block(tensors, shape, known, length - 2, path, embed), 0, path
    assert len(tree) == (budget or 8) and max(tree.passes) == 3 and tree.is_chain == (budget is None)
    admissions = {3: Asked(most=3), 4: Asked(refused=4), 5: Asked(most=5), 6: Asked(refused=6)}
    for count, admission in admissions.items() if budget is None else ():
        sampler = DraftSampler(LogitsProcessorList(), True, chain_admission=admission)
        (part,) = drafter.draft(seen, [request._replace(sampler=sampler)])
        assert part.passes == tree.passes[:count] and len(admission.signals) == min(count + 1, admission.most)


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


def test_a_new_drafter_has_as_many_heads_as_fit_its_width():
    target = families.qwen3()
    config = Eagle3Drafter.from_target(target, head_dim=8).config
    assert config.num_attention_heads * config.head_dim == target.config.hidden_size


def test_a_new_specblock_drafter_without_rank_head_and_shift_has_neither():
    with torch.device("meta"):  # as large as they are by default
        plain = SpecBlockDrafter(SpecBlockConfig(num_hidden_layers=2, rank_head=False, shift=False))
        whole = SpecBlockDrafter(SpecBlockConfig(num_hidden_layers=2, rank_head=True, shift=True))
    assert (plain.config.branching, plain.rank_head, len(plain.shift_proj)) == ([4], None, 0)
    assert whole.config.branching == [2, 4, 6, 4] and whole.rank_head is not None and len(whole.shift_proj) == 1
