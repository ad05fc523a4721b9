"""Where the information on future tokens lies: every source and reducer, with and without the KL term."""

from itertools import product

NAMES = {"hc_gate": "gate", "fc": "fc", "hybrid": "gate + fc", "stream_mean": "stream mean"}
CELLS = {
    f"{NAMES[reducer]} of {read.replace(' ', ' and ')}, KL {weight:g}": f"--layers 2 --reducer {reducer} "
    f"--target_layer_ids {read} --kl_weight {weight}"
    for weight, read, reducer in product((0.15, 0.0), ("-1", "1 3", "1 3 -1"), NAMES)
}
RATES = [2e-3, 4e-3]
