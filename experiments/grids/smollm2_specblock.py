"""SpecBlock for SmolLM2-135M-Instruct, and without each of its mechanisms; sizes and flags as in `smollm2`."""

SPECBLOCK = (
    "--drafter_type specblock --reducer fc --target_layer_ids 1 10 19 28 --draft_vocab_size 4096 "
    "--intermediate_size 800 --recipe specblock"
)
CELLS = {
    "SpecBlock": SPECBLOCK,
    "without shift": f"{SPECBLOCK} --no_shift",
    "without broadcast": f"{SPECBLOCK} --no_broadcast",
    "without valid prefix": f"{SPECBLOCK} --valid_prefix false",
    "without rank head": f"{SPECBLOCK} --no_rank_head",
}
METHODS = {name: [f"8{nodes}" for nodes in ("", ", 8 nodes", ", 16 nodes")] for name in CELLS}
