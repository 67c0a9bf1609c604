"""A recipe whose environment is not here is shown from its record, and executed as soon as the environment is there."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from bs4 import BeautifulSoup
from msgspec import structs
from project import ROOT, Project

from triton_gallery.recipe.contents import load
from triton_gallery.recipe.needs import missing, packages
from triton_gallery.records.page_cache import Pages
from triton_gallery.records.record_store import Records

BLOCK = '# /// script\n# requires-python = ">=3.11"\n# dependencies = ["torch>=2.11", "rare-package>=2"]\n# ///\n'
CODE = 'import rare_package\n\nprint("made with", rare_package.__name__)'


@pytest.fixture
def project(make_project: Callable[..., Project]) -> Project:
    """Return a project with a recipe that wants a package which is not here."""
    project = make_project()
    project.write(rare=CODE)
    file = project.root / "gallery" / "things" / "rare.py"
    file.write_text(BLOCK + file.read_text())
    return project


def install(project: Project, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Make the package, as if pip had installed it."""
    folder = project.root / "packages"
    metadata = folder / "rare_package.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: rare-package\nVersion: {version}\n")
    (folder / "rare_package.py").touch()
    # `Project.environment` puts the sources in front
    monkeypatch.setattr(
        Project,
        "environment",
        {**project.environment, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{folder}"},
    )


def strip(project: Project) -> str:
    """Return the text of the strip under the recipe's title."""
    return BeautifulSoup(project.page("rare"), "html.parser").select_one(".recipe-strip").text


def test_page_without_environment_and_then_with_it(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    status, output = project.build()
    assert status == 0, output
    assert "not executed, lacks rare-package>=2" in output
    assert "Not executed where this page was built, which lacks rare-package>=2" in strip(project)
    page = BeautifulSoup(project.page("rare"), "html.parser")
    assert "import rare_package" in page.select_one(".highlight-Python").text
    assert not page.select(".sphx-glr-script-out, .recorded, .danger")
    assert "rare" not in project.build()[1]

    install(project, monkeypatch, "1.9")
    assert "lacks rare-package>=2 (here is 1.9)" in project.build()[1]

    install(project, monkeypatch, "2.1")
    status, output = project.build()
    assert status == 0, output
    assert "passed" in output
    assert "rare-package 2.1" in strip(project)
    assert "made with rare_package" in project.page("rare")


def test_record_stands_in(project: Project) -> None:
    project.build()
    (recipe,) = load(project.root / "gallery")
    run = Pages(project.root / "docs" / "recipes").run("things/rare")
    assert run
    records = Records(project.root / "docs" / "_records")
    gpu = structs.replace(run.environment, name="Test GPU", capability="9.0", memory=1)
    with pytest.raises(ValueError, match="nothing to record"):
        records.write(recipe, structs.replace(run, environment=gpu), {}, None)
    (output,) = run.outputs
    recorded = structs.replace(
        run,
        environment=gpu,
        missing=[],
        packages={"rare-package": "2.1"},
        outputs=[structs.replace(output, text="made with rare_package")],
    )
    records.write(recipe, recorded, {}, None)
    status, text = project.build()
    assert status == 0, text
    (shown,) = BeautifulSoup(project.page("rare"), "html.parser").select(".recorded")
    assert "made with rare_package" in shown.text
    assert "Test GPU" in strip(project)
    assert "rare-package 2.1" in strip(project)


def test_companion_travels_with_the_recipe(make_project: Callable[..., Project]) -> None:
    """A file that carries the recipe's name lies where it is executed, and is offered for download."""
    project = make_project()
    project.write(reads='print("it says", open("reads.txt").read())')
    companion = project.root / "gallery" / "things" / "reads.txt"
    for text in ("one", "two"):
        companion.write_text(text)
        status, output = project.build()
        assert status == 0, output
        assert f"it says {text}" in project.page("reads")
    (link,) = BeautifulSoup(project.page("reads"), "html.parser").select(".glance a[href$='reads.txt']")
    built = project.root / "_build" / "html" / "recipes" / "things" / link["href"]
    assert built.read_text() == "two"


def test_recipe_for_a_gpu_alone_is_shown_from_its_record(make_project: Callable[..., Project]) -> None:
    """It declares which; elsewhere it is not executed."""
    project = make_project()
    project.write(hopper="raise SystemError('executed')")
    file = project.root / "gallery" / "things" / "hopper.py"
    file.write_text('# /// script\n# [tool.triton-gallery]\n# gpu = "==9.0"\n# ///\n' + file.read_text())
    status, output = project.build()
    assert status == 0, output
    assert "lacks an NVIDIA GPU of compute capability 9.0 (here is none)" in output
    assert "an NVIDIA GPU of compute capability 9.0" in BeautifulSoup(project.page("hopper"), "html.parser").text


def test_needs_are_printed_for_pip(project: Project) -> None:
    assert project.run("needs", "things/rare")[1].split() == ["rare-package>=2", "torch>=2.11"]


@pytest.mark.parametrize(
    ("block", "lacks"),
    [
        ("# dependencies = []", []),
        ('# requires-python = "<3"', ["Python <3"]),
        ('# dependencies = ["torch==1.0"]', ["torch==1.0 (here is"]),
        ("# dependencies = ['rare; python_version < \"3\"']", []),
        ('# [tool.triton-gallery]\n# gpu = "==9.0"', []),
        ('# [tool.triton-gallery]\n# gpu = ">=10"', ["an NVIDIA GPU of compute capability >=10 (here is one of 9.0)"]),
    ],
)
def test_what_is_missing(block: str, lacks: list[str]) -> None:
    reasons = missing(Path("recipe.py"), f"# /// script\n{block}\n# ///\n", "9.0")
    assert len(reasons) == len(lacks)
    assert all(text.startswith(start) for text, start in zip(reasons, lacks, strict=True))


BAD = ["# dependencies = [", '# dependencies = ["a b"]', "# dependencies = [1]"]
BAD += [f"# [tool.triton-gallery]\n# {line}" for line in ('gpu = "hopper"', "backward = 1", 'dtype = ["float32"]')]


@pytest.mark.parametrize("block", BAD)
def test_block_out_of_order_is_refused(block: str) -> None:
    with pytest.raises(ValueError, match=r"recipe\.py: its script metadata is not in order: "):
        packages(Path("recipe.py"), f"# /// script\n{block}\n# ///\n")
