"""`doctor --quick` begins no prompt that would end after its share of the time, on a machine where each takes long."""

from dataclasses import replace
from types import SimpleNamespace

from hf_hyperdflash.benchmark.doctor import examine as doctor
from hf_hyperdflash.benchmark.doctor.round_costs import MeasuredCosts
from hf_hyperdflash.training import trials

from ..conftest import tiny_drafter
from ..helpers.families import qwen3
from ..helpers.tokenizers import characters

SECONDS, OF_A_TOKEN, SHARE = 60.0, 0.15, 0.5


def test_generating_ends_within_its_share(monkeypatch):
    target = qwen3().eval()
    drafter = tiny_drafter(target)
    clock, generate, ended = SimpleNamespace(now=0.0), trials.Local.generate, []

    def slow(method, prompt, temperature, new):
        record = generate(method, prompt, temperature, 3)
        clock.now += OF_A_TOKEN * new
        return replace(record, new_tokens=new, seconds=OF_A_TOKEN * new)

    def measure_round_costs(*_, **__):
        ended.append(clock.now)
        return MeasuredCosts(9, 1, 1.0, {1: 1.0, 64: 1.0}, {1: 0.1})

    for module in (doctor, trials):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now, perf_counter=lambda: 0.0))
    monkeypatch.setattr(trials.Local, "generate", slow)
    monkeypatch.setattr(doctor, "measure_round_costs", measure_round_costs)
    found = doctor.examine(target, drafter, characters(), prompts=doctor.PROMPTS[:4], seconds=SECONDS)
    assert SHARE * SECONDS / 2 < ended[0] <= SHARE * SECONDS + 1e-6
    assert found.tau >= 1 and not found.differing
