"""What is said of a drafter by its configuration alone, and which kind it is of."""

import pytest
from transformers import PreTrainedConfig

from hf_hyperdflash.hub.kinds import KINDS, describe, kind_in, kind_of, title

from ..conftest import tiny_drafter, tiny_target


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_config_json_names_its_kind_by_type_or_class(kind):
    assert kind_in({"model_type": kind.model_type}) is kind
    assert kind_in({"model_type": "deepseek_v4", "architectures": ["Other", kind.class_name]}) is kind
    assert kind_in({"model_type": "deepseek_v4", "architectures": None}) is None


def test_a_title_tells_a_drafter_from_others_of_its_kind():
    drafter = tiny_drafter(tiny_target(), target_layer_ids=[0, 1])
    assert title(drafter.config) == "HyperDFlash on 0, 1"
    assert {title(kind.config()) for kind in KINDS if kind.title is None} == {
        kind.name for kind in KINDS if kind.title is None
    }


@pytest.mark.parametrize(("name", "words"), [("owl", "an owl drafter"), ("wren", "a wren drafter")])
def test_of_somebodys_own_kind_little_is_said(name, words):
    config = PreTrainedConfig()
    config.model_type = name
    assert kind_of(config) is None and title(config) == name
    assert words in str(describe(config))
