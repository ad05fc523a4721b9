"""The count of texts that part finds where they do, and nothing else."""

import json
import runpy

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_hyperdflash import HyperDFlashDrafter

from ..helpers.scripts import ROOT, rows_of, run
from ..helpers.tokenizers import characters


def tiny_pair(folder):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=96, pad_token_id=0, eos_token_id=5, initializer_range=0.3,
    )  # fmt: skip
    target = LlamaForCausalLM(config)
    target.save_pretrained(folder / "target")
    characters().save_pretrained(folder / "target")
    HyperDFlashDrafter.from_target(target, tokenizer=characters(), num_hidden_layers=1).save_pretrained(
        folder / "drafter"
    )
    (folder / "suites").mkdir()
    for name, texts in {
        "sums": ["What is 3 plus 4?", "And 2?", "Let it be."],
        "talk": ["Hello, how are you?"],
    }.items():
        lines = [json.dumps({"turns": [text]}) for text in texts]
        (folder / "suites" / f"{name}.jsonl").write_text("\n".join(lines))


def test_float32_texts_are_equal_alone_and_in_batches_and_a_second_run_writes_nothing_again(tmp_path):
    tiny_pair(tmp_path)
    for size in (1, 2):
        output = tmp_path / f"by {size}"
        told = ["--target", tmp_path / "target", "--drafter", tmp_path / "drafter", "--data", tmp_path / "suites"]
        told += ["--output", output, "--dtype", "float32", "--max_new_tokens", 12, "--batch_size", size]
        table = rows_of(run("experiments/count_ties.py", *told, "--limit", 2).partition("| dtype")[2])
        assert table["float32"][:2] == ["all", "3"] and table["float32"][3] == "0"
        before = (output / "texts.jsonl").read_text()
        run("experiments/count_ties.py", *told, "--limit", 3)  # one prompt more
        assert (output / "texts.jsonl").read_text().startswith(before)
        texts = json.loads((output / "results.json").read_text())["texts"]
        found = sorted((each["suite"], each["prompt"]) for each in texts)
        assert found == [("sums", 0), ("sums", 1), ("sums", 2), ("talk", 0)]
        assert all(1 <= each["tokens"] <= 12 and each["parted"] is None for each in texts)


def test_the_distance_is_that_of_the_two_scores_in_steps_of_the_format(tmp_path):
    parting = runpy.run_path(str(ROOT / "experiments" / "count_ties.py"))["parting"]
    tiny_pair(tmp_path)
    target = LlamaForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.bfloat16)
    prompt = torch.tensor([[7, 8, 9, 10]])
    alone = target.generate(prompt, attention_mask=prompt > 0, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    alone = alone[0, 4:]
    assert parting(target, prompt, alone, alone.clone()) is None
    logits = target(torch.cat([prompt, alone[None, :3]], dim=1)).logits[0, -1]
    best, second = logits.topk(2).indices.tolist()
    other = alone.clone()
    other[3] = second if int(alone[3]) == best else best
    found = parting(target, prompt, alone, other)
    top = float(logits.max())
    spacing = next(2.0**n for n in range(10, -10, -1) if 2.0**n <= abs(top)) * 2**-7  # bfloat16 has 8 bits
    assert found["token"] == 3
    assert abs(found["steps"] - abs(float(logits[best] - logits[second])) / spacing) <= 2
