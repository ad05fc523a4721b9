"""Train a HyperDFlash drafter: `hf-hyperdflash train` as a script, for `accelerate launch`.

accelerate launch --config_file examples/accelerate/ddp.yaml examples/train_drafter.py --target TARGET ...
"""

import sys

from hf_hyperdflash.cli.app import run

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    run()
