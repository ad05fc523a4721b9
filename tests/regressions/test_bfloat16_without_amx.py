"""A CPU with AVX512-BF16 and no AMX multiplies bfloat16 in hardware: text that need not be exact is in bfloat16."""

import pytest

from hf_hyperdflash.hub.loading import default_dtype

AMX, AVX512 = "torch.cpu._is_amx_tile_supported", "torch.cpu._is_avx512_bf16_supported"


@pytest.mark.parametrize("has_amx", [True, False])
@pytest.mark.parametrize("has_avx512", [True, False])
def test_either_instruction_is_enough(monkeypatch, has_amx, has_avx512):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name, has in ((AMX, has_amx), (AVX512, has_avx512)):
        monkeypatch.setattr(name, lambda has=has: has, raising=False)
    assert default_dtype("org/name/model.gguf", is_exact=False) == ("bfloat16" if has_amx or has_avx512 else "float32")
    assert default_dtype("org/name/model.gguf") == "float32"
