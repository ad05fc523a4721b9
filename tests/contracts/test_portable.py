"""Every kind of drafter against every promise of the code in its saved folder, in a process without the package."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModel, PreTrainedTokenizerFast

from hf_hyperdflash import __version__
from hf_hyperdflash.decoding.stats import keep_trees
from hf_hyperdflash.drafters.letter import PORTABLE
from hf_hyperdflash.hub.kinds import KINDS as SAVED_KINDS

from ..conftest import mostly_nightly, prompt, tiny_drafter
from ..helpers import families
from ..helpers.headed_drafters import headed
from ..helpers.processes import python
from ..helpers.refusals import Refusal
from .test_drafters import KINDS, LAWS, READ, SAVED, of_family

ROOT = Path(__file__).parents[2]
# With a running state: the reducer of targets with several streams, and drafters of one stream.
RUNNING = {
    name: of_family(getattr(families, name), lambda target: headed(target, "state", num_draft_tokens=4))
    for name in ("qwen3_next", "granite_hybrid", "falcon_h1", "hunyuan_v4", "glm5_next", "qwen4_exp")
}
WITHOUT_CODE = {"mtp head", "gemma4 assistant"}  # which are saved in their publishers' layouts
PAIRS = {
    **{kind: KINDS[kind] for kind in SAVED if kind not in WITHOUT_CODE},
    **RUNNING,
    "gemma2": of_family(families.gemma2, tiny_drafter),
}
# Whose stock text depends on how it is cut into forwards: equal scores of an indexer choose one or another.
UNSTEADY = {"hunyuan_v4": {"processors of transformers"}}
# The most lines that a folder may have, by the kind of target.
LIMITS = {"one stream": 1500, "running state": 2000, "deepseek_v4": 2500}


def saved(folder: Path, target, drafter) -> Path:
    target.save_pretrained(folder / "target")
    drafter.save_pretrained(folder / "drafter")
    letters = Tokenizer(models.WordLevel({chr(65 + i): i for i in range(64)}, unk_token="A"))
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(folder / "tokenizer")
    return folder


def without_package(asked: str, folder: Path) -> dict:
    """What a function of `saved_folder` says of a folder, in a process of its own."""
    code = (
        "import json, sys; from pathlib import Path; from tests.helpers import saved_folder; "
        f"print(json.dumps(saved_folder.{asked}(Path(sys.argv[1]))))"
    )
    environment = os.environ | {"HF_MODULES_CACHE": str(folder / "modules"), "PYTHONPATH": str(ROOT)}
    done = python("-c", code, folder, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "kind",
    mostly_nightly(["hyperdflash", "eagle3", *sorted(PAIRS.keys() - {"hyperdflash", "eagle3"})], kept=2),
)
def test_a_folder_drafts_without_the_package(kind, tmp_path):
    """Takes seconds: a process without the package, and some thirty generations in it."""
    target, drafter = PAIRS[kind](tmp_path / "checkpoint")
    told = without_package("promises", saved(tmp_path, target, drafter))
    drafter.bind(target)
    with keep_trees():
        target.generate(prompt(13), do_sample=False, max_new_tokens=24, assistant_model=drafter)
    drafts = [tree.drafts.tokens.tolist() for tree in drafter.last_stats.trees]
    assert told.pop("kind") == type(drafter).__name__
    assert told.pop("drafts") == drafts and told.pop("accepted") == drafter.last_stats.accepted
    for what, message in told.pop("refused").items():
        assert message and "\n" not in message, what
        assert what.startswith("(") or "install hf-hyperdflash" in message, (what, message)
    broken = {promise for promise, is_kept in told.items() if is_kept is not True}
    assert broken <= UNSTEADY.get(kind, set())


@pytest.mark.parametrize("kind", mostly_nightly(LAWS, 2))
def test_sampled_text_has_the_targets_law(kind, tmp_path):
    """By every way that the draws can go, which takes seconds."""
    told = without_package("law", saved(tmp_path, *LAWS[kind]()))
    # Linear attention rounds in another way over several tokens than over one.
    assert told["furthest"] < (1e-3 if kind == "running state" else 1e-5) and told["accepted"] > 0


@pytest.mark.parametrize("kind", PAIRS)
def test_a_folder_is_short(kind, tmp_path):
    target, drafter = PAIRS[kind](tmp_path / "checkpoint")
    drafter.save_pretrained(tmp_path)
    texts = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*.py")}
    name = drafter.config.model_type
    assert set(texts) == {f"modeling_{name}.py", f"portable_{name}.py", "custom_generate/generate.py"}
    kind_of_target = "deepseek_v4" if target.config.model_type == "deepseek_v4" else "one stream"
    kind_of_target = "running state" if kind in RUNNING else kind_of_target
    assert sum(len(text.splitlines()) for text in texts.values()) <= LIMITS[kind_of_target]
    for text in texts.values():
        # It imports torch and transformers, or the package in a `try`; every name is defined; nothing is opened.
        tree = ast.parse(text)
        imported = {node.module for node in tree.body if isinstance(node, ast.ImportFrom) and not node.level}
        imported |= {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
        outside = {module.partition(".")[0] for module in imported} - set(__import__("sys").stdlib_module_names)
        assert outside <= {"torch", "transformers", "accelerate"}
        called = {
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert not called & {"open", "exec", "eval", "compile", "__import__"}


def test_every_kind_that_is_saved_has_its_letter():
    assert {kind.model_type for kind in SAVED_KINDS if kind.drafter.carries_code} == PORTABLE.keys()


def test_an_installed_package_runs_the_drafter_itself(tmp_path):
    target = families.qwen3().eval()
    drafter = tiny_drafter(target, **READ)
    drafter.save_pretrained(tmp_path)
    assert isinstance(AutoModel.from_pretrained(tmp_path, trust_remote_code=True), type(drafter))


def test_an_older_package_is_refused(tmp_path, monkeypatch):
    drafter = tiny_drafter(families.qwen3().eval(), **READ)
    monkeypatch.setattr("hf_hyperdflash.drafters.letter.__version__", "9.1.0")
    drafter.save_pretrained(tmp_path)
    Refusal(lambda: AutoModel.from_pretrained(tmp_path, trust_remote_code=True), ("9.1.0", __version__, "pip")).check()
