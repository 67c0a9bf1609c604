"""What weighs on a page, and which pages are alike."""

from collections import Counter
from collections.abc import Callable

from project import Project

from triton_gallery.site.search import Words, alike, weights


def page(text: str, title: str = "", name: str = "") -> Words:
    return Words(Counter(text.split()), title.split(), name.split())


def test_a_page_weighs_what_it_says_often_and_others_do_not() -> None:
    kernel = 40 * "kernel "
    pages = {f"other{number}": page(kernel) for number in range(9)}
    pages |= {"about": page(kernel + 20 * "sort "), "mentions": page(kernel + "sort ")}
    found = weights(pages)
    assert found["about"]["sort"] > 2 * found["mentions"].get("sort", 0)
    assert found["about"]["sort"] > found["about"].get("kernel", 0)
    assert "sort" not in found["other1"]


def test_what_a_page_is_called_weighs_more() -> None:
    """In a short title more than in a long one; of the file's name, words count that the page has not."""
    text = 10 * "sort " + 90 * "kernel "
    others = {f"other{number}": page(90 * "kernel ") for number in range(9)}
    titles = {"without": "rows", "long": "sort these rows and those", "short": "sort rows"}
    found = weights({**others, **{name: page(text, title) for name, title in titles.items()}})
    assert found["without"]["sort"] < found["long"]["sort"] < found["short"]["sort"]
    named = weights({**others, "named": page(text, "rows", "top sort"), "top": page("top")})["named"]
    assert named["top"] > 0


def test_those_are_alike_that_say_the_same() -> None:
    weighed = {"a": {"sort": 3.0, "row": 1.0}, "b": {"dot": 3.0}, "c": {"sort": 1.0}, "d": {"sort": 2.0, "dot": 2.0}}
    assert alike("a", weighed) == ["c", "d", "b"]
    assert alike("a", {"a": {}, "b": {}}) == ["b"]


def test_second_build_keeps_the_words_of_a_name(make_project: Callable[..., Project]) -> None:
    """They stand nowhere on the page, and it is not read again."""
    project = make_project()
    project.write(zebra_stripe="x = 1")
    path = project.root / "gallery" / "things" / "zebra_stripe.py"
    path.write_text(path.read_text().replace("zebra stripe", "Animals"))
    for text in ("", "More words."):
        with (project.root / "docs" / "index.md").open("a") as index:
            index.write(f"\n{text}\n")
        status, output = project.build()
        assert status == 0, output
        assert '"zebra":' in (project.root / "_build" / "html" / "searchindex.js").read_text()
