"""What is said of an op's records: who is faster, where, and that bands which overlap make nobody faster."""

import dataclasses
from pathlib import Path

from triton_gallery.recipes.contents import Recipe
from triton_gallery.recipes.tables import Table
from triton_gallery.records.formats import Device
from triton_gallery.records.summary import Summary, headline
from triton_gallery.sphinx.verdict import NOTHING, OLDER, sentences, short

H200 = Device("Test H200", "9.0", 1, None, None, "2.11", "3.6", "3.12")
H100 = dataclasses.replace(H200, name="Test H100")
RECIPE = Recipe("things", "square", Path("square.py"))
SERIES = {
    "Triton": [100.0, 200.0, 300.0],
    "PyTorch": [50.0, 210.0, 100.0],
    "Liger": [100.5, None, 250.0],
    "Roof": [400.0, 400.0, 400.0],
}


def bands(share: float) -> dict[str, dict[str, list[float | None]]]:
    """Return bands that reach this share of each figure to both sides."""
    return {
        name: {key: [value and value * factor for value in values] for key, values in SERIES.items()}
        for name, factor in (("low", 1 - share), ("high", 1 + share))
    }


TABLE = Table("results", "size", "GB/s", ["one", "two", "three"], SERIES, **bands(0.01))


def item(kind: str = "forward, beside libraries", **others: object) -> Summary:
    """Return a benchmark beside other libraries."""
    made = Summary(RECIPE, kind, TABLE, H200, "2026-01-01", is_fresh=True, is_page=False, dtype="bfloat16")
    return dataclasses.replace(made, **others)


def said(*items: Summary) -> list[str]:
    """Return the sentences."""
    return [paragraph.astext() for paragraph in sentences(items)]


def test_each_library_has_its_ratios_and_its_wins() -> None:
    (text,) = said(item())
    assert text == (
        "Forward: on Test H200 in bfloat16, over 3 shapes, median 2.00 times the speed of PyTorch (0.95 to 3.00), "
        "1.10 times Liger at 2 (1.00 to 1.20); 0.50 of the roof (0.25 to 0.75). Slower than PyTorch at 1 of 3; at "
        "worst 0.95 times PyTorch, at two. Equal within the spread: Liger at 1 of 2."
    )
    assert short(item()).split()[::2] == ["1.10", "Liger"]


def test_bands_that_overlap_make_nobody_faster() -> None:
    (text,) = said(item(table=dataclasses.replace(TABLE, **bands(0.03))))
    assert "Slower" not in text
    assert (
        "No library is faster at any of these shapes. Equal within the spread: PyTorch at 1 of 3, Liger at 1 of 2."
        in text
    )


def test_without_bands_nobody_is_called_faster() -> None:
    (text,) = said(item(table=dataclasses.replace(TABLE, low={}, high={})))
    assert text.endswith("The spread was not kept, so neither side is called faster.")


def test_where_the_cpu_decided_no_library_is_compared() -> None:
    late = {name: [True, True, False] for name in ("PyTorch", "Liger")}
    series = {**SERIES, "PyTorch": [50.0, 210.0, None], "Liger": [1.0, None, None]}
    page = item("", table=dataclasses.replace(TABLE, series=series, late=late), is_page=True, dtype="")
    assert said(page) == [
        "Forward: on Test H200, over 1 size of the lesson, median 0.75 of the roof. Where PyTorch or Liger was "
        "measured, the GPU waited for the CPU."
    ]
    assert short(page) == ""


def test_what_is_old_or_missing_is_said() -> None:
    stale = item(is_fresh=False)
    assert said() == said(stale) == [NOTHING]
    _, last = said(stale, item("", is_page=True))
    assert last == OLDER


def test_backward_repeats_nothing() -> None:
    forward, backward = said(item(), item("backward, beside libraries"))
    assert backward.startswith("Backward: 2.00 times the speed of PyTorch")
    assert "Test H200" in forward


def test_headline_is_the_op_itself_on_the_device_of_its_page() -> None:
    page = item("", is_page=True)
    works = [item(kind, device=device) for kind in ("fp16", "forward", "backward, packed") for device in (H100, H200)]
    backward = item("backward")
    found = headline([page, *works, item("backward", device=H100), backward, item("forward", is_fresh=False)])
    assert [(one.kind, one.device.name) for one in found] == [("forward", "Test H200"), ("backward", "Test H200")]
    assert headline([page, item(is_fresh=False)]) == [page]
    assert [one.kind for one in headline([item("loss"), item("float32, loss"), item("loss and gradients")])] == [
        "loss",
        "loss and gradients",
    ]
