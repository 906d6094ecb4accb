"""Imported before any test module, and so before torch: the package's own settings of the environment come first."""

import ifb_handler  # noqa: F401  isort: skip

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a test draws does not depend on the tests before it."""
    torch.manual_seed(0)
