"""What holds for the package as a whole: import direction, no side effects, public names."""

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import hf_hyperdflash

PACKAGE = Path(hf_hyperdflash.__file__).parent
# A module may import only modules to its left.
ORDER = [
    "version", "configuration_hyperdflash", "recipe", "loading", "model_card", "hub", "mask_token", "cache", "linear_cache", "losses", "blocks", "places", "data", "attentions", "draft_processors", "generation", "per_thread", "residual", "indexer", "hooks", "target", "prompt_lookup", "locking", "fingerprint",
    "modeling_hyperdflash", "formats", "mtp_checkpoint", "modeling_mtp", "features", "evaluation", "training_args", "checkpoints", "trainer", "train_flags", "sources", "train", "intervals", "other_settings", "doctor", "suites", "benchmark", "summary", "leads", "figures", "report", "terminal", "cli",
]  # fmt: skip


def imports_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    found = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1}
    return {name.split(".")[0] for name in found if name}


def test_imports_run_one_way():
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert modules == set(ORDER)
    for position, name in enumerate(ORDER):
        assert imports_of(PACKAGE / f"{name}.py") <= set(ORDER[:position]), name
    # What `evaluate` loads from a path is copied elsewhere first.
    assert not any(imports_of(path) for path in (PACKAGE / "metrics").glob("*.py"))


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
    return dict(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING), dict(CONFIG_MAPPING._extra_content), v4.DeepseekV4ForCausalLM._is_stateful
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
    if hf_hyperdflash._MODULE_OF.get(name) not in ("doctor", "evaluation", "trainer", "training_args") and not hf_hyperdflash._MODULE_OF.get(name, "").startswith("metrics."):
        getattr(hf_hyperdflash, name)
print(sorted(m for m in set(sys.modules) - before if not m.startswith(('hf_hyperdflash', 'transformers'))))
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
print(measure_acceptance(*pair, [torch.tensor([[0, 50, 60, 70]])], max_new_tokens=6)["tau"])
sys.argv = ["hf-hyperdflash", "doctor", "--target", target, "--drafter", drafter, "--max-new-tokens", "4"]
with contextlib.redirect_stderr(io.StringIO()) as said:
    try:
        run()
    except SystemExit as ended:
        assert not ended.code, said.getvalue()
_, _, shown = said.getvalue().partition("Generating from 24 prompts ...")
assert "generating: " in shown, said.getvalue()
"""
    tau, *diagnosis = run(code).splitlines()
    assert float(tau) >= 1 and diagnosis[-1] == "No problem found."
