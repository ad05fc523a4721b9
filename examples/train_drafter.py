"""Train a HyperDFlash drafter: `hf-hyperdflash train` as a script, for `accelerate launch`.

accelerate launch --config_file examples/accelerate/ddp.yaml examples/train_drafter.py --target TARGET ...
"""

from hf_hyperdflash.train import main

if __name__ == "__main__":
    main()
