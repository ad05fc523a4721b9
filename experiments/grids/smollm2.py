"""Six kinds of drafters for SmolLM2-135M-Instruct, all of some 10.9 million parameters, and one that goes on.

They read the same layers, and draft the answers' 4,096 most frequent tokens. Each is trained with its own paper's
loss; the block with a state head with what measured best here. `--drafter` is the one that goes on.
"""

READ = "--reducer fc --target_layer_ids 1 10 19 28 --draft_vocab_size 4096"
BLOCK = f"{READ} --layers 2 --num_draft_tokens 7 --mask_token_id 16"
CELLS = {
    "State head": f"{BLOCK} --intermediate_size 1024 --sequential_head state --recipe ours",
    "Vanilla DFlash": f"{BLOCK} --intermediate_size 1320 --recipe hyperdflash --kl_weight 0 --loss_decay 4",
    "DSpark": f"{BLOCK} --intermediate_size 336 --sequential_head markov --head_rank 64 --confidence_head "
    "--sample_from_anchor --recipe dspark",
    "EAGLE-3": f"--drafter_type eagle3 {READ} --intermediate_size 2840 --recipe eagle3",
    "SpecBlock": f"--drafter_type specblock {READ} --intermediate_size 800 --recipe specblock",
    "Shipped": "--drafter {drafter} --recipe ours --learning_rate 1.5e-4",
}
LIKE = "State head"
NODES = ("", ", 8 nodes", ", 16 nodes")
DRAFTS = {"SpecBlock": 8}
METHODS = {name: [f"{DRAFTS.get(name, 7)}{nodes}" for nodes in NODES] for name in CELLS}
