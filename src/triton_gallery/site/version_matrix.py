"""With which versions of Triton lessons, ops and features were tried: a line on each page, and tables of all."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from docutils import nodes
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective

from triton_gallery.site import page_context
from triton_gallery.site.freshness import depends_on
from triton_gallery.site.render import bullets, folded, marks, op_link, page_link, paragraph, table
from triton_gallery.site.version_table import PAGE
from triton_gallery.versions.matrix import FEATURE, KERNELS, LESSON, OP, Outcome, Tried, hashes, load

PASSED, FAILED, OLDER, UNTRIED = "passed", "fails", "older code", "not tried"
CLASSES = {PASSED: "fits", FAILED: "fails", OLDER: "unmeant", UNTRIED: "unmeant"}

Verdict = tuple[str, str]  # what came of something in a word, and why
Codes = Mapping[str, Mapping[str, str]]  # of each kind, the hash of the present code by name


def tried(env: BuildEnvironment) -> list[Tried]:
    """Return the results of each version of Triton, the newest last."""
    return load(Path(env.srcdir, "_versions"))


def strip(env: BuildEnvironment, page: str, op: str = "") -> list[nodes.Node]:
    """Return a line with a mark for each version of Triton; nothing if nothing was tried.

    Args:
        env: Sphinx's.
        page: the name of the page of the lesson, or of the one that hands over the op.
        op: the name of the op, for a line about that.
    """
    depends_on(env, marks_shown, page, op)
    spans, up = marks_shown(env, page, op), "../" if op else "../../"
    return [marks((f'<a href="{up}{PAGE}.html">Runs with Triton</a>', spans))] if spans else []


def marks_shown(env: BuildEnvironment, page: str, op: str) -> list[tuple[str, str, str]]:
    """Return the marks in that line; for `freshness.depends_on`."""
    spans, recipe = [], page_context.recipes(env).get(page)
    if recipe is None:
        return []
    now = hashes([recipe])
    for trial in tried(env):
        word, why = _of_op(trial, recipe.key, op, now) if op else _verdict(trial, LESSON, recipe.key, now)
        about = f"Triton {trial.triton}, torch {trial.torch}, numpy {trial.numpy}: {why or word}"
        spans.append((CLASSES[word], about, _short(trial) if word == PASSED else f"{_short(trial)} {word}"))
    return spans


class FeaturesDirective(SphinxDirective):
    """`features-by-version`: the probes of Triton's features."""

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        depends_on(self.env, shown)
        trials = tried(self.env)
        names = sorted({name for trial in trials for name in trial.outcomes[FEATURE]}, key=str.lower)
        if not names:
            return [paragraph("Nothing has been tried yet.")]
        rows = {name: [_word_and_reason(trial.outcomes[FEATURE].get(name)) for trial in trials] for name in names}
        return [_table("feature", trials, rows, {name: nodes.Text(name) for name in names})]


class RecipesDirective(SphinxDirective):
    """`recipes-by-version`: lessons and ops with each Triton."""

    def run(self) -> list[nodes.Node]:
        """Return a line on the versions, then a table of lessons and one of ops."""
        depends_on(self.env, shown)
        trials, recipes, ops = tried(self.env), page_context.recipes(self.env), page_context.ops(self.env)
        if not trials:
            return [paragraph("Nothing has been tried yet.")]
        now = hashes(list(recipes.values()))
        lessons = {
            recipe.key: [_verdict(trial, LESSON, recipe.key, now) for trial in trials] for recipe in recipes.values()
        }
        of_ops = {op: [_of_op(trial, recipes[page].key, op, now) for trial in trials] for op, page in ops.items()}
        with_what = "; ".join(f"{trial.triton} with torch {trial.torch} and numpy {trial.numpy}" for trial in trials)
        pythons = ", ".join(dict.fromkeys(trial.python for trial in trials))
        return [
            paragraph(f"Triton {with_what}; Python {pythons}."),
            _tables("lesson", trials, lessons, {recipe.key: page_link(page) for page, recipe in recipes.items()}),
            *([_tables("op", trials, of_ops, {op: op_link(op) for op in of_ops})] if of_ops else []),
        ]


def shown(env: BuildEnvironment) -> object:
    """Return what the tables show; for `freshness.depends_on`."""
    return tried(env), hashes(list(page_context.recipes(env).values()))


def _tables(
    title: str, trials: Sequence[Tried], rows: Mapping[str, Sequence[Verdict]], names: Mapping[str, nodes.Node]
) -> nodes.Node:
    """Return a table of the rows that failed with some Triton and, folded, one of those that passed with each."""
    passed = {name: verdicts for name, verdicts in rows.items() if all(word == PASSED for word, _ in verdicts)}
    others = {name: verdicts for name, verdicts in rows.items() if name not in passed}
    count = f"{len(passed)} of {len(rows)} {title}s passed with each Triton."
    box = nodes.container("", paragraph(f"{count} The others:" if others else count))
    if others:
        box += _table(title, trials, others, names)
    if passed:
        box += folded(f"The {title}s that passed with each Triton", [_table(title, trials, passed, names)])
    return box


def _table(
    title: str, trials: Sequence[Tried], rows: Mapping[str, Sequence[Verdict]], names: Mapping[str, nodes.Node]
) -> nodes.Node:
    """Return a table with a word for each row and Triton and, folded below it, why some did not pass."""
    columns = [title, *(f"Triton {_short(trial)}" for trial in trials)]
    box = table(columns, [[names[name], *(word for word, _ in verdicts)] for name, verdicts in rows.items()], "tried")
    for cell in box.findall(nodes.entry):
        if cell.astext() == FAILED:
            cell["classes"].append("failed")
    reasons = defaultdict[tuple[str, str], list[str]](list)
    for name, verdicts in rows.items():
        for trial, (word, why) in zip(trials, verdicts, strict=True):
            if why and word != PASSED:
                reasons[name, why].append(_short(trial))
    if not reasons:
        return box
    texts = [f"{name}, Triton {', '.join(tritons)}: {why}" for (name, why), tritons in reasons.items()]
    return nodes.container(
        "", box, *folded(f"Why each {title} failed or was not tried", [bullets(map(paragraph, texts))])
    )


def _of_op(trial: Tried, key: str, op: str, now: Codes) -> Verdict:
    """Return the worse of the verdicts on an op and on the kernels of its recipe."""
    verdicts = [_verdict(trial, OP, op, now), _verdict(trial, KERNELS, key, now)]
    worst_first = (verdict for word in (FAILED, UNTRIED, OLDER) for verdict in verdicts if verdict[0] == word)
    return next(worst_first, verdicts[0])


def _verdict(trial: Tried, kind: str, name: str, now: Codes) -> Verdict:
    """Return the verdict on something, if its code is the present one."""
    outcome = trial.outcomes[kind].get(name)
    if outcome and outcome.code_hash != now[kind][name]:
        return OLDER, f"on {outcome.date[:10]} an older version was tried"
    return _word_and_reason(outcome)


def _word_and_reason(outcome: Outcome | None) -> Verdict:
    if outcome is None:
        return UNTRIED, ""
    if outcome.missing:
        return UNTRIED, f"needs {', '.join(outcome.missing)}"
    return (FAILED, outcome.failure) if outcome.failure else (PASSED, f"tried on {outcome.date[:10]}")


def _short(trial: Tried) -> str:
    """Return the major and minor version of a Triton."""
    return ".".join(trial.triton.split(".")[:2])
