"""Training of EAGLE-3 and SpecBlock against loops over positions, written from the papers."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hyperdflash import capture_residual
from hf_hyperdflash.drafters.parts.heads import rank_classes, rank_features
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.training.losses.loss import IGNORE_INDEX, rank_loss
from hf_hyperdflash.training.losses.objective import collate

from ..conftest import CSA, SLIDING, mostly_nightly, tiny_target
from ..helpers import oracle_eagle3, oracle_specblock
from ..helpers.families import qwen3
from ..helpers.training import packed_rows, rows
from ..helpers.training import trainer_for as any_trainer
from ..helpers.unrolled import eagle3_oracle, specblock_oracle, unrolled


@pytest.fixture(scope="module", params=["qwen3", "deepseek_v4"])
def target(request):
    torch.manual_seed(0)
    return (qwen3() if request.param == "qwen3" else tiny_target(layer_types=[SLIDING, CSA, SLIDING])).eval()


def trainer_for(folder, target, drafter, recipe, train, **options):
    settings = {"num_anchors": 5, "per_device_train_batch_size": 3, **options}
    return any_trainer(folder, target, drafter, train, recipe=recipe, **settings)


@torch.no_grad()
def what_is_read(drafter, target, ids):
    """Of one document: conditions `[seq, hidden_size]` and the tokens' embeddings."""
    with capture_residual(target, drafter.target_layer_ids) as captured:
        target(ids)
    return drafter.condition(captured[0])[0], drafter.embed(target_of(target), ids)[0]


def prepared(trainer, batch):
    """Add what training lays over a batch, and return the residual."""
    trainer.objective.add_anchors(batch, trainer.state.global_step)
    batch["residual"] = trainer.residual(batch)
    return batch["residual"]


OWN = {"draft_vocab_size": 40, "own_embedding": True}
FIELDS = [
    {}, {"block_size": 1, "max_blocks": 4}, {"max_blocks": 1}, {"shift": False}, {"broadcast": False},
    {"num_hidden_layers": 3, "block_size": 2, "max_blocks": 3, "rank_head": False}, OWN,
]  # fmt: skip


@pytest.mark.parametrize("fields", mostly_nightly(FIELDS, kept=3), ids=str)
@torch.no_grad()
def test_specblock_is_trained_as_the_loops_say(tmp_path, target, fields):
    """Logits and rank logits of every anchor, block and slot, in rows of several documents."""
    drafter = unrolled("specblock", target, **{"block_size": 3, "max_blocks": 3, **fields})
    trainer = trainer_for(tmp_path, target, drafter, "specblock", train=packed_rows([(9, 14), (12, 11), (23,)]))
    batch = collate(trainer.train_dataset.to_list())
    prepared(trainer, batch)
    anchors, steps, size = batch["anchors"], batch["steps"], drafter.config.block_size
    found = trainer.objective.run_drafter(drafter, batch)
    tensors, shape = specblock_oracle(drafter, target)
    off = frozenset(name for name in ("shift", "broadcast") if not fields.get(name, True))
    first, compared = steps[::size].tolist(), 0
    for row, (ids, positions) in enumerate(zip(batch["input_ids"], batch["position_ids"])):
        for number, anchor in enumerate(anchors[row].tolist()):
            if anchor < 0:
                continue
            start = anchor - int(positions[anchor])
            document = ids[start : start + int((positions[start:] - positions[start] >= 0).long().cumprod(0).sum())]
            until = (positions[start + 1 :] == 0).nonzero()
            document = ids[start : start + 1 + int(until[0])] if len(until) else ids[start:]
            condition, embeds = what_is_read(drafter, target, document[None])
            at = anchor - start
            known = oracle_specblock.blocks(tensors, shape, condition[:at], embeds[1 : at + 1], off)
            last, path = known[-1], []
            for block, offset in enumerate(first):
                if block:
                    if at + offset >= len(document):
                        break  # no label there
                    path.append((last, offset - first[block - 1] - 1))
                    last = oracle_specblock.later_block(tensors, shape, known, at - 1, path, embeds[at + offset], off)
                for slot in range(size):
                    place = row, number, block * size + slot
                    expected = oracle_specblock.logits(tensors, shape, last.hidden[slot])
                    logits = drafter.drafted_logits(target_of(target), found.states[place])
                    torch.testing.assert_close(logits, expected, atol=3e-4, rtol=2e-3)
                    if found.ranks is not None:
                        expected = oracle_specblock.rank_logits(tensors, shape, last.hidden[slot])
                        torch.testing.assert_close(found.ranks[place], expected, atol=3e-4, rtol=2e-3)
                    compared += 1
    assert compared > 12 and (found.ranks is not None) == drafter.config.rank_head


@pytest.mark.parametrize(("recipe", "fields"), [("eagle3", {}), ("ours", {}), ("eagle3", OWN)], ids=str)
def test_eagle3s_training_time_test(tmp_path, target, recipe, fields):
    """The distillation of every step against loops, weighted as the recipe says."""
    drafter = unrolled("eagle3", target, max_blocks=4, **fields)
    ids = drafter.draft_ids if fields else slice(None)
    trainer = trainer_for(tmp_path, target, drafter, recipe, train=rows(3))
    batch = collate(trainer.train_dataset.to_list())
    loss, terms = trainer.compute_loss(drafter, batch, return_outputs=True)
    assert loss.requires_grad
    tensors, shape = eagle3_oracle(drafter, target)
    sums, counts = torch.zeros(4), torch.zeros(4)
    with torch.no_grad():
        for row, text in enumerate(batch["input_ids"]):
            condition, embeds = what_is_read(drafter, target, text[None])
            # A token that cannot be drafted brings nothing.
            targets = target(text[None]).logits[0].softmax(-1)[:, ids]
            for anchor, labels in zip(batch["anchors"][row].tolist(), batch["labels"][row]):
                valid = int((labels != IGNORE_INDEX).sum())
                if anchor < 0 or not valid:
                    continue
                each = oracle_eagle3.ttt_losses(
                    tensors, shape, condition[:-1], embeds[1:], targets, embeds, valid, [anchor - 1]
                )[0]
                at = targets[anchor : anchor + valid]
                entropy = -(at * (at / at.sum(-1, keepdim=True)).log()).sum(-1)
                sums[:valid] += each - entropy
                counts[:valid] += 1
    decay = torch.exp(-torch.arange(4) / trainer.args.loss_decay)
    kl = (decay * sums / counts.clamp(min=1)).sum() / 4
    torch.testing.assert_close(terms.kl, kl, atol=1e-4, rtol=1e-3)
    if recipe == "eagle3":
        torch.testing.assert_close(loss.detach(), terms.kl)


@pytest.mark.parametrize("fields", [{}, OWN], ids=str)
def test_specblocks_loss_counts_valid_prefixes_and_ranks(tmp_path, target, fields):
    drafter = unrolled("specblock", target, block_size=3, max_blocks=2, **fields)
    ids = drafter.draft_ids if fields else torch.arange(64)
    if fields:  # a token that cannot be drafted is not taken for the first that can
        with torch.no_grad():
            drafter.lm_head.weight[0] *= 4
    trainer = trainer_for(tmp_path, target, drafter, "specblock", train=rows(3), num_anchors=9)
    batch = collate(trainer.train_dataset.to_list())
    residual = prepared(trainer, batch)
    labels = batch["labels"]
    # Where the drafter is right must not always be nowhere: half of the labels are what it drafts.
    with torch.no_grad():
        drafted = trainer.objective.run_drafter(drafter, batch)
        logits = drafter.drafted_logits(target_of(target), drafted.states)
        chance = torch.Generator().manual_seed(0)
        copied = torch.rand(labels.shape, generator=chance) < 0.6
        labels.copy_(torch.where(copied & (labels != IGNORE_INDEX), ids[logits.argmax(-1)], labels))
    loss, terms = trainer.compute_loss(drafter, batch, return_outputs=True)
    blocks = labels.flatten(0, 1).unflatten(1, (2, 3)).flatten(0, 1)
    of_blocks = logits.flatten(0, 1).unflatten(1, (2, 3)).flatten(0, 1)
    valid = oracle_specblock.valid_prefix(ids[of_blocks.argmax(-1)], blocks)
    assert 0 < valid.sum() < (blocks != IGNORE_INDEX).sum()
    kept = blocks.masked_fill(~valid, IGNORE_INDEX).view_as(labels.flatten(0, 1))
    with torch.no_grad():
        teacher = target.get_output_embeddings()(trainer.objective.teacher(batch["anchors"], residual, batch["steps"]))
    share, taught = teacher.softmax(-1)[..., ids].sum(-1), teacher[..., ids].log_softmax(-1)
    kl = share * (taught.exp() * (taught - logits.flatten(0, 1).log_softmax(-1))).sum(-1)
    has = kept != IGNORE_INDEX
    means = (kl * has).sum(0) / has.sum(0).clamp(min=1)
    weights = torch.exp(-torch.arange(3) / trainer.args.loss_decay).repeat(2)
    torch.testing.assert_close(terms.kl, (weights * means).sum() / 6, atol=1e-5, rtol=1e-4)
    classes = torch.full_like(blocks, IGNORE_INDEX)
    for at in (blocks != IGNORE_INDEX).nonzero().tolist():
        place = (ids == blocks[tuple(at)]).nonzero().flatten().tolist()  # none if it cannot be drafted
        classes[tuple(at)] = oracle_specblock.rank_class(of_blocks[tuple(at)], *place) if place else 3
    ranks = oracle_specblock.rank_loss(drafted.ranks.flatten(0, 1).unflatten(1, (2, 3)).flatten(0, 1), classes)
    torch.testing.assert_close(terms.rank, ranks.detach(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(loss.detach(), terms.kl + terms.rank)
    loss.backward()
    learning = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in learning)
    assert len(learning) == len(list(drafter.parameters())) - bool(fields)  # its embedding is the target's


def test_parts_of_a_batch_on_several_processes_sum_to_its_loss(tmp_path, target):
    """Threads stand for them, which wait for each other where processes do."""
    drafter = unrolled("specblock", target, block_size=3, max_blocks=2)
    trainer = trainer_for(tmp_path, target, drafter, "specblock", train=rows(5))
    objective, batch = trainer.objective, collate(trainer.train_dataset.to_list())
    prepared(trainer, batch)
    counts = objective.counts([batch])
    drafter.train()

    def gradients(losses):
        drafter.zero_grad()
        sum(losses).backward()
        return {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}

    objective.total = lambda value: value
    whole = objective.step(drafter, batch, counts=counts)
    wanted = gradients([whole.loss])
    barrier, given, found = threading.Barrier(2), {}, {}

    def total(value):
        given[threading.get_ident()] = value
        barrier.wait()
        summed = sum(given.values())
        barrier.wait()
        return summed

    def run(part):
        own = {name: value if name == "steps" else value[part] for name, value in batch.items()}
        with torch.enable_grad():
            found[part.start] = objective.step(drafter, own, counts=counts)

    objective.total = total
    threads = [threading.Thread(target=run, args=(part,)) for part in (slice(0, 2), slice(2, 5))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in ("loss", "kl", "rank"):
        torch.testing.assert_close(sum(getattr(each, name) for each in found.values()), getattr(whole, name))
    torch.testing.assert_close(gradients([each.loss for each in found.values()]), wanted)


def test_the_rank_head_trains_itself_alone(tmp_path, target):
    drafter = unrolled("specblock", target, block_size=3, max_blocks=2)
    trainer = trainer_for(tmp_path, target, drafter, "specblock", train=rows(3))
    batch = collate(trainer.train_dataset.to_list())
    gradients = []
    for weight in (0.0, 2.0):
        trainer.args.rank_weight = weight
        drafter.zero_grad()
        trainer.compute_loss(drafter, dict(batch)).backward()
        gradients.append({name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None})
    for name, gradient in gradients[0].items():
        if not name.startswith("rank_head"):
            torch.testing.assert_close(gradients[1][name], gradient)
    assert gradients[1]["rank_head.up_proj.weight"].any()


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 14), st.integers(1, 4), st.sampled_from([1.0, 3.0, 10.0]))
def test_rank_loss_is_the_loops(seed, blocks, slots, budget):
    chance = torch.Generator().manual_seed(seed)
    logits = torch.randn(blocks, slots, 4, generator=chance, requires_grad=True)
    classes = torch.randint(0, 4, (blocks, slots), generator=chance)
    right = torch.rand(blocks, slots, generator=chance) < 0.6
    classes = torch.where(right, logits.argmax(-1), classes)
    ends = torch.randint(0, slots + 1, (blocks, 1), generator=chance)
    classes[torch.arange(slots) >= ends] = IGNORE_INDEX
    found, expected = rank_loss(logits, classes, budget), oracle_specblock.rank_loss(logits, classes, budget)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    for each in torch.autograd.grad(found, logits), torch.autograd.grad(expected, logits):
        assert each[0].isfinite().all()


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(20, 50))
def test_ranks_and_their_classes_are_the_loops(seed, vocabulary):
    chance = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocabulary, generator=chance).round(decimals=1)
    for token in range(vocabulary):
        assert int(rank_classes(logits, torch.tensor(token))) == oracle_specblock.rank_class(logits, token)
    features = rank_features(logits)
    best = logits.sort(descending=True).values[:20]
    probabilities = best.softmax(0)
    assert features.shape == (15,)
    torch.testing.assert_close(features[:10], probabilities.log()[:10])
    torch.testing.assert_close(features[10:13], best[0] - best[[1, 2, 4]])
    torch.testing.assert_close(features[13], probabilities[0])
    torch.testing.assert_close(features[14], -(probabilities * probabilities.log()).sum())


def test_blocks_go_on_from_any_slot_and_the_same_ones_again(tmp_path, target):
    drafter = unrolled("specblock", target, block_size=3, max_blocks=3)
    trainer = trainer_for(tmp_path, target, drafter, "specblock", train=rows(3))
    seen = set()
    for step in range(60):
        steps = trainer.objective.steps(step)
        assert torch.equal(steps, trainer.objective.steps(step))
        seen.add(tuple((steps[::3].diff() - 1).tolist()))
    assert seen == {(a, b) for a in range(3) for b in range(3)}
    assert trainer.objective.steps().tolist() == list(range(9))


def test_no_anchor_without_an_entry(tmp_path, target):
    drafter = unrolled("eagle3", target)
    row = {"input_ids": list(range(2, 12)), "loss_mask": [1] * 10}
    trainer = trainer_for(tmp_path, target, drafter, "eagle3", train=[row], num_anchors=99)
    batch = collate(trainer.train_dataset.to_list())
    trainer.objective.add_anchors(batch, trainer.state.global_step)
    assert batch["anchors"].tolist() == [list(range(1, 9))]
    assert trainer.objective.layer_ids[-1] == -1
