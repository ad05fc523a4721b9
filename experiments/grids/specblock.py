"""SpecBlock beside EAGLE-3, beside blocks with a state head, and without each of its mechanisms.

What they read is said after `--`, for example `-- --target_layer_ids 1 3 -1 --reducer hybrid --max_steps 1500`, and
their size by `--parameters 2035000`.
"""

SPECBLOCK = "--drafter_type specblock --recipe specblock"
ONE_LAYER = "--layers 1 --no_shift --valid_prefix false"  # there is nothing to shift between
CELLS = {
    "SpecBlock": SPECBLOCK,
    "EAGLE-3": "--drafter_type eagle3 --recipe eagle3",
    "State head": "--layers 2 --sequential_head state --head_rank 256 --recipe ours",
    "without shift": f"{SPECBLOCK} --no_shift",
    "without broadcast": f"{SPECBLOCK} --no_broadcast",
    "without valid prefix": f"{SPECBLOCK} --valid_prefix false",
    "without shift and valid prefix": f"{SPECBLOCK} --no_shift --valid_prefix false",
    "without rank head": f"{SPECBLOCK} --no_rank_head",
    "blocks of three": f"{SPECBLOCK} {ONE_LAYER} --block_size 3 --max_blocks 3",
    "blocks of two": f"{SPECBLOCK} {ONE_LAYER} --block_size 2 --max_blocks 4",
}
DRAFTS = {name: {"EAGLE-3": 7, "State head": 6, "blocks of three": 9}.get(name, 8) for name in CELLS}
METHODS = {name: [f"{drafts}, 16 nodes", f"{drafts}, 60 nodes"] for name, drafts in DRAFTS.items()}
for name in (
    "SpecBlock",
    "without shift and valid prefix",
    "blocks of three",
    "blocks of two",
    "EAGLE-3",
    "State head",
):
    METHODS[name].insert(0, str(DRAFTS[name]))  # the chain, too
