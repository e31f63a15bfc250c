"""The Sampler keeps the contract of generators; vLLM's generator keeps the same one in tests/with_vllm."""

from __future__ import annotations

import pytest

from generator_contract import CONTRACT, Check, contract_model
from nemotron_ultra.generation import Sampler


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_sampler(check: Check):
    check(Sampler(contract_model(), max_slots=20), contract_model())
