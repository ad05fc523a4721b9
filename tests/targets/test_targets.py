import copy
import json
import logging
import os
import pickle
import re
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    DeepseekV4ForCausalLM,
    GraniteConfig,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
)
from transformers.generation.streamers import BaseStreamer
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Indexer

from hf_hyperdflash import PromptLookupDrafter, bind, capture_residual, load_target, unbind
from hf_hyperdflash.decoding.bind import BoundTarget
from hf_hyperdflash.targets.registry import target_of

from ..conftest import half_right_about, prompt, tiny_drafter, tiny_target
from ..helpers.deepseek_checkpoints import quantized
from ..helpers.families import (
    COMMON,
    deepseek_v4,
    gemma3n,
    gemma4_e,
    granite_hybrid,
    qwen3,
    qwen3_next,
)
from ..helpers.headed_drafters import headed
from ..helpers.processes import python
from ..helpers.tree_drafters import RandomTrees


def greedy(target, ids, **kwargs):
    return target.generate(ids, do_sample=False, max_new_tokens=12, **kwargs)


def test_a_target_is_bound_as_long_as_a_drafter_has_bound_it(target, drafter):
    """Which changes this instance alone, is undone, and says whether it was new."""
    own, plain, config, ids = type(target), tiny_target(1), copy.deepcopy(target.config), prompt(9)
    other, stranger = tiny_drafter(target), tiny_drafter(target)
    expected = greedy(target, ids)
    assert drafter.bind(target, as_default=True) is True and drafter.bind(target, as_default=True) is False
    assert type(target) is not own and type(target).__name__ == own.__name__ and isinstance(target, own)
    assert own._is_stateful and type(plain) is own
    of = target_of(target)
    assert target_of(target) is of and target_of(of) is of and of.model is target
    assert torch.equal(greedy(target, ids), expected) and drafter.last_stats.rounds
    other.bind(target)
    stranger.unbind(target)  # which never bound it
    drafter.unbind(target)
    drafter._remember(None)
    assert torch.equal(greedy(target, ids), expected)  # with no default any more
    assert other.last_stats is None and drafter.last_stats is None
    assert torch.equal(greedy(target, ids, assistant_model=other), expected) and other.last_stats.rounds
    other.unbind(target)
    assert type(target) is own and target.config == config and target_of(target) is not of
    other.unbind(target)
    for each in (drafter, other):
        each.bind(target)
    assert type(unbind(target)) is own  # at once
    drafter.bind(target)
    del each
    drafter.unbind(target)  # what unbinding at once has forgotten keeps it no longer
    assert type(target) is own
    with pytest.raises(ValueError, match="stateful"):
        greedy(target, ids, assistant_model=drafter)


def test_another_name_only_warns(target, caplog):
    drafter = tiny_drafter(target, target_name_or_path="org/one")
    target.config._name_or_path = "org/two"
    with caplog.at_level(logging.WARNING):
        drafter.bind(target)
    assert "org/one" in caplog.text and "org/two" in caplog.text
    caplog.clear()
    target.config._name_or_path = "/some/where/one"
    with caplog.at_level(logging.WARNING):
        drafter.bind(target)
    assert not caplog.text


def test_copies_pickles_and_checkpoints_of_a_bound_target(target, drafter, tmp_path):
    ids = prompt(9)
    expected = greedy(target, ids)
    drafter.bind(target)
    for again in (copy.deepcopy(target), pickle.loads(pickle.dumps(target))):
        assert isinstance(again, BoundTarget) and again is not target
        assert torch.equal(greedy(again, ids, assistant_model=drafter), expected)
        assert type(unbind(again)) is DeepseekV4ForCausalLM
    target.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is DeepseekV4ForCausalLM and loaded.config.architectures == ["DeepseekV4ForCausalLM"]
    assert torch.equal(greedy(loaded, ids), expected)
    moved = target.to(torch.float64).to(torch.float32)
    assert isinstance(moved, BoundTarget)


@pytest.mark.parametrize("family", [deepseek_v4, qwen3_next], ids=lambda family: family.__name__)
def test_one_thread_ends_while_another_is_inside_a_module(family):
    """The interleaving that crashes where hooks come and go with each call: torch has listed a module's hooks, and
    before it comes to ours another thread takes its own away."""
    torch.manual_seed(0)
    target, ids = family().eval(), prompt(12)
    expected = greedy(target, ids)
    drafter = half_right_about(target, expected[0])
    first_is_half_way, second_is_inside, first_is_done = (threading.Event() for _ in range(3))
    found = {}

    def inside(*_):
        if threading.current_thread().name == "second" and not second_is_inside.is_set():
            second_is_inside.set()
            assert first_is_done.wait(60)

    for module in target.modules():  # a user's hooks, before ours
        if isinstance(module, DeepseekV4Indexer):
            module.register_forward_hook(inside)
    for layer in target.model.layers if family is qwen3_next else ():
        for part in layer.children():
            part.register_forward_pre_hook(inside)
    drafter.bind(target)

    class Pause(BaseStreamer):
        puts = 0

        def put(self, value):
            self.puts += 1
            if self.puts == 3:
                first_is_half_way.set()
                assert second_is_inside.wait(60)

        def end(self):
            pass

    def first():
        found["first"] = greedy(target, ids, assistant_model=drafter, streamer=Pause())
        first_is_done.set()

    def second():
        assert first_is_half_way.wait(60)
        found["second"] = greedy(target, ids, assistant_model=drafter)

    threads = [threading.Thread(target=run, name=run.__name__) for run in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert torch.equal(found["first"], expected) and torch.equal(found["second"], expected)


def test_capturing_around_a_generation_sees_it(target, drafter):
    """A reader of one's own and the drafter's, in one thread."""
    ids = prompt(9)
    with capture_residual(target) as plain:
        greedy(target, ids)
    drafter.bind(target)
    with capture_residual(target) as captured:
        greedy(target, ids, assistant_model=drafter)
    torch.testing.assert_close(captured[0], plain[0])
    assert drafter.last_stats.rounds < len(captured) <= drafter.last_stats.rounds + 2


def test_a_target_is_loaded_whole_or_for_its_embedding_and_head_alone(target, tmp_path):
    target.save_pretrained(tmp_path)
    for options in ({}, {"num_hidden_layers": 0}):
        loaded = load_target(tmp_path, **options)
        assert len(loaded.model.layers) == (0 if options else 3)
        assert torch.equal(loaded.lm_head.weight, target.lm_head.weight)


def test_a_multimodal_class_around_granite_scales_nothing():
    """Its head is its own; of Granite's text part it has the layers alone."""
    text = GraniteConfig(**{**COMMON, "vocab_size": 64}, intermediate_size=48, num_hidden_layers=2,
                         num_key_value_heads=2, logits_scaling=3.0, embedding_multiplier=2.0)  # fmt: skip
    vision = CLIPVisionConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
                              image_size=8, patch_size=4, projection_dim=16)  # fmt: skip
    target = LlavaNextForConditionalGeneration(LlavaNextConfig(vision_config=vision, text_config=text)).eval()
    states = torch.randn(1, 3, 64)
    torch.testing.assert_close(target_of(target).logits(states), target.get_output_embeddings()(states))


@pytest.mark.parametrize(("family", "layers"), [(gemma3n, ()), (gemma4_e, (0, 1))])
def test_where_some_layers_give_no_state_for_each_token_others_are_read(family, layers):
    torch.manual_seed(0)
    target, text = family().eval(), prompt(12)
    expected = greedy(target, text)
    others = [PromptLookupDrafter(target)]
    others += [RandomTrees(target, [expected[0]], target_layer_ids=layers)] if layers else []
    for drafter in others:
        drafter.bind(target)
        assert torch.equal(greedy(target, text, assistant_model=drafter), expected)
        drafter.unbind(target)


# Takes seconds: dynamo traces each layer.
def test_compiled_layers_pass_their_residual_and_write_the_same_text():
    """Hooks that come after compilation run, and find what belongs to this capture."""
    target, ids = qwen3().eval(), prompt(9)
    text = greedy(target, ids)
    with torch.no_grad(), capture_residual(target, [0, -1]) as expected:
        target(ids)
        target(ids[:, :5])
    for layer in target.model.layers:
        layer.compile(backend="eager", dynamic=True)
    with torch.no_grad():
        target(ids)  # compiled without a hook
        for _ in range(2):
            with capture_residual(target, [0, -1]) as captured:
                target(ids)
                target(ids[:, :5])
            for one, other in zip(captured, expected, strict=True):
                torch.testing.assert_close(one, other)
    drafter = tiny_drafter(target)
    drafter.bind(target)
    assert torch.equal(greedy(target, ids, assistant_model=drafter), text)


@pytest.mark.skipif(
    torch.__version__ < (2, 12), reason="earlier torch takes no function into a graph that has a branch out of it"
)
def test_a_bound_target_is_one_graph_where_nobody_reads_it():
    target, ids = qwen3().eval(), prompt(9)
    with torch.no_grad():
        expected = target(ids).logits
        bind(target)
        whole = torch.compile(target.model, backend="eager", fullgraph=True)
        torch.testing.assert_close(target.lm_head(whole(ids).last_hidden_state), expected)


@pytest.mark.nightly  # inductor compiles whole forwards
def test_a_graph_that_may_not_break_says_what_to_do():
    torch._dynamo.reset()
    target = qwen3().eval()
    drafter = tiny_drafter(target)
    drafter.bind(target)
    expected, own = greedy(target, prompt(5)), target.forward
    target.forward = torch.compile(own, backend="eager", fullgraph=True)
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=r"bound target: compile the target with `fullgraph=False`"
    ):
        greedy(target, prompt(5), assistant_model=drafter)
    target.forward = torch.compile(own, backend="eager", fullgraph=False)
    assert torch.equal(greedy(target, prompt(5), assistant_model=drafter), expected)
    torch._dynamo.reset()  # what was tried in vain is tried no more


def test_an_offloaded_target_writes_the_same_text(tmp_path):
    target = tiny_target(hidden_size=64)
    ids = prompt(20)
    expected = target.generate(ids, do_sample=False, max_new_tokens=20)
    drafts = half_right_about(target, expected[0])
    target.save_pretrained(tmp_path / "saved")
    for on_cpu in ([], ["model.embed_tokens", "model.layers.0", "model.norm"]):
        places = {f"model.{name}": "disk" for name, _ in target.model.named_children() if name != "layers"}
        places |= {"lm_head": "disk", **{f"model.layers.{i}": "disk" for i in range(3)}}
        spread = AutoModelForCausalLM.from_pretrained(
            tmp_path / "saved", device_map=places | dict.fromkeys(on_cpu, "cpu"),
            offload_folder=tmp_path / "offload", dtype=torch.float32,
        )  # fmt: skip
        assert spread.lm_head.weight.is_meta
        for drafter in (headed(spread, "state", head_candidates=5), drafts):
            drafter.bind(spread)
            out = spread.generate(ids, do_sample=False, max_new_tokens=20, assistant_model=drafter)
            assert torch.equal(out, expected) and drafter.last_stats.rounds
        assert spread.lm_head.weight.is_meta


QUANTIZED = re.compile(r"\.(attn\.(wq_a|wq_b|wkv|wo_a|wo_b)|ffn\.(experts\.\d+|shared_experts)\.w\d)\.weight$")


@pytest.mark.parametrize("fp4_experts", [False, True])
def test_a_quantized_checkpoint_is_drafted_for(tmp_path, fp4_experts):
    """As DeepSeek ships V4: block-scaled FP8, and FP4 experts. Without a GPU transformers dequantizes it on
    loading."""
    source = tiny_target(hidden_size=64, moe_intermediate_size=64)
    source.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    weights = {name: tensor for name, tensor in tensors.items() if QUANTIZED.search(name)}
    stored, values = quantized(weights, (128, 128), "scale", torch.float8_e8m0fnu, fp4_experts)
    tensors |= stored
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    target = AutoModelForCausalLM.from_pretrained(tmp_path)
    layer = target.model.layers[1]
    assert torch.equal(layer.self_attn.q_a_proj.weight, values["model.layers.1.attn.wq_a.weight"])
    assert torch.equal(layer.mlp.experts.down_proj[2], values["model.layers.1.ffn.experts.2.w2.weight"])
    drafter, ids = tiny_drafter(target), prompt(20)
    assert drafter.hc_gate.hc_fn.dtype == torch.float32
    assert torch.equal(drafter.hc_gate.hc_fn, source.model.hc_head.hc_fn)
    expected = greedy(target, ids)
    for choice in (drafter, half_right_about(target, expected[0])):
        choice.bind(target)
        assert torch.equal(greedy(target, ids, assistant_model=choice), expected)


class Quantized(torch.nn.Linear):
    """Whose weight alone says nothing of what it computes."""

    def __init__(self, weight, plain):
        torch.nn.Module.__init__(self)
        self.weight, self.computes = weight, plain

    def forward(self, states):
        return self.computes(states.float())


@torch.no_grad()
def test_logits_of_some_tokens_are_the_heads_whatever_its_weight_is():
    """Rows of a plain head, with its bias, in its dtype; of what has no rows to be read, all of the head's logits."""
    target = granite_hybrid()
    states, some, of = torch.randn(3, 64), torch.tensor([[5, 0, 63], [7, 7, 1], [2, 3, 4]]), target_of(target)
    plain = torch.nn.Linear(64, 64, bias=True)
    weights = (
        torch.nn.Parameter(torch.zeros(64, 64).to(torch.float8_e4m3fn), requires_grad=False),
        torch.nn.Parameter(torch.zeros(64, 32, dtype=torch.uint8), requires_grad=False),
        type("Packed", (torch.nn.Parameter,), {})(torch.zeros(64, 64)),
        torch.nn.Parameter(torch.zeros(64, 64, device="meta")),
    )
    heads = [
        (plain, 1e-4),
        (copy.deepcopy(plain).bfloat16(), 0.05),
        *((Quantized(each, plain), 1e-4) for each in weights),
    ]
    for head, tolerance in heads:
        target.lm_head = head
        found, expected = of.logits_of(states, some), of.logits(states).gather(1, some)
        assert found.dtype == (torch.bfloat16 if head.weight.dtype == torch.bfloat16 else torch.float32)
        torch.testing.assert_close(found.float(), expected.float(), atol=tolerance, rtol=tolerance)


TWO_RANKS = """
import os, sys
import torch, torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from tests.conftest import half_right_about, prompt
from tests.helpers.headed_drafters import headed
torch.set_num_threads(1)
plans = [{"tp_plan": "auto"}]
if hasattr(DistributedConfig(), "ep_size"):  # experts spread as whole experts
    plans.append({"distributed_config": DistributedConfig(tp_size=2, ep_size=2, tp_plan="auto")})
whole, ids = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval(), prompt(20)
options = dict(do_sample=False, max_new_tokens=20)
expected = whole.generate(ids, **options)
drafts = half_right_about(whole, expected[0])
for plan in plans:
    spread = AutoModelForCausalLM.from_pretrained(sys.argv[1], **plan).eval()
    for drafter in (headed(spread, "state", head_candidates=5), drafts):
        drafter.bind(spread)
        same = torch.equal(spread.generate(ids, assistant_model=drafter, **options), expected)
        sys.stdout.write(f"rank {dist.get_rank()} {list(plan)} {same} {drafter.last_stats.tau > 1}\\n")  # one piece
        sys.stdout.flush()
dist.barrier()
os._exit(0)  # torch's own threads abort an interpreter that ends by itself now and then
"""


@pytest.mark.nightly  # two processes import transformers
def test_a_target_spread_over_two_processes_writes_the_same_text(tmp_path):
    """Tensor- and expert-parallel: each rank drafts the same tokens and verifies them together with the other."""
    tiny_target(hidden_size=64).save_pretrained(tmp_path / "saved")
    (tmp_path / "run.py").write_text(TWO_RANKS)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = python(*launcher, tmp_path / "run.py", tmp_path / "saved", env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.findall(r"rank \d \[[^]]*\] (True|False) (True|False)", done.stdout)
    assert len(found) in (4, 8) and all(same == "True" for same, _ in found), done.stdout
    assert sum(some == "True" for _, some in found) >= len(found) // 2  # the drafts that were partly right
