"""The grids of `experiments/sweep.py` have flags that `train` takes."""

import runpy
import shlex

import pytest

from hf_hyperdflash.training.script import parse

from ..helpers.scripts import DRAFTER, ROOT


@pytest.mark.parametrize("grid", sorted((ROOT / "experiments" / "grids").glob("*.py")), ids=lambda grid: grid.stem)
def test_every_cell_of_a_grid_has_flags_that_train_takes(grid, tmp_path):
    found = runpy.run_path(str(grid))
    for flags in found["CELLS"].values():
        words = shlex.split(flags.format(drafter=DRAFTER, work_dir=tmp_path))
        parse(["--target", "target", "--output_dir", str(tmp_path), "--use_cpu", "true", *words])
    assert found.get("LIKE", next(iter(found["CELLS"]))) in found["CELLS"]
    assert found.get("METHODS", {}).keys() <= found["CELLS"].keys()
