"""A figure of several panels, of which a page shows one: buttons choose the direction, the dtype or the GPU.

Without scripts, and on paper, all panels stand one below the other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from docutils import nodes

from triton_gallery.recipe.tables import Table
from triton_gallery.site.render import html

KINDS = {"gpu": "GPU", "direction": "Direction", "dtype": "Dtype", "variant": "Workload", "layout": "Layout"}
FORWARD, BACKWARD = "forward", "backward"
UNNAMED = "default"  # a workload without a name


@dataclass(frozen=True)
class Panel:
    """A panel of a figure.

    Attributes:
        about: what it shows, by keys of `KINDS`.
        shown: its content.
        classes: of its element, besides those of all panels.
    """

    about: dict[str, str]
    shown: Sequence[nodes.Node]
    classes: str = ""


def about_table(table: Table, gpu: str = "") -> dict[str, str]:
    """Return what a benchmark's table shows, for a panel."""
    words = table.kind.replace(FORWARD, "").replace(BACKWARD, "")
    variant = ", ".join(filter(None, map(str.strip, words.split(","))))
    return {"gpu": gpu, "direction": BACKWARD if BACKWARD in table.kind else FORWARD, "variant": variant or UNNAMED}


def figure_of(panels: Sequence[Panel]) -> list[nodes.Node]:
    """Return a figure of panels, the first of which is chosen, with buttons for that in which they differ."""
    if not panels:
        return []
    values = {kind: list(dict.fromkeys(panel.about.get(kind, "") for panel in panels)) for kind in KINDS}
    kinds = [kind for kind, texts in values.items() if len(texts) > 1]
    abouts = [tuple(panel.about.get(kind, "") for kind in kinds) for panel in panels]
    if len({*abouts}) < len(panels):
        raise ValueError(f"two panels of a figure are about the same, so no button chooses one of them: {abouts}")
    groups = "".join(_buttons(kind, values[kind]) for kind in kinds)
    shown: list[nodes.Node] = [html(f'<figure class="panels">{groups and f"<div class=switches>{groups}</div>"}')]
    for panel in panels:
        classes = " ".join(filter(None, ["panel", "" if panel is not panels[0] else "chosen", panel.classes]))
        data = "".join(f' data-{kind}="{escape(panel.about.get(kind, ""))}"' for kind in kinds)
        shown += [html(f'<div class="{classes}"{data}>'), *panel.shown, html("</div>")]
    return [*shown, html("</figure>")]


def _buttons(kind: str, values: Iterable[str]) -> str:
    """Return the buttons that choose one of several values."""
    buttons = "".join(
        f'<button type="button" aria-pressed="{str(not place).lower()}">{escape(value)}</button>'
        for place, value in enumerate(values)
    )
    return f'<div role="group" aria-label="{KINDS[kind]}" data-kind="{kind}">{buttons}</div>'
