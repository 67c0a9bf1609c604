"""The op of the recipe Attention on Hopper."""

# ruff: noqa: N806 - lengths and head dimensions have the recipe's names

import itertools
import math
import re
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from attentions import SPECIAL, arguments, exact, refused, shapes
from case import Case, Draw, Refused, assert_close, check, in_float64
from compiled import Ask, graphs
from inputs import DEVICE, Layout

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy's infinities, in the interpreter
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

RECIPE = Path("attention") / "hopper_attention.py"
HEADS = [8, 16, 40, 64, 72, 96, 128]
ROOMS = {90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}  # bytes of shared memory


# Around the edges of tiles, full or causal; heads alone and in groups; no keys, no queries; scales; blocks after blocks
SIZES = [(2, 2, 1, 70, 150, 40, True), (1, 4, 2, 129, 65, 128), (1, 3, 3, 127, 129, 64, True), (1, 1, 1, 1, 300, 96)]
SIZES += [(1, 2, 1, 33, 0, 16, True), (1, 2, 1, 70, 70, 32, False, 0.3)]
SIZES += SPECIAL
SIZES += [(1, 2, 1, 70, 70, 32, True, scale) for scale in (1e-30, 1.0, 2.5)]
SIZES += [(2, 0, 2, 9, 9, 16), (0, 2, 1, 9, 9, 16), (1, 2, 1, 0, 33, 16)]
SIZES += [(1, 1, 1, 1, 1, 8, True), (1, 2, 2, 256, 256, 8)]
SIZES += [(1, 2, 1, 300, 400, D, True) for D in (16, 32, 64, 72, 96, 128)]
# The tests of broken recipes run what has "accumulator" in its name: see mutants.py.
CONTRACT = [
    Case(
        "hopper_attention",
        arguments,
        exact,
        autocast="asked",
        name="hopper_attention in a float32 accumulator",
        sizes=SIZES,
        small=(2, 4, 2, 40, 50, 16, True),
        in_layouts=(2, 2, 1, 37, 20, 24, True),
        many=(16, 24, 8, 263, 131, 24, True),
        shapes=shapes(HEADS),
        dtypes=[torch.float16, torch.bfloat16],
        refused=[
            *refused(
                "hopper_attention",
                *(0, 4, 12, 100, 136, 256),
                takes="float16 and bfloat16, not",
                text="a multiple of 8 up to 128.*: flash_attention_forward takes other D$",
            ),
            *(
                Refused(
                    lambda draw, dtype=dtype: (draw(2, 4, 3, 16, dtype=dtype),) * 3,
                    TypeError,
                    f"hopper_attention takes float16 and bfloat16, not {dtype}: flash_attention_for",
                )
                for dtype in (torch.float32, torch.float64)
            ),
        ],
    ),
]


def assert_right(out: torch.Tensor, *inputs: Any) -> None:
    """Assert that a result of such arguments is right."""
    (right,) = exact(*in_float64(inputs))
    assert out.shape == right.value.shape
    assert_close(CONTRACT[0], out.dtype, out, right)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Return a contiguous tensor of random numbers."""
    return Layout("contiguous", seed).make(shape, dtype, DEVICE)


@pytest.mark.parametrize("D", [64, 128])
def test_accumulator_of_small_tiles(taken: ModuleType, monkeypatch: pytest.MonkeyPatch, D: int) -> None:
    """Those where shared memory is small, at lengths around their edges."""
    monkeypatch.setattr(taken, "_hopper_attention_room", lambda _: 99 * 1024)
    for lengths, causal in itertools.product([(1, 300), (127, 129), (129, 31), (256, 256)], (False, True)):
        check(CONTRACT[0], taken, torch.float16, arguments(Draw(torch.float16), 1, 2, 1, *lengths, D, causal))


@pytest.mark.parametrize("near", [1, 2, 3, 5, 6, 7])
def test_accumulator_of_groups_of_heads(taken: ModuleType, monkeypatch: pytest.MonkeyPatch, near: int) -> None:
    """Each tile is computed once, whether or not a group divides the heads."""
    LK = 150
    monkeypatch.setattr(taken, "HOPPER_ATTENTION_NEAR", near * 4 * LK * 16)
    check(CONTRACT[0], taken, torch.float16, arguments(Draw(torch.float16), 2, 3, 3, 300, LK, 16, True))


def launches(taken: ModuleType, monkeypatch: pytest.MonkeyPatch, *inputs: torch.Tensor) -> dict[str, Any]:
    """Return what the launcher passes to the kernel."""
    launched: dict[str, Any] = {}

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*arguments: Any, **known: Any) -> None:
                launched.update(known, grid=grid, blocks=[d.block_shape for d in arguments[:4]], near=arguments[4])

            return launch

    monkeypatch.setattr(taken, "_hopper_attention_kernel", Kernel())
    taken.hopper_attention(*inputs)
    return launched


def test_accumulator_tiles(taken: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tile depends on the head and on the shared memory; a group of heads, on the bytes of their keys."""
    for room, tiles in ((227 * 1024, taken.HOPPER_ATTENTION_TILES), (99 * 1024, None)):
        monkeypatch.setattr(taken, "_hopper_attention_room", lambda _, room=room: room)
        for D in HEADS:
            BLOCK_D = 64 if D <= 64 else 128
            m, n, num_warps, num_stages = tiles[BLOCK_D] if tiles else taken.HOPPER_ATTENTION_SMALL
            with monkeypatch.context() as patch:
                q, k = normal(2, 3, 500, D), normal(2, 3, 20000, D)
                launched = launches(taken, patch, q, k, k)
            assert launched["blocks"] == [[1, 1, k, BLOCK_D] for k in (m, n, n, m)]
            assert (launched["num_warps"], launched["num_stages"]) == (num_warps, num_stages)
            assert launched["grid"] == (6 * -(-500 // m),)
            assert launched["near"] == min(6, max(1, 2**24 // (2 * k[0, 0].nbytes)))


def test_accumulator_takes_strides(taken: ModuleType) -> None:
    """What the engine takes is not copied, and what it does not take is: of the same values."""
    x = normal(4, 6, 40, 32)
    storage = torch.zeros(2 * x.numel() + 8, dtype=x.dtype, device=DEVICE)
    only = x[:1].as_strided((1, 6, 40, 32), (3, 1280, 32, 1))  # the stride of an only one may be anything
    for fit in (x, x[1:, ::2, 3:, 8:], x.transpose(1, 2), x.transpose(0, 2), only):
        assert taken._hopper_attention_taken(fit) is fit
        strides = taken._hopper_attention_descriptor(fit, [16, 64]).strides
        assert all(s % 8 == 0 for s in strides[:3])
    others = [x[..., 4:], x[..., ::2], x.mT, x[:, :1].expand(4, 6, 40, 32), x[:, :, :1].expand(4, 6, 40, 32)]
    others += [storage[1:].as_strided(x.shape, x.stride()), storage.as_strided(x.shape, (7681, 1280, 32, 1))]
    for other in others:
        copy = taken._hopper_attention_taken(other)
        assert copy.is_contiguous()
        assert copy.data_ptr() != other.data_ptr()
        assert torch.equal(copy, other)


def test_accumulator_reads_nothing_beside_its_inputs(taken: ModuleType) -> None:
    """NaN in what lies around the keys stays there."""
    around = torch.full((2, 100, 3, 96), torch.nan, dtype=torch.float16, device=DEVICE)
    around[:, 5:75, 1:, 8:88] = normal(2, 70, 2, 80)
    x = around[:, 5:75, 1:, 8:88].transpose(1, 2)
    assert taken._hopper_attention_taken(x) is x
    for causal in (False, True):
        check(CONTRACT[0], taken, torch.float16, (x, x, x, causal, None))


def refusal(error: type[Exception], call: Callable[[], object]) -> str:
    """Return what such an error says, or nothing if there is none: a broken recipe has to fail an assertion."""
    try:
        call()
    except error as raised:
        return str(raised)
    return ""


def test_accumulator_refuses_scales(taken: ModuleType) -> None:
    """What is no scale, it names."""
    q = torch.ones(2, 4, 3, 16, dtype=torch.float16, device=DEVICE)
    for scale in (0.0, -0.5, math.inf, math.nan):
        message = refusal(ValueError, partial(taken.hopper_attention, q, q, q, scale=scale))
        assert message.startswith(f"hopper_attention takes a positive scale, not {scale}: flash_attention_forward")


def test_accumulator_has_no_gradient(taken: ModuleType) -> None:
    """A gradient is refused, not zero, and the error says what has one."""
    q = torch.ones(1, 1, 3, 16, dtype=torch.float16, device=DEVICE, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"^hopper_attention has no gradient: flash_attention does$"):
        taken.hopper_attention(q, q, q).sum().backward()


@pytest.mark.parametrize(("backend", "arch"), [("cuda", 80), ("cuda", 89), ("hip", "gfx942")])
def test_accumulator_refuses_gpus(
    taken: ModuleType, monkeypatch: pytest.MonkeyPatch, backend: str, arch: int | str
) -> None:
    """A GPU without a copy engine is named, and asked for once it is called."""
    target = SimpleNamespace(backend=backend, arch=arch)
    utils = SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": 227 * 1024})
    active = SimpleNamespace(get_current_target=lambda: target, utils=utils)
    monkeypatch.setattr(taken.triton.runtime, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(torch.accelerator, "device_index", nullcontext)
    look = partial(taken._hopper_attention_room.__wrapped__, torch.device("cuda", 0))
    message = refusal(RuntimeError, look)
    assert re.match(rf"hopper_attention takes .* 9\.0 .* this is {backend} {arch}: flash_attention_forward", message)
    target.backend, target.arch = "cuda", 90
    assert look() == 227 * 1024


def test_steps_of_the_page(recipe: ModuleType) -> None:
    """The first kernel is right, the op handed out head by head, and the kernel that can be split."""
    for length in (128, 200, 300):
        x = [normal(1, 3, length, 64, seed=seed) for seed in range(3)]
        for tile in (*recipe.TILES, (64, 32, 4, 2)):
            assert_right(recipe.attention(*x, tile=tile), *x)
        assert_right(recipe.one_by_one(*x), *x, True)
        assert recipe.HOPPER_ATTENTION_NEAR == 2**24
        for causal in (False, True):
            # Split, it is wrong with some compilers: the page tries it in a child process, and says so.
            assert_right(recipe.walk(*x, causal, specialize=False), *x, causal)


def test_orders_of_the_page(recipe: ModuleType) -> None:
    """Each order has each tile once, and the persistent kernel takes those of pairs."""
    for heads, length in ((64, 4096), (5, 1100), (7, 900)):
        rows = -(-length // 128)
        everything = sorted((h, r) for h in range(heads) for r in range(rows))
        near = 2**24 // (512 * length)
        assert sorted(recipe.in_groups(heads, rows, near)) == everything
        assert sorted(itertools.chain(*recipe.in_pairs(heads, rows))) == everything
        lists = recipe.hand_out(recipe.in_groups(heads, rows, near), 264)
        assert sorted(itertools.chain(*lists)) == everything
        total = sum(r + 2 for _, r in everything)
        orders = recipe.orders(length, heads)
        assert len(orders) == 4
        assert all(len(work) == 264 and sum(work) == total for work in orders.values())
        # Nobody is handed a tile while another has been free for longer.
        first = recipe.orders(length, heads)["handed out, in groups"]
        assert max(first) - min(first) <= rows + 1


def code(kernel: Any, dtype: str, tile: tuple[int, ...], D: int, causal: bool, gpu: int) -> dict[str, Any]:
    """Return what the compiler says of the op's kernel."""
    import triton  # where it is imported first, the choice of the interpreter is made

    m, n, num_warps, num_stages = tile
    sizes = {"q_desc": m, "k_desc": n, "v_desc": n, "out_desc": m}
    types = {name: f"tensordesc<{dtype}{[1, 1, size, D]}>" for name, size in sizes.items()} | {"NEAR": "i32"}
    known = {"GROUP": 1, "SCALE": D**-0.5 * math.log2(math.e), "CAUSAL": causal}
    known["LOWEST"] = torch.finfo(torch.float32).min
    source = triton.compiler.ASTSource(kernel, types | dict.fromkeys(known, "constexpr"), known)
    target = triton.backends.compiler.GPUTarget("cuda", gpu, 32)
    made = triton.compile(source, target=target, options={"num_warps": num_warps, "num_stages": num_stages})
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    text = made.asm["ptx"]
    registers, stack = map(int, re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0])
    return {
        "registers": registers,
        "spilled": stack,
        "shared": made.metadata.shared,
        "wgmma": len(re.findall(r"wgmma\.mma_async", text)),
        "copies": len(re.findall(r"cp\.async\.bulk\.tensor\.4d\S*global\.mbarrier", text)),
        "pointers": len(re.findall(r"ld\.global|st\.global|cp\.async\.c[ag]", text)),
        "exponentials": set(re.findall(r"ex2\.[\w.]+", text)),
    }


def codes(taken: ModuleType) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return that for all tiles on the GPUs that get them."""
    results = {}
    for gpu, room in ROOMS.items():
        for D, tile in taken.HOPPER_ATTENTION_TILES.items():
            tile = taken.HOPPER_ATTENTION_SMALL if room < taken.HOPPER_ATTENTION_ROOM else tile
            for dtype, causal in itertools.product(("fp16", "bf16"), (False, True)):
                results[gpu, dtype, D, causal] = code(taken._hopper_attention_kernel, dtype, tile, D, causal, gpu)
    return results


@pytest.mark.thorough
def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Heads of 128 alone spill on Hopper, all fit, the engine copies every block, an exponential is one instruction."""
    (results,) = on_h100(gallery / RECIPE, codes)
    assert len(results) == 3 * 2 * 2 * 2
    for (gpu, dtype, D, causal), known in results.items():
        # The page says that heads of 128 spill some on Hopper, for which the tiles are chosen.
        most = 0 if gpu == 90 else 8
        assert known["spilled"] <= (120 if (gpu, D) == (90, 128) else most), (gpu, dtype, D, causal)
        assert known["shared"] + 1024 <= ROOMS[gpu] + 1024
        assert known["copies"] > 0
        assert known["pointers"] == 0
        assert known["exponentials"] == {"ex2.approx.ftz.f32"}
        assert (known["wgmma"] > 0) == (gpu == 90)
        if gpu == 90:  # two programs, so one can work while the other waits
            programs = 65536 // (128 * -(-known["registers"] // 8 * 8)), 228 * 1024 // (known["shared"] + 1024)
            assert min(programs) >= 2


def traced(recipe: ModuleType) -> list[list[str]]:
    """Return the graph of a causal call."""
    x = torch.randn(2, 4, 40, 64, dtype=torch.float16)
    return graphs(lambda q, k, v: recipe.hopper_attention(q, k, v, True), x, x[:, :2], x[:, :2])


def test_graph(gallery: Path, on_h100: Ask) -> None:
    """The op is one call, and nothing is copied beside it."""
    ((graph,),) = on_h100(gallery / RECIPE, traced)
    assert graph == ["triton_gallery.hopper_attention.default"]


@needs_a_gpu
def test_first_work_of_a_thread(taken: ModuleType) -> None:
    """A thread that has not used the GPU yet can make descriptors."""
    q, k, v = (normal(1, 2, 300, 64, seed=seed) for seed in range(3))
    with ThreadPoolExecutor(1) as pool:
        assert_right(pool.submit(taken.hopper_attention, q, k, v).result(), q, k, v)


@pytest.mark.needs_gpu_memory(18)
def test_beyond_int32(taken: ModuleType) -> None:
    """More than 2**31 elements: the last head is right."""
    q = torch.zeros(1, 2**13 + 1, 2048, 128, dtype=torch.float16, device=DEVICE)
    q[0, -1] = torch.randn(2048, 128, device=DEVICE)
    k = torch.randn(1, 1, 100, 128, device=DEVICE).half()
    out = taken.hopper_attention(q, k, k)
    assert_right(out[:, -1:], q[:, -1:], k, k)
    torch.testing.assert_close(out[0, 0, 0], k[0, 0].float().mean(0).half(), rtol=0, atol=1e-3)


def test_page(printed: Callable[[str], str]) -> None:
    """What the page prints without a GPU is what its text says."""
    out = printed("attention/hopper_attention")
    assert re.search(r"heads of 64, \[64, 128\], 4 warps, 2 stages +\d+ +0 +\d+ +3\n", out)
    assert re.search(r"heads of 128, \[128, 64\], 4 warps, 2 stages +\d+ +0 +\d+ +2\n", out)
    assert re.search(r"handed out, in groups( +1\.0[0-3]\d){6}\n", out)
    assert re.search(r"persistent, in pairs( +1\.03\d){6}\n", out)
    assert re.search(r"\nasked, 8 warps +not split +8 ", out)
    assert re.search(r"\nasked, 4 warps +split +12 +\d+ +0 +\[128\] +\[40, .*232.*\]\n", out)
    assert re.search(r"\nthe mask under an if +not split +4 ", out)
    assert re.search(r"\na second loop +the compiler fails *\n", out)
    assert re.search(r"\nq by the host +the compiler fails *\n", out)
    assert "takes a positive scale, not -1.0: flash_attention_forward takes any\n" in out


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("sums of before not rescaled", "acc = tl.dot(p, v, acc * rescale[:, None])\n", "acc = tl.dot(p, v, acc)\n"),
    ("keys past the end are seen", "seen = offs_n < k_desc.shape[2]\n", "seen = offs_n < k_desc.shape[2] + BLOCK_N\n"),
    ("queries see the next key", "seen & (offs_n <= offs_m)\n", "seen & (offs_n <= offs_m + 1)\n"),
    (
        "the diagonal begins a block late",
        "off_m // BLOCK_N * BLOCK_N)\n",
        "off_m // BLOCK_N * BLOCK_N + BLOCK_N)\n",
    ),
    ("heads do not share keys", "shared = head // GROUP", "shared = head"),
    ("a row of nothing is divided by 0", "tl.where(total == 0, 1.0, total)", "total"),
    ("the first heads alone", "    head = first + within % near\n", "    head = within % near\n"),
    (
        "the last group is as large as others",
        "near = tl.minimum(q_desc.shape[0] * HEADS - first, NEAR)\n",
        "near = NEAR\n",
    ),
    ("any strides", "if apart and x.stride(3) == 1 and", "if x.stride(3) == 1 and"),
    ("any address", "x.stride(3) == 1 and x.data_ptr() % 16 == 0:", "x.stride(3) == 1:"),
    ("columns as rows", "if apart and x.stride(3) == 1 and", "if apart and"),
    ("rows that overlap", "all(s >= x.shape[3] and s % 8 == 0 for", "all(s % 8 == 0 for"),
    ("the stride of an only one", "strides = [s if n > 1 else x.shape[3] for", "strides = [s for"),
    ("the interpreter's bfloat16", "        q = q.to(tl.float32)  # the", "        pass  # the"),
    ("one tile for all GPUs", "    if room < HOPPER_ATTENTION_ROOM:\n", "    if room < 0:\n"),
    ("groups of all heads", "HOPPER_ATTENTION_NEAR // (4 * LK * D)", "HOPPER_ATTENTION_NEAR"),
    ("any scale", "not 0 < scale < math.inf:", "scale == 0:"),
    ("a gradient without a word", "hopper_attention.register_autograd(_hopper_attention_gradient)\n", ""),
    ("no launcher for GPUs", '_hopper_attention_launch, "CUDA"\n', '_hopper_attention_launch, "XPU"\n'),
    ("any GPU", 'target.backend != "cuda" or target.arch < 90:', 'target.backend != "cuda":'),
]
