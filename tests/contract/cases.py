"""The cases of all ops, and the decorators that ask a test of each."""

from collections.abc import Callable, Collection
from dataclasses import replace

import pytest
import torch
from case import Case
from collect_cases import collect, runs_here
from selection import DTYPES

QUICK_SIZES = 8
CASES = [replace(case, recipe=recipe) for recipe, case in collect("CONTRACT") if runs_here(recipe)]


def each_case(wanted: Callable[[Case], object] = lambda _: True) -> pytest.MarkDecorator:
    """Ask a test of each case that has what it is about."""
    return pytest.mark.parametrize(
        "case", [pytest.param(case, id=case.name or case.call) for case in CASES if wanted(case)]
    )


def each_dtype(
    wanted: Callable[[Case], object] = lambda _: True, quick: Collection[torch.dtype] = DTYPES
) -> pytest.MarkDecorator:
    """Ask a test of each case in each of its dtypes; a quick run takes some, or all where there are none of these."""
    return pytest.mark.parametrize(
        ("case", "dtype"),
        [
            pytest.param(
                case,
                dtype,
                id=f"{case.name or case.call}-{str(dtype).removeprefix('torch.')}",
                marks=() if dtype in quick or not {*quick} & {*case.dtypes} else pytest.mark.thorough,
            )
            for case in CASES
            if wanted(case)
            for dtype in case.dtypes
        ],
    )
