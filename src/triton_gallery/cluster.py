"""Executes recipes on the GPU workers of a Dask cluster.

A worker that announces the resource GPU=1 takes one recipe at a time. What shapes the execution travels with the
recipe: the settings and the machinery of this checkout, which the worker runs in a process of its own. So workers share
no folder with this machine; they only need the packages.

A recipe is sent when a worker is free. Dask would hand out all of them at once, and hold the death of a worker against
all that wait for it.
"""

import ipaddress
import itertools
import math
import pickle
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from triton_gallery.courier import Kit, make_courier, pack
from triton_gallery.device import Environment
from triton_gallery.execute import Submit
from triton_gallery.recording import FarmError
from triton_gallery.remote import Answer, Request
from triton_gallery.sandbox import Result, Task, failed

if TYPE_CHECKING:
    from distributed import Client

GPU = {"GPU": 1}
ATTEMPTS = 2  # a worker's death need not be the recipe's doing
CONNECTING = 10.0  # seconds
PATIENCE = 60.0  # seconds without a worker that could take a recipe
POLL = 0.2  # seconds
MOST = 256  # recipes under way at once; a thread here waits for each


class WorkerDiedError(Exception):
    """A worker left the cluster before it answered."""


@contextmanager
def connect(address: str, confdir: Path, insecure: bool) -> Iterator["Cluster"]:
    """Connect to a scheduler and ask its GPU workers what executes there.

    Args:
        address: `tls://host:port`, with the certificates that Dask's configuration names; or `tcp://host:port`.
        confdir: the folder of `conf.py`.
        insecure: whether `tcp://` may lead to another machine.

    Raises:
        FarmError: if there is no such cluster, it cannot be trusted, or a worker cannot execute recipes.
    """
    try:
        from distributed import Client, Security
    except ImportError:
        raise FarmError("a cluster needs the package distributed: python -m pip install distributed") from None
    encrypted = _is_encrypted(address, insecure)
    security = Security(require_encryption=encrypted or None)  # None: as configured
    if security.require_encryption and not encrypted:
        raise FarmError(f"{address} is not encrypted, which Dask's configuration requires")
    if encrypted and not (security.tls_ca_file and security.tls_client_cert):
        names = ", ".join(f"DASK_DISTRIBUTED__COMM__TLS__{name}" for name in ("CA_FILE", "CLIENT__CERT", "CLIENT__KEY"))
        raise FarmError(f"{address} needs certificates; name their files in {names}")
    try:
        security.get_connection_args("client")  # reads the certificates; Client leaves half of itself if that fails
        client = Client(address, security=security, timeout=CONNECTING, set_as_default=False)
    except OSError as error:
        raise FarmError(f"no scheduler to trust answers at {address}: {' '.join(str(error).split())}") from None
    with client, ThreadPoolExecutor(max_workers=MOST) as pool:
        cluster = Cluster(client, pool, pack(confdir))
        try:
            cluster.ask_all(address)
            yield cluster
        finally:
            cluster.stop()


class Cluster:
    """The GPU workers of a cluster; those that join later are used too."""

    def __init__(self, client: "Client", pool: ThreadPoolExecutor, kit: Kit) -> None:
        """Take a connected client, threads to wait in, and what travels with each recipe."""
        self._client, self._pool, self._kit, self._courier = client, pool, kit, make_courier()
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # for what follows
        self._busy: set[str] = set()
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[Environment, Sequence[str]]] = {}  # a recipe's turn: for what, and not on which
        self._environments: dict[str, Environment | None] = {}  # by worker; None if it is of no use
        self._present: set[str] = set()
        self._looked = -math.inf
        self._answered = monotonic()

    def ask_all(self, address: str) -> None:
        """Wait for workers, and ask what executes there; FarmError if there are none, or one cannot execute recipes."""
        end = monotonic() + PATIENCE
        while not self._workers():
            if monotonic() > end:
                raise FarmError(f"{address} has no worker that announces GPU=1; see docs/guide/cluster.md")
            time.sleep(POLL)
        workers = sorted(self._present)
        self._environments.update(zip(workers, self._pool.map(self._ask, workers), strict=True))

    def stop(self) -> None:
        """Take back what was sent; the workers end it."""
        self._stopping.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    @property
    def environments(self) -> Sequence[Environment]:
        """What executes there: one for each worker."""
        return [environment for environment in self._environments.values() if environment]

    def on(self, kind: Sequence[Environment]) -> AbstractContextManager[Submit]:
        """Return what carries tasks out on the workers of a kind, one at a time on each."""
        return nullcontext(lambda task: self._pool.submit(self._execute, task, kind[0], next(self._numbers)))

    def _execute(self, task: Task, kind: Environment, number: int) -> Result:
        """Have a worker execute a recipe, and another one if that dies."""
        tried: list[str] = []
        try:
            while len(tried) < ATTEMPTS:
                worker, environment = self._take(kind, number, tried)
                tried.append(worker)
                try:
                    answer = self._send(worker, (task, environment))
                    assert isinstance(answer, tuple)
                    return answer
                except WorkerDiedError:
                    continue
                finally:
                    self._free(worker)
            what = f"{ATTEMPTS} workers died while they executed it"
        except Exception as error:
            what = f"could not be executed: {error}"
        finally:
            with self._lock:
                self._waiting.pop(number, None)
        return failed(task, kind, what, "\n".join(f"tried on {worker}" for worker in tried))

    def _take(self, kind: Environment, number: int, tried: Sequence[str]) -> tuple[str, Environment]:
        """Wait for a free worker of a kind, and for one's turn; return it and what executes there. It is then busy."""
        end = monotonic() + PATIENCE
        while not self._stopping.is_set():
            with self._lock:
                self._waiting[number] = kind, tried
                fit = [worker for worker in self._workers() - set(tried) if self._may_be(worker, kind)]
                free = (worker for worker in fit if worker not in self._busy)
                worker = next((worker for worker in free if not self._is_owed(worker, kind, number)), None)
                if worker:
                    self._busy.add(worker)
                    del self._waiting[number]
            if worker:
                environment = self._look(worker)
                if environment and self._may_be(worker, kind):
                    return worker, environment
                self._free(worker)
            if fit:
                end = monotonic() + PATIENCE
            elif monotonic() > end:
                raise WorkerDiedError(f"no worker with {kind.name} is left")
            time.sleep(POLL)
        raise WorkerDiedError("stopped")

    def _is_owed(self, worker: str, kind: Environment, number: int) -> bool:
        """Whether a worker would do for a recipe whose turn is earlier."""
        earlier = (waits for other, waits in self._waiting.items() if other < number)
        return any(wanted.kind == kind.kind and worker not in tried for wanted, tried in earlier)

    def _free(self, worker: str) -> None:
        with self._lock:
            self._busy.remove(worker)

    def _may_be(self, worker: str, kind: Environment) -> bool:
        known = self._environments.get(worker, kind)
        return known is not None and known.kind == kind.kind

    def _look(self, worker: str) -> Environment | None:
        """Return what executes on a worker, which is held busy; ask it if it joined after the start."""
        if worker not in self._environments:
            try:
                environment: Environment | None = self._ask(worker)
            except FarmError:
                environment = None
            with self._lock:
                self._environments[worker] = environment
        return self._environments[worker]

    def _ask(self, worker: str) -> Environment:
        """Return what executes on a worker; FarmError if it is not one GPU."""
        try:
            found = self._send(worker, None)
        except Exception as error:
            raise FarmError(f"{worker} does not tell what executes there: {error}") from None
        assert isinstance(found, list)
        if not found[0].is_gpu:
            raise FarmError(f"{worker} announces a GPU, but torch sees none there")
        if len(found) > 1:
            raise FarmError(f"{worker} sees {len(found)} GPUs; start a worker for each, with CUDA_VISIBLE_DEVICES")
        return found[0]

    def _send(self, worker: str, request: Request) -> Answer:
        """Have a worker answer a request; WorkerDiedError if it does not live to."""
        from distributed import KilledWorker

        sent = self._client.submit(
            self._courier, self._kit, pickle.dumps(request), workers=[worker], resources=GPU, pure=False
        )
        try:
            while True:
                try:
                    sent.exception(timeout=1)  # waits for its end alone: the answer may take longer to come
                    answer: Answer = pickle.loads(sent.result(PATIENCE))  # noqa: S301 - the cluster is trusted
                    return answer
                except TimeoutError:
                    with self._lock:
                        wanted = not self._stopping.is_set() and worker in self._workers()
                    if not wanted:
                        raise CancelledError from None
        except (KilledWorker, CancelledError):
            raise WorkerDiedError(f"{worker} died") from None
        finally:
            sent.cancel()

    def _workers(self) -> set[str]:
        """Return the addresses of the workers that announce a GPU, as of a second ago at the most."""
        if monotonic() - self._looked > 1:
            scheduler = self._client.scheduler
            if scheduler is None:
                raise FarmError("the connection to the scheduler is lost")
            with suppress(OSError):  # it is being connected again
                workers = self._client.sync(scheduler.identity, callback_timeout=CONNECTING)["workers"]
                self._present = {address for address, worker in workers.items() if worker["resources"].get("GPU")}
                self._answered = monotonic()
            self._looked = monotonic()
        if monotonic() - self._answered > PATIENCE:
            raise FarmError("the scheduler does not answer")
        return self._present


def _is_encrypted(address: str, insecure: bool) -> bool:
    """Whether an address asks for TLS; FarmError if it is none, or asks for too little."""
    parts = urlsplit(address)
    try:
        whole = parts.scheme in {"tcp", "tls"} and parts.hostname and parts.port
        whole = whole and address == f"{parts.scheme}://{parts.netloc}"  # as Dask takes it
    except ValueError:
        whole = None
    if not whole:
        raise FarmError(f"{address!r} is no scheduler's address; one is tls://host:port, or tcp://127.0.0.1:port")
    if parts.scheme == "tls":
        return True
    if not insecure and not _is_loopback(parts.hostname or ""):
        raise FarmError(f"{address} would let others run code there and here; use tls://, or --insecure (INSECURE=1)")
    return False


def _is_loopback(host: str) -> bool:
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(address).is_loopback for address in found)
