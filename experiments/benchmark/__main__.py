"""Small measurements of one part each: what a round, a head, a cache, the loss or a training step costs.

python experiments/benchmark loop --layers 6
python experiments/benchmark loop --help
"""

import importlib
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
NAMES = sorted(path.stem for path in HERE.glob("[a-z]*.py"))


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in NAMES:
        raise SystemExit(f"Error: the measurement is {name!r}, expected one of {', '.join(NAMES)}.")
    device = next((word for word in sys.argv if word.removeprefix("--device=").startswith("cuda")), None)
    if device is not None and not torch.cuda.is_available():
        raise SystemExit(
            f"Error: `--device` is {device.removeprefix('--device=')!r}, and torch {torch.__version__} finds no GPU "
            "here, expected one: leave it out to measure on the CPU."
        )
    sys.path[0] = str(HERE.parent)
    sys.argv[:2] = [f"{HERE.name} {name}"]
    try:
        importlib.import_module(f"{HERE.name}.{name}").main()
    except (ValueError, OSError) as error:  # what the user can mend
        raise SystemExit(f"Error: {' '.join(str(error).split())}") from None


if __name__ == "__main__":
    main()
