"""The search: what is found of a page, how the browser ranks it, and which recipes are alike."""

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from project import ROOT, Project

from triton_gallery.site.search import WORDS, Entry, Section, alike, script

STATIC = ROOT / "docs" / "_static"
FAQ = (ROOT / "docs" / "faq.md").read_text()


def test_those_are_alike_that_say_the_same() -> None:
    """What all have says nothing; a title says more than a word in the text."""
    texts = {"a": "kernel sort sort rows", "b": "kernel dot dot", "c": "kernel sort", "d": "kernel dot sort rows"}
    assert alike("a", texts)[-1] == "b"
    assert alike("b", texts)[0] == "d"
    assert alike("a", {"a": "", "b": ""}) == ["b"]


@pytest.fixture(scope="module")
def project(make_project: Callable[..., Project]) -> Project:
    """Return a small project that was built twice; the second build read its home page alone."""
    project = make_project()
    project.write(zebra_stripe="# Prose of the recipe.\nx = max(1, 2)", other="y = 2")
    path = project.root / "gallery" / "things" / "zebra_stripe.py"
    path.write_text(path.read_text().replace("zebra stripe", "Animals"))
    (project.root / "docs" / "faq.md").write_text("# FAQ\n\n(lions)=\n## Where are lions?\n\nNot here: $x$ `a.b`.\n")
    (project.root / "docs" / "glossary.md").write_text("# Glossary\n\n```{glossary}\npaws\n  Feet of a lion.\n```\n")
    for text in ("```{toctree}\nfaq\nglossary\n```", "See {doc}`recipes/things/zebra_stripe`."):
        with (project.root / "docs" / "index.md").open("a") as index:
            index.write(f"\n{text}\n")
        status, output = project.build()
        assert status == 0, output
    return project


def test_index_has_pages_questions_and_terms(project: Project) -> None:
    html = project.root / "_build" / "html"
    index = (html / "_static" / "search_index.js").read_text()
    entries = json.loads(index.removeprefix("var searchIndex = ").removesuffix(";\n"))["entries"]
    found = {entry["title"]: entry for entry in entries}
    recipe = found["Animals"]
    assert "zebra_stripe" in recipe["about"]
    assert recipe["kind"] == "Lesson"
    assert "max(1, 2)" not in json.dumps(recipe["sections"])
    assert found["Where are lions?"]["sections"] == [{"anchor": "lions", "title": "", "text": "Not here: a.b."}]
    assert found["paws"]["sections"][0] == {"anchor": "term-paws", "title": "", "text": "Feet of a lion."}
    assert "See Animals." in found["Small"]["sections"][0]["text"]
    assert not (html / "searchindex.js").exists()


def entry(title: str, text: str = "", kind: str = "Lesson", **other: Any) -> Entry:
    return Entry(other.pop("page", title.lower().replace(" ", "_")), kind, title, [Section("", "", text)], **other)


# As many pages as a ranking needs
ENTRIES = [
    entry("Softmax", "Each row is read once. The sum stays in registers. A row has a mask.", names=["torch.softmax"]),
    entry("Softmax of long rows", "Rows that registers cannot hold. Its title says rows, rows, rows."),
    entry("LayerNorm", "Mean and variance of a row, then its backward."),
    entry("Flash attention", "Queries and keys, and a backward."),
    entry("Matrix product", "Tiles on the tensor cores. A tile has registers.", code=["tl.dot"]),
    entry("Debugging a kernel", "A kernel may print. The rabbit is elsewhere."),
    entry("Dropout", "Philox makes the numbers."),
    entry("Top-k", "The largest elements of a row."),
    Entry(
        "long_page",
        "Guide",
        "Long page",
        [Section("", "", f"{'Of other things. ' * 30}"), Section("zebras", "Zebras", f"{'No. ' * 99}Zebras run. Yes.")],
    ),
    Entry("faq", "FAQ", "Is there an fp8 matmul?", [Section("fp8-matmul", "", "Not yet. Use another.")]),
    Entry("faq", "FAQ", "Is there a fused AdamW?", [Section("fused-adamw", "", "Not yet.")]),
]
Find = Callable[[str], dict[str, Any]]
FIND = """
({ query, typing }) => {
  const { results, lacks, rare } = search.find(query, typing);
  const shown = results.map((result) => ({
    address: `${result.entry.page}#${result.entry.sections[0].anchor}`, ...result.entry, excerpt: search.excerpt(result)
  }));
  return { results: shown, titles: shown.map(({ title }) => title), lacks, rare };
}
"""


def searching(page: Page, index: Path) -> Find:
    """Return a function that searches an index in the browser."""
    for file in (STATIC / "minisearch.min.js", index):
        page.add_script_tag(path=file)
    page.add_script_tag(content=(STATIC / "search.js").read_text().partition("\n// The page of the search")[0])
    page.evaluate("search.ready")
    return lambda query, typing=False: page.evaluate(FIND, {"query": query, "typing": typing})


@pytest.fixture(scope="module")
def find(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Find]:
    index = tmp_path_factory.mktemp("index") / "index.js"
    index.write_text(script(ENTRIES, {}))
    page = browser.new_page()
    yield searching(page, index)
    page.close()


@pytest.mark.parametrize(
    ("query", "title"),
    [
        ("softmax", "Softmax"),
        ("softmax unheardof", "Softmax"),  # any word
        ("how do I write a softmax kernel in triton", "Softmax"),  # filler
        ("softmax registers hold", "Softmax of long rows"),  # more words
        ("backward philox", "Dropout"),  # the rarer word
        ("torch.nn.functional.softmax", "Softmax"),
        ("layer norm", "LayerNorm"),
        ("layernorm backward", "LayerNorm"),
        ("layer-norm", "LayerNorm"),
        ("topk", "Top-k"),
        ("top k", "Top-k"),
        ("tl.dot", "Matrix product"),
        ("masking", "Softmax"),
        ("gemm", "Matrix product"),  # synonyms
        ("sdpa", "Flash attention"),
        ("breakpoint", "Debugging a kernel"),
        ("softmx", "Softmax"),  # typing errors
        ("flash attentiom", "Flash attention"),
    ],
)
def test_best_page_comes_first(find: Find, query: str, title: str) -> None:
    assert find(query)["titles"][0] == title


def test_beginning_of_a_word_finds_it_while_one_types(find: Find) -> None:
    assert find("softm", typing=True)["titles"][0].startswith("Softmax")
    assert find("softmax atte", typing=True)["titles"][:2] != []
    assert "Flash attention" in find("softmax atte", typing=True)["titles"]


@pytest.mark.parametrize("query", ["adamw", "fused AdamW", "AdamW kernel"])
def test_search_says_what_the_gallery_is_known_to_lack(find: Find, query: str) -> None:
    found = find(query)
    assert found["lacks"] == "optimizers"
    assert found["titles"][0] == "Is there a fused AdamW?"


def test_search_says_which_words_it_does_not_know(find: Find) -> None:
    assert find("convolution kernel")["lacks"] == "“convolution”"
    assert find("rabbit")["lacks"] == "“rabbit”", "a page has it, in passing"
    assert find("rabbit")["titles"] == ["Debugging a kernel"]
    assert (find("softmax convolution")["lacks"], find("softmax convolution")["rare"]) == ("", "convolution")
    assert (find("softmax")["lacks"], find("softmx")["lacks"], find("kernel")["lacks"]) == ("", "", "")


def test_excerpt_is_what_a_page_says_of_the_words(find: Find) -> None:
    (result,) = find("zebras")["results"]
    assert result["excerpt"]["anchor"] == "zebras"
    assert result["excerpt"]["text"].startswith("Zebras run.")


def test_page_of_the_search(browser: Browser, project: Project) -> None:
    """It works from a disk, by keyboard, and as one types; an address has a search."""
    page = browser.new_page(viewport={"width": 390, "height": 844})
    complaints: list[str] = []
    page.on("console", lambda message: message.type == "error" and complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    address = (project.root / "_build" / "html").as_uri()
    page.goto(f"{address}/search.html?q=lions")
    field, links = page.get_by_role("searchbox"), page.locator("#search-results a")
    expect(links.first).to_have_text("Where are lions?")
    expect(page.get_by_role("status")).to_have_text("2 results.")
    field.fill("")
    expect(links).to_have_count(0)
    field.press_sequentially("anima")
    expect(links.first).to_have_text("Animals")
    field.press("ArrowDown")
    expect(links.first).to_be_focused()
    page.keyboard.press("ArrowUp")
    expect(field).to_be_focused()
    field.blur()
    page.keyboard.press("/")
    expect(field).to_be_focused()
    field.press("Enter")
    page.wait_for_url("**/zebra_stripe.html")
    page.keyboard.press("/")
    page.wait_for_url("**/search.html*")
    page.set_viewport_size({"width": 1280, "height": 844})
    page.goto(f"{address}/index.html")
    page.keyboard.press("/")
    page.keyboard.type("paws")
    page.keyboard.press("Enter")
    page.wait_for_url("**/search.html?q=paws")
    expect(links.first).to_have_text("paws")
    page.close()
    assert complaints == []


def test_words_lead_to_the_faq() -> None:
    """And each answer there is short, has an address that stays, and leads on."""
    anchors = re.findall(r"^\(([\w-]+)\)=\n## .+$", FAQ, flags=re.MULTILINE)
    assert len(anchors) == len(set(anchors)) == FAQ.count("\n## ")
    words = tomllib.loads(WORDS.read_text())
    assert {lack["faq"] for lack in words["missing"]} <= set(anchors)
    for answer in re.split(r"\n## .+\n", FAQ)[1:]:
        lines = answer.partition("\n\n(")[0].strip().splitlines()
        assert len(lines) <= 3, lines
        assert max(map(len, lines)) <= 150, lines
        assert ".rst)" in answer or ".md)" in answer or "has no page" in answer, lines


# What people ask, and what has to be among the first three
ASKED = {
    "fp8 matmul in triton": "recipes/low_precision/fp8_matmul#",
    "mixture of experts kernel": "recipes/experts/moe_layer#",
    "fused adamw": "faq#fused-adamw",
    "top-p top-k sampling": "faq#sampling",
    "why is my triton kernel slower than pytorch": "faq#slower-than-pytorch",
    "autotune takes forever": "faq#autotune-takes-forever",
    "what does other in tl.load do": "faq#masked-load-other",
    "torch.compile graph break with my kernel": "faq#graph-break",
    "fp8 block scales 128x128 deepseek": "recipes/low_precision/block_scaled_matmul#",
    "int4 weights W4A16": "recipes/low_precision/int4_matmul#",
    "all-reduce over nvlink": "faq#all-reduce",
    "are atomic adds deterministic": "faq#atomics-deterministic",
    "mamba state space model": "faq#mamba",
    "tl.dot_scaled mxfp8": "recipes/low_precision/mx_matmul#",
    "does it run on AMD": "faq#amd",
    "how do I profile a kernel with ncu": "faq#profile",
    "grouped gemm": "recipes/experts/grouped_matmul#",
    "triton vs cuda vs gluon": "faq#triton-cuda-gluon",
    "out of resource: shared memory": "faq#out-of-resource",
    "where is triton's cache": "faq#triton-cache",
    "RoPE hugging face": "faq#huggingface-rope",
    "tl.topk": "recipes/fusion/topk#",
    "tl.make_tensor_descriptor": "recipes/matmul/tensor_descriptors#",
    "torch.library.triton_op": "recipes/pytorch/triton_op#",
    "illegal memory access": "recipes/first_steps/debugging#",
    "custom_op vs triton_op": "recipes/pytorch/which_api#",
    "launch overhead": "recipes/pytorch/what_a_call_costs#",
    "flash attention backward": "recipes/attention/flash_attention#",
    "compared with Liger-Kernel": "performance#",
    "run without GPU": "guide/run#",
    "layer norm": "recipes/fusion/layer_norm#",
    "torch.nn.functional.softmax": "recipes/fusion/softmax#",
    "my first kernel": "recipes/first_steps/vector_add#",
}


def test_search_answers_what_people_ask(browser: Browser, site: Path) -> None:
    page = browser.new_page()
    find = searching(page, site / "_static" / "search_index.js")
    found = {query: [result["address"] for result in find(query)["results"][:3]] for query in ASKED}
    page.close()
    assert {query: first for query, first in found.items() if ASKED[query] not in first} == {}
