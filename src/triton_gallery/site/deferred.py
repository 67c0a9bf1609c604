"""Loads the content of large folds when a reader opens them.

All but those of the class "stays" are taken out of a page as it is written, into two files beside it. `deferred.js`
loads the script `<page>.folded.js` when the first of them is opened; it is a script because a page opened from a disk
may fetch nothing else. Where scripts do not run, each fold links to its place in `<page>.folded.html`, which has the
same content.
"""

import json
import re
import zlib
from html import escape
from typing import Any

from sphinx.application import Sphinx

from triton_gallery.site.sphinx_internals import output_file

LARGE = 3000  # characters of markup
SUFFIXES = (".folded.js", ".folded.html")  # of the files beside a page
FOLD = re.compile(r'(?s)(<details class="fold">\s*<summary>.*?</summary>)(.*)</details>')
TAG = re.compile(r"<details\b|</details>")
LINK = '<p class="deferred"><a href="{address}#fold-{number}">Read this part on a page of its own</a></p>'
PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="robots" content="noindex">
<title>{title}: what is folded</title>
{styles}
</head>
<body class="folded">
<main class="content">
<h1><a href="{file}.html">{title}</a>: what is folded</h1>
{parts}
</main>
</body>
</html>
"""


def defer(app: Sphinx, page: str, template: str, context: dict[str, Any], _: object) -> None:
    """Move the content of a page's large folds into files beside it."""
    if app.builder.format != "html" or "body" not in context:
        return
    output = output_file(app, page)
    context["body"], parts = without_large_folds(context["body"], output.stem)
    script_file, plain = map(output.with_suffix, SUFFIXES)
    if not parts:
        script_file.unlink(missing_ok=True)
        plain.unlink(missing_ok=True)
        return
    contents = [content for _, content in parts]
    sections = (
        f'<section id="fold-{number}">\n{fold.replace("<details", "<details open")}{content}</details></section>'
        for number, (fold, content) in enumerate(parts)
    )
    text = PAGE.format(
        title=re.sub("<[^>]*>", "", context["title"]),
        styles="\n".join(context["css_tag"](file) for file in context["css_files"]),
        file=escape(output.stem),
        parts="\n".join(sections),
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    script_file.write_text(script(contents), encoding="ascii")
    plain.write_text(text, encoding="utf-8")


def script(data: object) -> str:
    """Return the text of a script file that hands over data to `deferred.load`."""
    return f"deferred.loaded({json.dumps(data)});\n"


def without_large_folds(body: str, file: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the markup of a page in which large folds have a link instead of their content, and what was taken out.

    That is a pair for each fold: its head, and its content with the folds inside it. `file` is the name of the page's
    file without its suffix.
    """
    shown, parts = list[str](), list[tuple[str, str]]()
    depth, start, end = 0, 0, 0
    # Another address for other content, as browsers keep files
    address = f"{escape(file)}.folded.html?{zlib.crc32(body.encode()):08x}"
    for tag in TAG.finditer(body):
        depth += -1 if tag[0].startswith("</") else 1
        if depth == 1 and not tag[0].startswith("</"):
            start = tag.start()
        if depth == 0:
            fold = FOLD.fullmatch(body, start, tag.end())
            if fold and len(fold[2]) > LARGE:
                shown += [body[end:start], fold[1], LINK.format(address=address, number=len(parts)), "</details>"]
                parts.append((fold[1], fold[2]))
                end = tag.end()
    return "".join([*shown, body[end:]]), parts
