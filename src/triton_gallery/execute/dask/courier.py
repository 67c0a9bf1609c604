"""What travels to a cluster's worker besides a recipe, and what the worker does with it.

A worker may have another version of this project, or none. So nothing that it unpickles comes from here by name: it
gets files, starts a process on them, and passes bytes in and out.
"""

from collections.abc import Callable
from pathlib import Path

Kit = dict[str, bytes]  # files by their paths


def pack() -> Kit:
    """Return the files of this package."""
    package = Path(__file__).parents[2]
    return {f"src/{path.relative_to(package.parent)}": path.read_bytes() for path in package.rglob("*.py")}


def make_courier() -> Callable[[Kit, bytes, str], bytes | None]:
    """Return what a Dask worker executes; it takes a kit, a pickled request and a folder, and returns the answer.

    There is none if the folder is not that of the worker, which then has the address of one that died. It is made here
    because Dask sends the code of an inner function, and of others the name alone.
    """

    def courier(kit: Kit, request: bytes, home: str) -> bytes | None:
        import os
        import subprocess
        import sys
        import tempfile
        from contextlib import suppress
        from pathlib import Path

        import dask
        from distributed import Reschedule, get_worker

        worker = get_worker()
        if worker.local_directory != home:
            return None
        key = worker.get_current_task()
        with tempfile.TemporaryDirectory(dir=worker.local_directory, ignore_cleanup_errors=True) as name:
            folder = Path(name)
            for path, content in {**kit, "request": request}.items():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(content)
            # threads of libraries: recipes want as many as they have where no cluster is
            of_nanny = dask.config.get("distributed.nanny.pre-spawn-environ")
            variables = {k: v for k, v in os.environ.items() if v != str(of_nanny.get(k))}
            paths = [str(folder / "src"), *filter(None, [variables.get("PYTHONPATH")])]
            variables |= {"PYTHONPATH": os.pathsep.join(paths), "TMPDIR": name}
            command = [sys.executable, "-P", "-m", "triton_gallery.execute.dask.on_worker"]
            with open(folder / "log", "wb") as log:
                process = subprocess.Popen(
                    command, cwd=folder, env=variables, stdin=subprocess.PIPE, stdout=log, stderr=log
                )
            with process:  # leaving it closes standard input, which ends the process
                while process.poll() is None:
                    if worker.state.tasks[key].state == "cancelled" or worker.status.name in {"closing", "closed"}:
                        raise Reschedule  # to nowhere: it is only for this worker
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(0.2)
            if not (folder / "answer").exists():
                told = (folder / "log").read_text(errors="replace").strip()
                raise RuntimeError(told[-2000:] or f"ended with status {process.returncode}")
            return (folder / "answer").read_bytes()

    return courier
