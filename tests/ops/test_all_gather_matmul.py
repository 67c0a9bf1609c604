"""The ops of the recipe All-gather and matmul, between ranks that share memory of the CPU, and its exercises."""

import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from case import Case, Draw, Exact, Refused
from collect_cases import require
from hypothesis import strategies as st
from inputs import FLOATS, sizes
from ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy's infinities, in the interpreter
PATH = "several_gpus/all_gather_matmul.py"
require(PATH.removesuffix(".py"))


def join_one(_: ModuleType) -> None:
    """Join a group of one rank, if there is none yet."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def matrices(draw: Draw, M: int, N: int, K: int) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Make rows and a weight, for the group of one rank."""
    return draw(M, K), draw(N, K), "0"


def exact(x: torch.Tensor, weight: torch.Tensor, group: str) -> list[Exact]:
    """Return the product, in K sums one after another."""
    return [Exact(x @ weight.T, x.abs() @ weight.abs().T, roundings=max(x.shape[1], 1))]


def special(draw: Draw) -> list[tuple[torch.Tensor, torch.Tensor, str]]:
    """Make matrices with NaN and infinities, at the edges too: those spoil their rows and columns."""
    x, weight, group = matrices(draw, 150, 136, 72)
    x, weight = torch.ones_like(x), torch.ones_like(weight)
    x[3, 71], x[149, 0], x[64, 20] = torch.nan, torch.inf, -torch.inf
    weight[135, 71], weight[5, 20] = torch.inf, torch.nan
    return [(x, weight, group)]


# M, N and K: more rows of tiles than a group, edges of tiles, rows that the copy engine does not take
SIZES = [(130, 152, 40), (65, 200, 17), (573, 150, 8), (1, 1, 1), (3, 5, 0), (0, 8, 8), (8, 0, 8), (33, 65, 19)]
SIZES += [(128, 128, 64), (257, 129, 72)]
KINDS = "all_gather_matmul takes two float matrices of one dtype, not .* and torch."
SHAPES = r"all_gather_matmul takes matrices of shapes .*, not \(.*\) and \(.*\)$"
GATHERED = Case(
    "all_gather_matmul",
    matrices,
    exact,
    autocast="asked",
    sizes=SIZES,
    small=(4, 5, 8),
    many=(4099, 4097, 65),
    shapes=st.tuples(sizes(128, 300), sizes(128, 300), sizes(128, 300)),
    prepare=join_one,
    contiguous=False,
    reference=lambda x, weight, group: (x.double() @ weight.double().T).to(x.dtype),
    special=special,
    refused=[
        Refused(lambda draw: (draw(8, 8).int(), draw(8, 8).int(), "0"), TypeError, f"{KINDS}int32"),
        Refused(lambda draw: (draw(8, 8), draw(8, 8).half(), "0"), TypeError, f"{KINDS}float16"),
        Refused(lambda draw: (draw(8), draw(8, 8), "0"), ValueError, SHAPES),
        Refused(lambda draw: (draw(8, 8), draw(8), "0"), ValueError, SHAPES),
        Refused(lambda draw: (draw(8, 8), draw(8, 4), "0"), ValueError, SHAPES),
        Refused(
            lambda draw: (draw(8, 8), draw(8, 8).to("meta"), "0"),
            ValueError,
            "all_gather_matmul takes two matrices on one device, not on .* and meta",
        ),
        Refused(
            lambda draw: (draw(8, 8), draw(8, 8), "nobody"),
            ValueError,
            "all_gather_matmul takes the name of a group that has this rank, .* not 'nobody'",
        ),
    ],
)
CONTRACT = [GATHERED, replace(GATHERED, call="all_gather_matmul_scatter")]
COPY = "buffers.mine[place].copy_(buffers.peers[peer][place])"
FLAG = "flags[peer, i : i + 1].copy_(buffers.ones[peer])"
BREAKS = [
    ("a flag is not waited for", "lost = _all_gather_matmul_wait(flag_ptr, tries)", "lost = 0.0"),
    ("the first flag is for all chunks", "flags_ptr + shard * chunks + off_m // chunk", "flags_ptr + shard * chunks"),
    ("the flag comes before the chunk", f"{COPY}\n            {FLAG}", f"{FLAG}\n            {COPY}"),
    (
        "rows are read before they are there",
        "rows may be read.\n        _all_gather_matmul_barrier(buffers, 0)\n",
        "rows may be read.\n",
    ),
    (
        "rows are written before they are read",
        "with _all_gather_matmul_aside(buffers):\n            _all_gather_matmul_barrier(buffers, 1)\n",
        "pass\n",
    ),
    (
        "parts are stored before the last are summed",
        "left with them.\n        _all_gather_matmul_barrier(buffers, 0)\n",
        "left with them.\n",
    ),
    (
        "parts are summed before all are stored",
        "parts of this rank's rows.\n        _all_gather_matmul_barrier(buffers, 1)\n",
        "parts of this rank's rows.\n",
    ),
    ("the sum begins with the last rank", "partial_ptr + rank * size", "partial_ptr + (RANKS - 1 - rank) * size"),
    (
        "a tile goes past the shard",
        "mask = (offs_m < M)[:, None] & (offs_n < stride)[None, :]",
        "mask = (offs_n < stride)[None, :]",
    ),
]

# In each rank; `op` is the module of the op, and GROUP the name of all ranks
OPENING = """
import datetime, importlib.util, os, sys, threading, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=100))
RANK, RANKS, GROUP = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
spec = importlib.util.spec_from_file_location("op", sys.argv[1])
op = sys.modules["op"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(op)
dtype = getattr(torch, sys.argv[2])
generator = torch.Generator().manual_seed(0)

def random(*shape):
    return torch.randn(*shape, generator=generator).to(dtype)

def all_random(*shape):
    return [random(*shape) for _ in range(RANKS)]

def near(out, xs, ws, what):
    # Each rank rounds its product: one eps of it. Triton's interpreter cuts off instead of rounding.
    pairs = [(x.double(), w.double()) for x, w in zip(xs, ws)]
    expected = sum(x @ w.T for x, w in pairs)
    info = torch.finfo(dtype)
    unit = 2**-53 if dtype == torch.float64 else 2**-24
    allowed = sum(x.shape[1] * unit * (x.abs() @ w.abs().T) + info.eps * (x @ w.T).abs() for x, w in pairs)
    allowed += info.eps * (expected.abs() + info.tiny) + RANKS * unit * allowed
    where = slice(None) if out.shape == expected.shape else slice(RANK * len(out), (RANK + 1) * len(out))
    wrong = ((out.double() - expected[where]).abs() > allowed[where]) | out.isnan()
    assert not wrong.any(), f"{what}: {wrong.sum()} of {wrong.numel()} are wrong on rank {RANK}"

def gathered(xs, ws, what):
    out = op.all_gather_matmul(xs[RANK], ws[RANK], GROUP)
    near(out, [torch.cat(xs)], [ws[RANK]], what)

def scattered(xs, ws, what):
    out = op.all_gather_matmul_scatter(xs[RANK], ws[RANK], GROUP)
    near(out, xs, ws, what)
"""
SHAPES_OF_RANKS = """
for M, N, K in ((70, 136, 72), (1, 5, 7), (129, 50, 44), (33, 500, 179)):
    for turn in range(2):
        gathered(all_random(M, K), all_random(N, K), (M, N, K, turn))
        scattered(all_random(RANKS * M, K), all_random(N, K), (M, N, K, turn, "scattered"))
# Of any strides; N differs between ranks, and may be 0; so does K where parts are summed
xs, ws = all_random(72, 40), all_random(40, 24)
gathered([x.T for x in xs], [random(72, 8 * r).T for r in range(RANKS)], "transposed")
scattered([random(8 * r + 3, 2 * RANKS).T for r in range(RANKS)], [random(5, 8 * r + 3) for r in range(RANKS)], "parts")
op.ALL_GATHER_MATMUL_CHUNK = 1  # so that a chunk has 128 rows
gathered(all_random(300, 24), all_random(17, 24), "chunks")
assert op.all_gather_matmul(torch.ones(0, 8), torch.ones(8, 8), GROUP).shape == (0, 8)
assert not op.all_gather_matmul(torch.ones(2, 0), torch.ones(3, 0), GROUP).any()
if RANKS > 1:
    try:
        op.all_gather_matmul_scatter(torch.ones(RANKS + 1, 8), torch.ones(8, 8), GROUP)
    except ValueError as error:
        assert str(error).startswith("all_gather_matmul_scatter takes a multiple of")
    else:
        raise AssertionError("rows that ranks do not divide")
dist.destroy_process_group()  # else it may abort at the end
print(f"checked {RANK}\\n", end="")
"""
DELAYS = """
op.ALL_GATHER_MATMUL_CHUNK = 1
M, N, K = 256, 8, 24
plain = {name: getattr(op, f"_all_gather_matmul_{name}") for name in ("pull", "barrier", "sum_kernel")}
torch_copy = torch.Tensor.copy_
threads = []

def late_copy(*arguments):
    if threading.current_thread() in threads:
        time.sleep(0.1)
    return torch_copy(*arguments)

def pull_aside(*arguments):
    # A thread instead of the side stream, whose copies are late
    threads.append(threading.Thread(target=plain["pull"], args=arguments))
    threads[-1].start()

def barrier_aside(*arguments):
    while threads:
        threads.pop().join()
    plain["barrier"](*arguments)

gathered(all_random(M, K), all_random(N, K), "first")
torch.Tensor.copy_, op._all_gather_matmul_pull, op._all_gather_matmul_barrier = late_copy, pull_aside, barrier_aside
for turn in range(2):
    gathered(all_random(M, K), all_random(N, K), f"copies are late, turn {turn}")
torch.Tensor.copy_, op._all_gather_matmul_pull, op._all_gather_matmul_barrier = torch_copy, *[*plain.values()][:2]

def late_pull(*arguments):
    time.sleep(1.0 * (RANK == 1))
    plain["pull"](*arguments)

xs, ws = [[all_random(M, K) for _ in range(2)] for _ in range(2)], all_random(N, K)
dist.barrier()
time.sleep(1.0 * (RANK == 1))  # its rows come late
gathered(xs[0][0], ws, "rows are late")
op._all_gather_matmul_pull = late_pull
outs = [op.all_gather_matmul(x[RANK], ws[RANK], GROUP) for x in xs[0]]
for x, out in zip(xs[0], outs):
    near(out, [torch.cat(x)], [ws[RANK]], "rows are read late")
op._all_gather_matmul_pull = plain["pull"]

class LateSum:
    def __getitem__(self, grid):
        time.sleep(1.0 * (RANK == 0))
        return plain["sum_kernel"][grid]

xs = [all_random(RANKS * 16, K) for _ in range(2)]
scattered(xs[0], ws, "parts")
dist.barrier()
time.sleep(1.0 * (RANK == 1))
scattered(xs[1], ws, "parts are late")
op._all_gather_matmul_sum_kernel = LateSum()
outs = [op.all_gather_matmul_scatter(x[RANK], ws[RANK], GROUP) for x in xs]
for x, out in zip(xs, outs):
    near(out, x, ws, "parts are summed late")
dist.destroy_process_group()  # else it may abort at the end
print(f"checked {RANK}\\n", end="")
"""
NEVER = """
op._all_gather_matmul_pull = lambda *_: None
op.ALL_GATHER_MATMUL_TRIES = 3
out = op.all_gather_matmul(random(8, 16), random(8, 16), GROUP).view(RANKS, 8, 8)
there = [rank == RANK for rank in range(RANKS)]
assert [not part.isnan().any() for part in out] == there
assert [part.isnan().all().item() for part in out] == [not here for here in there]
dist.destroy_process_group()  # else it may abort at the end
print(f"checked {RANK}\\n", end="")
"""
ORDER = """
# In float32, 1 + 2**25 is 2**25: the sum tells its order.
value = (1.0, 2.0**25, -(2.0**25))[RANK]
out = op.all_gather_matmul_scatter(torch.full((RANKS, 1), value), torch.ones(1, 1), GROUP)
assert out.item() == 0.0, out
dist.destroy_process_group()  # else it may abort at the end
print(f"checked {RANK}\\n", end="")
"""
# Answers and kernels of the page; `p` is the recipe
ON_THE_PAGE = """
import torch
import triton
import triton.language as tl
import all_gather_matmul as p

@triton.jit
def hasty_kernel(flag_ptr, out_ptr, call, tries):
    tl.store(out_ptr, tl.load(flag_ptr))

@triton.jit
def last_first_kernel(parts_ptr, out_ptr, size, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(axis=0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for rank in tl.static_range(RANKS):
        acc += tl.load(parts_ptr + (RANKS - 1 - rank) * size + offs, mask=offs < size, other=0.0)
    tl.store(out_ptr + offs, acc, mask=offs < size)

assert p.check_counter(p.counter_answer_kernel)
assert p.check_sum(p.sum_answer_kernel)
assert not p.check_counter(hasty_kernel)
assert not p.check_sum(last_first_kernel)
assert not p.check_counter(None) and not p.check_sum(None)
for chunk in (32, 64):
    for turn in range(2):
        x = p.random(p.ROWS, p.K)
        y = p.gather_matmul(x, p.weight, chunk=chunk)
        assert (p.error_of(y, p.gather(x), p.weight).abs() <= 1).all()
p.dist.destroy_process_group()
print(f"checked {p.RANK}\\n", end="")
"""


def run(file: str | None, folder: Path, ranks: int, program: str, dtype: str = "float32") -> str:
    """Run a program in ranks without a GPU, given the file of the op; return what they printed."""
    script = folder / "checks.py"
    script.write_text(program)
    return run_ranks(script, ranks, *([file, dtype] if file else []))


def assert_checked(said: str, ranks: int) -> None:
    """Assert that all ranks came to their end."""
    assert sorted(re.findall(r"checked (\d)", said)) == [str(rank) for rank in range(ranks)]


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize(
    "ranks", [2, pytest.param(3, marks=pytest.mark.thorough), pytest.param(1, marks=pytest.mark.thorough)]
)
def test_products(taken: ModuleType, tmp_path: Path, ranks: int, dtype: torch.dtype) -> None:
    """At odd sizes, in other strides, twice in turn, in several chunks."""
    assert taken.__file__
    name = str(dtype).removeprefix("torch.")
    assert_checked(run(taken.__file__, tmp_path, ranks, OPENING + SHAPES_OF_RANKS, name), ranks)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_delays_float32(taken: ModuleType, tmp_path: Path, ranks: int) -> None:
    """Whatever is late is waited for: copies, rows, parts, and whoever has not read them."""
    assert taken.__file__
    assert_checked(run(taken.__file__, tmp_path, ranks, OPENING + DELAYS), ranks)


def test_never_float32(taken: ModuleType, tmp_path: Path) -> None:
    """Rows that never come are not waited for forever: their products are NaN, and no others."""
    assert taken.__file__
    assert_checked(run(taken.__file__, tmp_path, 2, OPENING + NEVER), 2)


def test_order_of_the_sum_float32(taken: ModuleType, tmp_path: Path) -> None:
    assert taken.__file__
    assert_checked(run(taken.__file__, tmp_path, 3, OPENING + ORDER), 3)


def test_needs_a_group(taken: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taken.dist, "is_initialized", lambda: False)
    for op in (taken.all_gather_matmul, taken.all_gather_matmul_scatter):
        with pytest.raises(RuntimeError, match=r"^all_gather_matmul takes a group of ranks, and there is none: "):
            op(torch.ones(8, 8), torch.ones(8, 8), "0")


def test_needs_a_copy_engine(taken: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    join_one(taken)

    def refuses(device: torch.device) -> None:
        raise RuntimeError("persistent_matmul takes other GPUs")

    monkeypatch.setattr(taken, "_persistent_matmul_gpu", refuses)
    with pytest.raises(RuntimeError, match=r"^all_gather_matmul takes tensors on NVIDIA GPUs of compute capability 9"):
        taken.all_gather_matmul(torch.ones(8, 8), torch.ones(8, 8), "0")


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_page(gallery: Path, tmp_path: Path, ranks: int) -> None:
    """A kernel that does not wait has wrong rows: those of the other ranks."""
    said = run(None, tmp_path, ranks, (gallery / PATH).read_text())
    assert f"0 tries: {64 * (ranks - 1)} of {64 * ranks} rows are wrong" in said
    assert f"tries: 0 of {64 * ranks} rows are wrong" in said
    assert said.count("not solved yet") == 2


def test_exercises(gallery: Path, tmp_path: Path) -> None:
    """The answers are right, and what does not wait, or adds in another order, is not."""
    (tmp_path / "all_gather_matmul.py").write_text((gallery / PATH).read_text())
    assert_checked(run(None, tmp_path, 2, ON_THE_PAGE), 2)
