"""Proof of flex-overlap: 1F1B overlap treats a registered backend as deepep. tests/ranks trains with both at once."""

from __future__ import annotations

import pytest
from megatron.core.models.common.utils import should_free_input
from routers import config


@pytest.mark.parametrize("backend", ["deepep", "twohop", "dedup"])
def test_overlap_keeps_the_inputs_of_a_registered_backend(backend: str) -> None:
    options = config(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend=backend)
    assert not should_free_input("moe_dispatch", True, options, 4)
    assert should_free_input("moe_combine", True, options, 4)
    assert should_free_input("mlp", True, options, 4)
