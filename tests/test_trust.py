"""Whom the command trusts: what it asks of a cluster before it sends code there, and takes results from it."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from farm import Cluster, Farm
from project import ROOT

from triton_gallery.cluster import connect
from triton_gallery.recording import FarmError

TLS = "DASK_DISTRIBUTED__COMM__TLS__"


def certificates(folder: Path) -> dict[str, str]:
    """Make an authority and one certificate of it; return the variables that name them for all roles."""
    folder.mkdir()
    for command in (
        "req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -days 2 -subj /CN=authority",
        "req -newkey rsa:2048 -nodes -keyout farm.key -out farm.csr -subj /CN=farm",
        "x509 -req -in farm.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -out farm.pem",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    roles = {
        f"{TLS}{role}__{what}": str(folder / f"farm.{ending}")
        for role in ("CLIENT", "SCHEDULER", "WORKER")
        for what, ending in (("CERT", "pem"), ("KEY", "key"))
    }
    return {"DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION": "True", f"{TLS}CA_FILE": str(folder / "ca.pem"), **roles}


def test_encrypted_cluster_takes_its_own(
    make_farm: Callable[..., Farm], make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    """With the cluster's certificates a recipe is recorded; without, with others or unencrypted none is."""
    ours, others = certificates(tmp_path / "ours"), certificates(tmp_path / "others")
    farm = make_farm(one="print('one')")
    cluster = make_cluster("tls", **ours)
    cluster.add("0")
    assert cluster.address.startswith("tls://")
    for address, variables, reason in (
        (cluster.address, {}, f"needs certificates; name their files in {TLS}CA_FILE"),
        (cluster.address, {**ours, f"{TLS}CA_FILE": "nowhere"}, "No such file or directory"),
        (cluster.address, others, "no scheduler to trust answers at tls://127.0.0.1"),
        (cluster.address.replace("tls", "tcp"), {}, "no scheduler to trust answers at tcp://127.0.0.1"),
        (cluster.address.replace("tls", "tcp"), ours, "which Dask's configuration requires"),
    ):
        status, output = farm.record("--dask", address, **variables)
        assert status == 2
        assert reason in " ".join(output.split())
        assert "Traceback" not in output
    assert not farm.recorded()
    status, output = farm.record("--dask", cluster.address, **ours)
    assert status == 0, output
    assert set(farm.recorded()) == {"one"}


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
    monkeypatch.setattr("triton_gallery.cluster.CONNECTING", 1)
    assert reason in refusal(address)


def refusal(address: str, insecure: bool = False) -> str:
    """Return why nothing is recorded there."""
    with pytest.raises(FarmError) as refused, connect(address, ROOT, insecure):
        pass
    return str(refused.value)


def test_insecure_is_for_those_who_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton_gallery.cluster.CONNECTING", 1)
    assert "no scheduler to trust answers" in refusal("tcp://192.0.2.1:1", insecure=True)


def test_worker_without_gpu_is_refused(make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster without a worker that announces a GPU is refused, and a worker that has none."""
    monkeypatch.setattr("triton_gallery.cluster.PATIENCE", 1)
    cluster = make_cluster()
    assert "has no worker that announces GPU=1" in refusal(cluster.address)
    cluster.add("")
    assert "announces a GPU, but torch sees none there" in refusal(cluster.address)


def test_package_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert "pip install distributed" in refusal("tcp://127.0.0.1:1")
