"""The picture of draft trees shows the rounds that are run."""

import runpy
from types import SimpleNamespace

from transformers import AutoTokenizer

from hf_hyperdflash import load_drafter, load_target
from hf_hyperdflash.training.data.encoding import encode_prompts

from ..helpers.scripts import DRAFTER, EXAMPLES, ROOT, run


def test_trees_are_drawn_as_they_were(tmp_path):
    text = ["--prompt", "What is 3 plus 4?", "--rounds", 2, "--tree-budget", 9]
    said = run("examples/draw_trees.py", *text, "--output", tmp_path / "new" / "trees.png")
    assert f"{tmp_path / 'new' / 'trees.png'}: 2 rounds, " in said
    assert (tmp_path / "new" / "trees.png").stat().st_size > 5000
    drawing = runpy.run_path(str(ROOT / "examples/draw_trees.py"))
    target = load_target(EXAMPLES / "models" / "tiny-deepseek-v4", dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "models" / "tiny-deepseek-v4")
    drafter = load_drafter(DRAFTER, target=target)
    drafter.bind(target)
    arguments = SimpleNamespace(prompt=text[1], rounds=2, tree_budget=9, temperature=0.0, seed=0)
    rounds = drawing["rounds_of"](arguments, target, tokenizer, drafter)
    ids = encode_prompts(tokenizer, [{"messages": [{"role": "user", "content": text[1]}]}])[0]
    written = target.generate(ids, do_sample=False, max_new_tokens=20)[0, ids.shape[1] + 1 :].tolist()
    told = [token for kept in rounds for token in [*kept.drafts.tokens[kept.accepted].tolist(), kept.own]]
    assert told == written[: len(told)] and len(told) > 2
