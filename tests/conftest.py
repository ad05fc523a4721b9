"""Tiny real DeepSeek-V4 models, built in code."""

from __future__ import annotations

import gc
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, RepetitionPenaltyLogitsProcessor
from transformers.utils import logging

from hf_hyperdflash import HyperDFlashDrafter

SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
MIXES = [[SLIDING, CSA, HCA], [HCA, CSA, CSA], [CSA, SLIDING, HCA], [HCA, HCA, CSA], [SLIDING, SLIDING, CSA]]
MODELS = Path(__file__).parent.parent / "examples" / "models"
DURATIONS = Path(__file__).parent.parent / "build" / "durations.tsv"  # seconds and test, or seconds and file
os.environ["HF_HYPERDFLASH_GGUF_CACHE"] = "0"  # what tests read stays out of the user's cache


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # what is imported is no garbage: a trainer collects at its end, and would look through all of torch


def mostly_nightly(cases, kept=1):
    """Cases for `parametrize`, of which each change runs the first ones."""
    cases = list(cases)
    values = [case if isinstance(case, tuple) else (case,) for case in cases[kept:]]
    return [*cases[:kept], *(pytest.param(*each, marks=pytest.mark.nightly) for each in values)]


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter):
    """Keep what each test took, and say where the time goes."""
    reports = [
        report for reports in terminalreporter.stats.values() for report in reports if hasattr(report, "duration")
    ]
    tests, files = Counter(), Counter()
    for report in reports:
        tests[report.nodeid] += report.duration
        files[report.nodeid.split("::")[0]] += report.duration
    if not tests:
        return
    DURATIONS.parent.mkdir(exist_ok=True)
    DURATIONS.write_text(
        "".join(f"{seconds:.2f}\t{name}\n" for name, seconds in [*files.most_common(), *tests.most_common()])
    )
    terminalreporter.section(
        f"the dearest of {len(files)} files, seconds of a worker; each test is in {DURATIONS.name}"
    )
    for name, seconds in files.most_common(10):
        terminalreporter.line(f"{seconds:8.1f} {name}")
    over = sum(seconds > 5 for seconds in tests.values())
    terminalreporter.line(f"{files.total():8.1f} in all; {over} of {len(tests)} tests took more than 5 s")


@pytest.fixture(autouse=True)
def _one_thread_and_seed():
    torch.set_num_threads(1)  # two test workers share two cores
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _as_talkative_as_before():
    """Commands ask transformers for silence, which would last for all tests after theirs."""
    verbosity = logging.get_verbosity()
    yield
    logging.set_verbosity(verbosity)


def tiny_config(**fields) -> DeepseekV4Config:
    """Small enough that sliding and compression windows close within a test's few dozen tokens. Many index heads and a
    large `index_topk`: with few, equal ReLU scores make stock V4 itself depend on how a prompt is chunked."""
    layer_types = fields.pop("layer_types", [SLIDING, CSA, HCA])
    defaults = dict(
        vocab_size=64,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=len(layer_types),
        layer_types=layer_types,
        mlp_layer_types=["hash_moe"] + ["moe"] * (len(layer_types) - 1),
        compress_rates={CSA: 4, HCA: 8},
        sliding_window=8,
        num_attention_heads=4,
        head_dim=16,
        partial_rotary_factor=0.5,
        q_lora_rank=16,
        o_groups=2,
        o_lora_rank=8,
        index_n_heads=8,
        index_head_dim=16,
        index_topk=512,
        n_routed_experts=4,
        num_experts_per_tok=2,
        hc_sinkhorn_iters=4,
        max_position_embeddings=1024,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return DeepseekV4Config(**{**defaults, **fields})


def tiny_target(seed: int = 0, **fields) -> DeepseekV4ForCausalLM:
    torch.manual_seed(seed)
    config = tiny_config(**fields)
    target = DeepseekV4ForCausalLM(config).eval()
    for name, table in target.named_buffers():
        if name.endswith("tid2eid"):
            scores = torch.rand(config.vocab_size, config.n_routed_experts)
            table.copy_(scores.topk(config.num_experts_per_tok).indices)
    # Zero-initialised gates would hide a gate that is not copied, or applied without its base and scale.
    head = target.model.hc_head
    with torch.no_grad():
        head.hc_base.normal_()
        head.hc_scale.fill_(1.3)
    return target


def tiny_drafter(target, **fields) -> HyperDFlashDrafter:
    fields = {"mask_token_id": 1, "num_hidden_layers": 2, **fields}
    return HyperDFlashDrafter.from_target(target, **fields).eval()


class PerfectDrafter(HyperDFlashDrafter):
    """Drafts what it is told to: the best any drafter could do."""

    def expect(self, target, sequence):
        # The state whose logits are largest at the wanted token: solved once, for an LM head of full row rank.
        self.sequence, self.states = sequence, torch.linalg.pinv(target.get_output_embeddings().weight.detach()).T
        return self

    def forward(self, block_embeds, position_ids, context=None, *rest):
        following = [self.sequence[min(p, len(self.sequence) - 1)] for p in position_ids[0].tolist()]
        return self.states[following][None].to(self.device)


def perfect(target, sequence, **fields):
    drafter = tiny_drafter(target, **fields)
    drafter.__class__ = PerfectDrafter
    drafter.config.mask_token_id = None  # a text of a random model has any token, and a mask token is never drafted
    return drafter.expect(target, sequence.tolist())


def half_right(target, ids, **kwargs):
    return half_right_about(target, target.generate(ids, do_sample=False, **kwargs)[0])


def half_right_about(target, text):
    """As `half_right`, where the target's text has been written already."""
    sequence = text.clone()
    generator = torch.Generator().manual_seed(1)
    wrong = torch.rand(sequence.shape, generator=generator) < 0.3
    sequence[wrong] = (sequence[wrong] + 1) % 60 + 2
    return perfect(target, sequence)


def penalty_counts_padding() -> bool:
    """Whether a repetition penalty of transformers takes padding for text, as before 5.23
    (`test_upstream.test_which_penalty_counts_padding`)."""
    try:
        RepetitionPenaltyLogitsProcessor(2.0, prompt_ignore_length=torch.tensor([1]))
    except ValueError:
        return True
    return False


def prompt(length: int, seed: int = 0, vocab_size: int = 64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, vocab_size, (1, length), generator=generator)


@pytest.fixture(scope="session")
def dense_pair(tmp_path_factory):
    """The folders of a dense target and its drafter, made in code."""
    from .helpers.dense_pair import save_dense_pair

    return save_dense_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def target():
    return tiny_target()


@pytest.fixture
def drafter(target):
    return tiny_drafter(target)
