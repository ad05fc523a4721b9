"""A vLLM server as a producer of features: what it writes into a feature folder is what the target computes here.

`.ci/vllm` makes an environment with vLLM and runs these; elsewhere they are skipped.
"""

from __future__ import annotations

import pytest

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: .ci/vllm makes an environment that has it")
