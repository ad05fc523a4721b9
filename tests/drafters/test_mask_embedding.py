"""The mask of a block: a token that is never drafted, or a vector of the drafter's own. What a fresh block says."""

import math

import pytest
import torch
from transformers import LogitsProcessorList

from hf_hyperdflash import Eagle3Drafter, HyperDFlashDrafter, SpecBlockDrafter, capture_residual
from hf_hyperdflash.benchmark.doctor.diagnosis import Examination
from hf_hyperdflash.benchmark.doctor.fit import check_mask_token
from hf_hyperdflash.drafters.parts.heads import HEADS
from hf_hyperdflash.drafters.sampling import DraftRequest, DraftSampler
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.training.arguments import HyperDFlashTrainingArguments
from hf_hyperdflash.training.losses.objective import collate, make_objective

from ..conftest import prompt, tiny_drafter
from ..helpers import families
from ..helpers.tokenizers import characters
from ..helpers.training import rows

KINDS = [{}, *({"sequential_head": kind, "head_rank": 8} for kind in HEADS), {"draft_vocab_size": 24}]


@pytest.fixture
def tied():
    """A tiny Llama whose LM head is its embedding, of rows as long as a trained model's."""
    torch.manual_seed(0)
    target = families.llama().eval()
    target.config.pad_token_id = None
    target.lm_head.weight = target.model.embed_tokens.weight
    with torch.no_grad():
        target.model.embed_tokens.weight.normal_().add_(0.5)
    return target


def own_vector(target, **fields):
    drafter = HyperDFlashDrafter.from_target(target, **{"num_hidden_layers": 2, **fields}).eval()
    assert drafter.config.mask_token_id is None
    return drafter


def first_loss(drafter, target):
    """Cross-entropy of a draft before any training, in nats."""
    batch = collate([{**row, "position_ids": range(len(row["input_ids"]))} for row in rows(4)])
    objective = make_objective(
        drafter, target_of(target), HyperDFlashTrainingArguments("unused", num_anchors=4, use_cpu=True)
    )
    objective.add_anchors(batch, 0)
    with torch.no_grad(), capture_residual(target, objective.layer_ids) as captured:
        target(batch["input_ids"])
        batch["residual"] = captured[0]
        return float(objective.step(drafter, batch, drafter.vocabulary_table).cross_entropy)


@pytest.mark.parametrize("fields", KINDS, ids=str)
@pytest.mark.parametrize(("budget", "do_sample"), [(None, True), (9, False)])
def test_the_mask_token_is_never_drafted(tied, fields, budget, do_sample):
    """Not even by a block that is sure of it, and nothing is drawn from a distribution that has it."""
    drafter = tiny_drafter(tied, **fields)
    drafter.norm.weight.data.fill_(1.0)  # as earlier releases begin
    mask = drafter.config.mask_token_id
    sampler = DraftSampler(LogitsProcessorList(), do_sample, budget)
    for seed in range(3):
        ids, context = prompt(9, seed=seed), drafter.new_context()
        with torch.no_grad():
            alone = tied.lm_head(drafter._end(tied.model.embed_tokens(torch.tensor([mask]))))
        assert alone.argmax() == mask
        request = DraftRequest(context, ids, torch.arange(9)[None], 6, sampler)
        (tree,) = drafter.draft(target_of(tied), [request])
        assert len(tree) and mask not in tree.tokens.tolist()
        assert tree.q is None or max(float(q[mask]) for q in tree.q) == 0


@pytest.mark.parametrize(
    "fields", [*KINDS, {"sample_from_anchor": True}, {"hidden_size": 48, "head_dim": 16}], ids=str
)
@pytest.mark.parametrize("mask", [1, None])
def test_a_fresh_block_is_sure_of_nothing(tied, fields, mask):
    """Where the LM head is the embedding, a slot's state is the embedding that the slot reads, and its logits say that
    token. Its first loss is a guess's."""
    make = tiny_drafter if mask else own_vector
    drafter = make(tied, **fields)
    guess = math.log(fields.get("draft_vocab_size", 64))
    assert first_loss(drafter, tied) < guess + 1.25  # a nat more than a guess, of the few tokens that were looked at
    if mask and "hidden_size" not in fields:
        drafter.norm.weight.data.fill_(1.0)
        assert first_loss(drafter, tied) > guess + 5


@pytest.mark.parametrize("kind", [Eagle3Drafter, SpecBlockDrafter])
@pytest.mark.parametrize("fields", [{}, {"draft_vocab_size": 24}, {"own_embedding": True}], ids=str)
def test_fresh_entries_are_sure_of_nothing(tied, kind, fields):
    drafter = kind.from_target(tied, **fields)
    guess = math.log(fields.get("draft_vocab_size", 64))
    assert first_loss(drafter, tied) < guess + 1.5
    drafter.norm.weight.data.fill_(1.0)
    assert first_loss(drafter, tied) > guess + 1.5


def test_with_a_head_of_its_own_a_target_leaves_the_norm_alone(qwen3):
    assert torch.equal(tiny_drafter(qwen3).norm.weight, torch.ones(64))
    assert torch.equal(Eagle3Drafter.from_target(qwen3).norm.weight, torch.ones(64))


@pytest.fixture
def qwen3():
    torch.manual_seed(0)
    target = families.qwen3().eval()
    target.config.pad_token_id = None
    return target


@pytest.mark.parametrize("fields", [{}, {"hidden_size": 48, "head_dim": 16}, {"sample_from_anchor": True}], ids=str)
def test_a_vector_of_its_own_stands_where_a_token_would(qwen3, fields):
    """The drafts, round by round, are those of a token whose embedding that vector is."""
    own = own_vector(qwen3, **fields)
    token = tiny_drafter(qwen3, **fields, mask_token_id=7)
    token.load_state_dict(own.state_dict(), strict=False)
    with torch.no_grad():
        own.mask_embedding.weight[0] = token._begin(qwen3.get_input_embeddings()(torch.tensor([7])))[0]
    for drafter in (own, token):
        drafter.bind(qwen3)
    ids = torch.cat([prompt(9), prompt(9, seed=1)])
    for batch, asked in ((ids[:1], {}), (ids, {"tree_budget": 8})):  # one text and two, whose blocks share a pass
        options = dict(attention_mask=torch.ones_like(batch), do_sample=False, max_new_tokens=20, pad_token_id=0)
        plain, accepted = qwen3.generate(batch, **options), []
        for drafter in (own, token):
            assert torch.equal(qwen3.generate(batch, assistant_model=drafter, **options, **asked), plain)
            accepted.append(drafter.last_stats.accepted)
        assert accepted[0] == accepted[1]


def test_the_doctor_says_what_masks(qwen3):
    examined = Examination(qwen3, own_vector(qwen3), characters())
    assert list(check_mask_token(examined)) == []
    assert examined.found.facts["mask token"].startswith("none, ")
