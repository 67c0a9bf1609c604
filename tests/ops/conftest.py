"""The tests of one op or lesson each: what is special to it."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def interpreted(quick_interpreter: None) -> None:
    """Have the interpreter run the kernels, unless there is a GPU."""
