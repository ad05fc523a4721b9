"""What holds for the package as a whole: import direction, no side effects, public names."""

import subprocess
import sys
from graphlib import TopologicalSorter

import pytest

import hf_hyperdflash
from tools.house import PACKAGE, ROOMS, import_graph, imports, modules

from .helpers.processes import python

MODULES = modules()


def test_imports_run_one_way():
    graph = import_graph()
    list(TopologicalSorter(graph).static_order())  # raises on a circle
    rooms = {module: module.partition(".")[0] for module in MODULES if not module.startswith("serving.")}
    assert set(rooms.values()) == set(ROOMS)
    wrong = [
        (a, b)
        for a, room in rooms.items()
        for b in graph[a]
        if b not in rooms or ROOMS.index(rooms[b]) > ROOMS.index(room)
    ]
    assert not wrong
    # What `evaluate` loads from a path is copied elsewhere first.
    assert not any("from ." in path.read_text() for path in (PACKAGE / "benchmark" / "metrics").glob("*.py"))


def test_what_serves_imports_reducers_heads_and_configuration_alone():
    """An engine runs them in its own loop: nothing of ours that needs transformers' models."""
    served = {module for module in MODULES if module.startswith("serving.")}
    parts = {f"drafters.parts.{name}" for name in ("reducers", "heads", "block_attention")}
    # What writes features: the file of a part, and how a checkpoint is known without loading it.
    features = {f"training.features.{name}" for name in ("part_file", "engine_protocol", "checkpoint")}
    known_by = {"drafters.weights", "hub.gguf", "version"}
    assert {b for module in features | known_by for b in imports(MODULES[module], MODULES)} <= features | known_by
    # The kinds of drafters are words and names of modules.
    allowed = {*parts, *features, "drafters.blocks.configuration_hyperdflash", "hub.kinds"} | served
    assert imports(MODULES["hub.kinds"], MODULES) == {
        "hub.descriptions"
    }  # of which `import hf_hyperdflash` loads nothing heavy
    assert served and not {b for module in served for b in imports(MODULES[module], MODULES)} - allowed
    assert {b for part in parts for b in imports(MODULES[part], MODULES)} <= {*parts, "targets.gate"}
    importing = {module for module in MODULES if imports(MODULES[module], MODULES) & served}
    assert importing <= served  # nobody needs it


TORCH_ALONE = """
import sys
for other in ("transformers", "accelerate", "huggingface_hub", "safetensors", "numpy"):
    sys.modules[other] = None
import hf_hyperdflash.drafters.parts.heads, hf_hyperdflash.drafters.parts.reducers
import hf_hyperdflash.trees.growth, hf_hyperdflash.trees.acceptance
"""


def test_trees_reducers_and_heads_are_torch_alone():
    """So that an engine can import them: in a process where nothing else of the package's needs can be imported."""
    assert run(TORCH_ALONE) == ""


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_importing_loads_nothing_heavy():
    loaded = run("import sys, hf_hyperdflash; print([m for m in ('torch', 'transformers') if m in sys.modules])")
    assert loaded == "[]"


@pytest.mark.nightly  # a process that imports everything
def test_using_everything_changes_no_registry():
    code = """
import transformers.models.deepseek_v4.modeling_deepseek_v4 as v4
from transformers import AttentionInterface, AttentionMaskInterface, cache_utils
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
def registries():
    is_stateful = v4.DeepseekV4ForCausalLM._is_stateful
    attention = [sorted(each._global_mapping) for each in (AttentionInterface, AttentionMaskInterface)]
    return dict(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING), dict(CONFIG_MAPPING._extra_content), is_stateful, attention
before = registries()
import hf_hyperdflash
for name in hf_hyperdflash.__all__:
    getattr(hf_hyperdflash, name)
print(registries() == before)
"""
    assert run(code) == "True"


@pytest.mark.nightly  # imports in processes of their own
def test_importing_is_as_fast_as_what_it_needs():
    # Not a time but its cause: nothing beyond torch, transformers' own needs and our modules is loaded. Only what
    # trains and measures needs more: transformers' Trainer, and `evaluate` for its two modules.
    code = """
import sys
import transformers.models.deepseek_v4.modeling_deepseek_v4, transformers.models.qwen3.modeling_qwen3
import transformers.generation.utils, torch.utils.data, tqdm.auto
before = set(sys.modules)
import hf_hyperdflash
for name in hf_hyperdflash.__all__:
    if not hf_hyperdflash._MODULE_OF.get(name, "").startswith(("training.", "benchmark.")):
        getattr(hf_hyperdflash, name)
own = ("hf_hyperdflash", "transformers", "tokenizers")
print(sorted(m for m in set(sys.modules) - before if not m.startswith(own)))
"""
    assert run(code) == "[]"


def test_public_names_exist_and_are_documented():
    for name in hf_hyperdflash.__all__:
        thing = getattr(hf_hyperdflash, name)
        assert name == "__version__" or thing.__doc__, name
    assert set(hf_hyperdflash.__all__) <= set(dir(hf_hyperdflash))


@pytest.mark.nightly  # a process without the extras measures and diagnoses a pair
def test_measuring_and_the_doctor_need_no_extra():
    """In a process where nothing of the extras can be imported: what `pip install hf-hyperdflash` alone gives."""
    models = PACKAGE.parent / "examples" / "models"
    code = f"""
import contextlib, io, sys
for extra in ("datasets", "peft", "evaluate", "matplotlib", "pandas"):
    sys.modules[extra] = None  # as if it were not installed
import torch
from hf_hyperdflash import HyperDFlashDrafter, load_target, measure_acceptance
from hf_hyperdflash.cli.app import run
target, drafter = {str(models / "tiny-deepseek-v4")!r}, {str(models / "tiny-deepseek-v4-hyperdflash")!r}
pair = load_target(target, dtype="float32"), HyperDFlashDrafter.from_pretrained(drafter, dtype="float32").eval()
measured = measure_acceptance(*pair, [torch.tensor([[0, 50, 60, 70]])], max_new_tokens=6)
print(measured["tau"] * measured["rounds"] + 1 - measured["tokens"])  # the prompt's own token is of no round
sys.argv = ["hf-hyperdflash", "doctor", "--target", target, "--drafter", drafter, "--max-new-tokens", "4"]
with contextlib.redirect_stderr(io.StringIO()) as said:
    try:
        run()
    except SystemExit as ended:
        assert not ended.code, said.getvalue()
assert "from up to 24 prompts" in said.getvalue(), said.getvalue()
"""
    done = python("-c", code)  # nothing of the extras is imported there before
    assert done.returncode == 0, done.stderr
    missing, *diagnosis = done.stdout.strip().splitlines()
    assert float(missing) in (0, -1) and diagnosis[-1] != "Problems found."
