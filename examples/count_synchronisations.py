"""How often the host waits for a GPU in a verification round of six drafts, and where: no GPU is needed to count.

    python examples/count_synchronisations.py

The target is a tiny DeepSeek-V4 whose experts run as batched matrix products, on one simulated GPU, the drafter on another.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.test_devices import waits_of_a_round


def main() -> None:
    for do_sample in (False, True):
        for accepted in (6, 3, 0):
            waits = waits_of_a_round(accepted, do_sample)
            print(f"{'sampled' if do_sample else 'greedy'}, {accepted} of 6 accepted: {waits.total()} waits")
            for place, count in waits.most_common():
                print(f"  {count:3} {place}")


if __name__ == "__main__":
    main()
