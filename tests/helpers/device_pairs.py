"""A target and a drafter on simulated devices, which write what they write on the CPU."""

import torch

from hf_hyperdflash import bind

from ..conftest import CSA, prompt, tiny_target
from .families import qwen3
from .simulated_devices import SimulatedDevices

PLACES = [("cuda:0", "cuda:0"), ("cuda:0", "cuda:1"), ("cuda:0", "cpu"), ("cpu", "cuda:0")]
APART = PLACES[1]


def small_target(layer_types=(CSA,), **fields):
    target = tiny_target(3, hidden_size=64, layer_types=list(layer_types), hc_sinkhorn_iters=1, **fields)
    target.set_experts_implementation("batched_mm")
    return bind(target)


def small_qwen3():
    """For what comes after a drafter has read its target, whichever that is: V4's forwards have more operations."""
    torch.manual_seed(3)
    return bind(qwen3(layers=1).eval())


def on_cpu(tensor):
    return getattr(tensor, "on_cpu", tensor)


def moved(values, place):
    return {name: value.to(place) if torch.is_tensor(value) else value for name, value in values.items()}


def assert_same_text(target, drafter, places=APART, **options):
    """On the devices of `places` the pair writes what it writes on the CPU, in the same rounds."""
    options = {"input_ids": prompt(12), "max_new_tokens": 6, "do_sample": False, **options}
    torch.manual_seed(1)
    expected = target.generate(assistant_model=drafter, **options)
    rounds = drafter.last_stats.emitted
    with SimulatedDevices():
        target.to(places[0])
        if isinstance(drafter, torch.nn.Module):
            drafter.to(places[1])
        torch.manual_seed(1)
        text = target.generate(assistant_model=drafter, **moved(options, places[0]))
    assert text.device == torch.device(places[0]) and torch.equal(on_cpu(text), expected)
    assert drafter.last_stats.emitted == rounds
