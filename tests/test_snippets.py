"""Every Python snippet of the pages runs, one after the other, and every command has the flags that a page gives it.

What a page has on the Hub lies in folders of the same names beside it, small and real; what it pushes goes to
`helpers/hub_server.py`.
"""

import json
import os
import re
import shlex
import sys
from pathlib import Path
from textwrap import dedent, indent
from types import ModuleType

import pytest
import torch
import transformers
import typer
from packaging.version import Version
from safetensors.torch import load_file, save_file

from hf_hyperdflash import Drafter, Eagle3Drafter, HyperDFlashDrafter, SpecBlockDrafter, load_drafter, load_target
from hf_hyperdflash.cli.app import app
from hf_hyperdflash.hub.formats import export_dflash
from hf_hyperdflash.training.script import make_parser
from hf_hyperdflash.trees.growth import DraftStep

from .conftest import MODELS, prompt, tiny_target
from .helpers.hub_server import HubServer
from .helpers.processes import python

ROOT = MODELS.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "model_cards").glob("*.md"))]
TARGET, DRAFTER = MODELS / "tiny-deepseek-v4", MODELS / "tiny-deepseek-v4-hyperdflash"

# What pages say that they take as given, beside the README's first snippet.
GIVEN = """
import torch
from datasets import Dataset
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(1)
from hf_hyperdflash import load_drafter, load_target
answered = [{"role": "user", "content": "What is 3 + 4?"}, {"role": "assistant", "content": "The answer is 7."}]
Dataset.from_list([{"messages": answered}] * 4).to_json("answers.jsonl")
chats, held_out = Dataset.from_list([{"messages": answered}] * 2), Dataset.from_list([{"messages": answered}])
"""
# After each snippet of the README that loads a drafter: it is bound as the first one's is, and drafts. A name in its
# comment is another drafter for the same target.
DRAFTS = """
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
inputs = inputs.to(target.device)
for drafter in [drafter, *(load_drafter(other, target=target) for other in {others})]:
    drafter.bind(target)
    target.generate(**inputs, assistant_model=drafter, max_new_tokens=8, do_sample=False)
    assert drafter.last_stats.nodes, drafter
    drafter.unbind(target)
"""
TRAIN_FLAGS = set(make_parser([])._option_string_actions)
OF_OTHERS = {"--config_file"}  # accelerate's
OF_TOOLS = re.compile(r"^from (lm_eval|trl|transformers\.cli)\b", re.MULTILINE)  # run in tests/tools/
ONE_AFTER_THE_OTHER = """
import os, sys
for name in sys.argv[1:]:  # a traceback names the page
    os.chdir(name)
    exec(compile(open(f"{name}.py").read(), f"{name}.py", "exec"), {"__name__": "__main__"})
    os.chdir("..")
"""


def snippets(page: Path, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def names(tmp_path_factory, dense_pair) -> Path:
    """A folder in which what the pages name on the Hub are folders."""
    root = tmp_path_factory.mktemp("names")
    for owner in ("Qwen", "z-lab", "RedHatAI", "weijiezz", "deepseek-ai", "org"):
        (root / owner).mkdir()
    (root / "examples").symlink_to(ROOT / "examples")
    (root / "Qwen" / "Qwen3-8B").symlink_to(dense_pair[0])
    qwen = load_target(dense_pair[0], dtype="float32")
    conventional = HyperDFlashDrafter.from_target(qwen, reducer="fc", target_layer_ids=[1, 3, 5], num_hidden_layers=1)
    export_dflash(conventional, root / "z-lab" / "Qwen3-8B-DFlash-b16")
    Eagle3Drafter.from_target(qwen).save_pretrained(root / "RedHatAI" / "Qwen3-8B-speculator.eagle3")
    SpecBlockDrafter.from_target(qwen).save_pretrained(root / "weijiezz" / "SpecBlock-Qwen3-8B")
    quantized(root / "deepseek-ai" / "DeepSeek-V4-Flash-0731")
    v4 = load_target(str(TARGET), dtype="float32")
    load_drafter(str(DRAFTER), target=v4).save_pretrained(root / "org" / "my-drafter")
    return root


def quantized(folder: Path) -> None:
    """The shipped target with one weight in FP8 and its experts in FP4, as DeepSeek ships them."""
    folder.mkdir()
    for path in TARGET.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.0.attn.wq_a.weight"
    scale = tensors[name].abs().max().float() / 448
    tensors |= {name: (tensors[name] / scale).to(torch.float8_e4m3fn)}
    tensors[name.removesuffix("weight") + "scale"] = torch.full((1, 2), scale)
    for name in [name for name in tensors if name.startswith("model.") and ".experts." in name]:
        rows, columns = tensors[name].shape
        tensors[name] = torch.randint(-128, 128, (rows, columns // 2)).to(torch.int8)
        tensors[name.removesuffix("weight") + "scale"] = torch.full((rows, columns // 32), 2.0**-6)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"expert_dtype": "fp4"}
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.20"), reason="earlier transformers runs no DeepSeek-V4 in bfloat16"
)
def test_snippets_run(names, tmp_path):
    pages = [page for page in PAGES if page.parent.name != "model_cards" and snippets(page)]  # cards: test_cards.py
    assert pages[0].name == "README.md" and len(pages) > 5
    first = snippets(pages[0])[0]
    for page in pages:
        folder = tmp_path / page.stem
        folder.mkdir()
        for path in names.iterdir():
            (folder / path.name).symlink_to(path)
        given = [GIVEN] if page == pages[0] else [GIVEN, first, "requests = [inputs] * 2"]
        own = [dedent(snippet) for snippet in snippets(page) if not OF_TOOLS.search(snippet)]
        hub = 'custom_generate="org/my-drafter"'  # a folder, here, and so named twice
        own = [snippet.replace(hub, f'{hub}, assistant_model="org/my-drafter"') for snippet in own]
        if page == pages[0]:
            own = [snippet + drafts(snippet) for snippet in own]
        (folder / f"{page.stem}.py").write_text("\n".join([*given, *own]))
    with HubServer({"hf_writer": {"name": "alice", "write": True, "orgs": ["org"]}}) as hub:
        environment = {**hub.environment(tmp_path / "home", "hf_writer"), "PYTHONPATH": str(ROOT)}
        environment |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        ran = python("-c", ONE_AFTER_THE_OTHER, *(page.stem for page in pages), cwd=tmp_path, env=environment)
        assert ran.returncode == 0, ran.stderr[-3000:]
        assert hub.files("org/my-drafter")["model.safetensors"]  # the README pushes it


def test_the_recipe_of_a_drafter_is_one(monkeypatch):
    """Its file, by its test."""
    written, _, tested = map(dedent, snippets(ROOT / "docs" / "extending" / "drafter.md"))
    monkeypatch.setitem(sys.modules, "hf_hyperdflash.drafters.without_weights.NAME", module := ModuleType("NAME"))
    vars(module)["__package__"] = "hf_hyperdflash.drafters.without_weights"
    exec(written, vars(module))
    exec(tested, names := {"__package__": "tests.drafters"})
    (options,) = names["test_greedy_text_is_the_targets"].pytestmark
    for each in options.args[1]:
        names["test_greedy_text_is_the_targets"](each)


def test_the_recipes_excerpt_drafts():
    """It is the end of a `propose`."""
    excerpt = dedent(snippets(ROOT / "docs" / "extending" / "drafter.md")[1])
    target, made = tiny_target(), {}
    given = {"DraftStep": DraftStep, "logits": torch.randn(1, target.config.vocab_size)}
    exec(
        f"def propose(self, target, context, ids, position_ids, count, sampler):\n{indent(excerpt, '    ')}",
        given,
        made,
    )
    drafter = type("Excerpt", (Drafter,), {"propose": made["propose"], "config": target.config})()
    plain = target.generate(prompt(9), do_sample=False, max_new_tokens=8)
    drafter.bind(target)
    assert torch.equal(target.generate(prompt(9), do_sample=False, max_new_tokens=8, assistant_model=drafter), plain)
    assert drafter.last_stats.nodes


def drafts(snippet: str) -> str:
    """What lets the drafters draft that a snippet of the README loads and names."""
    if "load_drafter(" not in snippet:
        return ""
    return DRAFTS.format(others=re.findall(r'# or "(.*?)"', snippet))


def commands(page: Path) -> list[list[str]]:
    lines = "\n".join(snippets(page, "bash")).replace("\\\n", " ").splitlines()
    return [
        shlex.split(line, comments=True)
        for line in lines
        if re.search(r"(^|[ /])hf-hyperdflash |examples/\S+\.py", line)
    ]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.stem)
def test_commands_have_their_flags(page):
    ours = typer.main.get_command(app).commands
    for command in commands(page):
        words = [word for word in command if not word.startswith("-")]
        program = next(i for i, word in enumerate(words) if word.endswith(("hf-hyperdflash", ".py")))
        if words[program].endswith(".py"):
            assert (ROOT / words[program]).is_file(), words[program]
            code = (ROOT / words[program]).read_text()
            known = set(re.findall(r'add_argument\(\s*"(--[\w-]+)"', code))
            known |= set(TRAIN_FLAGS) if "train_drafter" in words[program] else set()
        elif words[program + 1] == "train":
            known = TRAIN_FLAGS
        else:
            known = {name for option in ours[words[program + 1]].params for name in option.opts}
        given = {word.partition("=")[0] for word in command if word.startswith("--")}
        assert given - {"--"} <= known | OF_OTHERS, (given - known, command)


def test_the_first_text_is_as_the_page_shows_it():
    page = (ROOT / "docs" / "index.md").read_text()
    (asked,) = re.findall(r'--show "(.*)"', page)
    (shown,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    models = ROOT / "examples" / "models"
    pair = ["--target", models / "tiny-deepseek-v4", "--drafter", models / "tiny-deepseek-v4-hyperdflash"]
    terminal = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm"}
    code = "from hf_hyperdflash.cli.app import run; run()"
    ran = python("-c", code, "generate", *pair, "--show", asked, env=terminal)
    assert ran.returncode == 0, ran.stderr
    beneath, colours = r"\x1bD.*?\x1b8", r"\x1b\[[\d;]*m"
    printed = re.sub(f"{beneath}|{colours}", "", ran.stdout, flags=re.DOTALL)
    without_speed = [re.sub(r"(?:[\d.]+|…) tokens/s", "", text) for text in (printed + ran.stderr, shown)]
    said, lines = (
        " ".join(without_speed[0].split()),
        [" ".join(line.split()) for line in without_speed[1].splitlines()],
    )
    assert [line for line in lines if line not in said] == []
    assert "Loading weights" not in ran.stderr  # transformers' bar, which a pipe does not need
