"""What a drafter of somebody's own returns is refused in one line that names its class."""

from collections import namedtuple

import pytest
import torch

from hf_hyperdflash.drafters.base import Drafter
from hf_hyperdflash.trees.tree import DraftTree

from ..conftest import prompt
from ..helpers.families import qwen3
from ..helpers.loops import in_transformers_loop


class Returns(Drafter):
    """Proposes one and the same."""

    def __init__(self, target, proposed):
        self.config, self.proposed, self.max_draft_tokens = target.config, proposed, 4

    def propose(self, *_):
        return self.proposed() if callable(self.proposed) else self.proposed


def chain(*tokens, q=None):
    return lambda: DraftTree.chain(torch.tensor(tokens), q)


UNIFORM = torch.full((64,), 1 / 64)
Lookalike = namedtuple("Lookalike", "tokens parents q depths")  # as of another copy of this code
WRONG = [
    (None, "returned None: expected a `DraftTree`"),
    ([5, 7], "returned a list: expected"),
    (torch.tensor([5, 7]), "returned a Tensor: expected"),
    (chain(5, 64), "returned the token 64: expected .* token ids from 0 to 63"),
    (chain(-1), "returned the token -1: expected"),
    (chain(5.0), "returned tokens of torch.float32 on cpu: expected"),
    (chain(True), "returned tokens of torch.bool on cpu: expected"),
    (lambda: DraftTree.chain(torch.tensor([5], device="meta")), "returned tokens of torch.int64 on meta: expected"),
    (chain(5, q=[UNIFORM[:63]]), r"returned a distribution that is torch.float32 \[63\]: expected .* `\[64\]`"),
    (chain(5, 6, q=[None, UNIFORM[None]]), r"returned a distribution that is torch.float32 \[1, 64\]: expected"),
    (chain(5, q=[UNIFORM.long()]), r"returned a distribution that is torch.int64 \[64\]: expected"),
    (chain(5, q=[0.5]), "returned a distribution that is float: expected"),
    (Lookalike(torch.tensor([99]), (-1,), None, (1,)), "returned the token 99: expected"),
]


@pytest.mark.parametrize(("proposed", "words"), WRONG)
@pytest.mark.parametrize("way", ["alone", "batch", "sampled", "transformers"])
def test_what_cannot_be_verified_is_refused(proposed, words, way):
    target = qwen3(2).eval()
    drafter = Returns(target, proposed)
    drafter.bind(target)
    ids = prompt(9).expand(2 if way == "batch" else 1, -1)
    generate = (
        target.generate
        if way != "transformers"
        else lambda ids, assistant_model, **options: in_transformers_loop(target, assistant_model, ids, **options)
    )
    with pytest.raises(ValueError, match="`propose` of the drafter, a Returns, " + words) as refused:
        generate(ids, assistant_model=drafter, do_sample=way == "sampled", max_new_tokens=6)
    assert "\n" not in str(refused.value)


def test_tokens_that_are_no_tensor_make_no_tree():
    with pytest.raises(ValueError, match=r"tokens of type list, expected a tensor `\[nodes\]`"):
        DraftTree.chain([5, 7])


@pytest.mark.parametrize(("proposed", "words"), [(None, "a NoneType"), ([], "0 of them")])
def test_trees_of_a_batch_are_one_for_each_text(proposed, words):
    target = qwen3(2).eval()
    drafter = Returns(target, chain(5))
    drafter.propose_batch = lambda *_: proposed
    drafter.bind(target)
    with pytest.raises(
        ValueError, match=f"`propose_batch` of the drafter, a Returns, returned {words}: expected .* of 2"
    ):
        target.generate(prompt(9).expand(2, -1), assistant_model=drafter, do_sample=False, max_new_tokens=6)


def test_each_tree_of_a_batch_is_checked():
    target = qwen3(2).eval()
    drafter = Returns(target, chain(5))
    for wrong, words in [(chain(64), "returned the token 64"), (chain(*range(2, 8)), "made 6 drafts, .* at most 4")]:
        drafter.propose_batch = lambda *_, wrong=wrong: [chain(5)(), wrong()]
        drafter.bind(target)
        with pytest.raises(ValueError, match=words):
            target.generate(prompt(9).expand(2, -1), assistant_model=drafter, do_sample=False, max_new_tokens=9)
