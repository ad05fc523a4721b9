"""What all drafters have in common, on drafters of a few lines."""

import copy
import threading
from importlib import import_module

import pytest
import torch
from transformers import AutoModel, GenerationConfig

from hf_hyperdflash import DeepseekV4MTPDrafter, Drafter, Observer, PromptLookupDrafter, bind
from hf_hyperdflash.hub.kinds import KINDS
from hf_hyperdflash.trees.tree import DraftTree

from ..conftest import half_right, prompt, tiny_drafter, tiny_target
from ..helpers.families import qwen3


class Repeating(Drafter):
    """Drafts the anchor again and again: the least that a drafter can be."""

    def __init__(self, target):
        self.config, self.seen = target.config, []

    def extend(self, target, context, residual, position_ids, next_ids):
        assert residual is None
        self.seen.append((context.end, position_ids[0].tolist(), next_ids[0].tolist()))

    def propose(self, target, context, ids, position_ids, count, sampler):
        assert context.end == ids.shape[1] - 1 == position_ids[0, -1]
        return DraftTree.chain(ids[0, -1:].expand(count))


class Listener(Observer):
    def __init__(self):
        self.rounds, self.tokens = [], 0

    def add_round(self, context, tree, logits, accepted):
        self.rounds.append((tree.tokens.tolist(), logits, accepted))

    def end(self, stats):
        self.tokens = stats.tokens


def test_a_drafter_of_two_methods_is_lossless_and_its_observer_hears_of_every_round():
    target, ids = tiny_target(hidden_size=64), prompt(9)
    with torch.no_grad():
        target.lm_head.weight[7] *= 4  # so that the target repeats itself, sometimes
    options = dict(do_sample=False, max_new_tokens=24)
    expected = target.generate(ids, **options)
    drafter = Repeating(target)
    drafter.num_draft_tokens, drafter.observer = 3, Listener()
    drafter.bind(target)
    assert torch.equal(target.generate(ids, assistant_model=drafter, **options), expected)
    assert drafter.observer.tokens == 24
    text, stats = expected[0].tolist(), drafter.last_stats
    assert [len(accepted) for drafts, _, accepted in drafter.observer.rounds if drafts] == stats.accepted
    # What the target said after the anchor and after every accepted draft is what it wrote.
    at = len(text) - 24
    for drafts, logits, accepted in drafter.observer.rounds:
        assert logits.shape == (len(drafts) + 1, 64) and accepted == list(range(len(accepted)))
        written = logits.argmax(-1).tolist()[: len(accepted) + 1]
        assert written == text[at : at + len(written)]
        at += len(written)
    assert at == len(text)
    # Every token but the last was taken in once, in order, with the one that follows it.
    taken = [pair for _, *pairs in drafter.seen for pair in zip(*pairs)]
    assert taken == list(zip(range(len(text) - 1), text[1:]))


@pytest.mark.parametrize(
    ("make", "usual"),
    [(Repeating, 1), (lambda target: PromptLookupDrafter(target, 4), 4), (tiny_drafter, 6),
     (lambda target: DeepseekV4MTPDrafter(target.config), 3)],
    ids=["any number", "lookup", "block", "mtp"],
)  # fmt: skip
def test_a_number_of_drafts_can_be_given_back(make, usual):
    drafter = make(tiny_target())
    assert drafter.num_draft_tokens == usual and drafter.last_stats is None
    for number in (1, "auto", drafter.max_draft_tokens or 500):
        drafter.num_draft_tokens = number
        assert drafter.num_draft_tokens == number
    drafter.num_draft_tokens = None
    assert drafter.num_draft_tokens == usual


def test_a_generation_that_could_not_draft_leaves_no_statistics():
    target, ids = tiny_target(hidden_size=64), prompt(9)
    drafter, other = tiny_drafter(target), tiny_drafter(target)
    drafter.bind(target)
    options = dict(do_sample=False, max_new_tokens=6)
    for each in (drafter, other):
        target.generate(ids, assistant_model=each, **options)
        assert each.last_stats.tokens == 6
    target.generate(ids, assistant_model=drafter, num_beams=2, **options)
    assert drafter.last_stats is None and other.last_stats.tokens == 6


def test_each_thread_finds_its_own_statistics():
    target, ids = tiny_target(hidden_size=64), prompt(9)
    drafter = half_right(target, ids, max_new_tokens=20)
    drafter.bind(target)
    target.generate(ids, assistant_model=drafter, do_sample=False, max_new_tokens=20)
    mine, theirs = drafter.last_stats, []

    def elsewhere():
        theirs.append(drafter.last_stats)
        target.generate(ids, assistant_model=drafter, do_sample=False, max_new_tokens=5)
        theirs.append(drafter.last_stats)

    for _ in range(8):  # one after the other, so that a later one gets an earlier one's number
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert theirs[-2] is None and theirs[-1].tokens == 5
    assert drafter.last_stats is mine and mine.tokens == 20


def test_a_drafter_in_files_of_its_own_carries_them(tmp_path, monkeypatch):
    """A file with any name, and what it imports beside it, which use the installed package."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "sizes.py").write_text("WIDTH = 3\n")
    (tmp_path / "mine" / "own.py").write_text(
        "import torch\n"
        "from transformers import PreTrainedConfig\n"
        "from hf_hyperdflash.drafters.saved import SavedDrafter\n"
        "from .sizes import (\n    WIDTH,\n)\n"
        "class OwnConfig(PreTrainedConfig):\n    model_type = 'own'\n"
        "class Own(SavedDrafter):\n"
        "    config_class = OwnConfig\n"
        "    def __init__(self, config):\n"
        "        super().__init__(config)\n"
        "        self.norm = torch.nn.Linear(WIDTH, WIDTH)\n"
        "        self.post_init()\n"
        "    def _init_weights(self, module): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    own = import_module("mine.own")
    own.Own(own.OwnConfig()).save_pretrained(tmp_path / "saved")
    assert {path.name for path in (tmp_path / "saved").glob("*.py")} == {"own.py", "sizes.py"}
    loaded = AutoModel.from_pretrained(tmp_path / "saved", trust_remote_code=True)
    assert loaded.norm.weight.shape == (3, 3) and type(loaded) is not own.Own


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.config_path], ids=lambda kind: kind.model_type)
def test_a_configuration_is_saved_alone_after_transformers_loaded_its_code(tmp_path, kind):
    """As from a folder whose code is the installed package's: the next configuration could not be saved."""
    for registered in (kind.config, kind.drafter):
        registered.register_for_auto_class()
    kind.config().save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert not kind.drafter.is_remote_code()


def test_a_default_drafts_for_who_names_none():
    target, ids = tiny_target(hidden_size=64), prompt(9)
    options = dict(do_sample=False, max_new_tokens=12)
    expected = target.generate(ids, **options)
    drafter, other = half_right(target, ids, max_new_tokens=12), Repeating(target)

    def drafting(**given):
        for each in (drafter, other):
            each._remember(None)
        assert torch.equal(target.generate(**{"input_ids": ids, **given}, **options), expected)
        return [each for each in (drafter, other) if each.last_stats is not None]

    drafter.bind(target)
    assert drafting() == []  # bound, and no default
    drafter.bind(target, as_default=True)
    other.bind(target)  # which changes no default
    assert drafting() == drafting(generation_config=GenerationConfig(**options)) == [drafter]
    assert drafter.last_stats.rounds < 11
    assert drafting(assistant_model=None) == [] and drafting(assistant_model=other) == [other]
    original, target = target, copy.deepcopy(target)
    assert drafting() == []  # a copy has a default of its own, which is a copy
    target = original
    other.bind(target, as_default=True)
    assert drafting() == [other]
    other.unbind(target)
    drafter.bind(target)  # of which nothing is left
    assert drafting() == []


@pytest.mark.parametrize(
    "asked",
    [dict(num_beams=2), dict(generation_config=GenerationConfig(num_beams=2)), dict(prompt_lookup_num_tokens=2),
     dict(custom_generate=lambda model, input_ids, **rest: input_ids)],
    ids=lambda asked: next(iter(asked)),
)  # fmt: skip
def test_a_default_leaves_other_ways_alone(asked):
    target, ids = qwen3().eval(), torch.cat([prompt(9)] * (1 if "prompt_lookup_num_tokens" in asked else 2))
    options = dict(do_sample=False, max_new_tokens=6, attention_mask=torch.ones_like(ids))
    expected = target.generate(ids, **options, **asked)
    drafter = tiny_drafter(target, reducer="fc")
    drafter.bind(target, as_default=True)
    assert torch.equal(target.generate(ids, **options, **asked), expected)
    assert drafter.last_stats is None
    target.generate(ids, **options)
    assert drafter.last_stats is not None


def test_a_target_with_a_default_may_assist():
    """transformers' assisted loop crops the cache that the assistant's `generate` left."""
    target, ids = qwen3().eval(), prompt(9)
    options = dict(do_sample=False, max_new_tokens=8)
    expected = target.generate(ids, **options)
    bind(target)
    assistant = qwen3().eval()
    drafter = tiny_drafter(assistant, reducer="fc")
    drafter.bind(assistant, as_default=True)
    assert torch.equal(target.generate(ids, assistant_model=assistant, **options), expected)
    assert drafter.last_stats is None
