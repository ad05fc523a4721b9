"""docs/serving.md's tools without the packages that it is about: its snippets run with stand-ins for them.

A stand-in does with the target what the package does, it calls `generate`. Whether the packages take what a snippet
gives them is tested where they are installed: `.ci/tools` runs `tools/test_page.py` and `tools/test_serve.py`.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType, SimpleNamespace

import pytest
from datasets import Dataset
from transformers import AutoTokenizer, GenerationConfig
from transformers.cli import serve
from transformers.cli.serving import model_manager, utils

from hf_hyperdflash import load_drafter, load_target

from .conftest import MODELS
from .test_snippets import OF_TOOLS, PAGES, snippets

NAME = str(MODELS / "tiny-deepseek-v4")
ASKED = [{"role": "user", "content": "What is 2 + 3?"}]
TOOLS = {page.stem: page for page in PAGES}["serving"]


def asked(tokenizer, times=1):
    return tokenizer.apply_chat_template(
        [ASKED] * times, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )


def evaluated(model, tasks, apply_chat_template):
    assert tasks == ["sums"] and apply_chat_template
    return model.pretrained.generate(**asked(model.tokenizer), do_sample=False, max_new_tokens=12)


class Trainer:
    """Of each step it draws the rollouts of one prompt."""

    def __init__(self, model, reward_funcs, args, train_dataset, processing_class):
        assert callable(reward_funcs) and len(train_dataset) == 1
        self.model, self.args, self.tokenizer = model, args, processing_class

    def train(self):
        config = GenerationConfig(do_sample=True, max_new_tokens=12, **self.args.generation_kwargs)
        self.model.generate(**asked(self.tokenizer, self.args.num_generations), generation_config=config)


class Server:
    """It loads its target when it is asked for."""

    def __init__(self, name, **options):
        inspect.signature(serve.Serve.__init__).bind(self, name, **options)
        self._model_manager = SimpleNamespace(
            load_model_and_processor=self.loaded, process_model_name=model_manager.ModelManager.process_model_name
        )

    @staticmethod
    def loaded(name):
        inspect.signature(model_manager.ModelManager.load_model_and_processor).bind(None, name)
        path = name.removesuffix("@main")  # which transformers before 5.24 adds to a folder, too
        assert name == model_manager.ModelManager.process_model_name(path)
        return load_target(path, dtype="float32"), AutoTokenizer.from_pretrained(path)


@pytest.fixture
def stand_ins(monkeypatch):
    config = lambda folder, **options: SimpleNamespace(**options)  # noqa: E731
    model = lambda pretrained, tokenizer: SimpleNamespace(pretrained=pretrained, tokenizer=tokenizer)  # noqa: E731
    for name, what in {
        "lm_eval": {"simple_evaluate": evaluated}, "lm_eval.models": {}, "lm_eval.models.huggingface": {"HFLM": model},
        "trl": {"GRPOConfig": config, "GRPOTrainer": Trainer},
    }.items():  # fmt: skip
        module = ModuleType(name)
        vars(module).update(what)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(serve, "Serve", Server)


def given() -> dict:
    target, tokenizer = load_target(NAME, dtype="float32"), AutoTokenizer.from_pretrained(NAME)
    return {
        "target": target, "tokenizer": tokenizer, "drafter": load_drafter(f"{NAME}-hyperdflash", target=target),
        "tasks": ["sums"], "reward": len, "prompts": Dataset.from_dict({"prompt": [ASKED]}),
        "name": NAME, "drafter_name": f"{NAME}-hyperdflash", "port": 8000,
    }  # fmt: skip


@pytest.mark.parametrize("begins", ["from lm_eval", "from trl", "from transformers.cli"])
def test_a_tools_snippet_drafts(stand_ins, begins):
    (snippet,) = [code for code in snippets(TOOLS) if code.startswith(begins)]
    exec(snippet, names := given())
    target, drafter = names["target"], names["drafter"]
    if begins == "from transformers.cli":
        target.generate(**asked(names["tokenizer"]), do_sample=False, max_new_tokens=12)  # as the server does
    stats = drafter.last_stats
    assert stats.tau > 1
    if begins == "from trl":
        assert len(stats.rows) == 4 and stats.draft_positions == 3


def test_no_tools_snippet_is_forgotten():
    elsewhere = [code for page in PAGES for code in snippets(page) if OF_TOOLS.search(code)]
    assert len(elsewhere) == 3 and all(code in TOOLS.read_text() for code in elsewhere)


def test_transformers_server_hands_no_assistant_to_generate():
    """Which is why the command drafts with none."""
    own = inspect.getsource(utils.GenerateManager)
    assert own.count("model.generate") > 1 and "assistant" not in own
    assert "assistant_model" not in inspect.signature(serve.Serve.__init__).parameters
