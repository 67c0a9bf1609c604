"""The workflows: what runs where, with which rights, and how records are committed."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from project import ROOT, without_make

from triton_gallery.versions.matrix import pairs

FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in FOLDER.glob("*.yml")}
SITE = WORKFLOWS["site"]


def test_make_targets_are_real() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    scripts = " ".join(step.get("run", "") for step in SITE["jobs"]["build"]["steps"])
    named = re.findall(r"make ([a-z-]+)", scripts)
    # What is wrong is not recorded, and the site shows the new records.
    assert named == ["test-gpu", "record", "listings", "html"]
    assert set(named) <= targets


def test_every_week_all_versions_are_tried() -> None:
    """Those that are listed, by the first word of a line, and the newest that was released."""
    weekly = WORKFLOWS["versions"]
    assert re.fullmatch(r"\d+ \d+ \* \* [0-6]", weekly[True]["schedule"][0]["cron"])
    assert not weekly["jobs"]["try"]["strategy"]["fail-fast"]
    (listing,) = [step["run"] for step in weekly["jobs"]["list"]["steps"] if "run" in step]
    (read,) = re.findall(r"awk '(.+)' (\S+)", listing)
    text = subprocess.run(["awk", *read], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert text.split() == [pair.triton for pair in pairs(ROOT / "docs" / "_versions")]
    assert '. + ["next"]' in listing
    (trial, summary) = [step["run"] for step in weekly["jobs"]["try"]["steps"] if "run" in step]
    assert 'make versions TRITON="$TRITON" FORCE=1 2>&1 | tee' in trial
    assert trial.startswith("set -o pipefail"), "what fails has to fail the job"
    assert "GITHUB_STEP_SUMMARY" in summary


def test_every_week_all_is_tested() -> None:
    """And before, what changed: a checkout of CI has the commit before."""
    weekly, ci = WORKFLOWS["thorough"], WORKFLOWS["ci"]
    assert set(weekly[True]) == {"schedule", "workflow_dispatch"}
    assert re.fullmatch(r"\d+ \d+ \* \* [0-6]", weekly[True]["schedule"][0]["cron"])
    assert weekly["jobs"]["test"]["env"]["THOROUGH"] == 1
    for workflow in (weekly, ci):
        assert {"run": ".ci/run"} in workflow["jobs"]["test"]["steps"]
    assert 'make test THOROUGH="${THOROUGH:-changed}"' in (ROOT / ".ci" / "run").read_text()
    (checkout,) = [step for step in ci["jobs"]["test"]["steps"] if "checkout" in step.get("uses", "")]
    assert checkout["with"]["fetch-depth"] == 2


def test_make_test_says_what_to_prove() -> None:
    for given, asked in {
        "": [],
        "THOROUGH=1": ["--thorough", '"all"'],
        "THOROUGH=changed": ["--thorough", '"changed"'],
        "RECIPE=fusion/softmax": ["--recipe", "fusion/softmax"],
    }.items():
        command = ["make", "--dry-run", "VENV=", "PYTHON=python", "test", *given.split()]
        text = subprocess.run(command, cwd=ROOT, env=without_make(), capture_output=True, text=True, check=True).stdout
        assert text.partition("loadgroup")[2].replace("\\", "").split() == asked


def test_actions_have_one_version() -> None:
    used = set(re.findall(r"uses: (\S+)@(\S+)", " ".join(path.read_text() for path in FOLDER.glob("*.yml"))))
    assert len({name for name, _ in used}) == len(used), sorted(used)


def test_your_own_machine_runs_main_alone() -> None:
    events = {"push", "workflow_dispatch", "release"}
    assert set(SITE[True]) == events, "a pull request would run on it"  # YAML reads `on` as true
    assert SITE[True]["push"] == {"branches": ["main"]}
    jobs = [
        job for workflow in WORKFLOWS.values() for job in workflow["jobs"].values() if "ubuntu" not in job["runs-on"]
    ]
    assert jobs == [SITE["jobs"]["build"]]
    assert jobs[0]["if"] == "vars.SITE_RUNNER && github.ref == 'refs/heads/main'"


def test_what_executes_recipes_cannot_write() -> None:
    for workflow in WORKFLOWS.values():
        for name, job in workflow["jobs"].items():
            executes = any("make" in step.get("run", "") or ".ci/run" in step.get("run", "") for step in job["steps"])
            rights = job.get("permissions", workflow["permissions"])
            assert not executes or "write" not in rights.values(), name
            for step in job["steps"]:
                if executes and "checkout" in step.get("uses", ""):
                    assert step["with"]["persist-credentials"] is False, name


@pytest.mark.parametrize("releases", [["v1.2", "v1.1", "v1.0", "nightly", "../v0"], []])
def test_releases_are_deployed_in_folders(tmp_path: Path, releases: list[str]) -> None:
    """Those whose tags are versions and that kept their site, in the order that GitHub has: the newest first."""
    (step,) = [step for step in SITE["jobs"]["deploy"]["steps"] if step.get("name", "").startswith("Add the versions")]
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "index.html").write_text("an older home")
    subprocess.run(["tar", "-czf", tmp_path / "kept.tar.gz", "-C", kept, "."], check=True)
    gh = tmp_path / "bin" / "gh"
    gh.parent.mkdir()
    gh.write_text(
        "#!/bin/sh\n"
        "[ $2 = $GH_FAILS ] && exit 1\n"
        f"[ $2 = list ] && printf '%s\\n' {' '.join(releases)} && exit\n"
        "[ $2 = view ] && { [ $3 = v1.1 ] || echo site.tar.gz; } && exit  # it kept none\n"
        f"cp {tmp_path}/kept.tar.gz site.tar.gz\n"
    )
    gh.chmod(0o755)
    (tmp_path / "site").mkdir()
    path = f"{gh.parent}:{os.environ['PATH']}"

    def run(fails: str) -> int:
        variables = {"PATH": path, "GH_FAILS": fails}
        return subprocess.run(["bash", "-e"], input=step["run"], cwd=tmp_path, text=True, env=variables).returncode

    for command in ("list", *(("view", "download") if releases else ())):
        assert run(fails=command) != 0, "the site would be deployed without its older versions"
        shutil.rmtree(tmp_path / "site")
        (tmp_path / "site").mkdir()
    assert run(fails="nothing") == 0
    listed = "".join(f'"{tag}", ' for tag in releases if tag in {"v1.2", "v1.0"})
    assert (tmp_path / "site" / "versions.js").read_text() == f"globalThis.siteVersions = [{listed}];\n"
    homes = {home.parent.name for home in (tmp_path / "site").glob("*/index.html")}
    assert homes == ({"v1.2", "v1.0"} if releases else set())


def test_release_keeps_what_was_built_of_its_commit() -> None:
    """A job that can write runs nothing of the repository; the site of main is then deployed again."""
    job = SITE["jobs"]["keep-release"]
    assert "github.event_name == 'release'" in job["if"]
    (step,) = job["steps"]
    assert "--commit $GITHUB_SHA --status success" in step["run"]
    assert step["run"].rstrip().endswith("gh workflow run site.yml --ref main")
    (uploaded,) = [step for step in SITE["jobs"]["build"]["steps"] if step.get("with", {}).get("name") == "site"]
    assert uploaded["with"]["path"] == "_build/html"


def git(folder: Path, *arguments: str) -> str:
    """Run git as someone; return what it printed."""
    command = ["git", "-c", "user.name=Someone", "-c", "user.email=someone@example.org", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a checkout of main as a workflow has it: of one commit, and without a name for new ones."""
    origin, work = tmp_path / "origin", tmp_path / "work"
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "none"))
    git(tmp_path, "init", "--quiet", "--initial-branch", "main", str(origin))
    git(origin, "config", "receive.denyCurrentBranch", "ignore")
    records = origin / "docs" / "_records" / "nvidia-h200" / "things"
    records.mkdir(parents=True)
    for name in ("old.json", "gone.png", "kept.json", "notes.md"):
        (records / name).write_text(f"{name}\n")
        git(origin, "add", "--all")
        git(origin, "commit", "--quiet", "--message", name)
    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{origin}", str(work))
    return work


def commit_records(checkout: Path) -> None:
    """Do what the workflow does after the records of the build came back."""
    (step,) = [step for step in SITE["jobs"]["commit-records"]["steps"] if step.get("name", "").startswith("Commit")]
    done = subprocess.run(["bash", "-e"], input=step["run"], cwd=checkout, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_changed_records_are_committed(checkout: Path) -> None:
    origin, records = checkout.with_name("origin"), checkout / "docs" / "_records" / "nvidia-h200" / "things"
    (records / "old.json").write_text("newer\n")
    (records / "gone.png").unlink()
    (records / "added.json").write_text("added\n")
    (checkout / "stray.txt").write_text("no record\n")
    for name in ("page.md", "old.json.partial", "script.js"):
        (records / name).write_text("no record\n")
    (records / "notes.md").unlink()
    (origin / "meanwhile.txt").write_text("main has moved on\n")
    git(origin, "add", "meanwhile.txt")
    git(origin, "commit", "--quiet", "--message", "Meanwhile")
    commit_records(checkout)
    changed = git(origin, "show", "--name-status", "--format=%an: %s", "main").split("\n")
    folder = "docs/_records/nvidia-h200/things"
    assert changed[0] == "github-actions[bot]: Record what was stale"
    assert changed[2:-1] == [f"A\t{folder}/added.json", f"D\t{folder}/gone.png", f"M\t{folder}/old.json"]
    assert git(origin, "log", "--format=%s", "main").split("\n")[1] == "Meanwhile"


def test_records_without_figures_are_committed(checkout: Path) -> None:
    records = checkout / "docs" / "_records" / "nvidia-h200" / "things"
    git(checkout.with_name("origin"), "rm", "--quiet", "docs/_records/nvidia-h200/things/gone.png")
    git(checkout.with_name("origin"), "commit", "--quiet", "--message", "No figures")
    git(checkout, "pull", "--quiet")
    (records / "added.json").write_text("added\n")
    commit_records(checkout)
    shown = git(checkout.with_name("origin"), "show", "--name-only", "--format=", "main").split()
    assert shown == ["docs/_records/nvidia-h200/things/added.json"]


def test_nothing_changed_commits_nothing(checkout: Path) -> None:
    before = git(checkout.with_name("origin"), "rev-parse", "main")
    commit_records(checkout)
    assert git(checkout.with_name("origin"), "rev-parse", "main") == before
