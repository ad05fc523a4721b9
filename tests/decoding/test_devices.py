"""Target and drafter on GPUs, also on different ones, without a GPU: see `simulated_devices`.

Values are the CPU's, so no data-dependent control flow is left out. What is, is listed here: what asks `torch.cuda`
itself (waiting for `exact_timing`, the benchmark's peak memory and hardware, pinned memory, fused optimizers,
grouped matrix products of experts); what only a GPU has (its kernels, its random numbers); saving. Backward passes run
on "lazy", a device type without streams, which autograd would ask a GPU for; there, autocast is not known.
"""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from accelerate import dispatch_model
from accelerate.state import AcceleratorState
from transformers import DynamicCache
from transformers.models.qwen3 import modeling_qwen3

from hf_hyperdflash import (
    DeepseekV4DSparkDrafter,
    DeepseekV4MTPDrafter,
    HyperDFlashTrainer,
    HyperDFlashTrainingArguments,
    PromptLookupDrafter,
    bind,
)
from hf_hyperdflash.drafters.deepseek_v4.configuration import DeepseekV4DSparkConfig
from hf_hyperdflash.targets.caches.deepseek_v4 import make_rewindable
from hf_hyperdflash.targets.caches.name import CACHE, cache_of
from hf_hyperdflash.training.features.fingerprint import target_fingerprint
from hf_hyperdflash.training.features.store import FeatureCache
from hf_hyperdflash.training.losses.objective import compute_residual

from ..conftest import CSA, HCA, SLIDING, half_right, mostly_nightly, perfect, prompt, tiny_drafter
from ..helpers import families
from ..helpers.deepseek_checkpoints import dspark_fields
from ..helpers.device_pairs import APART, PLACES, assert_same_text, on_cpu, small_qwen3, small_target
from ..helpers.headed_drafters import headed
from ..helpers.simulated_devices import CAN_SIMULATE, SimulatedDevices
from ..helpers.training import packed_rows, rows

pytestmark = pytest.mark.skipif(not CAN_SIMULATE, reason="only a CPU build of torch on Linux simulates a GPU")


def test_mistakes_are_seen():
    """The tests below could not fail if the simulation forgave what a GPU does not."""
    with SimulatedDevices():
        here, there = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")
        for mistake in (
            lambda: here + there,
            lambda: here + torch.ones(3),
            lambda: here[torch.zeros(2, dtype=torch.long, device="cuda:1")],
            lambda: torch.cat([here, there]),
            lambda: torch.nn.Linear(3, 3, device="cuda:1")(here),
        ):
            with pytest.raises(RuntimeError, match=r"device|indices on"):
                mistake()
        assert (here + 1).device == torch.device("cuda:0") and on_cpu(here + 1).tolist() == [2, 2, 2]


# Generation


def on_batched_experts(drafter):
    drafter.set_experts_implementation("batched_mm")
    return drafter


def dspark(target):
    drafter = DeepseekV4DSparkDrafter(DeepseekV4DSparkConfig.from_target_config(target.config, blocks=1)).eval()
    torch.nn.init.normal_(drafter.markov_head.markov_w2.weight)  # a fresh one says nothing
    return on_batched_experts(drafter)


def mtp(target):
    return on_batched_experts(DeepseekV4MTPDrafter(target.config).eval())


def family(made):
    torch.manual_seed(0)
    return on_batched_experts(bind(made().eval()))


def right_at_times(target):
    return half_right(target, prompt(12), max_new_tokens=6)


def with_fields(*layers, **fields):
    return lambda: small_target(layers or [SLIDING]), lambda target: tiny_drafter(target, **fields), {}


def with_head(kind, do_sample=False, **fields):
    made = lambda target: headed(target, kind, confidence_head=True, **fields)  # noqa: E731
    return small_qwen3, made, dict(do_sample=do_sample)


def with_tree(made, do_sample=False):
    return lambda: small_target([CSA]), made, dict(do_sample=do_sample, tree_budget=9)


PADDED = (torch.arange(12) >= 3).long()[None]
REPEATED = torch.cat([prompt(9), prompt(9)], dim=1)
# By name: a target, a drafter of it, and what is asked for.
PAIRS = {
    "sampled": (small_target, right_at_times, dict(do_sample=True, top_k=8)),
    "fc": with_fields(reducer="fc"),
    "hybrid": with_fields(reducer="hybrid"),
    "markov": with_head("markov", do_sample=True),
    "candidates": with_head("gated_markov", draft_vocab_size=30, head_candidates=5),
    "a tree": with_tree(lambda target: headed(target, "state", confidence_head=True), do_sample=True),
    "mtp": (lambda: small_target([SLIDING]), mtp, {}),
    "dspark": (lambda: small_target([CSA, SLIDING], **dspark_fields(target_layer_ids=[0, 1])), dspark, {}),
    "lookup": (small_target, lambda target: PromptLookupDrafter(target, 3), dict(input_ids=REPEATED)),
    "qwen3_next": (lambda: family(families.qwen3_next), right_at_times, {}),
    "hunyuan_v4": (lambda: family(families.hunyuan_v4), right_at_times, {}),
    # Padding on the left, a prompt in pieces, processors, and a choice among index entries.
    "a request": (
        lambda: small_target([CSA, HCA], index_topk=2),
        lambda target: half_right(target, prompt(12)[:, 3:], max_new_tokens=6),
        dict(attention_mask=PADDED, prefill_chunk_size=5, repetition_penalty=1.3, stop_strings=None),
    ),
    # The night's.
    "the mean in bfloat16": with_fields(reducer="stream_mean", dtype=torch.bfloat16),
    "a gate in float32": with_fields(dtype=torch.bfloat16),
    "projections": with_fields(hidden_size=32, reducer="fc"),
    "fewer tokens": with_fields(SLIDING, SLIDING, draft_vocab_size=30, target_layer_ids=[0, -1], sliding_window=9),
    "recurrent": with_head("recurrent", dtype=torch.bfloat16),
    "selector": with_head("selector", do_sample=True, conv_kernel_size=2),
    "state": with_head("state", do_sample=True, draft_vocab_size=30),
    "a tree of blocks": with_tree(lambda target: headed(target, "none", confidence_head=True)),
    "a tree of mtp": with_tree(mtp),
}


@pytest.mark.parametrize(
    ("pair", "places"), mostly_nightly([*((pair, APART) for pair in PAIRS), *(("fc", each) for each in PLACES)], 12)
)
def test_the_text_is_that_on_the_cpu(pair, places):
    made, drafter, options = PAIRS[pair]
    target = made()
    assert_same_text(target, drafter(target), places, **options)


@pytest.mark.nightly  # each module is on a simulated device
@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_a_target_spread_over_two():
    target = small_target([SLIDING, CSA])
    drafter = tiny_drafter(target)
    options = {"assistant_model": drafter, "max_new_tokens": 6, "do_sample": False}
    expected = target.generate(prompt(12), **options)
    first, second = ["embed_tokens", "rotary_emb", "layers.0"], ["layers.1", "hc_head", "norm"]
    places = {f"model.{name}": 0 for name in first} | {f"model.{name}": 1 for name in second} | {"lm_head": 1}
    with SimulatedDevices():
        for name, place in places.items():
            target.get_submodule(name).to(f"cuda:{place}")
        dispatch_model(target, {name: f"cuda:{place}" for name, place in places.items()}, force_hooks=True)
        text = target.generate(prompt(12).to("cuda:0"), **options)  # the drafter stays on the CPU
    assert torch.equal(on_cpu(text), expected)


def test_a_drafter_made_for_a_target_on_a_gpu():
    target = small_target()
    with SimulatedDevices():
        target.to("cuda:1")
        drafter = tiny_drafter(target, dtype=torch.bfloat16)
        assert {p.device for p in (*drafter.parameters(), *drafter.buffers())} == {torch.device("cuda:1")}
        assert drafter.hc_gate.hc_fn.dtype == torch.float32 and drafter.dtype == torch.bfloat16
        gate = target.model.hc_head.hc_fn
        assert torch.equal(on_cpu(drafter.hc_gate.hc_fn), on_cpu(gate))


def test_a_chat_goes_on():
    target = small_target()
    drafter = tiny_drafter(target)

    def turns(place):
        options = dict(assistant_model=drafter, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
        first = target.generate(prompt(9).to(place), **options)
        second = torch.cat([first.sequences, prompt(4, seed=5).to(place)], dim=1)
        return on_cpu(target.generate(second, **{CACHE: cache_of(first)}, **options).sequences)

    expected = turns("cpu")
    with SimulatedDevices():
        target.to("cuda:0")
        drafter.to("cuda:1")
        assert torch.equal(turns("cuda:0"), expected)


def test_a_cache_cropped_reordered_and_offloaded():
    target = small_target([SLIDING, CSA, HCA])

    def logits(place):
        cache = make_rewindable(DynamicCache(config=target.config))
        cache.activate_past_recording()
        ids = prompt(30).to(place)
        target(ids[:, :14], **{CACHE: cache})
        target(ids[:, 14:20], **{CACHE: cache})
        cache.crop(-9)
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([1, 0]).to(place))
        cache.batch_select_indices(torch.tensor([0]).to(place))
        for layer in cache.layers:
            layer.offload()
            layer.prefetch()
        return target(ids[:, 11:], **{CACHE: cache}).logits

    with torch.no_grad():
        expected = logits("cpu")
        with SimulatedDevices():
            target.to("cuda:1")
            found = logits("cuda:1")
    assert found.device == torch.device("cuda:1") and torch.equal(on_cpu(found), expected)


# How often the host waits


def waits_of_a_round(accepted: int, do_sample: bool, **fields) -> Counter[str]:
    """By place, of one verification round of six drafts, the first `accepted` of which are right."""
    target = small_target()
    # As good as greedy: what is drawn is known, and the same code runs.
    options = {"do_sample": do_sample, "temperature": 1e-3 if do_sample else None}
    options["max_new_tokens"] = max(8, accepted + 4)  # that round, and the beginning of another
    text = target.generate(prompt(12), do_sample=False, max_new_tokens=8)[0]
    text[13 + accepted] = (text[13 + accepted] + 1) % 60 + 2
    drafter, seen = perfect(target, text, **fields), []
    with SimulatedDevices() as devices:
        target.to("cuda:0")
        drafter.to("cuda:1")
        draft = drafter.draft

        def beginning_a_round(*args):
            seen.append(devices.waits.copy())
            return draft(*args)

        drafter.draft = beginning_a_round
        target.generate(prompt(12).to("cuda:0"), assistant_model=drafter, **options)
    assert drafter.last_stats.accepted[0] == accepted
    waits = seen[1] - seen[0]
    return Counter({place: count for place, count in waits.items() if not place.startswith("conftest.py")})


ONCE = [
    (3, False, None, 0), (3, True, None, 0), (6, True, "state", 5), (6, False, "recurrent", 0), (6, False, None, 0),
    (0, False, None, 0), (6, True, None, 0), (0, True, None, 0), (6, False, "selector", 5), (6, False, "state", 5),
]  # fmt: skip


@pytest.mark.parametrize(("accepted", "do_sample", "head", "candidates"), mostly_nightly(ONCE, 3))
def test_the_host_waits_once_a_round(accepted, do_sample, head, candidates):
    """What `experiments/benchmark rounds` counts on a Qwen3: in our loop, not in a model or a head."""
    fields = {} if head is None else dict(
        sequential_head=head, head_rank=4, head_candidates=candidates, confidence_head=True,
        confidence_temperatures=[1.5] * 6,
    )  # fmt: skip
    waits = waits_of_a_round(accepted, do_sample, **fields)
    assert waits.total() == 1, waits
    assert not any(part in place for place in waits for part in ("modeling", "path", "head")), waits


# Training


def trained(tmp_path, target, drafter, data, **args):
    arguments = HyperDFlashTrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, max_steps=2, logging_steps=1, num_anchors=4, report_to="none",
        save_strategy="no", disable_tqdm=True, max_length=64, loss_chunk_size=16,
        dataloader_pin_memory=False, optim="adamw_torch", loss_decay=4.0, **args,
    )  # fmt: skip
    trainer = HyperDFlashTrainer(drafter, target, arguments, train_dataset=data, eval_dataset=rows(2, seed=9))
    trainer.train()
    return trainer.evaluate()["eval_teacher_forced_tau"], [on_cpu(p).clone() for p in drafter.parameters()]


# Takes seconds: a run of training.
@pytest.mark.skipif(
    hasattr(modeling_qwen3, "maybe_autocast"), reason="transformers 5.17 asks for autocast, which lazy does not know"
)
@pytest.mark.parametrize("training, teacher", mostly_nightly([("cpu", "mean_pool"), ("lazy:0", "hc_head")]))
def test_a_training_run(tmp_path, monkeypatch, training, teacher):
    """On one GPU; and on the CPU beside a target that `device_map` put on a GPU."""
    target, data = small_target(), rows(4)
    drafter = tiny_drafter(target, reducer="hc_gate" if training == "cpu" else "fc")
    again = copy.deepcopy(drafter)
    expected = trained(tmp_path, target, drafter, data, kl_teacher=teacher, packing=True)
    AcceleratorState._reset_state(True)
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", training)
    try:
        with SimulatedDevices():
            for model, place in ((target, "lazy:0"), (again, training)):
                model.to(place).hf_device_map = {"": place, "all of it": place}  # or accelerate moves it once more
            found = trained(tmp_path, target, again, data, kl_teacher=teacher, packing=True)
    finally:
        AcceleratorState._reset_state(True)
    assert {str(p.device) for p in again.parameters()} == {training}
    torch.testing.assert_close(found, expected)


@pytest.mark.nightly  # a run of training on a simulated device
def test_features(tmp_path):
    target, made = small_target([SLIDING, CSA]), packed_rows([(9,), (5, 12)])
    for row in made:
        row["loss_mask"] = [int(bit) for bit in row["loss_mask"]]
    examples = [[torch.tensor([row[name]]) for name in ("input_ids", "position_ids")] for row in made]
    expected = [compute_residual(target, ids, positions, [0, -1]) for ids, positions in examples]
    fingerprint = target_fingerprint(target)
    FeatureCache.write(tmp_path / "cpu", made, target, dtype="float8")
    with SimulatedDevices():
        target.to("cuda:0")
        for (ids, positions), residual in zip(examples, expected):
            found = compute_residual(target, ids.to("cuda:1"), positions.to("cuda:1"), [0, -1])
            assert found.device == torch.device("cuda:1") and torch.equal(on_cpu(found), residual)
        assert target_fingerprint(target) == fingerprint
        cache = FeatureCache.write(tmp_path / "cuda", made, target, dtype="float8")
        assert cache.digest == FeatureCache(tmp_path / "cpu", target).digest
