"""What a configuration of a drafter refuses."""

from __future__ import annotations

import pytest

from hf_hyperdflash import HyperDFlashConfig
from tests.helpers.refusals import Refusal

REFUSED = {
    "a block of the anchor alone": Refusal(lambda: HyperDFlashConfig(block_size=1), ("block_size", "1", "2")),
}


@pytest.mark.parametrize("refusal", REFUSED.values(), ids=REFUSED)
def test_it_is_refused_in_one_line(refusal: Refusal):
    refusal.check()
