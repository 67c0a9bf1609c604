"""Links in recipe pages that the notebook cannot have.

In code, names of Triton and PyTorch lead to their documentation. In prose, the first mention of a glossary term leads
to its entry, that of a name such as ``tl.dot`` to its documentation. The name of another recipe's op leads to that
recipe's page. So does a file name such as ``row_sum.py`` or, of the guide, ``interpreter.md``, which becomes the title.
"""

import re
from collections import Counter
from collections.abc import Iterable
from html import escape
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

from triton_gallery.recipe.names import uses
from triton_gallery.recipe.op import op_of
from triton_gallery.site.api import address_of, in_full
from triton_gallery.site.page_context import recipes
from triton_gallery.site.render import paragraph
from triton_gallery.site.sphinx_internals import CODE_BLOCK, DOT, name_span

PROSE = (nodes.paragraph, nodes.list_item)
GLOSSARY = "glossary"  # its page
TERM = "term"  # the class of a word that leads to the glossary wherever it stands
SHOWN = 3  # recipes of a term
OFTEN = 2  # who has it less often only mentions it,
FEWER = 3  # and so does who has it so many times less often than another
NOT_IN = (nodes.reference, nodes.literal, nodes.literal_block, nodes.title, nodes.math, nodes.strong)


def link_prose(app: Sphinx, document: nodes.document, docname: str) -> None:
    """Link the prose of a recipe's page when it is written."""
    if docname in recipes(app.env):
        _link_recipes(app, document, docname)
        _link_names(app, document, docname)
        _link_terms(app, document, docname)


def link_code(app: Sphinx, page: str, template: str, context: dict[str, Any], _: object) -> None:
    """Link the code of a recipe's page when it is written."""
    recipe = recipes(app.env).get(page)
    if recipe is None or "body" not in context:
        return
    names = ((use.written, address_of(use.name)) for use in uses(recipe.text))
    addresses = {written: address for written, address in names if address}
    context["body"] = CODE_BLOCK.sub(lambda block: linked(block[0], addresses), context["body"])


def linked(markup: str, addresses: dict[str, str]) -> str:
    """Return the markup of code with links on names, given the address of each name as the code writes it."""
    if not addresses:
        return markup
    longest_first = sorted(addresses, key=len, reverse=True)
    pattern = re.compile(rf"(?<!{re.escape(DOT)})(?:{'|'.join(map(_spans, longest_first))})")

    def link(match: re.Match[str]) -> str:
        written = re.sub(r"<[^>]*>|@", "", match[0])
        return f'<a class="code-link" href="{escape(addresses[written])}">{match[0]}</a>'

    return pattern.sub(link, markup)


def _spans(written: str) -> str:
    """Return a pattern for the markup of a name, with or without a decorator's @."""
    first, *rest = map(re.escape, written.split("."))
    return re.escape(DOT).join([name_span(f"@?{first}"), *map(name_span, rest)])


def _link_recipes(app: Sphinx, document: nodes.document, docname: str) -> None:
    """Link mentions of other recipes' file names, of ops and of files of the guide to their pages."""
    by_page = [(page, recipe) for page, recipe in recipes(app.env).items() if page in app.env.all_docs]
    pages = {f"{recipe.name}.py": page for page, recipe in by_page}
    pages |= {op.name: page for page, recipe in by_page if (op := op_of(recipe))}
    pages |= {f"{page[6:]}.md": page for page in app.env.all_docs if page.startswith("guide/")}
    for literal in list(document.findall(nodes.literal)):
        page = pages.get(literal.astext())
        if page and page != docname and not isinstance(literal.parent, nodes.reference):
            title = app.env.titles[page].astext()
            is_file = literal.astext().endswith((".py", ".md"))
            shown = nodes.emphasis("", title) if is_file else literal.deepcopy()
            literal.replace_self(make_refnode(app.builder, docname, page, None, shown, title))


def _link_names(app: Sphinx, document: nodes.document, docname: str) -> None:
    """Link the first mention in prose of each name that is documented, written in full or as the script has it."""
    recipe = recipes(app.env)[docname]
    imported = {use.written: use.name for use in uses(recipe.text)}
    seen: set[str] = set()
    for literal in list(document.findall(nodes.literal)):
        written = literal.astext().partition("(")[0].removeprefix("@")
        address = address_of(imported.get(written) or in_full(written))
        if address and address not in seen and is_prose(literal):
            seen.add(address)
            literal.replace_self(nodes.reference("", "", literal.deepcopy(), refuri=address, classes=["code-link"]))


def _link_terms(app: Sphinx, document: nodes.document, docname: str) -> None:
    terms = {
        name.lower(): (page, anchor, name)
        for name, _, kind, page, anchor, _ in app.env.domains.standard_domain.get_objects()
        if kind == "term"
    }
    if not terms:
        return
    pattern = pattern_of(terms)
    seen: set[str] = set()
    for text in list(document.findall(nodes.Text)):
        if not is_prose(text):
            continue
        pieces: list[nodes.Node] = []
        end = 0
        for match in pattern.finditer(text):
            page, anchor, name = terms[match[1].lower()]
            if name in seen:
                continue
            seen.add(name)
            word = nodes.inline("", match[0], classes=["glossary-link"])
            link = make_refnode(app.builder, docname, page, anchor, word, name)
            pieces += [nodes.Text(text[end : match.start()]), link]
            end = match.end()
        if pieces:
            text.parent.replace(text, [*pieces, nodes.Text(text[end:])])


def title_link(app: Sphinx, docname: str, page: str) -> nodes.reference:
    """Return a resolved link from a document to a page, with the page's title as its text."""
    return make_refnode(app.builder, docname, page, None, nodes.Text(app.env.titles[page].astext()))


def pattern_of(terms: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds terms of the glossary, also in the plural."""
    longest_first = sorted(map(re.escape, terms), key=len, reverse=True)
    return re.compile(rf"\b({'|'.join(longest_first)})s?\b", re.IGNORECASE)


def is_prose(text: nodes.Node) -> bool:
    """Whether this is in a recipe's own prose: not code, not a heading, not already a link, not a table of figures."""
    inside_prose = False
    node: nodes.Node | None = text.parent
    while isinstance(node, nodes.Element):
        classes: list[str] = node.get("classes", [])
        if TERM in classes:
            return True
        # A column's title is a button where a table can be sorted, and a button holds no link.
        if isinstance(node, NOT_IN) or not {"glance", "sortable"}.isdisjoint(classes):
            return False
        inside_prose = inside_prose or isinstance(node, PROSE)
        node = node.parent
    return inside_prose


def add_recipes(app: Sphinx, document: nodes.document, docname: str) -> None:
    """Add to each term of the glossary the recipes that mention it most; by then all other pages have been read."""
    if docname != GLOSSARY:
        return
    definitions = {item[0].astext(): item[-1] for item in document.findall(nodes.definition_list_item)}
    read = [page for page in recipes(app.env) if page in app.env.all_docs]
    mentions = {page: _mentions(app.env, page, definitions) for page in read}
    for term, definition in definitions.items():
        counts = {page: mentioned[term.lower()] for page, mentioned in mentions.items()}
        least = max(OFTEN, max(counts.values(), default=0) / FEWER)
        most = [page for page in sorted(counts, key=lambda page: -counts[page])[:SHOWN] if counts[page] >= least]
        if isinstance(definition, nodes.definition) and most:
            links = [part for page in most for part in (", ", title_link(app, docname, page))]
            definition += paragraph("Shown in ", *links[1:], classes=["shown-in"])


def _mentions(env: BuildEnvironment, page: str, terms: Iterable[str]) -> Counter[str]:
    """Count the terms in the prose and in the headings of a page."""
    document = env.get_doctree(page)
    texts = [text for text in document.findall(nodes.Text) if is_prose(text) or isinstance(text.parent, nodes.title)]
    return Counter(match[1].lower() for text in texts for match in pattern_of(terms).finditer(text))


def follow_each_other(app: Sphinx, env: BuildEnvironment, added: set[str], changed: set[str], _: object) -> list[str]:
    """Have recipes' pages read again when the glossary is, as its terms are linked there, and the other way round."""
    pages, read = recipes(env), added | changed
    return [*(pages if GLOSSARY in read else ()), *([GLOSSARY] if read & pages.keys() else [])]
