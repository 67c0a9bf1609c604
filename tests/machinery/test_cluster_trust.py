"""Whom the command trusts: what it asks of a cluster before it sends code there, and takes results from it."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from fake_gpus import Cluster, GpuProject

from triton_gallery.execute.dask.cluster import connect
from triton_gallery.execute.recording import FarmError
from triton_gallery.recipe.contents import Recipe
from triton_gallery.recipe.device import Environment
from triton_gallery.recipe.outputs import Frame, Output
from triton_gallery.recipe.tables import Table
from triton_gallery.records.page_cache import Pages, Run

TLS = "DASK_DISTRIBUTED__COMM__TLS__"


def certificates(folder: Path) -> dict[str, str]:
    """Make an authority and one certificate of it; return the variables that name them for all roles."""
    folder.mkdir()
    for command in (
        "req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -days 2 -subj /CN=authority",
        "req -newkey rsa:2048 -nodes -keyout project.key -out project.csr -subj /CN=project",
        "x509 -req -in project.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -out project.pem",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    roles = {
        f"{TLS}{role}__{kind}": str(folder / f"project.{ending}")
        for role in ("CLIENT", "SCHEDULER", "WORKER")
        for kind, ending in (("CERT", "pem"), ("KEY", "key"))
    }
    return {"DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION": "True", f"{TLS}CA_FILE": str(folder / "ca.pem"), **roles}


def test_encrypted_cluster_takes_its_own(
    make_gpu_project: Callable[..., GpuProject], make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    """With the cluster's certificates a recipe is recorded; without, with others or unencrypted none is."""
    own_certificates, other_certificates = certificates(tmp_path / "ours"), certificates(tmp_path / "others")
    project = make_gpu_project(one="print('one')")
    cluster = make_cluster("tls", **own_certificates)
    cluster.add("0")
    assert cluster.address.startswith("tls://")
    for address, variables, reason in (
        (cluster.address, {}, f"needs certificates; name their files in {TLS}CA_FILE"),
        (cluster.address, {**own_certificates, f"{TLS}CA_FILE": "nowhere"}, "No such file or directory"),
        (cluster.address, other_certificates, "no scheduler to trust answers at tls://127.0.0.1"),
        (cluster.address.replace("tls", "tcp"), {}, "no scheduler to trust answers at tcp://127.0.0.1"),
        (cluster.address.replace("tls", "tcp"), own_certificates, "which Dask's configuration requires"),
    ):
        status, output = project.record("--dask", address, **variables)
        assert status == 2
        assert reason in " ".join(output.split())
        assert "Traceback" not in output
    assert not project.recorded()
    status, output = project.record("--dask", cluster.address, **own_certificates)
    assert status == 0, output
    assert set(project.recorded()) == {"one"}


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("tcp://192.0.2.1:8786", "use tls://, or --insecure"),
        ("tcp://0.0.0.0:8786", "use tls://, or --insecure"),
        ("tcp://no-such-host.invalid:8786", "use tls://, or --insecure"),
        ("192.0.2.1:8786", "is no scheduler's address"),
        ("tcp://127.0.0.1", "is no scheduler's address"),
        ("tcp://127.0.0.1:x", "is no scheduler's address"),
        ("ucx://127.0.0.1:8786", "is no scheduler's address"),
        ("TCP://127.0.0.1:8786", "is no scheduler's address"),
        ("tcp://127.0.0.1:8786/", "is no scheduler's address"),
        ("tcp://127.0.0.1:1", "no scheduler to trust answers"),
    ],
)
def test_address_is_refused(address: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton_gallery.execute.dask.cluster.CONNECTING", 1)
    assert reason in refusal(address)


def refusal(address: str, insecure: bool = False) -> str:
    """Return why nothing is recorded there."""
    with pytest.raises(FarmError) as refused, connect(address, insecure):
        pass
    return str(refused.value)


def test_insecure_is_for_those_who_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton_gallery.execute.dask.cluster.CONNECTING", 1)
    assert "no scheduler to trust answers" in refusal("tcp://192.0.2.1:1", insecure=True)


def test_worker_without_gpu_is_refused(make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster without a worker that announces a GPU is refused, and a worker that has none."""
    monkeypatch.setattr("triton_gallery.execute.dask.cluster.PATIENCE", 1)
    cluster = make_cluster()
    assert "has no worker that announces GPU=1" in refusal(cluster.address)
    cluster.add("")
    assert "announces a GPU, but torch sees none there" in refusal(cluster.address)


def test_package_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert "pip install distributed" in refusal("tcp://127.0.0.1:1")


LIES = """
def run(task, slot):
    import json, os, pickle
    import msgspec
    from triton_gallery.execute import supervisor

    name = task.recipe.name
    if name == "honest":
        return supervisor.run(task, slot)
    result, _ = supervisor.failed(task, slot.environment, None, "")
    files = {f"things/{name}.{ending}": b"a page" for ending in ("rst", "py")}
    if name == "other_gpu":
        other = msgspec.structs.replace(slot.environment, name="Other GPU")
        result = msgspec.structs.replace(result, environment=other)
    strays = {"outside": "../../outside.rst", "absolute": %r, "another": "things/honest.rst"}
    files |= {strays[name]: b"a lie"} if name in strays else {}
    fields = msgspec.to_builtins(result)
    answers = {
        "pickled": pickle.dumps((result, files)),
        "cut": b'[{"code": "0',
        "typed": json.dumps([{**fields, "seconds": "soon"}, {}]).encode(),
        "few": json.dumps([fields]).encode(),
        "encoded": json.dumps([fields, {"things/encoded.rst": "?"}]).encode(),
    }
    if name in answers:
        open("answer", "wb").write(answers[name])
        os._exit(0)
    return result, files


if __name__"""
REFUSED = {
    "outside": "brought a file that is not of its page: '../../outside.rst'",
    "absolute": "brought a file that is not of its page: '/",
    "another": "brought a file that is not of its page: 'things/honest.rst'",
    "other_gpu": "the answer is no result: it is of other code or another GPU",
    "pickled": "the answer is no result: 'utf-8' codec can't decode byte 0x80",
    "cut": "the answer is no result: Unterminated string",
    "typed": "the answer is no result: Expected `float`, got `str` - at `$[0].seconds`",
    "few": "the answer is no result: Expected `array` of length 2, got 1",
    "encoded": "the answer is no result: Invalid base64 encoded string - at `$[1][...]`",
}


def test_worker_that_lies_is_refused(
    make_gpu_project: Callable[..., GpuProject], make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    """What a worker answers is data that fits, or a failure of that recipe which one line tells; nothing is written."""
    project = make_gpu_project(honest="print('honest')", **dict.fromkeys(REFUSED, "print('lies')"))
    on_worker = project.root / "src" / "triton_gallery" / "execute" / "dask" / "on_worker.py"
    on_worker.write_text(on_worker.read_text().replace("\n\nif __name__", LIES % str(tmp_path / "absolute.rst")))
    cluster = make_cluster()
    cluster.add("0", "1")
    status, output = project.record("--dask", cluster.address, COLUMNS="300")
    assert status == 1
    for name, reason in REFUSED.items():
        (line,) = (line for line in output.splitlines() if line.lstrip().startswith(f"things/{name} "))
        assert reason in line
    assert set(project.recorded()) == {"honest"}, output
    assert "honest" in (project.root / "docs" / "recipes" / "things" / "honest.rst").read_text()
    written = {path.stem for path in (project.root / "docs" / "recipes").rglob("*.rst")}
    assert written == {"honest"}
    assert not (project.root / "outside.rst").exists()
    assert not (tmp_path / "absolute.rst").exists()


GPU = Environment("Test GPU", "9.0", 1, None, None, "2", "3", "3.12")
RUN = Run(
    GPU,
    "2026-01-01T00:00:00+00:00",
    1,
    [
        Output(
            "1" * 16,
            "text",
            ["sphx_glr_one_001.png"],
            Frame(["a"], [["1"]]),
            [Table("results", "n", "GB/s", [1.0, "two"], {"Triton": [1.0, None]}, {}, {}, {}, {})],
        )
    ],
    packages={"pip": "1"},
    source_hash="0" * 16,
    missing=["pop"],
)
FILES = ["one.rst", "one.py", "one.ipynb", "images/sphx_glr_one_001.png", "images/thumb/sphx_glr_one_thumb.png"]


@pytest.mark.parametrize(
    "stray",
    [
        "../other.rst",
        "../../conf.py",
        "/tmp/one.py",
        "things/../one.rst",
        "things/./one.rst",
        "things/one.d/../../../conf.py",
        "things/other.rst",
        "things/one_more.rst",
        "things/images/sphx_glr_other_001.png",
        "things/images/sphx_glr_one_8bit_001.png",
        "things/images/thumb/sphx_glr_other_thumb.png",
        "other/one.rst",
        "things/one.rst\n",
        "things/one.\0",
    ],
)
def test_no_file_leaves_its_page(tmp_path: Path, stray: str) -> None:
    """Whoever executed a recipe, here or elsewhere, what it brought is written below its own names or not at all."""
    pages, recipe = Pages(tmp_path / "docs" / "recipes"), Recipe("things", "one", Path("one.py"))
    files = {f"things/{name}": b"content" for name in FILES}
    assert pages.install(recipe, files, RUN) == RUN
    written = {str(path.relative_to(pages.folder)) for path in pages.folder.rglob("*") if path.is_file()}
    assert written == {*files, "things/one.py.md5", "things/one.run.json"}
    assert pages.run("things/one") == RUN
    run = pages.install(recipe, {**files, stray: b"content"}, RUN)
    assert run.failure == f"brought a file that is not of its page: {stray!r}"
    assert pages.run("things/one") == run
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [pages.run_file("things/one")]


@pytest.mark.parametrize("name", ["one.rst", "one.py", "one.ipynb", "images/sphx_glr_one_001.png"])
def test_page_without_its_files_failed(tmp_path: Path, name: str) -> None:
    pages, recipe = Pages(tmp_path), Recipe("things", "one", Path("one.py"))
    files = {f"things/{other}": b"content" for other in FILES if other != name}
    assert pages.install(recipe, files, RUN).failure == f"brought no 'things/{name}'"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seconds", "1"),
        ("seconds", True),
        ("date", "today"),
        ("date", "2026-13-01T00:00:00+00:00"),
        ("failure", ["what"]),
        ("device", {**msgspec.to_builtins(GPU), "memory": "1"}),
        ("device", {}),
        ("outputs", {}),
        ("outputs", [{"code": 1}]),
        ("outputs", [{"code": "1", "tables": [{"name": "results"}]}]),
        ("outputs", [{"code": "1", "frame": {"columns": [1], "rows": []}}]),
        ("packages", {"pip": 1}),
        ("packages", ["pip"]),
        ("more", "fields"),
    ],
)
def test_types_of_a_run_are_checked(field: str, value: object) -> None:
    fields = msgspec.to_builtins(RUN)
    assert msgspec.convert(fields, Run) == RUN
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - whatever it says
        msgspec.convert({**fields, field: value}, Run)
    assert str(refused.value)
    assert "\n" not in str(refused.value)
