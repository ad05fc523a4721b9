"""A `Target`: made once for a model, and handed to whoever asks about it."""

import copy
import warnings
from collections import Counter

import pytest
import torch
from transformers.cache_utils import Cache

from hf_hyperdflash import bind, capture_residual, unbind
from hf_hyperdflash.drafters.base import Drafter
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.targets.target import Target
from hf_hyperdflash.trees.tree import DraftTree

from ..conftest import prompt, tiny_drafter, tiny_target
from ..helpers.families import qwen3
from ..helpers.training import rows, trainer_for


@pytest.fixture
def made(monkeypatch):
    """How many targets were made."""
    made, init = Counter(), Target.__init__

    def counted(self, model, trunk):
        made["targets"] += 1
        init(self, model, trunk)

    monkeypatch.setattr(Target, "__init__", counted)
    return made


def test_a_bound_model_has_one_target(made):
    model = tiny_target()
    assert target_of(model) is not target_of(model)
    bind(model)
    made.clear()
    target = target_of(model)
    assert target_of(model) is target and target_of(target) is target and target.model is model and not made
    unbind(model)
    assert target_of(model) is not target


@pytest.mark.parametrize("budget", [None, 8])
@pytest.mark.parametrize("texts", [1, 2])
def test_rounds_make_no_target(made, budget, texts):
    torch.manual_seed(0)
    model = qwen3().eval()
    drafter = tiny_drafter(model)
    drafter.bind(model)
    made.clear()
    ids = torch.cat([prompt(9, seed=seed) for seed in range(texts)])
    model.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=drafter, tree_budget=budget,
                   max_new_tokens=20, do_sample=False, pad_token_id=0)  # fmt: skip
    assert drafter.last_stats.rounds > 2 and not made


def test_training_steps_make_no_target(made, tmp_path):
    torch.manual_seed(0)
    model = qwen3().eval()
    counts = []
    for steps in (1, 4):
        trainer = trainer_for(tmp_path / str(steps), model, tiny_drafter(model), rows(8), max_steps=steps)
        made.clear()
        trainer.train()
        counts.append(made["targets"])
    assert counts[1] - counts[0] == 3  # one a step: what captures the residual of a model that is not bound


class OfTheModel(Drafter):
    """Somebody's own from before there was a `Target`: it asks the model."""

    def __init__(self, model):
        self.config, self.asked = model.config, []

    def check_target(self, target):
        assert target.get_output_embeddings().weight.shape[0] == self.config.vocab_size

    def propose(self, target, context, ids, position_ids, count, sampler):
        states = target.get_input_embeddings()(ids[:, -1:])
        self.asked.append(target.vocab_size)
        return DraftTree.chain(target.lm_head(states)[0].argmax(-1)[:count])


def test_a_drafter_of_the_model_works_and_is_warned():
    torch.manual_seed(0)
    model = qwen3().eval()
    plain = model.generate(prompt(9), max_new_tokens=12, do_sample=False)
    drafter = OfTheModel(model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        drafter.bind(model)
        text = model.generate(prompt(9), max_new_tokens=12, do_sample=False, assistant_model=drafter)
    said = {str(each.message) for each in told if each.category is FutureWarning}
    for name in ("get_output_embeddings", "get_input_embeddings", "vocab_size", "lm_head"):
        assert any(f"write `target.model.{name}`" in each for each in said)
    assert torch.equal(text, plain) and drafter.asked


def test_our_drafters_ask_the_target_alone():
    """None of them is warned, and what is on neither is an error."""
    model = tiny_target()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drafter = tiny_drafter(model)
        drafter.bind(model)
        model.generate(prompt(9), max_new_tokens=12, do_sample=False, assistant_model=drafter)
    with pytest.raises(AttributeError, match="no_such_thing"):
        target_of(model).no_such_thing  # noqa: B018
    assert copy.copy(target_of(model)).model is model


def test_the_residual_of_a_target_is_its_models():
    model = tiny_target()
    with torch.no_grad(), capture_residual(model) as captured:
        model(prompt(9))
    assert captured[0].shape == (1, 9, target_of(model).streams, model.config.hidden_size)


def test_older_codes_names_are_understood():
    """Of a drafter's own code from before 0.3: it asks for `paths`, and its cache layers have `take_back`."""

    class OlderLayer:
        def take_back(self, start):
            aborted.append(start)

    aborted, target = [], target_of(tiny_target())
    assert target.paths == target.streams == target.config.hc_mult
    target.abort_forward(Cache(layers=[OlderLayer(), OlderLayer()]), 7)
    assert aborted == [7, 7]
