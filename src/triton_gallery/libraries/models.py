"""Measures models of the transformers library: as they are, with Liger's kernels, and with the gallery's ops.

`make models` runs it on a GPU host, and records each case as it ends:

    python -m triton_gallery.libraries.models                          # all cases
    python -m triton_gallery.libraries.models train base-2048 ours     # those with all of these words
    python -m triton_gallery.libraries.models --seconds 480            # what that time allows

Compiling takes most of the time, so cases get ready side by side, each in a process of its own: it makes its model,
compiles by calling it, and keeps the weights alone. When all are ready, one after the other is measured, with the
machine to itself. As many as the GPU's memory has room for are one round.

A case of training has AdamW and a batch of random tokens, the same for all ways. One of generation has a static cache.
"""

import argparse
import contextlib
import datetime
import gc
import importlib
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from tempfile import TemporaryFile
from typing import IO, Any

import msgspec
import torch

from triton_gallery.libraries.model_rows import (
    ATTENTION,
    GENERATE,
    KINDS,
    LIGER,
    LOSS,
    NORMS,
    OPTIMIZER,
    OURS,
    PLAIN,
    PRODUCTS,
    REST,
    TRAIN,
    WAYS,
    Case,
    ModelRow,
    Profile,
    Training,
    load_all,
    merge,
    ops_hash,
)
from triton_gallery.libraries.trial import RECORDS
from triton_gallery.recipe.data import Data
from triton_gallery.recipe.device import Environment, detect
from triton_gallery.records.files import BadRecordError
from triton_gallery.records.git import commit
from triton_gallery.records.rows import Rate

WARM, STEPS = 3, 12  # of training: those before the clock, and those it counts
PROMPT, TOKENS = 128, 128  # to generate
CALLS = 3
SECONDS = 480
PROCESSES = 16  # that get ready at a time
MEMBERS = 32  # of a round, each of which takes some 3 GB of the host's memory
GIB = 2**30
COMMAND = [sys.executable, "-m", "triton_gallery.libraries.models", "--case"]
SIZES: dict[str, dict[str, int]] = {  # of Llamas
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    | {"num_hidden_layers": 1, "vocab_size": 97},
    "small": {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 8}
    | {"num_hidden_layers": 8, "vocab_size": 128256},
    "base": {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 8}
    | {"num_hidden_layers": 8, "vocab_size": 128256},
    "wide": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    | {"num_hidden_layers": 4, "vocab_size": 128256},
}
WORDS = {  # in the names of kernels, in lower case; a later kind wins, as attention may be named cutlass too
    PRODUCTS: ("gemm", "nvjet", "cutlass", "xmma", "splitk"),
    NORMS: ("norm", "rsqrt"),
    LOSS: ("cross_entropy", "nll_loss", "softmax", "element_mul"),
    ATTENTION: ("flash", "fmha", "attention"),
    OPTIMIZER: ("adam", "multi_tensor"),
}


class Measured(Data, frozen=True):
    """What the process of a case found: fields of its row."""

    ms: Rate
    tokens: int
    training: Training | None = None


def cases() -> Iterator[Case]:
    """Yield all cases, those that most is asked of first; those to compare follow one another."""
    models = [(TRAIN, size, batch, length) for batch, length in ((4, 2048), (1, 16384)) for size in ("base", "wide")]
    models += [(GENERATE, "base", batch, PROMPT) for batch in (1, 32)]
    models += [(TRAIN, "small", batch, length) for batch, length in ((4, 2048), (1, 16384))]
    for model in models:
        for compiled in (False, True):
            for way in WAYS:
                yield Case(*model, way, compiled)


def held(case: Case) -> float:
    """Return the GiB that a case holds while it waits: its weights, and what CUDA takes for a process.

    One that generates has a cache and the memory of CUDA graphs, too.
    """
    return 2 * _weights(case) / GIB + (2 if case.work == GENERATE else 1)


def peak(case: Case) -> float:
    """Return the GiB that a case takes at most, roughly and rather too many."""
    if case.work == GENERATE:
        return held(case) + 2
    config, tokens = SIZES[case.size], case.batch * case.length
    of_weights = 6 * _weights(case)  # gradients, and two numbers of AdamW
    of_layer = 26 * config["hidden_size"] + 8 * config["intermediate_size"]  # bytes of a token
    of_logits = config["vocab_size"] * (12 if case.way == PLAIN else 4)
    return held(case) + (of_weights + tokens * (config["num_hidden_layers"] * of_layer + of_logits)) / GIB


def _weights(case: Case) -> int:
    """Return how many weights a model has, but those of norms."""
    config = SIZES[case.size]
    hidden = config["hidden_size"]
    keys = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    of_layer = hidden * (2 * hidden + 2 * keys + 3 * config["intermediate_size"])
    return 2 * hidden * config["vocab_size"] + config["num_hidden_layers"] * of_layer


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel, by its name."""
    kinds = [kind for kind, words in WORDS.items() if any(word in kernel.lower() for word in words)]
    return kinds[-1] if kinds else REST


# In the process of a case


def ask(word: str) -> None:
    """Say a word to who began this process, and go on when it answers."""
    print(word, flush=True)
    if not sys.stdin.readline():
        sys.exit("who began this process has ended")


def place() -> tuple[str, torch.dtype]:
    """Return the device and the dtype of a model's weights."""
    return ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)


def build(case: Case) -> Any:
    """Return a model with random weights."""
    import transformers

    device, dtype = place()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES[case.size], max_position_embeddings=case.length + TOKENS)
    # A CPU would take longer to draw the weights than the measurement takes. They are drawn in their dtype: where
    # float32 was before, the allocator would hold the rest of each segment that has a weight in it.
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    if case.way == LIGER:
        importlib.import_module("liger_kernel.transformers").apply_liger_kernel_to_llama(model=model)
    elif case.way == OURS:
        from triton_gallery_ops.transformers import patch

        print(patch(model), file=sys.stderr)
    return model


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def milliseconds(call: Callable[[], Any]) -> float:
    """Return the time of a call, with the GPU's."""
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return 1000 * (time.perf_counter() - start)


def rate(times: list[float]) -> Rate:
    """Return the median, the 20th and the 80th percentile."""
    quantiles = statistics.quantiles(times, n=5, method="inclusive")
    return [statistics.median(times), quantiles[0], quantiles[3]]


def profile(step: Callable[[], Any]) -> dict[str, float]:
    """Return the milliseconds of a step's kernels, by their kind; without a GPU, those of operators."""
    on_gpu = torch.cuda.is_available()
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        step()
        synchronize()
    times = dict.fromkeys(KINDS, 0.0)
    for event in profiler.key_averages():
        time_us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        times[kind_of(event.key)] += 0 if event.is_user_annotation else time_us / 1000
    return times


def compiled_early(model: Any) -> Any:
    """Return a model that compiles its forward and its backward, and then asks for memory, before it computes."""
    import torch._functorch.config
    from torch._inductor.compile_fx import compile_fx

    asked = False

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal asked
        made = compile_fx(graph, inputs)
        if not asked:
            asked = True
            ask("room")
        return made

    torch._functorch.config.force_non_lazy_backward_lowering = True
    return torch.compile(model, backend=backend)


def train(case: Case, model: Any) -> Callable[[], Measured]:
    """Get ready to train, and return what measures it."""
    model.train()
    ids = torch.randint(model.config.vocab_size, (case.batch, case.length), device=model.device)
    if case.compiled:
        forward = compiled_early(model)
    else:
        ask("room")
        forward = model

    def gradients() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        loss: torch.Tensor = forward(ids, labels=ids, use_cache=False).loss
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    for _ in range(2):  # the second has nothing to compile
        gradients()
    model.zero_grad(set_to_none=True)

    def measure() -> Measured:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=torch.cuda.is_available())
        losses, times = [], []

        def step() -> None:
            losses.append(gradients())
            optimizer.step()

        for number in range(WARM + STEPS):
            if number == WARM and torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            times.append(milliseconds(step))
        most = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 1
        ms, found = rate(times[WARM:]), [loss.item() for loss in losses]
        training = Training(most / GIB, found, Profile(ms[0], profile(step)))
        return Measured(ms, case.batch * case.length, training)

    return measure


def generate(case: Case, model: Any) -> Callable[[], Measured]:
    """Get ready to generate, and return what measures it."""
    model.eval()
    model.generation_config.pad_token_id = 0
    prompt = torch.randint(1, model.config.vocab_size, (case.batch, case.length), device=model.device)
    call = partial(
        model.generate,
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=TOKENS,
        min_new_tokens=TOKENS,
        do_sample=False,
        cache_implementation="static",
        disable_compile=not case.compiled,
    )
    ask("room")
    call()

    def measure() -> Measured:
        call()
        return Measured(rate([milliseconds(call) for _ in range(CALLS)]), case.batch * TOKENS)

    return measure


def in_process(case: Case) -> None:
    """Be the process of a case: get ready, wait, measure, and print what was found."""
    for module in ("transformers.models.llama.modeling_llama", "torch._inductor.compile_fx"):
        importlib.import_module(module)
    work = train if case.work == TRAIN else generate
    measure = work(case, build(case))
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    ask("ready")
    print(msgspec.json.encode(measure()).decode())


# In the process that begins them


class Process:
    """The process of a case; its errors are a file, as a pipe that nobody reads would stop it."""

    def __init__(self, case: Case) -> None:
        """Start it."""
        self.case = case
        self.errors: IO[str] = TemporaryFile("w+")  # noqa: SIM115
        code = msgspec.json.encode(case).decode()
        command = [*COMMAND, code]
        # One compiler each, as there are more cases than cores
        variables = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=variables, stdin=pipe, stdout=pipe, stderr=self.errors, text=True)
        assert self.process.stdin
        assert self.process.stdout
        self.stdin, self.stdout = self.process.stdin, self.process.stdout

    def hears(self, *words: str) -> str:
        """Return the first of these words that it says, or JSON; nothing if it ends before."""
        spoken = (line.strip() for line in self.stdout)  # and what libraries print
        return next((line for line in spoken if line in words or line.startswith("{")), "")

    def answer(self) -> None:
        """Have it go on; if it ended, that shows when it is heard."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self.stdin.fileno(), b"on\n")

    def end(self) -> str:
        """End it, and return the last line of its errors."""
        self.process.kill()
        self.process.wait()
        self.errors.seek(0)
        return (self.errors.read().strip() or f"it ended with {self.process.returncode}").splitlines()[-1]


class Run:
    """A run of cases: their processes, the GPU's memory, and the time."""

    def __init__(self, seconds: float, memory: float) -> None:
        """Begin it, with seconds and GiB."""
        self.memory = memory
        self.room = self.free = 0.0  # GiB beside those that a round holds: all, and what nobody takes
        self.is_over = threading.Event()
        self._begun: list[Process] = []
        self._changed = threading.Condition()
        self._timer = threading.Timer(seconds, self.end)
        self._timer.daemon = True
        self._timer.start()

    def rounds(self, chosen: Iterable[Case]) -> Iterator[list[Case]]:
        """Yield cases that get ready together: while one takes its most, memory holds the others."""
        members: list[Case] = []
        for case in chosen:
            several = [*members, case]
            most = sum(map(held, several)) + max(peak(each) - held(each) for each in several)
            if members and (most > self.memory or len(several) > MEMBERS):
                yield members
                several = [case]
            members = several
        if members:
            yield members

    def ready(self, members: list[Case]) -> dict[Case, Process]:
        """Return the processes of a round when all are ready, or have failed; without those that time forbids."""
        self.room = self.free = max(0.0, self.memory - sum(map(held, members)))
        order = sorted(members, key=lambda case: not case.compiled)  # those that take longest begin
        with ThreadPoolExecutor(min(PROCESSES, os.cpu_count() or 1)) as pool:
            processes = dict(zip(order, pool.map(self._ready, order), strict=True))
        return {case: process for case in members if (process := processes[case])}

    def _ready(self, case: Case) -> Process | None:
        with self._changed:
            if self.is_over.is_set():
                return None
            process = Process(case)
            self._begun.append(process)
        if process.hears("room", "ready") == "room":
            gib = min(self.room, peak(case) - held(case))
            with self._changed:
                self._changed.wait_for(lambda: self.free >= gib)
                self.free -= gib
            process.answer()
            process.hears("ready")
            with self._changed:
                self.free += gib
                self._changed.notify_all()
        return process

    def end(self) -> None:
        """End all processes: who waits for one then goes on."""
        with self._changed:
            self.is_over.set()
            self._timer.cancel()
            for process in self._begun:
                process.process.kill()


def packages() -> dict[str, str]:
    """Return the versions of the libraries that a model is made of."""
    found = {}
    for name in ("transformers", "liger-kernel"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure the cases that the arguments name; return the exit status: 1 if one has no figures."""
    parser = argparse.ArgumentParser(prog="python -m triton_gallery.libraries.models")
    parser.add_argument("words", nargs="*", help="of the cases to measure, as: train base-2048 ours eager")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="after which it stops")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # as JSON, in a process of its own
    options = parser.parse_args(arguments)
    if options.case:
        in_process(msgspec.json.decode(options.case, type=Case))
        return 0
    chosen = [case for case in cases() if {*options.words} <= {*str(case).split()}]
    environment = detect()[0].environment
    try:
        load_all(RECORDS)  # what is there is refused now, not after the GPU has worked
    except BadRecordError as error:
        print(error, file=sys.stderr)
        return 2
    made = (environment, datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), commit(), packages())
    run = Run(options.seconds, 0.9 * (environment.memory or 2**40) / GIB)
    left, failed = dict.fromkeys(chosen), 0
    try:
        for members in run.rounds(chosen):
            for case, process in run.ready(members).items():
                process.answer()
                line = process.hears()
                reason = process.end()
                if run.is_over.is_set():
                    break
                del left[case]
                try:
                    keep(case, msgspec.json.decode(line, type=Measured), made)
                except (msgspec.DecodeError, BadRecordError) as error:
                    failed += 1
                    print(f"{case}: failed: {error if line else reason}", flush=True)
    finally:
        run.end()
    if left:
        print(f"not run, as {options.seconds:.0f} s were over: {', '.join(map(str, left))}")
    return int(bool(failed or left))


def keep(case: Case, found: Measured, made: tuple[Environment, str, str | None, dict[str, str]]) -> None:
    """Print what was found of a case and, if it ran on a GPU, record it."""
    parts = [f"{found.ms[0]:.1f} ms", f"{1000 * found.tokens / found.ms[0]:.0f} tokens/s"]
    if found.training:
        profile = found.training.profile
        kinds = (f"{kind} {time:.1f}" for kind, time in [*profile.kinds.items(), ("idle", profile.idle)])
        losses = f"loss {found.training.losses[0]:.4f} to {found.training.losses[-1]:.4f}"
        parts += [f"{found.training.gib:.1f} GiB", losses, *kinds]
    print(f"{case}: {', '.join(parts)}", flush=True)
    if made[0].is_gpu:
        code = ops_hash() if case.way == OURS else None
        row = ModelRow(case, SIZES[case.size], code, *made, found.ms, found.tokens, found.training)
        merge(RECORDS, [row], [("models", case) for case in cases()])


if __name__ == "__main__":
    sys.exit(main())
