"""What holds for the package as a whole: import direction, no side effects, public names."""

import ast
import subprocess
import sys
from pathlib import Path

import hf_hyperdflash

PACKAGE = Path(hf_hyperdflash.__file__).parent
# A module may import only modules to its left.
ORDER = [
    "configuration_hyperdflash", "recipe", "model_card", "cache", "linear_cache", "losses", "blocks", "data", "attentions", "draft_processors", "generation", "prompt_lookup", "per_thread", "residual", "indexer", "hooks", "target", "locking", "fingerprint",
    "modeling_hyperdflash", "formats", "mtp_checkpoint", "modeling_mtp", "features", "evaluation", "training_args", "trainer", "train", "doctor", "suites", "benchmark", "summary", "leads", "figures", "report", "terminal", "cli",
]  # fmt: skip


def imports_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    found = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1}
    return {name.split(".")[0] for name in found if name}


def test_imports_run_one_way():
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert modules == set(ORDER)
    for position, name in enumerate(ORDER):
        assert imports_of(PACKAGE / f"{name}.py") <= {"metrics", *ORDER[:position]}, name
    # What `evaluate` loads from a path must stand alone.
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
    # trains and measures needs more: transformers' Trainer and the `evaluate` library.
    code = """
import sys
import transformers.models.deepseek_v4.modeling_deepseek_v4, transformers.models.qwen3.modeling_qwen3
import transformers.generation.utils, torch.utils.data, tqdm.auto
before = set(sys.modules)
import hf_hyperdflash
for name in hf_hyperdflash.__all__:
    if hf_hyperdflash._MODULE_OF.get(name) not in ("doctor", "evaluation", "trainer", "training_args"):
        getattr(hf_hyperdflash, name)
print(sorted(m for m in set(sys.modules) - before if not m.startswith(('hf_hyperdflash', 'transformers'))))
"""
    assert run(code) == "[]"


def test_public_names_exist_and_are_documented():
    for name in hf_hyperdflash.__all__:
        thing = getattr(hf_hyperdflash, name)
        assert name == "__version__" or thing.__doc__, name
    assert set(hf_hyperdflash.__all__) <= set(dir(hf_hyperdflash))
