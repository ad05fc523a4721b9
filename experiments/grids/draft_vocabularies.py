"""What a draft vocabulary's size is worth: one block with a state head, from 2,048 tokens to all of the target's.

`--drafter` is not needed. `experiments/count_vocabulary.py` counts what each covers of other text.
"""

BLOCK = "--layers 2 --num_draft_tokens 7 --intermediate_size 1024 --sequential_head state --recipe ours"
CELLS = {
    f"{size or 'all'} tokens": f"--reducer fc --target_layer_ids 1 10 19 28 {BLOCK} --draft_vocab_size {size}"
    for size in (2048, 4096, 8192, 16384, 0)
}
METHODS = {name: ["7", "7, 16 nodes"] for name in CELLS}
