"""Drawing from a vocabulary made float64 sums of all of it: megabytes that a CPU fetched and gave back every round."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_hyperdflash.trees.draws import sample_index

ROWS, VOCABULARY = 7, 49_152


class Largest(TorchDispatchMode):
    """Keeps the size of the largest tensor that an operation makes, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        inputs = {part.untyped_storage().data_ptr() for part in args if isinstance(part, torch.Tensor)}
        for part in made if isinstance(made, tuple | list) else (made,):
            if isinstance(part, torch.Tensor) and part.untyped_storage().data_ptr() not in inputs:
                self.bytes = max(self.bytes, part.untyped_storage().nbytes())
        return made


def test_a_draw_makes_nothing_of_a_vocabularys_size():
    weights = torch.rand(ROWS, VOCABULARY)
    with Largest() as largest:
        tokens = sample_index(weights)
    assert tokens.shape == (ROWS, 1) and 0 < largest.bytes < weights.nbytes / 10
