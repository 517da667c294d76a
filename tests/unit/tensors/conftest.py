"""What tests of several formats share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def master() -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
