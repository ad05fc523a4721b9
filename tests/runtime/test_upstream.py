"""What we rely on in transformers, and the patch under `examples/upstream/` that would make `bind` unnecessary.

A failing test of the first part names what to look at: upstream has moved.
"""

import inspect
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig, DeepseekV4ForCausalLM, DynamicCache, FineGrainedFP8Config, GenerationMixin
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer, LinearAttentionLayer
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4CSACache, DeepseekV4HCACache

from ..conftest import prompt, tiny_config, tiny_target
from ..helpers.processes import python

PATCH = Path(__file__).parents[2] / "examples" / "upstream" / "transformers-5.23.0.patch"
ROOT = Path(__file__).parents[2]
MOVED = "transformers has changed what hf_hyperdflash relies on: "


def names(function):
    return list(inspect.signature(function).parameters)


def test_stock_v4_still_needs_binding():
    assert DeepseekV4ForCausalLM._is_stateful, (
        MOVED + "DeepSeek-V4 is no longer stateful. Can its caches be cropped now? Then `bind` may only need the loop."
    )
    cache = DynamicCache(config=tiny_target().config)
    kinds = {type(layer) for layer in cache.layers}
    assert kinds == {DynamicSlidingWindowLayer, DeepseekV4HCACache, DeepseekV4CSACache}, MOVED + "V4's cache layers."
    assert "crop" not in vars(DeepseekV4HCACache) and "crop" not in vars(DeepseekV4CSACache), (
        MOVED + "V4's compressed layers have a `crop`: compare it with ours, which could go."
    )
    assert not hasattr(GenerationMixin, "get_candidate_generator"), MOVED + "assistants may bring a generator along."


def test_what_bind_overrides_is_called_as_we_expect():
    expected = {
        "_prepare_cache_for_generation": ["generation_config", "model_kwargs", "generation_mode"],
        "_assisted_decoding": [
            "input_ids", "logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer",
            "inputs_tensor", "assistant_model", "assistant_tokenizer", "tokenizer",
        ],
        "_prefill": ["input_ids", "generation_config", "model_kwargs"],
    }  # fmt: skip
    for method, parameters in expected.items():
        assert names(getattr(GenerationMixin, method))[1 : len(parameters) + 1] == parameters, MOVED + method
    defaults = transformers.GenerationConfig._get_default_generation_params()
    assert "num_assistant_tokens" in defaults, MOVED + "how an unset `num_assistant_tokens` is told from a set one."


def test_what_the_rewindable_layers_extend_is_as_we_expect():
    layer = DeepseekV4CSACache(tiny_target().config)
    state = {"buffer_kv", "buffer_gate", "compressed_kv", "entry_count", "overlap_kv", "overlap_gate", "compress_rate",
             "keys", "values", "cumulative_length", "sliding_window", "record_past", "is_initialized"}  # fmt: skip
    assert state <= set(vars(layer)), MOVED + f"V4's cache state, without {state - set(vars(layer))}"
    known = state | {"dtype", "device", "_sliding_window_tensor"}
    assert set(vars(layer)) <= known, MOVED + f"new state of V4's cache: {set(vars(layer)) - known}. Must it rewind?"
    assert names(DeepseekV4HCACache.store_compression_weights) == ["self", "name", "kv", "gate"], MOVED
    assert names(DeepseekV4CSACache.update_overlap_state) == ["self", "name", "chunk_kv", "chunk_gate", "head_dim"]
    linear = vars(LinearAttentionLayer())
    states = {name for name in linear if "state" in name or "kernel" in name}
    assert states == {
        "number_of_states", "conv_states", "recurrent_states", "is_conv_states_initialized",
        "is_recurrent_states_initialized", "has_previous_state", "conv_kernel_size",
    }, MOVED + f"linear attention's state: {states}"  # fmt: skip
    assert not LinearAttentionLayer().is_croppable, MOVED + "linear attention can be cropped: our layer could go."
    assert hasattr(Cache, "activate_past_recording") and hasattr(Cache, "is_croppable")


def test_v4s_experts_are_fp4_by_its_config_json_alone(tmp_path):
    """The README loads V4-Flash, whose config.json says so beside `quantization_config`, by its name."""
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    fields = tiny_config().to_dict() | {"expert_dtype": "fp4", "quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = DeepseekV4ForCausalLM(config)
    replace_with_fp8_linear(
        model, quantization_config=FineGrainedFP8Config(**config.quantization_config), pre_quantized=True
    )
    kinds = {module.gate_up_proj.dtype for name, module in model.named_modules() if name.endswith(".experts")}
    assert kinds == {torch.int8}, MOVED + "where V4's `expert_dtype` is looked for."


# The patch

OVERLAY = """
import importlib.util, sys
from pathlib import Path

PATCHED = {
    "transformers.models.deepseek_v4.modeling_deepseek_v4": "models/deepseek_v4/modeling_deepseek_v4.py",
    "transformers.generation.utils": "generation/utils.py",
}

class Overlay:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in PATCHED:
            return importlib.util.spec_from_file_location(name, Path(sys.argv[1]) / "src/transformers" / PATCHED[name])

sys.meta_path.insert(0, Overlay)
import torch
from transformers.generation.candidate_generator import CandidateGenerator
from hf_hyperdflash import HyperDFlashDrafter, capture_residual
from hf_hyperdflash.runtime.sampling import DraftSampler
from tests.conftest import MIXES, PerfectDrafter, half_right_about, prompt, tiny_drafter, tiny_target
torch.set_num_threads(1)


class HyperDFlashCandidates(CandidateGenerator):
    '''What a drafter would bring along.'''

    requires_model_outputs, model_kwargs_overrides = True, {}

    def __init__(self, drafter, target, generation_config, processor):
        self.drafter, self.target, self.config, self.processor = drafter, target, generation_config, processor
        self.context, self.capture = drafter.new_context(), capture_residual(target, drafter.target_layer_ids)
        self.residuals, self.end = self.capture.__enter__(), 0

    def get_candidates(self, input_ids, *, is_first_iteration, **kwargs):
        count = min(6, self.config.max_length - input_ids.shape[1] - 1)
        if is_first_iteration or count < 1:
            return input_ids, None
        kept, positions = input_ids.shape[1] - 1 - self.end, torch.arange(input_ids.shape[1])[None]
        self.drafter.extend(self.target, self.context, self.residuals[-1][:, :kept], positions[:, self.end : -1], None)
        self.end += kept
        sampler = DraftSampler(self.processor, False)
        tree = self.drafter.propose(self.target, self.context, input_ids, positions, count, sampler)
        return torch.cat([input_ids, tree.tokens[None]], dim=1), None

    def update_candidate_strategy(self, *args, **kwargs):
        pass


def get_candidate_generator(self, main_model, generation_config, logits_processor, model_kwargs):
    self.used = HyperDFlashCandidates(self, main_model, generation_config, logits_processor)
    return self.used


HyperDFlashDrafter.get_candidate_generator = get_candidate_generator
for mix, kinds in enumerate(MIXES[:3]):
    target, ids = tiny_target(mix, layer_types=kinds, hidden_size=64), prompt(20, mix)
    ids = torch.cat([ids, ids[:, :9]], dim=1)
    options = dict(do_sample=False, max_new_tokens=40)
    expected = target.generate(ids, **options)
    looked_up = target.generate(ids, prompt_lookup_num_tokens=5, **options)
    print("prompt lookup", torch.equal(looked_up, expected))
    second = target.generate(ids, assistant_model=tiny_target(mix, layer_types=kinds, hidden_size=64), **options)
    print("second V4", torch.equal(second, expected))
    for drafter in (tiny_drafter(target), half_right_about(target, expected[0])):
        out = target.generate(ids, assistant_model=drafter, **options)
        drafter.used.capture.__exit__(None, None, None)
        print("hyperdflash", torch.equal(out, expected))
"""


@pytest.mark.skipif(transformers.__version__ != "5.23.0", reason="the patch is written against transformers 5.23.0")
def test_the_patch_makes_binding_unnecessary(tmp_path):
    """Applied to the installed transformers: V4 drafts unbound, by prompt lookup, a second V4 and HyperDFlash."""
    installed = Path(transformers.__file__).parent
    for line in PATCH.read_text().splitlines():
        if line.startswith("--- a/src/transformers/"):
            file = line.removeprefix("--- a/src/transformers/")
            (tmp_path / "src/transformers" / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(installed / file, tmp_path / "src/transformers" / file)
    subprocess.run(["git", "apply", "--whitespace=nowarn", str(PATCH)], cwd=tmp_path, check=True)
    script = tmp_path / "run.py"
    script.write_text(OVERLAY)
    done = python(script, tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith(("prompt", "second", "hyper"))]
    assert len(lines) == 12 and all(line.endswith("True") for line in lines), lines
    with pytest.raises(ValueError, match="stateful"):  # which the unpatched transformers of this process refuses
        tiny_target().generate(prompt(9), prompt_lookup_num_tokens=3)
    torch.manual_seed(0)
