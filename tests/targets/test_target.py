"""A `Target`: made once for a model, and handed to whoever asks about it."""

import copy
from collections import Counter

import pytest
import torch

from hf_hyperdflash import bind, capture_residual, unbind
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.targets.target import Target

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


def test_our_drafters_ask_the_target_alone():
    """What is the model's alone is an error."""
    model = tiny_target()
    drafter = tiny_drafter(model)
    drafter.bind(model)
    model.generate(prompt(9), max_new_tokens=12, do_sample=False, assistant_model=drafter)
    with pytest.raises(AttributeError, match="get_input_embeddings"):
        target_of(model).get_input_embeddings  # noqa: B018
    with pytest.raises(AttributeError, match="no_such_thing"):
        target_of(model).no_such_thing  # noqa: B018
    assert copy.copy(target_of(model)).model is model


def test_the_residual_of_a_target_is_its_models():
    model = tiny_target()
    with torch.no_grad(), capture_residual(model) as captured:
        model(prompt(9))
    assert captured[0].shape == (1, 9, target_of(model).streams, model.config.hidden_size)
