"""Executes recipes on the GPU workers of a Dask cluster.

A worker that announces the resource GPU=1 is a slot, which takes one recipe at a time. One that dies is a slot less,
one that joins a slot more. Dask would hand out all recipes at once, and hold a death against all that wait.

What shapes the execution travels with the recipe: the settings, and the machinery of this checkout, which the worker
runs in a process of its own. So workers share no folder with this machine; they only need the packages.
"""

import asyncio
import ipaddress
import logging
import pickle
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from time import monotonic
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from triton_gallery.execute.dask.courier import Kit, make_courier, pack
from triton_gallery.execute.dask.on_worker import Request, unpack
from triton_gallery.execute.execute import Say, Submit
from triton_gallery.execute.recording import FarmError
from triton_gallery.execute.supervisor import Result, Task, failed
from triton_gallery.recipe.device import Environment, Slot

if TYPE_CHECKING:
    from distributed import Client

GPU = {"GPU": 1}
ATTEMPTS = 2  # a worker's death need not be the recipe's doing
CONNECTING = 10.0  # seconds
PATIENCE = 60.0  # seconds without a worker that could take a recipe
POLL = 0.5  # seconds

Worker = tuple[str, str]  # its address, and its folder there: another one may get the address

_log = logging.getLogger(__name__)


class WorkerDiedError(Exception):
    """A worker left the cluster before it answered."""


@contextmanager
def connect(address: str, insecure: bool) -> Iterator["Cluster"]:
    """Connect to a scheduler and ask its GPU workers what executes there.

    Args:
        address: `tls://host:port`, with the certificates that Dask's configuration names; or `tcp://host:port`.
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
    with client:
        cluster = Cluster(client, pack())
        client.sync(cluster.start, address)
        yield cluster


class Cluster:
    """The GPU workers of a cluster; those that join later are used too. Its coroutines run in the client's loop."""

    def __init__(self, client: "Client", kit: Kit) -> None:
        """Take a connected client and what travels with each recipe."""
        self._client, self._kit, self._courier = client, kit, make_courier()
        self._workers: dict[Worker, asyncio.Task[Environment]] = {}  # what executes there is asked when a worker joins
        self._busy: set[Worker] = set()
        self._changed = asyncio.Event()
        self._answered = monotonic()
        self.slots: Sequence[Slot] = []

    async def start(self, address: str) -> None:
        """Wait for workers, and ask what executes there; FarmError if there are none, or one cannot execute recipes."""
        self._watching = asyncio.create_task(self._watch())
        end = monotonic() + PATIENCE
        while not self._workers:
            if monotonic() > end:
                raise FarmError(f"{address} has no worker that announces GPU=1; see docs/guide/cluster.md")
            await self._changed.wait()
        environments = await asyncio.gather(*self._workers.values())
        self.slots = [Slot(environment, None) for environment in environments]

    def on(self, kind: Sequence[Slot], tasks: Sequence[Task], say: Say) -> AbstractContextManager[Submit]:
        """Return what carries tasks out on the workers of a kind, one at a time on each and without a warm-up."""
        loop, environment = self._client.loop.asyncio_loop, kind[0].environment
        return nullcontext(lambda task: asyncio.run_coroutine_threadsafe(self._execute(task, environment), loop))

    async def _execute(self, task: Task, environment: Environment) -> Result:
        """Have a worker execute a recipe, and another one if that dies."""
        tried: list[str] = []
        try:
            while len(tried) < ATTEMPTS:
                worker = await self._take(environment)
                tried.append(worker[0])
                try:
                    return unpack(await self._send(worker, (task, environment)), task, environment)
                except WorkerDiedError:
                    continue
                finally:
                    self._busy.remove(worker)
                    self._wake()
            failure = f"{ATTEMPTS} workers died while they executed it"
        except Exception as error:
            failure = f"could not be executed: {error}"
        return failed(task, environment, failure, "\n".join(f"tried on {address}" for address in tried))

    async def _take(self, environment: Environment) -> Worker:
        """Wait for a free worker with this environment, and for those who wait already."""
        end = monotonic() + PATIENCE
        while True:
            self._check(None)
            fit = {worker: asked for worker, asked in self._workers.items() if _may_have(asked, environment)}
            for worker, asked in fit.items():
                if asked.done() and worker not in self._busy:
                    self._busy.add(worker)
                    return worker
            if fit:
                end = monotonic() + PATIENCE
            elif monotonic() > end:
                raise FarmError(f"no worker with {environment.name} is left")
            await self._changed.wait()

    def _wake(self) -> None:
        """Have those who wait look again, in their order."""
        self._changed.set()
        self._changed.clear()

    async def _watch(self) -> None:
        """Look again and again which workers are there: a slot for each."""
        while True:
            with suppress(Exception):  # the connection may be made again; `_check` knows when it is too late
                items = (await asyncio.wait_for(self._client.scheduler.identity(), CONNECTING))["workers"].items()
                present = {
                    (address, worker["local_directory"]) for address, worker in items if worker["resources"].get("GPU")
                }
                self._answered = monotonic()
                for worker in self._workers.keys() - present:
                    del self._workers[worker]
                for worker in present - self._workers.keys():
                    self._workers[worker] = asyncio.create_task(self._ask(worker))
                    self._workers[worker].add_done_callback(self._tell)
            self._wake()
            await asyncio.sleep(POLL)

    async def _ask(self, worker: Worker) -> Environment:
        """Return what executes on a worker; FarmError if it is not one GPU, or unlike those at the start."""
        address, _ = worker
        try:
            first, *others = msgspec.json.decode(await self._send(worker, None), type=list[Environment])
        except Exception as error:
            raise FarmError(f"{address} does not tell what executes there: {error}") from None
        if not first.is_gpu:
            raise FarmError(f"{address} announces a GPU, but torch sees none there")
        if others:
            gpus = f"{len(others) + 1} GPUs"
            raise FarmError(f"{address} sees {gpus}; start a worker for each, with CUDA_VISIBLE_DEVICES")
        if self.slots and first not in [slot.environment for slot in self.slots]:
            raise FarmError(f"{address} has another GPU, driver or version than the workers at the start")
        return first

    def _tell(self, asked: asyncio.Task[Environment]) -> None:
        """Tell of a worker that joined after the start why it is of no use."""
        error = None if asked.cancelled() else asked.exception()
        if error and self.slots and self._client.status == "running":
            _log.warning("%s; it is not used", error)

    async def _send(self, worker: Worker, request: Request) -> bytes:
        """Have a worker answer a request; WorkerDiedError if it dies, FarmError if the scheduler does."""
        from distributed import KilledWorker

        address, folder = worker
        parcel = self._kit, pickle.dumps(request), folder
        while True:
            self._check(worker)
            sent = self._client.submit(self._courier, *parcel, workers=[address], resources=GPU, pure=False)
            answer: asyncio.Future[bytes | None] = asyncio.ensure_future(sent.result())
            try:
                while not (await asyncio.wait([answer], timeout=POLL))[0]:
                    self._check(worker)
                if (text := answer.result()) is not None:
                    return text
            except (CancelledError, KilledWorker):
                pass  # the worker died, which `_check` will tell, or the connection broke: then it is sent again
            finally:
                answer.cancel()
                sent.release()
            await asyncio.sleep(POLL)

    def _check(self, worker: Worker | None) -> None:
        """Raise FarmError if no worker can be had any more, WorkerDiedError if this one cannot."""
        if self._client.status not in {"connecting", "running"}:
            raise FarmError("the connection to the scheduler is lost")
        if monotonic() - self._answered > PATIENCE:
            raise FarmError("the scheduler does not answer")
        if worker and worker not in self._workers:
            raise WorkerDiedError(f"{worker[0]} died")


def _may_have(asked: asyncio.Task[Environment], environment: Environment) -> bool:
    return not asked.done() or (asked.exception() is None and asked.result() == environment)


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
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)
