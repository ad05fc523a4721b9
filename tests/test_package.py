"""What holds for the package as a whole: import direction, no side effects, public names."""

import ast
import shutil
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import hf_hyperdflash
from hf_hyperdflash import (
    DeepseekV4DSparkDrafter,
    DeepseekV4MTPDrafter,
    Eagle3Drafter,
    HyperDFlashDrafter,
    SpecBlockDrafter,
)

from .helpers.processes import python

PACKAGE = Path(hf_hyperdflash.__file__).parent
# A module may import only modules to its left. The families of targets may build on each other.
ORDER = [
    "aslm",
    "runtime.version", "runtime.cache_name", "runtime.draws", "runtime.tree", "runtime.tree_rows", "runtime.stats",
    "runtime.verification", "runtime.reducers", "runtime.heads", "runtime.reach", "runtime.attention_masks",
    "runtime.hooks", "runtime.inference_mode",
    "runtime.held_tree", "runtime.cache_ragged", "runtime.cache_linear", "runtime.cache_deepseek_v4",
    "runtime.survival", "runtime.node_survival", "runtime.growth", "runtime.schedule", "runtime.tree_schedule",
    "runtime.batch_schedule", "runtime.sampling",
    "runtime.rank_head", "runtime.rank_growth",
    "runtime.stopping", "runtime.continuation", "runtime.row", "runtime.rope_switch", "runtime.target_family",
    "runtime.target_*",
    "runtime.targets", "runtime.pair", "runtime.rounds", "runtime.shown",
    "runtime.request", "runtime.decoding", "runtime.batch_prefill", "runtime.batch_decoding", "runtime.batch_request",
    "runtime.candidates", "runtime.binding", "runtime.recipe",
    "runtime.configuration_drafter", "runtime.configuration_unrolled",
    "runtime.configuration_*", "runtime.block_path", "runtime.weights", "runtime.mask_token", "runtime.layers",
    "runtime.joint_context",
    "runtime.drafter", "runtime.reading_drafter", "runtime.block_drafter", "runtime.unrolled_drafter",
    "runtime.mtp_checkpoint", "runtime.drafter_deepseek_v4",
    "runtime.modeling_*", "runtime.prompt_lookup", "hub.descriptions", "hub.cards",
    "hub.layout", "hub.layout_*", "hub.formats", "hub.publish",
    "serving.ordered_drafts", "serving.served_config", "serving.vllm_config", "serving.vllm", "serving.vllm_*",
    "serving.sglang_config", "serving.sglang_selector", "serving.sglang_last_layer", "serving.sglang_drafter",
    "serving.sglang",
    "loading", "training.chunk_loss",
    "training.losses", "training.blocks", "training.places", "training.messages", "training.data", "training.teacher",
    "training.locking", "training.fingerprint", "training.features", "training.store", "training.arguments",
    "training.objective", "training.unrolled",
    "training.lessons", "training.bandit", "training.adaptation",
    "training.acceptance", "training.checkpoints", "training.identity", "training.record",
    "training.trainer", "training.flags",
    "training.progress",
    "training.script",
    "benchmark.intervals", "benchmark.other_settings", "benchmark.recommended",
    "benchmark.doctor", "benchmark.suites", "benchmark.results",
    "benchmark.runner", "benchmark.served_counts", "benchmark.endpoint", "benchmark.reliability",
    "benchmark.calibration", "benchmark.figures", "benchmark.report", "display.text", "display.tree",
    "cli.options", "cli.models", "cli.live_line", "cli.who_wrote", "cli.generate",
    "cli.train", "cli.calibrate", "cli.measure", "cli.share", "cli.app",
]  # fmt: skip
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in PACKAGE.rglob("*.py")
    if path.stem != "__init__" and path.parent.name != "metrics"
}


def place(module: str) -> int:
    if module in ORDER:
        return ORDER.index(module)
    places = [i for i, pattern in enumerate(ORDER) if fnmatch(module, pattern)]
    assert places, f"{module} has no place in ORDER"
    return places[0]


def imports_of(module: str) -> set[str]:
    """Modules of the package that a module imports, anywhere in it."""
    path = MODULES[module]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = path.parents[node.level - 1].relative_to(PACKAGE).parts
            name = ".".join([*folder, *(node.module or "").split(".")]).strip(".")
            found |= {name} if name in MODULES else {f"{name}.{part.name}".strip(".") for part in node.names}
    return found & MODULES.keys()


def test_imports_run_one_way():
    assert not [pattern for pattern in ORDER if not any(fnmatch(module, pattern) for module in MODULES)]
    graph = {module: imports_of(module) for module in MODULES}
    list(TopologicalSorter(graph).static_order())  # raises on a circle
    wrong = [(a, b) for a, imported in graph.items() for b in imported if place(b) > place(a)]
    assert not wrong
    # What `evaluate` loads from a path is copied elsewhere first.
    assert not any("from ." in path.read_text() for path in (PACKAGE / "metrics").glob("*.py"))


def test_what_serves_imports_reducers_heads_and_configuration_alone():
    """An engine runs them in its own loop: nothing of ours that needs transformers' models."""
    served = {module for module in MODULES if module.startswith("serving.")}
    allowed = {"runtime.reducers", "runtime.heads", "runtime.reach", "runtime.configuration_hyperdflash"} | served
    assert served and not {b for module in served for b in imports_of(module)} - allowed
    importing = {module for module in MODULES if imports_of(module) & served}
    assert importing <= served  # nobody needs it


DRAFTERS = [HyperDFlashDrafter, DeepseekV4MTPDrafter, DeepseekV4DSparkDrafter, SpecBlockDrafter, Eagle3Drafter]
WITHOUT_WEIGHTS = ["prompt_lookup.py"]  # drafters that are not saved


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_saved_drafter_carries_what_drafting_needs_and_nothing_else(drafter):
    code = drafter.code_files()
    assert {path.parent for path in code} == {PACKAGE / "runtime"}
    # Nothing that trains, writes cards or pushes, by what it would take.
    imported = {
        alias.name if isinstance(node, ast.Import) else node.module or ""
        for path in code
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    roots = {name.partition(".")[0] for name in imported}
    assert not roots & {
        "datasets",
        "peft",
        "evaluate",
        "matplotlib",
        "tqdm",
        "jinja2",
        "rich",
        "typer",
        "numpy",
        "filelock",
    }
    assert not any("trainer" in name.lower() for name in imported)


def test_the_runtime_is_what_drafters_carry():
    carried = {path.name for drafter in DRAFTERS for path in drafter.code_files()}
    assert {path.name for path in (PACKAGE / "runtime").glob("*.py")} - carried == {"__init__.py", *WITHOUT_WEIGHTS}


def test_reducers_are_torch_alone():
    """So that an engine can import them: in a process where nothing else of the package's needs can be imported."""
    code = """
import sys
for other in ("transformers", "accelerate", "huggingface_hub", "safetensors", "numpy"):
    sys.modules[other] = None
from types import SimpleNamespace
import torch
from hf_hyperdflash.runtime.reducers import REDUCERS
config = SimpleNamespace(hidden_size=8, target_hidden_size=8, target_hc_mult=2, target_layer_ids=[0, -1], num_paths=4,
                         rms_norm_eps=1e-6, hc_eps=1e-6, path_norm=True)
for reducer in REDUCERS.values():
    engine = torch.nn.Module()
    engine.config = config
    for name, module in reducer.modules(config).items():
        engine.add_module(name, module)
    for parameter in engine.parameters():
        torch.nn.init.normal_(parameter)
    print(tuple(reducer.reduce(engine, torch.randn(1, 3, 4, 8), torch.float32).shape))
"""
    assert run(code).splitlines() == ["(1, 3, 8)"] * 4


def test_heads_are_torch_alone():
    code = """
import sys
for other in ("transformers", "accelerate", "huggingface_hub", "safetensors", "numpy"):
    sys.modules[other] = None
from types import SimpleNamespace
import torch
from hf_hyperdflash.runtime.heads import HEADS, ConfidenceHead, along_text
config = SimpleNamespace(target_hidden_size=8, vocab_size=9, draft_vocab_size=0, head_rank=4, rms_norm_eps=1e-6)
for kind in HEADS.values():
    head = kind(config)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    ids, states = torch.randint(0, 9, (2, 3)), torch.randn(2, 3, 8)
    out = along_text(states, ids, torch.randn(2, 3, 8), head, ConfidenceHead(config, head.memory_size))
    print(tuple(out.states.shape), tuple(out.confidence.shape))
"""
    assert run(code).splitlines() == ["(2, 3, 8) (2, 3)"] * 5


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_importing_loads_nothing_heavy():
    loaded = run("import sys, hf_hyperdflash; print([m for m in ('torch', 'transformers') if m in sys.modules])")
    assert loaded == "[]"


def test_using_everything_changes_no_registry():
    code = """
import transformers.models.deepseek_v4.modeling_deepseek_v4 as v4
from transformers import cache_utils
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
def registries():
    is_stateful = v4.DeepseekV4ForCausalLM._is_stateful
    return dict(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING), dict(CONFIG_MAPPING._extra_content), is_stateful
before = registries()
import hf_hyperdflash
for name in hf_hyperdflash.__all__:
    getattr(hf_hyperdflash, name)
print(registries() == before)
"""
    assert run(code) == "True"


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
    if not hf_hyperdflash._MODULE_OF.get(name, "").startswith(("training.", "benchmark.", "metrics.")):
        getattr(hf_hyperdflash, name)
own = ("hf_hyperdflash", "transformers", "tokenizers")
print(sorted(m for m in set(sys.modules) - before if not m.startswith(own)))
"""
    assert run(code) == "[]"


def test_the_wheel_has_every_file(tmp_path):
    """Packages are found: a new folder of modules needs no line in pyproject.toml."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(PACKAGE.parent / name, tmp_path / name)
    copied = shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / PACKAGE.name / "more").mkdir()
    (tmp_path / PACKAGE.name / "more" / "__init__.py").touch()
    build = "import setuptools.build_meta as backend; backend.build_wheel('.')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"hf_hyperdflash-{hf_hyperdflash.__version__}-")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith(f"{PACKAGE.name}/")}
    assert names == {path.relative_to(tmp_path).as_posix() for path in copied.rglob("*") if path.is_file()}


def test_public_names_exist_and_are_documented():
    for name in hf_hyperdflash.__all__:
        thing = getattr(hf_hyperdflash, name)
        assert name == "__version__" or thing.__doc__, name
    assert set(hf_hyperdflash.__all__) <= set(dir(hf_hyperdflash))


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
assert "from 24 prompts: about" in said.getvalue(), said.getvalue()
"""
    done = python("-c", code)  # nothing of the extras is imported there before
    assert done.returncode == 0, done.stderr
    missing, *diagnosis = done.stdout.strip().splitlines()
    assert float(missing) in (0, -1) and diagnosis[-1] == "No problem found."


def test_the_drawing_of_the_rooms_is_the_codes():
    script = PACKAGE.parent / "docs" / "draw_rooms.py"
    assert subprocess.run([sys.executable, script, "--check"], check=False).returncode == 0, f"run {script.name}"
