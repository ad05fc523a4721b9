"""What it costs a sequential head to choose among the block's own best tokens, by the weight of their cross-entropy.

Candidates are chosen by the block's own logits, which `--blind_weight` trains. `--drafter`, which has a head, is
trained on with each weight, and then measured with each number of candidates.
"""

CELLS = {f"weight {weight:g}": f"--drafter {{drafter}} --blind_weight {weight}" for weight in (0, 0.1, 0.3, 1)}
START = {"head_candidates": 256}
CONFIGS = {"all tokens": {"head_candidates": 0}} | {f"{n} candidates": {"head_candidates": n} for n in (256, 64)}
