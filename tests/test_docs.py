"""What the prose says of the project is so."""

import re
import subprocess

from project import ROOT


def tracked() -> list[str]:
    """Return the files that git tracks, or would."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listing.splitlines() if (ROOT / name).exists()]


def test_file_tree_is_complete() -> None:
    (tree,) = re.findall(r"```text\n(.*?)```", (ROOT / "docs" / "contributing.md").read_text(), flags=re.DOTALL)
    named = set()
    folder = ""
    for line in tree.splitlines():
        name = line.split()[0]
        if not line.startswith(" ") and name.endswith("/"):
            folder = name
        named.add(name if not line.startswith(" ") else folder + name)
    files = [
        name
        for name in tracked()
        if re.match(r"src/|docs/[^/]*$|gallery/[^/]*$|((tests|benchmarks)/)?[^./][^/]*$", name)
    ]
    files = [name for name in files if name not in {"LICENSE", "gallery/GALLERY_HEADER.rst"}]
    assert [name for name in files if name not in named] == []
    assert [name for name in named if "<" not in name and "*" not in name and not (ROOT / name).exists()] in (
        [],
        ["docs/recipes/"],
    )


def test_make_targets_are_real() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "guide").glob("*.md")]
    for document in documents:
        named = set(re.findall(r"(?:^\$ |`|\| `)make ([a-z-]+)", document.read_text(), flags=re.MULTILINE))
        assert named <= targets, document


def test_pins_are_exact() -> None:
    for name in ("requirements.txt", "tests/requirements.txt"):
        for line in (ROOT / name).read_text().splitlines():
            assert not line or line.startswith("#") or re.match(r"[\w-]+==[\w.]+(; .*)?$", line), line
