"""What a draft vocabulary covers is counted in answers that it was not chosen from."""

import json
import runpy
from collections import Counter

from ..helpers.scripts import ROOT
from ..helpers.tokenizers import characters

SCRIPT = ROOT / "experiments" / "count_vocabulary.py"


def test_answers_are_counted_by_source_without_the_questions_and_the_last_tenth_is_held_out(tmp_path):
    texts = {"sums": ["1 2"] * 9 + ["3 3"], "talk": ["abb"] * 9 + ["abc"]}
    rows = [
        {"source": source, "messages": [{"role": "user", "content": "zzz"}, {"role": "assistant", "content": text}]}
        for source, answers in texts.items()
        for text in answers
    ]
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = characters()
    script = runpy.run_path(str(SCRIPT))
    seen, held_out = script["count_answers"](tmp_path / "answers.jsonl", tokenizer)
    one, two, three, space, a, b, c = tokenizer.convert_tokens_to_ids([*"123 abc"])
    assert seen == {"sums": Counter({one: 9, space: 9, two: 9}), "talk": Counter({a: 9, b: 18})}
    assert held_out == {"sums": Counter({three: 2, space: 1}), "talk": Counter({a: 1, b: 1, c: 1})}
    covered = script["covered"]
    assert covered(seen["talk"], 1, held_out["talk"]) == 1 / 3  # b alone
    assert covered(seen["talk"], 2, held_out["talk"]) == 2 / 3 and covered(seen["talk"], 2, held_out["sums"]) == 0
