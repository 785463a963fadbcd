"""Benches skip without a GPU as the tests do."""

from tests.conftest import pytest_runtest_setup

__all__ = ["pytest_runtest_setup"]
