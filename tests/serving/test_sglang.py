"""Our drafters in SGLang's own engine: what they draft, round by round, is what they draft in `generate`.

On a CPU, with `tests/helpers/sglang_on_cpu.py`, which says what stands there for a GPU. `.ci/sglang` makes an
environment with SGLang and runs these; elsewhere they are skipped.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_hyperdflash import load_drafter, load_target, load_tokenizer
from hf_hyperdflash.benchmark.server import Server, measure, sglang_interval, sglang_rounds
from hf_hyperdflash.benchmark.server_comparison import examine_server
from hf_hyperdflash.training.data.endpoint import fetch

from ..conftest import prompt, tiny_drafter
from ..helpers.served_drafters import HEAD, PAIRS, llama, our_drafts, qwen3, stirred, with_fields
from ..helpers.sglang_on_cpu import environment, listening, served

if find_spec("sglang") is None:
    pytest.skip("SGLang is not installed: .ci/sglang makes an environment that has it", allow_module_level=True)

# What SGLang serves beside that.
MORE = {
    "convolutions": (qwen3, with_fields(conv_kernel_size=2, conv_group_size=16)),
    "a layer by its number": (llama, with_fields(**HEAD, target_layer_ids=[0, 3])),
}


@torch.no_grad()
def exact(target: Any) -> Any:
    """With embeddings that bfloat16 can say: SGLang hands a drafter its block's in that type."""
    table = target.get_input_embeddings().weight
    table.copy_(table.bfloat16().float())
    return target


def are_alike(theirs: list[list[int]], ours: list[list[int]]) -> bool:
    """Whether nearly all drafts are ours: where two tokens almost tie, processors round otherwise. In the last rounds
    ours has no room for all; SGLang drafts whole blocks, and one for the last token, too."""
    pairs = [pair for row, own in zip(theirs, ours) for pair in zip(row, own, strict=False)]
    different = sum(a != b for a, b in pairs)
    return len(theirs) - len(ours) in (0, 1) and different <= 0.03 * len(pairs)


def drafts_the_same(target: Any, drafter: Any, folder: Path, **engine: Any) -> None:
    """Text and drafts of a short prompt and of a long one."""
    exact(target).save_pretrained(folder / "target")
    drafter.save_pretrained(folder / "drafter")
    prompts = [prompt(9, 1, 96), prompt(70, 2, 96)]
    expected = [our_drafts(target, drafter, ids, 24) for ids in prompts]
    asked = [ids[0].tolist() for ids in prompts]
    texts, theirs = served(folder / "engine", folder / "target", folder / "drafter", asked, 24, **engine)
    assert texts == [text for text, _ in expected]
    for (_, ours), rows in zip(expected, theirs, strict=True):
        assert are_alike(rows, ours) and len(ours) >= 4
        assert len({tuple(row) for row in ours}) > 2  # not the same whatever comes before


@pytest.mark.parametrize(("family", "drafter"), (PAIRS | MORE).values(), ids=PAIRS | MORE)
def test_every_pair_drafts_the_same(tmp_path, family, drafter):
    target = exact(family())
    drafts_the_same(target, drafter(target), tmp_path)


def test_fewer_drafts_of_a_causal_block(tmp_path):
    target = exact(qwen3())
    drafter = with_fields(causal_layers="all")(target)
    target.save_pretrained(tmp_path / "target")
    drafter.save_pretrained(tmp_path / "drafter")
    ids = prompt(9, 1, 96)
    text, ours = our_drafts(target, drafter, ids, 24)
    texts, theirs = served(
        tmp_path / "engine", tmp_path / "target", tmp_path / "drafter", [ids[0].tolist()], 24,
        speculative_num_draft_tokens=3,
    )  # fmt: skip
    (rows,) = theirs
    assert texts == [text] and rows[0] == ours[0][:2] and {len(row) for row in rows} == {2}


def test_a_prompt_that_is_read_in_parts(tmp_path):
    target = exact(qwen3())
    drafter = with_fields(sequential_head="recurrent", head_rank=5)(target)
    drafts_the_same(target, drafter, tmp_path, chunked_prefill_size=32)


def test_a_pair_drafts_the_same(tmp_path, dense_pair):
    """With drafts that are accepted, in a batch of texts of different lengths, and with prompts that begin alike."""
    paths = dense_pair
    target = load_target(paths[0], dtype=torch.float32)
    drafter = load_drafter(paths[1], target=target, dtype=torch.float32)
    target.generation_config.eos_token_id = None
    prompts = [prompt(length, length, 2048) for length in (5, 17, 40, 90)]
    prompts += [torch.cat([prompts[-1], prompt(6, 3, 2048)], dim=1)]
    expected = [our_drafts(target, drafter, ids, 60) for ids in prompts]
    asked = [ids[0].tolist() for ids in prompts]
    texts, theirs = served(tmp_path / "one", *paths, asked, 60)
    assert texts == [text for text, _ in expected]
    for (_, ours), rows in zip(expected, theirs, strict=True):
        assert are_alike(rows, ours) and len(ours) < 45  # rounds, fewer than tokens
    texts, _ = served(tmp_path / "batch", *paths, asked, 60, batch=True, disable_overlap_schedule=False)
    assert texts == [text for text, _ in expected]


def test_a_server_is_asked_what_it_drafted(tmp_path, dense_pair):
    """By all that it tells: each answer's counts, its counters, which know no token past a text's end, its gauge."""
    prompts = [["What is 3 plus 4?", "And times 8?"], ["What is 12 times 8?"], ["Say hello."], ["Write a function."]]
    paths = dense_pair
    with listening(tmp_path / "server", *paths, "tiny") as root:
        before = sglang_rounds(fetch(f"{root}/metrics"), "tiny")
        figures = measure(Server(root, "tiny"), prompts, 0.0, 2, 60)
        page = fetch(f"{root}/metrics")
    rounds, written = (now - then for now, then in zip(sglang_rounds(page, "tiny"), before))
    assert figures["tau_of"] == "run" and figures["rounds"] == rounds > 40
    assert written == figures["new_tokens"] - figures["answers"]
    past_the_end = figures["rounds"] * figures["tau"] - written
    assert 0 <= past_the_end <= 6 * figures["answers"]
    assert len(figures["acceptance"]) == 6 and figures["acceptance"] == sorted(figures["acceptance"], reverse=True)
    assert figures["tau"] == pytest.approx(1 + sum(figures["acceptance"])) and figures["tau"] > 1.5
    assert 1 < sglang_interval(page, "tiny") <= 7


def test_a_server_is_compared_with_what_is_accepted_here(tmp_path, dense_pair):
    """With the drafter that it serves, and with one that drafts otherwise."""
    paths, prompts = dense_pair, ["What is 12 times 8?", "Say hello.", "Write a function.", "What is 3 plus 4?"]
    target, tokenizer = load_target(paths[0], dtype=torch.float32), load_tokenizer(paths[0])
    drafter = load_drafter(paths[1], target=target, dtype=torch.float32)
    other = stirred(load_drafter(paths[1], target=target, dtype=torch.float32))
    with listening(tmp_path / "server", *paths, "tiny") as root:
        asked = dict(prompts=prompts, max_new_tokens=60)
        found, of_other = (examine_server(target, each, tokenizer, root, **asked) for each in (drafter, other))
    assert found.there.rounds > 20 and found.same[0] >= 3 and not found.cause, str(found)
    assert of_other.cause == "drafter", str(of_other)


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ({"speculative_num_draft_tokens": 4}, "`--speculative-num-draft-tokens` is 4, but the drafter's block has 6"),
        ({"model_path": "target"}, "made for a target with `vocab_size` 2048, but this target's is 96"),
    ],
)
def test_what_does_not_fit_ends_in_one_line(tmp_path, dense_pair, engine, told):
    qwen3(num_hidden_layers=8).save_pretrained(tmp_path / "target")
    engine = {name: str(tmp_path / value) if name == "model_path" else value for name, value in engine.items()}
    with pytest.raises(RuntimeError) as caught:
        served(tmp_path / "engine", *dense_pair, [[5, 6]], 4, **engine)
    (line,) = {line for line in str(caught.value).splitlines() if line.startswith("ValueError: ")}
    assert told in line


def test_weights_that_are_not_there_are_named(tmp_path):
    from safetensors.torch import load_file, save_file

    target = exact(qwen3())
    target.save_pretrained(tmp_path / "target")
    tiny_drafter(target, head_dim=32, reducer="fc").save_pretrained(tmp_path / "drafter")
    weights = load_file(tmp_path / "drafter" / "model.safetensors")
    del weights["layers.1.mlp.up_proj.weight"], weights["hidden_norm.weight"]
    save_file(weights, tmp_path / "drafter" / "model.safetensors")
    with pytest.raises(
        RuntimeError, match=r"no numbers for layers\.1\.mlp\.gate_up_proj\.weight, hidden_norm\.weight"
    ):
        served(tmp_path / "engine", tmp_path / "target", tmp_path / "drafter", [[5, 6]], 4)


UNTOUCHED = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from transformers import AutoConfig
from sglang.srt.model_loader.utils import get_model_architecture
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from types import SimpleNamespace
def of(name):
    return SimpleNamespace(
        hf_config=SimpleNamespace(architectures=[name]), quantization=None, model_impl="auto", is_embedding_gemma=False
    )
known = "sglang.srt.models.registry" in sys.modules
theirs = get_model_architecture(of("Qwen3ForCausalLM"))[0]
from sglang.srt.models.registry import ModelRegistry
before = set(ModelRegistry.models)
ours = get_model_architecture(of("HyperDFlashDrafter"))[0]
print(json.dumps([known, theirs.__module__, ours.__module__, sorted(set(ModelRegistry.models) - before),
                  type(AutoConfig.for_model("qwen3")).__module__]))
"""


def test_installing_it_changes_nothing_for_others(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", UNTOUCHED], env=environment(tmp_path / "there"), capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    *_, line = ran.stdout.splitlines()
    known, theirs, ours, added, config = json.loads(line)
    assert not known  # a process that loads no model pays for none
    assert theirs == "sglang.srt.models.qwen3" and ours == "hf_hyperdflash.serving.sglang.drafter"
    assert added == ["HyperDFlashDrafter"] and config.startswith("transformers.")
