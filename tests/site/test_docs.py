"""What the prose says of the project is so."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from project import ROOT, without_make

from triton_gallery.cli import main
from triton_gallery.recipe.contents import load

GUIDE = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "guide").glob("*.md")]


def tracked() -> list[str]:
    """Return the files that git tracks, or would."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listing.splitlines() if (ROOT / name).exists()]


def test_file_tree_is_complete() -> None:
    (tree,) = re.findall(r"```text\n(.*?)```", (ROOT / "docs" / "contributing.md").read_text(), flags=re.DOTALL)
    named = set()
    folders: list[str] = []
    for line in tree.splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders = [*folders[:depth], name]
        named.add("".join(folders))
    files = [
        name
        for name in tracked()
        if re.match(r"src/|docs/[^/]*$|gallery/[^/]*$|(tests/((machinery|site)/)?)?[^./][^/]*$", name)
    ]
    files = [name for name in files if name not in {"LICENSE", "gallery/GALLERY_HEADER.rst"}]
    files = [name for name in files if not re.match(r"src/\w+/.+/__init__.py", name)]  # it stands at its folder
    files = [name for name in files if not re.match(r"src/triton_gallery_ops/[a-z]\w*\.py$", name)]
    assert [name for name in files if name not in named] == []
    missing = {name for name in named if "<" not in name and "*" not in name and not (ROOT / name).exists()}
    assert missing <= {"docs/recipes/", "docs/ops/"}


def test_faq_lists_its_questions() -> None:
    contents, *questions = re.split(r"(?m)^(?=\([\w-]+\)=$)", (ROOT / "docs" / "faq.md").read_text())
    anchors = [question[1:].partition(")")[0] for question in questions]
    assert sorted(re.findall(r"\(#([\w-]+)\)", contents)) == sorted(anchors)


def test_make_targets_are_real() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    for document in GUIDE:
        named = set(re.findall(r"(?:^\$ |`|\| `)make ([a-z-]+)", document.read_text(), flags=re.MULTILINE))
        assert named <= targets, document


def test_old_names_say_the_new_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["targets", "--json"]) == 2
    assert capsys.readouterr().err == "triton-gallery targets is now triton-gallery compiled\n"
    for given, now in {"AGAIN=1": "FORCE=1", "STALE=1": "ONLY_STALE=1", "targets": "make compile"}.items():
        done = subprocess.run(
            ["make", "help" if "=" in given else given, *([given] if "=" in given else [])],
            cwd=ROOT,
            env=without_make(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert now in done.stderr


def test_pins_are_exact() -> None:
    for name in ("requirements.txt", "tests/requirements.txt"):
        for line in (ROOT / name).read_text().splitlines():
            assert not line or line.startswith("#") or re.match(r"[\w-]+==[\w.]+(; .*)?$", line), line


def test_install_line_of_a_gpu_host_is_complete() -> None:
    """It names all of `requirements.txt` but what the host has."""
    pinned = set(re.findall(r"(?m)^([\w-]+)==", (ROOT / "requirements.txt").read_text()))
    guide = (ROOT / "docs" / "guide" / "gpu_host.md").read_text()
    (line,) = re.findall(r"(?m)^\$ python -m pip install (flit_core furo(?:.*\\\n)*.*)$", guide)
    assert set(line.replace("\\", "").split()) == pinned - {"torch", "triton"}


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Return a checkout whose environment `make` made, with the packages of this one in place of downloads."""
    for name in ("Makefile", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    shutil.copytree(ROOT / "gallery", tmp_path / "gallery")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "_records").symlink_to(ROOT / "docs" / "_records")
    (tmp_path / "requirements.txt").touch()
    make(tmp_path, ".venv/bin/python")
    (packages,) = tmp_path.glob(".venv/lib/python*/site-packages")
    (packages / "others.pth").write_text(f"import sys; sys.path.insert(0, {sysconfig.get_path('purelib')!r})")
    make(tmp_path, ".venv/.site")
    return tmp_path


def make(folder: Path, target: str) -> None:
    """Run `make` as if it were not run by another."""
    command = ["make", target, f"PYTHON={sys.executable}"]
    made = subprocess.run(command, cwd=folder, env=without_make(), capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr


def test_folders_may_have_spaces(tmp_path: Path) -> None:
    python = tmp_path / "my dir" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    command = ["make", "check-records", f"PYTHON={python}", "VENV=", "RECIPE=first_steps/vector_add"]
    made = subprocess.run(command, cwd=ROOT, env=without_make(), capture_output=True, text=True, check=False)
    assert "of 1 recipes want a new record" in made.stdout, made.stderr


def test_any_locale_will_do() -> None:
    """What a locale cannot print is a question mark: a table of failures that raises would hide them."""
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "COLUMNS": "60"}
    command = [sys.executable, "-m", "triton_gallery", "results", "fusion/softmax"]
    environment = {**os.environ, **plain, "PYTHONPATH": "src"}
    printed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert printed.returncode == 0, printed.stderr
    assert "?" in printed.stdout


CALL = re.compile(r"(?:\.venv/bin/triton-gallery|PYTHONPATH=src /path/to/python -m triton_gallery)((?: [\w./-]+)*)")


def test_commands_of_the_guide_work_as_written(installed: Path) -> None:
    """In an environment as `make` makes it, and with `VENV=` in one that has the other packages."""
    texts = [document.read_text() for document in GUIDE]
    calls = {call[1].strip() for text in texts for call in CALL.finditer(text)}
    assert calls >= {"", "needs section/name", "results --json"}
    assert not any(re.search(r"-m triton_gallery\b|(?m:^\$ triton-gallery)", CALL.sub("", text)) for text in texts)
    for call in [*sorted(calls - {""}), "--help"]:
        arguments = call.replace("section/name", load(ROOT / "gallery")[0].key).split()
        said = []
        for command, variables in (
            ([".venv/bin/triton-gallery"], {}),
            ([sys.executable, "-m", "triton_gallery"], {"PYTHONPATH": "src"}),
        ):
            environment = {"PATH": os.environ["PATH"], "HOME": str(installed), **variables}
            process = subprocess.run(
                [*command, *arguments], cwd=installed, env=environment, capture_output=True, text=True, check=False
            )
            assert process.returncode == 0, process.stderr
            said.append(process.stdout)
        assert said[0] == said[1] != ""
    assert said[0].startswith("usage: triton-gallery ")


def test_code_of_the_home_page_works() -> None:
    """It is what a reader tries first; without a GPU, in the interpreter."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "index.md").read_text(), flags=re.DOTALL)
    assert len([line for line in block.splitlines() if line and line != "import torch"]) == 2
    code = f"{block}\nprint(softmax(torch.ones(1, 4, device='cuda')))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    if not torch.cuda.is_available():
        code, environment["TRITON_INTERPRET"] = code.replace("cuda", "cpu"), "1"
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "0.2500, 0.2500, 0.2500, 0.2500" in run.stdout
