"""What a page leaves out of the code of a cell, and which cells it folds."""

import ast
from pathlib import Path

import pytest
from project import ROOT

from triton_gallery.site.cell_code import leading_imports, measurements, measuring, without_guards

KERNEL = """
@triton.jit
def double_kernel(x_ptr):
    pass


def double(x):
    double_kernel[(1,)](x)
"""
TIMES = """
if __name__ == "__main__" and DEVICE.type == "cuda":
    print(gpu_time({"Triton": partial(double, x)}))
"""
HELPERS = """
def rates(calls):
    return {name: 1 / times[0] for name, times in gpu_time(calls).items()}

"""
LAUNCHER = """
def again(x):
    kernel = double_kernel[(2,)]
    kernel(x)

"""
USES_HELPERS = 'if __name__ == "__main__" and DEVICE.type == "cuda":\n    print(rates({}))'


@pytest.mark.parametrize(
    ("code", "shown", "gpu_only"),
    [
        ('if __name__ == "__main__":\n    # Why\n    print(1)\n\n    print(2)', "# Why\nprint(1)\n\nprint(2)", False),
        ('if __name__ == "__main__" and DEVICE.type == "cuda":\n    print(1)', "print(1)", True),
        (
            'x = 1\n\nif __name__ == "__main__" and DEVICE.type == "cuda":\n    print(x)',
            'x = 1\n\nif DEVICE.type == "cuda":\n    print(x)',
            False,
        ),
        ('if __name__ == "__main__" and CAN:\n    print(1)', "if CAN:\n    print(1)", False),
        (
            'if (a or b) and c and __name__ == "__main__":\n    print(1)',
            "if (a or b) and c:\n    print(1)",
            False,
        ),
        ('if (\n    __name__ == "__main__"\n):\n    print(\n        1\n    )', "print(\n    1\n)", False),
    ],
)
def test_guards_are_left_out(code: str, shown: str, gpu_only: bool) -> None:
    assert without_guards(code) == (shown, gpu_only)


@pytest.mark.parametrize(
    "code",
    [
        'if __name__ == "__main__":\n    print(1)\nelse:\n    print(2)',
        'if DEVICE.type == "cuda":\n    print(1)',
        'if __name__ == "__main__":\n    text = """\n    in a string\n    """',
        """if __name__ == "__main__" and d["it's"]:\n    print(1)""",
        """if __name__ == "__main__" and d['say "no"']:\n    print(1)""",
        'if __name__ == "__main__": print(1)',
        'if __name__ == "__main__" and CAN: print(1)',
        'if __name__ == "__main__": print(\n    1\n)',
        'if __name__ == "__main__" and CAN: print(\n    1\n)',
        'if (\n    __name__ == "__main__"\n): print(1)',
        "x = 1",
    ],
)
def test_what_would_change_stays(code: str) -> None:
    assert without_guards(code) == (code, False)


def test_cells_that_only_measure_are_found() -> None:
    cells = {
        KERNEL: False,
        TIMES: True,
        HELPERS + TIMES: True,
        USES_HELPERS: True,
        KERNEL + TIMES: False,
        LAUNCHER + TIMES: False,
        "class Saved(Function):\n    pass\n" + TIMES: False,
        TIMES + "    assert torch.equal(x, y)\n": False,
        TIMES + "    torch.testing.assert_close(x, y)\n": False,
        TIMES + "    print(time.perf_counter())\n": False,
        TIMES + 'if __name__ == "__main__":\n    print(moved)\n': False,
    }
    assert dict(zip(cells, measuring(cells), strict=True)) == cells


def test_clock_that_a_recipe_defines_is_no_measurement() -> None:
    own = "def gpu_time(calls):\n    return [perf_counter() for call in calls]\n"
    assert measuring([TIMES, own, TIMES]) == [True, False, False]


def test_each_measurement_has_a_title_of_its_own() -> None:
    sections = ["Softmax", "How fast?", "The benchmark", "The benchmark", "The op"]
    titles = ["How fast?", "The benchmark, 1 of 2", "The benchmark, 2 of 2"]
    assert [*measurements(sections, [False, True, True, True, False])] == titles


def test_only_long_imports_are_folded() -> None:
    assert leading_imports("import os\nimport re\nfrom a import (\n    b,\n)\n\nx = 1") == 5
    assert leading_imports("import os\n\nx = 1") == 0
    assert leading_imports("x = 1") == 0


@pytest.mark.parametrize("path", sorted(ROOT.glob("gallery/*/*.py")), ids=lambda path: path.stem)
def test_code_of_recipes_is_still_code(path: Path) -> None:
    for block in path.read_text().split("\n# %%\n"):
        ast.parse(without_guards(block)[0])
