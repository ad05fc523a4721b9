"""What was compiled for plain calls over a static cache fits after a call with a drafter, too."""

import pytest
import torch._dynamo
from packaging.version import Version

from hf_hyperdflash import PromptLookupDrafter, bind

from ..conftest import mostly_nightly, prompt
from ..decoding.test_static_caches import compiling
from ..helpers import families


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.9"), reason="torch 2.8 makes no whole graph of a bound target's own calls"
)
@pytest.mark.parametrize("is_compiled", mostly_nightly([True, False]))
@pytest.mark.parametrize("asked", [{}, dict(max_cache_len=400), dict(prefill_chunk_size=4)])
def test_a_call_with_a_drafter_leaves_the_target_as_it_found_it(asked, is_compiled):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    target, counted = bind(families.qwen3(layers=2).eval()), torch._dynamo.utils.counters["stats"]
    options = dict(do_sample=False, max_new_tokens=6, cache_implementation="static", compile_config=compiling())
    text = target.generate(prompt(9), **options)
    graphs, attributes = counted["unique_graphs"], dict(vars(target))
    assert graphs == 1
    asked = {**asked, "disable_compile": not is_compiled, "assistant_model": PromptLookupDrafter(target)}
    assert torch.equal(target.generate(prompt(9), **options, **asked), text)
    assert vars(target).keys() == attributes.keys()
    assert all(value is attributes[name] for name, value in vars(target).items())
    assert counted["unique_graphs"] == graphs + is_compiled  # of the rounds
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(target.generate(prompt(9), **options), text)
    assert counted["unique_graphs"] == graphs + is_compiled
