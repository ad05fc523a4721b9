"""DeepSeek-V4 as vLLM's target: what it hands to a drafter, and what the drafter makes of it, on tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_hyperdflash.serving.vllm.config import reads_streams

from ..conftest import tiny_drafter, tiny_target
from ..helpers.headed_drafters import learned

pytest.importorskip("vllm", reason="vLLM is not installed: .ci/vllm makes an environment that has it")

STREAMS, WIDTH = 4, 32


class Trunk(nn.Module):
    """Gives and keeps what vLLM's trunk of DeepSeek-V4 does: the collapsed states, the mean over the paths of a layer
    and in a larger buffer its paths."""

    def __init__(self, streams: torch.Tensor, is_last: bool = True) -> None:
        super().__init__()
        self.streams, self.is_last = streams, is_last
        self._mtp_hidden_buffer = torch.full((64, STREAMS * WIDTH), torch.nan)

    def forward(self, input_ids: torch.Tensor, *_: Any) -> Any:
        if not self.is_last:
            return {"hidden_states": self.streams}
        self._mtp_hidden_buffer[: len(self.streams)] = self.streams.flatten(1)
        return self.streams.sum(1), [self.streams.mean(1)]


def target_with(trunk: Trunk, config: Any) -> Any:
    from hf_hyperdflash.serving.vllm.deepseek_v4 import DeepseekV4WithStreams

    made = DeepseekV4WithStreams.__new__(DeepseekV4WithStreams)
    nn.Module.__init__(made)
    made.model, made.hands_out_streams = trunk, config is not None and reads_streams(config)
    return made


def combined(config: Any, modules: dict[str, nn.Module], states: torch.Tensor) -> torch.Tensor:
    """By the served drafter's own method, with a drafter's modules."""
    from hf_hyperdflash.drafters.parts.reducers import REDUCERS
    from hf_hyperdflash.serving.vllm.drafter import ServedDrafter

    made = ServedDrafter.__new__(ServedDrafter)
    nn.Module.__init__(made)
    made.config, made.reducer, made.model = config, REDUCERS[config.reducer], nn.Module()
    made.model.config, made.model.norm = config, nn.RMSNorm(WIDTH)
    for name, module in modules.items():
        made.model.add_module(name, module)
    return made.combine_hidden_states(states)


@pytest.mark.parametrize("reducer", ["hc_gate", "hybrid", "fc", "stream_mean"])
@torch.no_grad()
def test_the_feature_is_what_the_drafter_makes_of_the_residual(reducer):
    drafter = learned(tiny_drafter(tiny_target(), reducer=reducer))
    streams = torch.randn(9, STREAMS, WIDTH)
    hidden, states = target_with(Trunk(streams), drafter.config)(torch.zeros(9), torch.arange(9))
    assert torch.equal(hidden, streams.sum(1))
    modules = {name: getattr(drafter, name) for name in drafter.reducer.modules(drafter.config)}
    feature = combined(drafter.config, modules, torch.cat(states, dim=-1))
    torch.testing.assert_close(drafter.hidden_norm(feature)[None], drafter.reduce(streams[None]))
    assert [state.shape[-1] for state in states] == [WIDTH if reducer == "stream_mean" else STREAMS * WIDTH]


def test_other_drafters_and_other_stages_get_what_vllm_gives():
    streams = torch.randn(5, STREAMS, WIDTH)
    for config in (None, SimpleNamespace(), SimpleNamespace(target_hc_mult=1, reducer="fc")):
        _, (mean,) = target_with(Trunk(streams), config)(torch.zeros(5), torch.arange(5))
        assert torch.equal(mean, streams.mean(1))
    reading = SimpleNamespace(target_hc_mult=4, reducer="hc_gate")
    assert target_with(Trunk(streams, is_last=False), reading)(torch.zeros(5), torch.arange(5)) == {
        "hidden_states": streams
    }


def test_features_get_each_stream_as_a_state(monkeypatch):
    """As vLLM makes the target for `extract_hidden_states`: without a drafter, so without a buffer for its streams."""
    from hf_hyperdflash.serving.vllm import deepseek_v4

    streams = torch.randn(5, STREAMS, WIDTH)

    def made_by_vllm(self, *, vllm_config, prefix=""):
        nn.Module.__init__(self)
        self.model, self.config = Trunk(streams), SimpleNamespace(hc_mult=STREAMS, hidden_size=WIDTH)
        self.model._mtp_hidden_buffer = None

    monkeypatch.setattr(deepseek_v4.DeepseekV4ForCausalLM, "__init__", made_by_vllm)
    monkeypatch.setattr(deepseek_v4, "get_pp_group", lambda: SimpleNamespace(is_last_rank=True))
    made = deepseek_v4.DeepseekV4WithStreams(
        vllm_config=SimpleNamespace(
            speculative_config=SimpleNamespace(
                method="extract_hidden_states", draft_model_config=SimpleNamespace(hf_config=SimpleNamespace())
            ),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
            model_config=SimpleNamespace(dtype=torch.float32),
        )
    )
    hidden, states = made(torch.zeros(5), torch.arange(5))
    assert torch.equal(hidden, streams.sum(1)) and torch.equal(torch.stack(states, dim=1), streams)


def test_the_states_of_another_target_are_refused():
    drafter = tiny_drafter(tiny_target(), reducer="fc")
    with pytest.raises(ValueError, match="reads 4 residual streams, but the target hands out 3"):
        combined(drafter.config, {"fc": drafter.fc}, torch.randn(2, 3 * WIDTH))


def test_it_takes_vllms_place_only_where_asked(monkeypatch):
    from vllm import ModelRegistry

    from hf_hyperdflash.serving.vllm.plugin import DEEPSEEK_V4, STREAMS_VARIABLE, register

    own = {name: ModelRegistry.models[name] for name in DEEPSEEK_V4}
    try:
        for value, taken in ((None, False), ("0", False), ("1", True)):
            monkeypatch.delenv(STREAMS_VARIABLE, raising=False) if value is None else monkeypatch.setenv(
                STREAMS_VARIABLE, value
            )
            register()
            assert all((ModelRegistry.models[name] != model) == taken for name, model in own.items())
        loaded = ModelRegistry.models["DeepseekV4ForCausalLM"].load_model_cls()
        assert loaded.__name__ == "DeepseekV4WithStreams" and hasattr(loaded, "hands_out_streams")
    finally:
        ModelRegistry.models.update(own)
