"""What a draft gains from knowing the one before it: every reducer and head with both losses, at one size.

A reducer reads what it does in the papers: vanilla DFlash's `fc` not the last layer, the gate nothing else.
"""

from itertools import product

READ = {"fc": "1 3", "hc_gate": "-1", "hybrid": "1 3 -1"}
RANKS = {"markov": 128, "recurrent": 128, "selector": 128, "state": 256}
HEADS = {"none": ""} | {head: f"--sequential_head {head} --head_rank {rank}" for head, rank in RANKS.items()}
CELLS = {
    f"{reducer}, {head}, {recipe}": f"--layers 2 --reducer {reducer} --target_layer_ids {READ[reducer]} "
    f"{HEADS[head]} --recipe {recipe}"
    for reducer, head, recipe in product(READ, HEADS, ("hyperdflash", "ours"))
}
LIKE = "hybrid, none, hyperdflash"
