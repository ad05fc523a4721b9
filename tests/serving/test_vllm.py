"""Our drafters in vLLM's own engine: what they draft, round by round, is what they draft in `generate`.

`.ci/vllm` makes an environment with vLLM and runs these; elsewhere they are skipped.
"""

from __future__ import annotations

import gc
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
)

from hf_hyperdflash import load_drafter, load_target
from hf_hyperdflash.drafters.parts.heads import run_heads
from hf_hyperdflash.hub.formats import export_dflash

from ..conftest import MODELS, prompt, tiny_drafter
from ..helpers.served_drafters import COMMON, HEAD, PAIRS, SLOT, our_drafts, qwen3, with_fields

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: .ci/vllm makes an environment that has it")

SETTINGS = dict(
    dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=4, skip_tokenizer_init=True, seed=0,
    enable_prefix_caching=False,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")


@contextmanager
def engine(target: str | Path, drafter: str | Path | None, **settings: Any) -> Iterator[Any]:
    from vllm.distributed import cleanup_dist_env_and_memory

    speculative = None if drafter is None else {"method": "dflash", "model": str(drafter)}
    speculative = speculative and {**speculative, **settings.pop("speculative", {})}
    try:
        yield vllm.LLM(str(target), speculative_config=speculative, **{**SETTINGS, **settings})
    finally:
        gc.collect()
        cleanup_dist_env_and_memory()


def written(made: Any, prompts: list[torch.Tensor], count: int, **sampling: Any) -> list[list[int]]:
    params = vllm.SamplingParams(
        **{"temperature": 0, "max_tokens": count, "ignore_eos": True, "detokenize": False, **sampling}
    )
    outputs = made.generate([{"prompt_token_ids": ids[0].tolist()} for ids in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture
def their_drafts(monkeypatch) -> list[list[int]]:
    """What vLLM's proposer drafts, a row a call and request."""
    from vllm.v1.spec_decode.dflash import DFlashProposer

    rows: list[list[int]] = []
    own = DFlashProposer.propose

    def propose(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        drafts = own(self, *args, **kwargs)
        rows.extend(drafts.tolist())
        return drafts

    monkeypatch.setattr(DFlashProposer, "propose", propose)
    return rows


def drafts_the_same(target: Any, drafter: Any, folder: Path, their_drafts: list[list[int]], **settings: Any) -> None:
    """Text and drafts of a short prompt and of a long one."""
    target.save_pretrained(folder / "target")
    if not (folder / "drafter").exists():  # in another layout
        drafter.save_pretrained(folder / "drafter")
    prompts = [prompt(9, 1, 96), prompt(70, 2, 96)]
    expected = [our_drafts(target, drafter, ids, 24) for ids in prompts]
    with engine(folder / "target", folder / "drafter", **settings) as made:
        for ids, (text, ours) in zip(prompts, expected):
            their_drafts.clear()
            assert written(made, [ids], 24) == [text]
            # In the last rounds ours has no room for all; vLLM drafts once more after the last token.
            theirs = [row[: len(own)] for row, own in zip(their_drafts, ours)]
            assert theirs == [own[: len(row)] for row, own in zip(their_drafts, ours)] and len(ours) >= 4
            assert len({tuple(row) for row in ours}) > 2  # not the same whatever comes before


def granite() -> Any:
    scales = dict(embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.5, attention_multiplier=0.2)
    shape = {name: value for name, value in COMMON.items() if name != "head_dim"}
    return GraniteForCausalLM(GraniteConfig(**{**shape, **scales})).eval()


def gemma3() -> Any:
    return Gemma3ForCausalLM(
        Gemma3TextConfig(**COMMON, sliding_window=32, layer_types=["sliding_attention", "full_attention"] * 2)
    ).eval()


# What vLLM serves beside that: SGLang rotates all of a head. Granite scales embeddings, which a state head reads, and
# logits, to which a Markov head adds.
HALF = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
MORE = {
    "RoPE of a part": (qwen3, with_fields(rope_parameters=HALF)),
    **{f"granite, {head}": (granite, with_fields(sequential_head=head, head_rank=5)) for head in ("state", "markov")},
}


@pytest.mark.parametrize(("family", "drafter"), (PAIRS | MORE).values(), ids=PAIRS | MORE)
def test_every_pair_drafts_the_same(tmp_path, their_drafts, family, drafter):
    target = family()
    drafts_the_same(target, drafter(target), tmp_path, their_drafts)


def test_fewer_drafts_of_a_causal_block(tmp_path, their_drafts):
    target = qwen3()
    drafter = with_fields(causal_layers="all")(target)
    drafts_the_same(target, drafter, tmp_path, their_drafts, speculative={"num_speculative_tokens": 2})


def test_a_pair_drafts_the_same(dense_pair, their_drafts):
    """With drafts that are accepted: whole rounds of them enter the context."""
    target = load_target(dense_pair[0], dtype=torch.float32)
    drafter = load_drafter(dense_pair[1], target=target, dtype=torch.float32)
    until_end = {"ignore_eos": False, "stop_token_ids": [target.config.eos_token_id]}
    with engine(*dense_pair) as made:
        for seed in range(3):
            ids = prompt(30, seed, 2048)
            text, ours = our_drafts(target, drafter, ids, 80)
            their_drafts.clear()
            assert written(made, [ids], 80, **until_end) == [text]
            theirs = [row[: len(own)] for row, own in zip(their_drafts, ours)]
            assert theirs == ours and len(ours) < 60  # rounds, fewer than tokens
        # A batch of texts of different lengths: blocks of one must not read another's.
        prompts = [prompt(length, length, 2048) for length in (5, 17, 40, 90)]
        texts = [our_drafts(target, drafter, ids, 40)[0] for ids in prompts]
        assert written(made, prompts, 40, **until_end) == texts


@pytest.fixture
def served(tmp_path):
    """Runs the command of docs/serving.md with another target and drafter, and returns where it answers."""
    started = []
    command = re.findall(
        r"^(vllm serve .*)$", (MODELS.parent.parent / "docs" / "serving.md").read_text(), re.MULTILINE
    )[0]

    def serve(target: Path, drafter: Path) -> str:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        words = shlex.split(command.replace("Qwen/Qwen3-8B", str(target)).replace("my-drafter", str(drafter)))
        words[0] = str(Path(sys.executable).with_name(words[0]))
        words += ["--host", "127.0.0.1", "--port", port, "--dtype", "float32", "--enforce-eager"]
        words += ["--served-model-name", "served"]  # as the scripts of examples/ name it
        log = (tmp_path / "log").open("wb")
        process = subprocess.Popen(
            [*words, "--max-model-len", "512", "--max-num-seqs", "4"], stdout=log, stderr=log, start_new_session=True
        )
        started.append(process)
        for _ in range(300):
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                return f"http://127.0.0.1:{port}"
            assert process.poll() is None, (tmp_path / "log").read_text()[-4000:]
            time.sleep(1)
        raise TimeoutError(f"no answer on port {port}")

    yield serve
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_the_documented_command_serves(dense_pair, served, monkeypatch):
    folders = dense_pair
    target = load_target(folders[0], dtype=torch.float32)
    drafter = load_drafter(folders[1], target=target, dtype=torch.float32)
    ids = prompt(30, 1, 2048)
    text, _ = our_drafts(target, drafter, ids, 40)
    root = served(*folders)
    asked = {"prompt": ids[0].tolist(), "max_tokens": 40, "temperature": 0, "return_token_ids": True}
    request = urllib.request.Request(
        f"{root}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        assert json.load(answer)["choices"][0]["token_ids"] == text
    monkeypatch.syspath_prepend(MODELS.parents[1] / "experiments")
    from serve_deepseek_v4 import gaps

    with torch.no_grad():
        logits = target(torch.tensor([ids[0].tolist() + text])).logits[0, ids.shape[1] - 1 : -1]
    best = logits.topk(2).values
    assert gaps(SimpleNamespace(root=root), ids[0].tolist(), 40) == pytest.approx(
        (best[:, 0] - best[:, 1]).tolist(), abs=1e-3
    )
    with urllib.request.urlopen(f"{root}/metrics") as page:
        found = re.findall(
            r"^vllm:spec_decode_num_accepted_tokens_total\{.*\} (.*)$", page.read().decode(), re.MULTILINE
        )
    assert [float(count) > 0 for count in found] == [True]


def test_a_prompt_that_is_read_in_parts(tmp_path, their_drafts):
    target = qwen3()
    drafter = with_fields(**HEAD)(target)
    target.save_pretrained(tmp_path / "target")
    drafter.save_pretrained(tmp_path / "drafter")
    ids = prompt(70, 2, 96)
    text, ours = our_drafts(target, drafter, ids, 24)
    with engine(tmp_path / "target", tmp_path / "drafter", max_num_batched_tokens=32) as made:
        assert written(made, [ids], 24) == [text]
    # vLLM drafts after each part, and once more at the end.
    found = [[row[: len(own)] for row, own in zip(their_drafts[part:], ours)] for part in range(len(their_drafts))]
    assert found.index(ours) > 0 and len(ours) >= 4


@torch.no_grad()
def joint_of_two(target: Any, ids: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """The probability of each second and third token after `ids`, `[vocabulary, vocabulary]`."""
    first = target(ids).logits[0, -1].softmax(-1)
    pairs = torch.cartesian_prod(torch.arange(vocabulary), torch.arange(vocabulary))
    logits = target(torch.cat([ids.expand(len(pairs), -1), pairs], dim=1)).logits.softmax(-1)
    second = logits[:, -2].gather(-1, pairs[:, 1:])[:, 0]  # given the first
    return torch.einsum(
        "a,ab,abc->bc", first, second.view(vocabulary, -1), logits[:, -1].view(vocabulary, vocabulary, -1)
    )


@pytest.mark.parametrize("drawn", ["greedy", "probabilistic"])
def test_drawn_text_is_distributed_as_the_targets(tmp_path, monkeypatch, drawn):
    """The second and third token are drafted: a draft that were judged by another distribution than it was drawn from
    would show in how often each pair is written."""
    from vllm.v1.sample import rejection_sampler

    def expanded(
        x: torch.Tensor, ends: torch.Tensor, _: int, replace_from: Any = 0, replace_to: Any = 0
    ) -> torch.Tensor:
        return torch.where(x == replace_from, replace_to, x).repeat_interleave(ends.diff(prepend=ends.new_zeros(1)))

    # On the CPU vLLM 0.32's own leaves the temperatures of drafts unset, its prompt lookup's as well as ours.
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", expanded)
    vocabulary, count = 8, 6000
    target = qwen3(vocab_size=vocabulary, initializer_range=0.1)
    drafter = with_fields(**HEAD, head_candidates=5, mask_token_id=7)(target)
    target.save_pretrained(tmp_path / "target")
    drafter.save_pretrained(tmp_path / "drafter")
    ids = prompt(9, 1, vocabulary)
    expected = joint_of_two(target, ids, vocabulary)
    settings = {"max_num_seqs": 64, "speculative": {"draft_sample_method": drawn}}
    with engine(tmp_path / "target", tmp_path / "drafter", **settings) as made:
        texts = torch.tensor(written(made, [ids] * count, 3, temperature=1.0))
    found = torch.zeros_like(expected)
    found.index_put_((texts[:, 1], texts[:, 2]), torch.ones(count), accumulate=True)
    chi_squared = ((found - count * expected).square() / (count * expected)).sum().item()
    freedom = vocabulary**2 - 1
    assert chi_squared < freedom + 5 * (2 * freedom) ** 0.5
    assert expected.max() < 0.2  # many pairs are likely


def test_a_target_that_hands_out_no_states_is_refused(tmp_path):
    target = gemma3()
    target.save_pretrained(tmp_path / "target")
    tiny_drafter(target, head_dim=32, reducer="fc").save_pretrained(tmp_path / "drafter")
    with pytest.raises(ValueError, match=r"vLLM's Gemma3ForCausalLM does not hand out .* `--model-impl transformers`"):
        with engine(tmp_path / "target", tmp_path / "drafter"):
            pass


def test_what_does_not_fit_ends_in_one_line(dense_pair):
    with pytest.raises(ValueError, match="`num_speculative_tokens` is 3, but the drafter's block has 6"):
        with engine(*dense_pair, speculative={"num_speculative_tokens": 3}):
            pass


def test_registering_changes_nothing_for_others():
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm import ModelRegistry

    from hf_hyperdflash.serving.vllm.plugin import ARCHITECTURES, register

    def known() -> tuple[dict[str, Any], set[str]]:
        return {name: value for name, value in ModelRegistry.models.items()}, set(CONFIG_MAPPING._extra_content)

    register()
    models, configs = known()
    for architecture in ARCHITECTURES:
        del ModelRegistry.models[architecture]
    before = dict(ModelRegistry.models)
    register()
    after, _ = known()
    assert set(after) == set(models) and {name: after[name] for name in before} == before
    assert type(AutoConfig.for_model("qwen3")).__module__.startswith("transformers.")
    assert configs >= {"hyperdflash", "specblock"} and os.environ.get("VLLM_PLUGINS") is None


def test_gemma_in_transformers_own_code_drafts_the_same(tmp_path, their_drafts):
    """The last: the class that vLLM runs itself cannot be made or run outside of it afterwards."""
    target = gemma3()
    drafter = with_fields(**HEAD)(target)
    drafts_the_same(target, drafter, tmp_path, their_drafts, model_impl="transformers")


# Drafters in others' layouts, as `export` writes them, served by vLLM's own code as `export` says. Of one layer: of
# several, vLLM-cpu 0.32 norms all keys of the context by the first one's weights. A window that speculators counts
# from the anchor it counts from each slot.
EXPORTED = [("z-lab", {}), ("z-lab", SLOT), ("speculators", {}), ("speculators", {"draft_vocab_size": 40})]


@pytest.mark.parametrize(("layout", "fields"), EXPORTED)
def test_what_is_exported_drafts_the_same_in_vllms_own_code(tmp_path, their_drafts, layout, fields):
    target = qwen3()
    drafter = with_fields(target_layer_ids=[0, 2], num_hidden_layers=1, **fields)(target)
    told = export_dflash(drafter, tmp_path / "drafter", layout, target)
    speculative = json.loads(re.findall("'({.*})'", told)[0])
    drafts_the_same(target, drafter, tmp_path, their_drafts, speculative=speculative)


@contextmanager
def loaded_by_vllm(target: Any, drafter: Any, layout: str, folder: Path, monkeypatch: Any) -> Iterator[Any]:
    """A drafter of ours as vLLM's own classes load it from what `export` wrote. DSpark and DFlash 2 are run by its
    second model runner alone, which wants a GPU's Triton: here of them runs what needs no runner."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    target.save_pretrained(folder / "target")
    told = export_dflash(drafter, folder / "drafter", layout, target)
    arguments = {"model": str(folder / "target"), **SETTINGS}
    arguments["speculative_config"] = json.loads(re.findall("'({.*})'", told)[0])
    with pytest.raises(ValueError, match="Model Runner V1 does not support"):
        EngineArgs(**arguments).create_engine_config()
    monkeypatch.setattr(VllmConfig, "_validate_v1_model_runner", lambda self: None)
    with engine(folder / "target", None) as _kept:  # as long as it is there, so is what vLLM's models are made in
        config = EngineArgs(**arguments).create_engine_config()
        with set_current_vllm_config(config), torch.no_grad():
            yield get_model(vllm_config=config, model_config=config.speculative_config.draft_model_config)


@pytest.mark.parametrize(
    ("layout", "fields"),
    [("deepspec", {}), ("speculators", {"sample_from_anchor": False}), ("speculators", {"draft_vocab_size": 40})],
)
def test_what_is_exported_as_dspark_says_the_same_in_vllms_own_classes(tmp_path, monkeypatch, layout, fields):
    target = qwen3()
    heads = {"sequential_head": "markov", "head_rank": 5, "head_candidates": 0, "confidence_head": True}
    drafter = with_fields(**{"target_layer_ids": [0, 2], "sample_from_anchor": True, **heads, **fields})(target)
    hidden, before = torch.randn(6, 64), torch.randint(96, (6,))
    ours = run_heads(hidden[:, None], before[:, None], None, drafter.head, drafter.confidence_head)
    bias = ours.vectors[:, 0] @ drafter.head.table.T
    with loaded_by_vllm(target, drafter, layout, tmp_path, monkeypatch) as model:
        assert type(model).__name__ == "Qwen3DSparkForCausalLM"
        known = model.markov_embed(before)
        torch.testing.assert_close(model.markov_bias(known), bias)
        torch.testing.assert_close(model.compute_confidence(hidden, known), ours.confidence[:, 0].sigmoid())
        if layout == "deepspec":  # which brings the target's LM head
            torch.testing.assert_close(model.compute_draft_logits(hidden), hidden @ target.lm_head.weight.T)
        count = fields.get("draft_vocab_size")
        if count:
            torch.testing.assert_close(model.compute_draft_logits(hidden), drafter.lm_head(hidden))
        ids = model.map_draft_to_target(torch.arange(count or 96))
        assert ids.tolist() == (drafter.draft_ids if count else torch.arange(96)).tolist()


def test_what_is_exported_as_dflash_2_says_the_same_in_vllms_own_classes(tmp_path, monkeypatch):
    target = qwen3()
    convolutions = {"conv_kernel_size": 2, "conv_group_size": 16, "causal_layers": "all"}
    drafter = with_fields(target_layer_ids=[0, 2], **convolutions, sequential_head="selector", head_rank=5)(target)
    hidden, anchors = torch.randn(4, 5, 64), torch.randint(96, (4,))
    best, ids = (hidden @ target.lm_head.weight.T).topk(16)
    with loaded_by_vllm(target, drafter, "z-lab", tmp_path, monkeypatch) as model:
        assert type(model).__name__ == "DFlash2Qwen3ForCausalLM"
        for theirs, ours in zip(model.model.layers, drafter.layers, strict=True):
            for name in ("attention_conv", "mlp_conv"):
                conv, own = getattr(theirs, name), getattr(ours, name)
                torch.testing.assert_close(conv.base_kernel.data, own.base_kernel.data)
                torch.testing.assert_close(conv.kernel_projection(hidden), own.kernel_projection(hidden))
        scores = model.model.candidate_selector(ids, best, hidden, anchors)
    previous, chosen, rows = torch.zeros(4, dtype=torch.long), anchors, torch.arange(4)
    for k in range(5):
        step = drafter.head(hidden[:, k], chosen, None, None)
        among = best[:, k] + (step.vectors @ drafter.head.table.T).gather(1, ids[:, k])
        torch.testing.assert_close(scores[rows, k, previous], among)
        previous = among.argmax(-1)
        chosen = ids[rows, k, previous]
