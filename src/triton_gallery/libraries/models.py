"""Measures models of the transformers library: as they are, with Liger's kernels, and with the gallery's ops.

`make models` runs it on a GPU host. Each case is a process of its own, so that none finds memory that another left; the
next one imports its libraries while this one is measured:

    python -m triton_gallery.libraries.models                          # all cases, one after the other
    python -m triton_gallery.libraries.models train base-2048 ours     # those with all of these words

A case of training has AdamW and a batch of random tokens, the same for all ways, and prints the median time of a step,
the most memory that tensors had, and the losses. One of generation has a static cache and prints tokens a second.
"""

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

WARM, STEPS = 5, 25  # of training: those before the clock, and those it counts
TOKENS = 128  # to generate
SIZES: dict[str, dict[str, int]] = {  # of Llamas
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    | {"num_hidden_layers": 2, "vocab_size": 97},
    "small": {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 8}
    | {"num_hidden_layers": 8, "vocab_size": 128256},
    "base": {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 8}
    | {"num_hidden_layers": 8, "vocab_size": 128256},
    "wide": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    | {"num_hidden_layers": 4, "vocab_size": 128256},
}
BATCHES = {2048: 4, 16384: 1}  # by the length of a sequence


@dataclass(frozen=True)
class Case:
    """What a process measures."""

    work: str  # train or generate
    model: str  # a size and a length, or a batch
    way: str  # plain, Liger or ours
    compiled: bool

    def __str__(self) -> str:
        """Return it as it is asked for."""
        return f"{self.work} {self.model} {self.way} {'compiled' if self.compiled else 'eager'}"


def cases() -> Iterator[Case]:
    """Yield all cases; those to compare follow one another."""
    models = {"train": [f"{size}-{length}" for size in ("small", "base", "wide") for length in BATCHES]}
    models["generate"] = [f"base-{batch}" for batch in (1, 32)]
    for work, names in models.items():
        for name in names:
            for compiled in (False, True):
                for way in ("plain", "Liger", "ours"):
                    yield Case(work, name, way, compiled)


def build(size: str, way: str, longest: int) -> Any:
    """Return a model with random weights, in bfloat16 on a GPU."""
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES[size], max_position_embeddings=longest)
    with torch.device(device):  # made there: a CPU would take longer to draw the weights than the measurement takes
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16 if device == "cuda" else torch.float32)
    if way == "Liger":
        importlib.import_module("liger_kernel.transformers").apply_liger_kernel_to_llama(model=model)
    elif way == "ours":
        from triton_gallery_ops.transformers import patch

        print(patch(model), file=sys.stderr)
    return model


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def train(model: Any, length: int, compiled: bool) -> dict[str, Any]:
    """Return the time of a step in milliseconds, the peak of memory in GiB, and the losses."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=torch.cuda.is_available())
    shape = BATCHES.get(length, 2), length
    # A mask without padding: with none, the library takes another way under torch.compile.
    inputs = {"input_ids": torch.randint(model.config.vocab_size, shape, device=model.device)}
    inputs |= {"labels": inputs["input_ids"], "attention_mask": torch.ones_like(inputs["input_ids"])}
    forward = torch.compile(model) if compiled else model
    losses, times = [], []
    for step in range(WARM + STEPS):
        if step == WARM and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        synchronize()
        start = time.perf_counter()
        loss = forward(**inputs, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize()
        times.append(time.perf_counter() - start)
        losses.append(loss.item())
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    counted = [1000 * seconds for seconds in times[WARM:]]
    return {
        "ms": statistics.median(counted),
        "ms, 20th and 80th percentile": [statistics.quantiles(counted, n=5)[i] for i in (0, 3)],
        "GiB": peak / 2**30,
        "losses": losses,
    }


def generate(model: Any, batch: int, compiled: bool) -> dict[str, Any]:
    """Return tokens a second, after a prompt of 128 tokens."""
    model.eval()
    model.generation_config.pad_token_id = 0
    prompt = torch.randint(1, model.config.vocab_size, (batch, 128), device=model.device)
    call = partial(
        model.generate,
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=TOKENS,
        min_new_tokens=TOKENS,
        do_sample=False,
        cache_implementation="static",
        disable_compile=not compiled,
    )
    times = []
    for _ in range(4):
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        times.append(time.perf_counter() - start)
    return {"tokens/s": batch * TOKENS / statistics.median(times[1:])}


def measure(case: Case) -> dict[str, Any]:
    """Measure a case in this process."""
    size, _, number = case.model.partition("-")
    work: Callable[..., dict[str, Any]] = {"train": train, "generate": generate}[case.work]
    longest = int(number) if case.work == "train" else 512
    return work(build(size, case.way, longest), int(number), case.compiled)


def begin(case: Case) -> subprocess.Popen[str]:
    """Start the process of a case, which imports the libraries and waits for a line before it measures."""
    command = [sys.executable, "-m", "triton_gallery.libraries.models", "--case", json.dumps(asdict(case))]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def main() -> int:
    """Measure the cases that the arguments name, and print a line of JSON for each."""
    parser = argparse.ArgumentParser(prog="python -m triton_gallery.libraries.models")
    parser.add_argument("words", nargs="*", help="of the cases to measure, as: train base-2048 ours eager")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # as JSON, in a process of its own
    arguments = parser.parse_args()
    if arguments.case:
        for module in ("transformers.models.llama.modeling_llama", "torch._inductor.compile_fx"):
            importlib.import_module(module)
        if not sys.stdin.readline():  # who began this process has ended
            return 1
        print(json.dumps(measure(Case(**json.loads(arguments.case)))))
        return 0
    chosen = [case for case in cases() if {*arguments.words} <= {*str(case).split()}]
    failed = 0
    begun = [*map(begin, chosen[:1])]
    for number, case in enumerate(chosen):
        begun += map(begin, chosen[number + 1 : number + 2])  # the next one, if there is one
        process = begun[number]
        output, errors = process.communicate("begin\n")
        if process.returncode:
            failed += 1
            print(f"{case}: failed: {(errors.strip() or str(process.returncode)).splitlines()[-1]}", flush=True)
        else:
            print(json.dumps({"case": str(case), **json.loads(output.splitlines()[-1])}), flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
