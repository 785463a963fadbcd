"""Benches skip without a GPU as the tests do."""

import pytest

from tests.conftest import pytest_runtest_setup

__all__ = ["pytest_runtest_setup"]


@pytest.fixture
def show(capsys):
    """A function that prints some lines on the terminal, whatever becomes of the bench."""

    def lines(*text: str) -> None:
        with capsys.disabled():
            print("", *text, sep="\n")

    return lines
