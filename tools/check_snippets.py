"""Run the Python snippets of the pages, one after the other, and the first text of the pages. `.ci/nightly` runs it.

    python tools/check_snippets.py              # all, four minutes on one core
    python tools/check_snippets.py using        # the README, which the others begin with, and docs/using.md

What a page has on the Hub lies in folders of the same names beside it, small and real; what it pushes goes to a server
on this machine. Snippets for lm-eval, TRL and transformers' server are run by `tools/check_programs.py`.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]  # of cards: tests/hub/test_cards.py
TARGET, DRAFTER = (ROOT / "examples/models" / name for name in ("tiny-deepseek-v4", "tiny-deepseek-v4-hyperdflash"))
OF_PROGRAMS = re.compile(r"^from (lm_eval|trl|transformers\.cli)\b", re.MULTILINE)
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
ONE_AFTER_THE_OTHER = """
import os, sys
for name in sys.argv[1:]:  # a traceback names the page
    os.chdir(name)
    exec(compile(open(f"{name}.py").read(), f"{name}.py", "exec"), {"__name__": "__main__"})
    os.chdir("..")
"""


def snippets(page: Path, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def make_names(root: Path) -> None:
    """Make folders of what the pages name on the Hub."""
    from hf_hyperdflash import Eagle3Drafter, HyperDFlashDrafter, SpecBlockDrafter, load_drafter, load_target
    from hf_hyperdflash.drafters.adapters import lora_config
    from hf_hyperdflash.hub.formats import export_dflash
    from tests.helpers.dense_pair import save_dense_pair

    for owner in ("Qwen", "z-lab", "RedHatAI", "weijiezz", "deepseek-ai", "org"):
        (root / owner).mkdir(parents=True)
    (root / "examples").symlink_to(ROOT / "examples")
    (root / "Qwen" / "Qwen3-8B").symlink_to(save_dense_pair(root)[0])
    qwen = load_target(root / "Qwen" / "Qwen3-8B", dtype="float32")
    conventional = HyperDFlashDrafter.from_target(qwen, reducer="fc", target_layer_ids=[1, 3, 5], num_hidden_layers=1)
    export_dflash(conventional, root / "z-lab" / "Qwen3-8B-DFlash-b16")
    Eagle3Drafter.from_target(qwen).save_pretrained(root / "RedHatAI" / "Qwen3-8B-speculator.eagle3")
    SpecBlockDrafter.from_target(qwen).save_pretrained(root / "weijiezz" / "SpecBlock-Qwen3-8B")
    make_quantized(root / "deepseek-ai" / "DeepSeek-V4-Flash-0731")
    v4 = load_target(str(TARGET), dtype="float32")
    drafter = load_drafter(str(DRAFTER), target=v4)
    drafter.save_pretrained(root / "org" / "my-drafter")
    drafter.add_adapter(lora_config(drafter, 4), "code")
    drafter.save_pretrained(root / "org" / "code-adapter")


def make_quantized(folder: Path) -> None:
    """Make the shipped target with one weight in FP8 and its experts in FP4, as DeepSeek ships them."""
    import torch
    from safetensors.torch import load_file, save_file

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


def run_pages(folder: Path) -> None:
    from tests.helpers.hub_server import HubServer
    from tests.helpers.processes import python

    chosen = [page for page in PAGES if page == PAGES[0] or page.stem in sys.argv[1:] or not sys.argv[1:]]
    pages, first = [page for page in chosen if snippets(page)], snippets(PAGES[0])[0]
    make_names(folder / "names")
    for page in pages:
        (folder / page.stem).mkdir()
        for path in (folder / "names").iterdir():
            (folder / page.stem / path.name).symlink_to(path)
        given = [GIVEN] if page == PAGES[0] else [GIVEN, first, "requests = [inputs] * 2"]
        own = [dedent(snippet) for snippet in snippets(page) if not OF_PROGRAMS.search(snippet)]
        hub = 'custom_generate="org/my-drafter"'  # a folder, here, and so named twice
        own = [snippet.replace(hub, f'{hub}, assistant_model="org/my-drafter"') for snippet in own]
        if page == PAGES[0]:
            own = [
                snippet + DRAFTS.format(others=re.findall(r'# or "(.*?)"', snippet)) * ("load_drafter(" in snippet)
                for snippet in own
            ]
        (folder / page.stem / f"{page.stem}.py").write_text("\n".join([*given, *own]))
    with HubServer({"hf_writer": {"name": "alice", "write": True, "orgs": ["org"]}}) as hub:
        environment = {**hub.environment(folder / "home", "hf_writer"), "PYTHONPATH": str(ROOT)}
        environment |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        ran = python("-c", ONE_AFTER_THE_OTHER, *(page.stem for page in pages), cwd=folder, env=environment)
        assert ran.returncode == 0, ran.stderr[-3000:]
        assert hub.files("org/my-drafter")["model.safetensors"]  # the README pushes it


def run_recipe() -> None:
    """The recipe's drafter, and its excerpt, the tree of one request: greedy text is the target's."""
    import torch

    from hf_hyperdflash import Drafter
    from hf_hyperdflash.trees.growth import DraftStep
    from tests.conftest import prompt, tiny_target

    written, excerpt = map(dedent, snippets(ROOT / "docs" / "extending" / "drafter.md"))
    module = sys.modules["hf_hyperdflash.drafters.without_weights.NAME"] = ModuleType("NAME")
    vars(module)["__package__"] = "hf_hyperdflash.drafters.without_weights"
    exec(written, vars(module))
    target, made = tiny_target(), {}
    given = {"DraftStep": DraftStep, "logits": torch.randn(1, target.config.vocab_size)}
    exec(excerpt, given, made)
    drafters = [vars(module)["LastTokenDrafter"](target)]

    class Excerpt(Drafter):
        config = target.config

        def draft(self, target: Any, requests: Any) -> Any:
            return [made["tree_of"](each) for each in requests]

    drafters.append(Excerpt())
    plain = target.generate(prompt(9), do_sample=False, max_new_tokens=8)
    for drafter in drafters:
        drafter.bind(target)
        text = target.generate(prompt(9), do_sample=False, max_new_tokens=8, assistant_model=drafter)
        assert torch.equal(text, plain) and drafter.last_stats.nodes


def run_first_text() -> None:
    """What the first page shows is what its command prints, but for the speed."""
    from tests.helpers.processes import python

    page = (ROOT / "docs" / "index.md").read_text()
    (asked,), (shown,) = re.findall(r'--show "(.*)"', page), re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    terminal = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm"}
    code = "from hf_hyperdflash.cli.app import run; run()"
    ran = python("-c", code, "generate", "--target", TARGET, "--drafter", DRAFTER, "--show", asked, env=terminal)
    assert ran.returncode == 0, ran.stderr
    printed = re.sub(r"\x1bD.*?\x1b8|\x1b\[[\d;]*m", "", ran.stdout, flags=re.DOTALL) + ran.stderr
    printed, shown = (re.sub(r"(?:[\d.]+|…) tokens/s", "", text) for text in (printed, shown))
    said, lines = " ".join(printed.split()), [" ".join(line.split()) for line in shown.splitlines()]
    assert [line for line in lines if line not in said] == [], printed
    assert "Loading weights" not in ran.stderr  # transformers' bar, which a pipe does not need


def main() -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        run_pages(Path(folder))
    if sys.argv[1:]:
        return
    run_recipe()
    run_first_text()


if __name__ == "__main__":
    main()
