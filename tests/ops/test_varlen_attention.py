"""The op of the recipe Variable-length attention."""

# ruff: noqa: N806 - lengths and head dimensions have the recipe's names

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import ModuleType

import pytest
import torch
from compiled import Ask, compiled, graphs, stack
from device_key import at_cuda
from guard import Guard, guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import DEVICE, Layout, first_quickly, layouts

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy's infinities, in the interpreter
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

RECIPE = "attention/varlen_attention.py"
KINDS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7, torch.float32: 2.0**-18, torch.float64: 2.0**-45}
HEADS = [16, 32, 40, 64, 80, 128]
Lengths = list[int]


@pytest.fixture(scope="module")
def taken(load_op: Callable[[str], ModuleType]) -> ModuleType:
    """Return the op as whoever takes it imports it."""
    return load_op(RECIPE)


@pytest.fixture(scope="module")
def recipe(load_recipe: Callable[[str], ModuleType]) -> ModuleType:
    """Return the recipe as a module."""
    return load_recipe(RECIPE)


def cu(lengths: Lengths) -> torch.Tensor:
    """Return where sequences of these lengths begin, and where the last one ends."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=DEVICE)


def of_sequences(
    x: list[torch.Tensor], queries: Lengths, keys: Lengths, causal: bool, scale: float | None
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield of each sequence q, k, v and further rows of queries, as (heads, tokens, D), and the probabilities."""
    q, k, v, *more = x
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    parts = [t.split(queries) for t in (q, *more)], [t.split(keys) for t in (k, v)]
    for seq in range(len(queries)):
        a, *rest = (part[seq].transpose(0, 1) for part in parts[0])
        b, c = (part[seq].transpose(0, 1) for part in parts[1])
        s = a @ b.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        if causal:  # the last query sees all keys
            hidden = torch.ones_like(s, dtype=torch.bool).triu(1 + s.shape[2] - s.shape[1])
            s = s.masked_fill(hidden, -torch.inf)
        p = (s - s.amax(-1, keepdim=True).clamp(min=-1e300)).exp() if s.shape[2] else s
        total = p.sum(-1, keepdim=True)
        yield a, b, c, *rest, p / total.masked_fill(total == 0, 1)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    queries: Lengths,
    keys: Lengths,
    causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Return the attention by its formula, sequence by sequence; a query that sees nothing gives 0."""
    outs = [(p @ c).transpose(0, 1) for _, _, c, p in of_sequences([q, k, v], queries, keys, causal, scale)]
    return torch.cat([*outs, q[:0]])


def gradients(
    x: list[torch.Tensor], queries: Lengths, keys: Lengths, causal: bool, scale: float | None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the gradients of q, k and v, given these and that of the result; and what each adds up if none cancels."""
    found: list[list[torch.Tensor]] = [[], [], []]
    for a, b, c, d, p in of_sequences(x, queries, keys, causal, scale):
        dp, most = d @ c.mT, d.abs() @ c.abs().mT
        delta, most_of_delta = (p * dp).sum(-1, keepdim=True), (p * most).sum(-1, keepdim=True)
        ds, terms = p * (dp - delta), p * (most + most_of_delta)
        factor = x[0].shape[-1] ** -0.5 if scale is None else scale
        found[0].append(torch.stack([ds @ b, terms @ b.abs()]) * factor)
        found[1].append(torch.stack([ds.mT @ a, terms.mT @ a.abs()]) * factor)
        found[2].append(torch.stack([p.mT @ d, p.mT @ d.abs()]))
    of_all = []
    for parts, tensor in zip(found, x[:3], strict=True):
        both = torch.cat(parts, dim=2).transpose(1, 2)  # (2, tokens, heads, D)
        heads = tensor.shape[1]
        both = both.unflatten(2, (heads, both.shape[2] // heads)).sum(3)
        of_all.append((both[0], both[1]))
    return of_all


def assert_close(
    out: torch.Tensor,
    x: tuple[torch.Tensor, ...],
    queries: Lengths,
    keys: Lengths,
    causal: bool = False,
    scale: float | None = None,
) -> None:
    """Assert that a result is as good as the roundings of probabilities and of itself."""
    q, k, v = (tensor.detach().double() for tensor in x)
    assert (out.dtype, out.shape, out.device.type) == (x[0].dtype, q.shape, DEVICE.type)
    assert out.is_contiguous()
    known = queries, keys, causal, scale
    expected, terms = attention(q, k, v, *known), attention(q, k, v.abs(), *known)
    smallest = torch.finfo(out.dtype).smallest_normal
    allowed = 2 * KINDS[out.dtype] * (terms + expected.abs() + smallest)
    assert ((out.detach().double() - expected).abs() <= allowed).all()


def assert_gradients_close(
    grads: tuple[torch.Tensor, ...],
    x: tuple[torch.Tensor, ...],
    do: torch.Tensor,
    queries: Lengths,
    keys: Lengths,
    causal: bool = False,
    scale: float | None = None,
) -> None:
    """Assert that gradients are as good as the roundings of what is added up, before anything cancels.

    These are the roundings of a result, of a probability, of its product with a difference, and of the gradient.
    """
    wide = [tensor.detach().double() for tensor in (*x, do)]
    expected = gradients(wide, queries, keys, causal, scale)
    for grad, (right, terms), of in zip(grads, expected, x, strict=True):
        assert (grad.dtype, grad.shape) == (of.dtype, of.shape)
        assert grad.is_contiguous()
        allowed = 4 * KINDS[of.dtype] * (terms + torch.finfo(of.dtype).smallest_normal)
        error = (grad.double() - right).abs()
        assert (error <= allowed).all(), (error / allowed).max().item()


def sequences(most: int = 70) -> st.SearchStrategy[tuple[Lengths, Lengths]]:
    """Lengths of queries and of keys, for up to four sequences: the same, or not; empty ones and single tokens too."""
    length = st.sampled_from([0, 1, 2, 15, 16, 17, 31, 32, 33, 64, 65]) | st.integers(0, most)
    pairs = st.lists(st.tuples(length, length), min_size=1, max_size=4)
    same = st.lists(length, min_size=1, max_size=4).map(lambda lengths: (lengths, lengths))
    return same | pairs.map(lambda found: ([a for a, _ in found], [b for _, b in found]))


def both(taken: ModuleType, x: tuple[torch.Tensor, ...], do: torch.Tensor, *known: object) -> list[torch.Tensor]:
    """Return the op's result and its gradients."""
    x = tuple(tensor.detach().requires_grad_() for tensor in x)
    out = taken.varlen_attention(*x, *known)
    return [out.detach(), *torch.autograd.grad(out, x, do)]


@settings(max_examples=30)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70)), min_size=1, max_size=300),
    BLOCK=st.sampled_from([16, 64]),
    down=st.booleans(),
    slack=st.sampled_from([0, 1, 10**6]),
)
def test_list_of_tiles_bool(
    taken: ModuleType, lengths: list[tuple[int, int]], BLOCK: int, down: bool, slack: int
) -> None:
    """It has each tile once, longest work first, and at most one idle entry for each sequence."""
    own, other = ([pair[side] for pair in lengths] for side in (0, 1))
    known = {"total": sum(own), "longest": max(own) + slack, "BLOCK": BLOCK, "DOWN": down}
    tiles = guarded(partial(taken._varlen_attention_list, **known), cu(own), cu(other))
    rows = tiles.tolist()
    count = sum(-(-length // BLOCK) for length in own)
    assert rows[count:] == [[0, -1]] * (len(rows) - count)
    assert len(rows) - count <= len(lengths)
    order = sorted(range(len(lengths)), key=lambda seq: (-other[seq], seq))
    expected = [[seq, block] for seq in order for block in range(-(-own[seq] // BLOCK))[:: -1 if down else 1]]
    assert rows[:count] == expected


def test_list_too_short_bool(taken: ModuleType) -> None:
    """A longest length that is too small loses tiles, and writes nowhere else."""
    lengths = [40, 100, 7]
    known = {"total": 147, "longest": 16, "BLOCK": 16, "DOWN": False}
    tiles = guarded(partial(taken._varlen_attention_list, **known), cu(lengths), cu(lengths))
    assert tiles.tolist() == [[1, 0], [1, 1], [1, 2]]


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@settings(max_examples=10)
@given(
    lengths=sequences(),
    D=st.sampled_from(HEADS),
    groups=st.sampled_from([(1, 1), (2, 1), (3, 3), (4, 2)]),
    causal=st.booleans(),
    of=st.tuples(layouts(), layouts(), layouts(), layouts()),
)
def test_value_and_gradient(
    taken: ModuleType,
    dtype: torch.dtype,
    lengths: tuple[Lengths, Lengths],
    D: int,
    groups: tuple[int, int],
    causal: bool,
    of: tuple[Layout, ...],
) -> None:
    """Both are right for any lengths, heads and layouts, and the same each time."""
    queries, keys = lengths
    heads, shared = groups
    shapes = (sum(queries), heads, D), *[(sum(keys), shared, D)] * 2, (sum(queries), heads, D)
    *x, do = (layout.make(shape, dtype, DEVICE) for layout, shape in zip(of, shapes, strict=True))
    known = cu(queries), cu(keys), max(queries), max(keys), causal
    first = both(taken, tuple(x), do, *known)
    if DEVICE.type == "cuda":  # in the interpreter, nothing runs side by side
        for one, again in zip(first, both(taken, tuple(x), do, *known), strict=True):
            assert torch.equal(one, again)
    assert_close(first[0], tuple(x), queries, keys, causal)
    assert_gradients_close(tuple(first[1:]), tuple(x), do, queries, keys, causal)


LENGTHS = {
    "same": ([130, 0, 1, 65], [130, 0, 1, 65]),
    "more keys": ([1, 3, 64], [200, 1, 129]),
    "more queries": ([140, 70], [1, 64]),
    "none": ([5, 0, 3], [0, 4, 0]),
}


@pytest.mark.parametrize("dtype", first_quickly(torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", [16, 64, 100, 256])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_every_tile(
    taken: ModuleType, lengths: tuple[Lengths, Lengths], D: int, causal: bool, dtype: torch.dtype
) -> None:
    """Each tile, at lengths around its edges; nothing beside the outputs is written, and all of them is."""
    queries, keys = lengths
    q, do = (Layout("contiguous", seed).make((sum(queries), 2, D), dtype, DEVICE) for seed in (0, 1))
    k, v = Layout("contiguous", 2).make((sum(keys), 2, 1, D), dtype, DEVICE).unbind(1)
    known = cu(queries), cu(keys), max(queries), max(keys), causal

    def forward(*x: torch.Tensor) -> torch.Tensor:
        return taken.varlen_attention_forward(*x, *known)[0]

    out = guarded(forward, q, k, v)
    assert_close(out, (q, k, v), queries, keys, causal)
    out, lse = taken.varlen_attention_forward(q, k, v, *known)
    with Guard() as guard:
        inputs = [guard.place(tensor) for tensor in (do, q, k, v, out, lse)]
        grads = taken.varlen_attention_backward(*inputs, *known)
    assert_gradients_close(grads, (q, k, v), do, queries, keys, causal)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_log_sum_exp(taken: ModuleType, dtype: torch.dtype) -> None:
    """It is the base-2 logarithm of the sum of a row's exponentials."""
    q, k, v = (Layout("contiguous", seed).make((50, 2, 32), dtype, DEVICE) for seed in range(3))
    places = cu([20, 30])
    _, lse = taken.varlen_attention_forward(q, k, v, places, places, 30, 30)
    scores = torch.einsum("mhd,nhd->hmn", q.double(), k.double()) * 32**-0.5
    scores[:, :20, 20:] = scores[:, 20:, :20] = -torch.inf
    torch.testing.assert_close(lse.double() * math.log(2), scores.logsumexp(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_scale(taken: ModuleType, dtype: torch.dtype) -> None:
    """A scale of one's own."""
    q, k, v, do = (Layout("contiguous", seed).make((60, 2, 32), dtype, DEVICE) for seed in range(4))
    lengths = [37, 23]
    for scale in (1e-3, 1, 0.5):
        found = both(taken, (q, k, v), do, cu(lengths), cu(lengths), 37, 37, True, scale)
        assert_close(found[0], (q, k, v), lengths, lengths, True, scale)
        assert_gradients_close(tuple(found[1:]), (q, k, v), do, lengths, lengths, True, scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_large_scores(taken: ModuleType, dtype: torch.dtype) -> None:
    """Scores in the thousands, all of them negative too: no power of 2 overflows where it counts."""
    lengths = [70, 33]
    q = torch.ones(103, 1, 64, dtype=dtype, device=DEVICE)
    for start, end in ((0, 1000), (-1000, -900), (-900, -1000)):
        k = torch.linspace(start, end, 103, dtype=dtype, device=DEVICE)[:, None, None].expand(103, 1, 64)
        v, do = (Layout("contiguous", seed).make((103, 1, 64), dtype, DEVICE) for seed in range(2))
        for causal in (False, True):
            found = both(taken, (q, k, v), do, cu(lengths), cu(lengths), 70, 70, causal)
            expected = attention(q.double(), k.double(), v.double(), lengths, lengths, causal)
            torch.testing.assert_close(
                found[0].double(), expected, rtol=0, atol=1e-2 if dtype == torch.float32 else 1e-9
            )
            assert all(tensor.isfinite().all() for tensor in found)


@pytest.mark.parametrize("dtype", first_quickly(torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_sequences_do_not_touch(taken: ModuleType, dtype: torch.dtype, causal: bool) -> None:
    """NaN in one sequence reaches no other, neither forward nor backward."""
    lengths = [33, 20, 0, 70]
    x = [Layout("contiguous", seed).make((123, 2, 32), dtype, DEVICE) for seed in range(4)]
    begins = [0, *accumulate(lengths)]
    for bad in (0, 1, 3):
        own = slice(begins[bad], begins[bad + 1])
        some = [tensor.clone() for tensor in x]
        for tensor in some:
            tensor[own] = torch.nan
        known = cu(lengths), cu(lengths), 70, 70, causal
        clean = both(taken, tuple(x[:3]), x[3], *known)
        for found, before in zip(both(taken, tuple(some[:3]), some[3], *known), clean, strict=True):
            assert found[own].isnan().all()
            found[own] = before[own]
            assert torch.equal(found, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_reads_nothing_beside_its_inputs(taken: ModuleType, dtype: torch.dtype) -> None:
    """NaN in what lies around a head stays there."""
    around = torch.full((80, 4, 96), torch.nan, dtype=dtype, device=DEVICE)
    around[5:75, 1:3, 8:88] = Layout("contiguous", 0).make((70, 2, 80), dtype, DEVICE)
    x, lengths = around[5:75, 1:3, 8:88], [40, 30]
    for causal in (False, True):
        found = both(taken, (x, x, x), x, cu(lengths), cu(lengths), 40, 40, causal)
        assert_close(found[0], (x, x, x), lengths, lengths, causal)
        assert_gradients_close(tuple(found[1:]), (x, x, x), x, lengths, lengths, causal)


@pytest.mark.parametrize("longest", [70, 71, 128, 10**6])
def test_longest_may_be_longer(taken: ModuleType, longest: int) -> None:
    """What is not needed of it changes no bit."""
    x = [Layout("contiguous", seed).make((123, 2, 32), torch.float32, DEVICE) for seed in range(4)]
    lengths = [33, 20, 0, 70]
    known = cu(lengths), cu(lengths)
    expected = both(taken, tuple(x[:3]), x[3], *known, 70, 70)
    for found, right in zip(both(taken, tuple(x[:3]), x[3], *known, longest, longest), expected, strict=True):
        assert torch.equal(found, right)


@pytest.mark.parametrize("fast", first_quickly(True, False))
@pytest.mark.parametrize("causal", [False, True])
def test_gradcheck_accumulator(taken: ModuleType, causal: bool, fast: bool) -> None:
    """PyTorch's check by differences, in float64, of ragged sequences and shared heads, in one direction or in each."""
    q = Layout("contiguous", 0).make((3, 2, 2), torch.float64, DEVICE).requires_grad_()
    k, v = (Layout("contiguous", seed).make((4, 1, 2), torch.float64, DEVICE).requires_grad_() for seed in (1, 2))
    known = cu([1, 0, 2]), cu([1, 1, 2]), 2, 2

    def op(*x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = taken.varlen_attention(*x, *known, causal, 0.7)
        return result

    assert torch.autograd.gradcheck(op, (q, k, v), fast_mode=fast)


def test_no_second_gradient(taken: ModuleType) -> None:
    """A gradient of the gradient is refused, not wrong; the log-sum-exp has none."""
    x = [torch.ones(3, 1, 16, dtype=torch.float64, device=DEVICE, requires_grad=True) for _ in range(3)]
    known = cu([3]), cu([3]), 3, 3
    out, lse = taken.varlen_attention_forward(*x, *known)
    assert not lse.requires_grad
    (grad,) = torch.autograd.grad(out.sum(), x[0], create_graph=True)
    with pytest.raises(RuntimeError, match="autograd"):
        grad.sum().backward()


def test_nothing_to_do(taken: ModuleType) -> None:
    """No sequences, or none with tokens."""
    for lengths in ([], [0], [0, 0]):
        x = [torch.ones(0, 2, 16, dtype=torch.float16, device=DEVICE, requires_grad=True) for _ in range(3)]
        out = taken.varlen_attention(*x, cu(lengths), cu(lengths), 0, 0)
        out.sum().backward()
        assert out.shape == x[0].grad.shape == (0, 2, 16)


def test_refuses(taken: ModuleType) -> None:
    """What the op does not take, it names."""
    q, places = torch.ones(6, 4, 16, dtype=torch.float16, device=DEVICE), cu([2, 4])
    with pytest.raises(TypeError, match=r"^varlen_attention takes float tensors, not torch\.int32"):
        taken.varlen_attention(*[q.int()] * 3, places, places, 4, 4)
    with pytest.raises(TypeError, match=r"one dtype .*float16.*torch\.bfloat16"):
        taken.varlen_attention(q, q.bfloat16(), q, places, places, 4, 4)
    with pytest.raises(TypeError, match=r"cu_seqlens of int32.*torch\.int64"):
        taken.varlen_attention(q, q, q, places.long(), places, 4, 4)
    for k, v, other in (
        (q[:, :3], q[:, :3], places),
        (q[:, :0], q[:, :0], places),
        (q, q[:, :2], places),
        (q[..., :8], q[..., :8], places),
        (q[0], q[0], places),
        (q, q[:3], places),
        (q, q, places[:2]),
        (q, q, places[None]),
    ):
        found = ", ".join(str(tuple(t.shape)) for t in (q, k, v, places, other))
        with pytest.raises(ValueError, match=rf"^varlen_attention takes q of .*{re.escape(found)}$"):
            taken.varlen_attention(q, k, v, places, other, 4, 4)
    for D in (0, 257):
        x = q.new_ones(6, 1, D)
        with pytest.raises(ValueError, match="D up to 256"):
            taken.varlen_attention(x, x, x, places, places, 4, 4)
    for scale in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=f"a scale above 0, not {scale}"):
            taken.varlen_attention(q, q, q, places, places, 4, 4, False, scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_launcher_serves_gpus(taken: ModuleType, dtype: torch.dtype) -> None:
    """On a GPU a call goes straight to the launcher; it does what the op does."""
    q, k, v, do = (Layout("contiguous", seed).make((40, 2, 32), dtype, DEVICE) for seed in range(4))
    known = cu([15, 25]), cu([15, 25]), 25, 25, True
    found = at_cuda(taken.varlen_attention_forward, q, k, v, *known)
    expected = taken.varlen_attention_forward(q, k, v, *known)
    found += at_cuda(taken.varlen_attention_backward, do, q, k, v, *found, *known)
    expected += taken.varlen_attention_backward(do, q, k, v, *expected, *known)
    for one, right in zip(found, expected, strict=True):
        assert torch.equal(one, right)


def test_steps_of_the_page(recipe: ModuleType) -> None:
    """The first kernel is right, whatever length is claimed, and the op is with every list; so is PyTorch's loop."""
    lengths = [1, 140, 0, 128, 31]
    x = [Layout("contiguous", seed).make((300, 2, 64), torch.float16, DEVICE) for seed in range(3)]
    for claimed in (140, 1000):
        assert_close(recipe.packed(*x, cu(lengths), claimed), tuple(x), lengths, lengths, True)
    wide = [tensor.double() for tensor in x]
    expected = attention(*wide, lengths, lengths, True)
    torch.testing.assert_close(recipe.one_by_one(*wide, lengths), expected)
    torch.testing.assert_close(recipe.reference(*wide, lengths, lengths, True), expected)
    BLOCK_M = recipe.VARLEN_ATTENTION_TILES["forward"][64][0]
    for tiles in recipe.orders(lengths, BLOCK_M).values():
        given = torch.tensor(tiles, dtype=torch.int32, device=DEVICE)
        known = cu(lengths), cu(lengths), 140, 140, True
        out, _ = recipe._varlen_attention_launch(*x, *known, listed=lambda *_, given=given: given)
        assert_close(out, tuple(x), lengths, lengths, True)


def at_launch(taken: ModuleType, kind: str, dtype: str, D: int, causal: bool) -> dict[str, object]:
    """Return what the launcher passes on for strides that 16 divides."""
    import triton.language as tl

    BLOCK_D = max(16, 1 << (D - 1).bit_length())
    BLOCK_M, BLOCK_N, num_warps, _ = taken.VARLEN_ATTENTION_TILES[kind][max(64, BLOCK_D)]
    known = {
        "dtype": dtype,
        "num_warps": num_warps,
        "multiples": ["TOTAL", *(f"stride_{of}{along}" for of in "qkvd" for along in "th")],
        **dict.fromkeys(("list_ptr", "cu_q_ptr", "cu_k_ptr"), "i32"),
        "lse_ptr": "fp32",
        "GROUP": 1,
        "D": D,
        "SCALE": D**-0.5 * math.log2(math.e),
        "CAUSAL": causal,
        "ACC": tl.float32,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "BLOCK_D": BLOCK_D,
    }
    of_one = {"LOWEST": torch.finfo(torch.float32).min} if kind == "forward" else {"delta_ptr": "fp32"}
    return known | of_one


def kernels(taken: ModuleType) -> dict[str, object]:
    """Return the three kernels that attend, by the names of their tiles."""
    names = {"forward": "", "dq": "_dq", "dkdv": "_dkdv"}
    return {kind: getattr(taken, f"_varlen_attention{name}_kernel") for kind, name in names.items()}


def codes(taken: ModuleType) -> dict[str, tuple[bool, set[str], bool]]:
    """Return whether rows are copied 16 bytes at a time, the matrix instructions, and whether exp2 is one."""
    found = {}
    for kind, kernel in kernels(taken).items():
        for D in (64, 128):
            text = compiled(kernel, **at_launch(taken, kind, "fp16", D, True)).asm["ptx"]
            widths = set(re.findall(r"cp\.async\.\S+ \[.*?\], \[.*?\], (\w+)", text))
            found[f"{kind} {D}"] = (
                "0x10" in widths,
                set(re.findall(r"(wgmma|mma)\.\S*?m\d+", text)),
                "ex2.approx" in text,
            )
    return found


def spills(taken: ModuleType) -> dict[str, int]:
    """Return the bytes that a thread spills, for every tile."""
    return {
        f"{kind} {D} {causal}": stack(kernel, **at_launch(taken, kind, "fp16", D, causal))
        for kind, kernel in kernels(taken).items()
        for D in (16, 32, 64, 96, 128, 256)
        for causal in (False, True)
    }


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Copies of 16 bytes, Hopper's instruction in all products, and one instruction for an exponential."""
    (found,) = on_h100(gallery / RECIPE, codes)
    assert found == {f"{kind} {D}": (True, {"wgmma"}, True) for kind in ("forward", "dq", "dkdv") for D in (64, 128)}


@pytest.mark.thorough
def test_few_register_spills(gallery: Path, on_h100: Ask) -> None:
    """None, but some in the gradient of keys, and there most for heads of 64."""
    (found,) = on_h100(gallery / RECIPE, spills)
    assert len(found) == 36
    assert {what for what, size in found.items() if size} <= {what for what in found if what.startswith("dkdv")}
    assert {what: size for what, size in found.items() if size > (280 if " 64 " in what else 128)} == {}


def traced(recipe: ModuleType) -> list[list[str]]:
    """Return the graphs of a call that is differentiated."""
    x = torch.randn(40, 4, 64, dtype=torch.float16, requires_grad=True)
    k = torch.randn(40, 2, 64, dtype=torch.float16, requires_grad=True)
    places = torch.tensor([0, 15, 40], dtype=torch.int32)
    return graphs(lambda q, k, cu: recipe.varlen_attention(q, k, k, cu, cu, 25, 25, True), x, k, places)


def test_torch_compile_copies_nothing(gallery: Path, on_h100: Ask) -> None:
    """Two kernels forward and four backward, and nothing is copied."""
    (found,) = on_h100(gallery / RECIPE, traced)
    counts = [sum(call == "triton_kernel_wrapper_functional" for call in graph) for graph in found]
    assert counts == [2, 4]
    for graph in found:
        assert not [call for call in graph if re.match(r"aten\.(clone|copy)", call)]


@pytest.mark.needs_gpu_memory(18)
def test_beyond_int32(taken: ModuleType) -> None:
    """More than 2**31 elements: the last sequence is right."""
    tokens = 2**20 + 40
    q = torch.zeros(tokens, 16, 128, dtype=torch.float16, device=DEVICE)
    q[-40:] = torch.randn(40, 16, 128, device=DEVICE)
    lengths = [*[2**14] * 64, 40]
    keys = [1] * 65
    k = torch.randn(65, 16, 128, device=DEVICE).half()
    out = taken.varlen_attention(q, k, k, cu(lengths), cu(keys), 2**14, 1)
    assert_close(out[-40:], (q[-40:], k[-1:], k[-1:]), [40], [1])


@needs_a_gpu
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("D", [*HEADS, 256])
@settings(max_examples=6)
@given(lengths=sequences(1500), causal=st.booleans())
def test_long(taken: ModuleType, dtype: torch.dtype, D: int, lengths: tuple[Lengths, Lengths], causal: bool) -> None:
    """Many blocks of any lengths."""
    queries, keys = lengths
    q, do = (torch.randn(sum(queries), 4, D, device=DEVICE).to(dtype) for _ in range(2))
    k, v = (torch.randn(sum(keys), 2, D, device=DEVICE).to(dtype) for _ in range(2))
    known = cu(queries), cu(keys), max(queries), max(keys), causal
    first = both(taken, (q, k, v), do, *known)
    assert_close(first[0], (q, k, v), queries, keys, causal)
    assert_gradients_close(tuple(first[1:]), (q, k, v), do, queries, keys, causal)
    for one, again in zip(first, both(taken, (q, k, v), do, *known), strict=True):
        assert torch.equal(one, again)


@needs_a_gpu
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_opcheck(taken: ModuleType, dtype: torch.dtype) -> None:
    """Both ops pass the whole of opcheck."""
    q, do = (torch.randn(70, 4, 64, device=DEVICE).to(dtype) for _ in range(2))
    k, v = (torch.randn(70, 2, 64, device=DEVICE).to(dtype) for _ in range(2))
    known = cu([30, 40]), cu([30, 40]), 40, 40, True
    x = [tensor.requires_grad_() for tensor in (q, k, v)]
    found = torch.library.opcheck(taken.varlen_attention_forward, (*x, *known))
    assert set(found.values()) == {"SUCCESS"}
    out, lse = taken.varlen_attention_forward(*x, *known)
    x = [tensor.detach() for tensor in (do, q, k, v, out, lse)]
    assert set(torch.library.opcheck(taken.varlen_attention_backward, (*x, *known)).values()) == {"SUCCESS"}


@needs_a_gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(taken: ModuleType, dynamic: bool) -> None:
    """torch.compile takes the op with its gradient, and other sizes."""
    torch.compiler.reset()
    for lengths in ([40, 3], [70, 0, 5], [300]):
        q, k, v, do = (torch.randn(sum(lengths), 3, 64, device=DEVICE).half() for _ in range(4))
        known = cu(lengths), cu(lengths), max(lengths), max(lengths), True
        op = torch.compile(lambda *x: taken.varlen_attention(*x), fullgraph=True, dynamic=dynamic)
        x = [tensor.requires_grad_() for tensor in (q, k, v)]
        out = op(*x, *known)
        assert_close(out, (q, k, v), lengths, lengths, True)
        assert_gradients_close(torch.autograd.grad(out, x, do), (q, k, v), do, lengths, lengths, True)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_gpu(taken: ModuleType) -> None:
    """The op runs where its inputs are, whichever GPU is the current one."""
    q = torch.randn(50, 2, 64, device="cuda:1").half().requires_grad_()
    places = torch.tensor([0, 20, 50], dtype=torch.int32, device="cuda:1")
    out = taken.varlen_attention(q, q, q, places, places, 30, 30)
    assert_close(out, (q, q, q), [20, 30], [20, 30])
    out.sum().backward()
    assert q.grad.isfinite().all()


def two_sequences(normal: Callable[..., torch.Tensor], M: int, N: int) -> tuple[object, ...]:
    """Return inputs for the op: two sequences, of so many tokens, but few, and two heads that share one of keys."""
    lengths = [M % 300, N % 300]
    shape = sum(lengths), 1, 64
    places = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=normal(1).device)
    return normal(shape[0], 2, 64), normal(*shape), normal(*shape), places, places, max(lengths), max(lengths), True


def by_pytorch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, places: torch.Tensor, *_: object) -> torch.Tensor:
    """Return what `two_sequences` is to give."""
    lengths = places.diff().tolist()
    parts = zip(*(tensor.transpose(0, 1).split(lengths, 1) for tensor in (q, k, v)), strict=True)
    options = {"is_causal": True, "enable_gqa": True}
    outs = [torch.nn.functional.scaled_dot_product_attention(*(t[None] for t in x), **options)[0] for x in parts]
    return torch.cat(outs, 1).transpose(0, 1)


# Ops for test_on_gpu.py and test_taken.py, with inputs that fit them, and the same through PyTorch.
OPS = [("varlen_attention", two_sequences, by_pytorch)]

# Mutants for test_bite.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("keys past the end are seen", "    seen = offs_n < LK\n", "    seen = offs_n < LK + 64\n"),
    ("tokens of the next sequence are loaded", "mask = mask & (offs < L)", "mask = mask & (offs < L + 64)"),
    ("padding of a head is read", "    mask = offs_d < D\n", "    mask = offs_d < D + 8\n"),
    ("queries see the next key", "seen & (offs_n <= offs_m + LK - LQ)", "seen & (offs_n <= offs_m + LK - LQ + 1)"),
    ("the first query sees one key", "seen & (offs_n <= offs_m + LK - LQ)", "seen & (offs_n <= offs_m)"),
    ("the diagonal begins late", "tl.minimum(seen + 1, LK)", "tl.minimum(seen + BLOCK_N, LK)"),
    ("sums of before not rescaled", "acc = acc * rescale\n", "acc = acc * 1.0\n"),
    ("the difference is not subtracted", "ds = p * (dp - delta[None, :])", "ds = p * dp"),
    ("backward, queries see the next key", "<= offs_m[None, :] + LK - LQ\n", "<= offs_m[None, :] + LK - LQ + 1\n"),
    (
        "backward, the diagonal begins late",
        "some = some // BLOCK_M * BLOCK_M",
        "some = tl.cdiv(some, BLOCK_M) * BLOCK_M",
    ),
    ("backward, the diagonal ends early", "(block + 1) * BLOCK_N - 1 + LQ - LK", "block * BLOCK_N + LQ - LK"),
    ("one member of a group counts", "of_q = head * GROUP + member", "of_q = head * GROUP"),
    ("equally long sequences share places", "(other == work) & (offs < seq)", "(other == work) & (offs < 0)"),
    ("what is left over says nothing", "range(count + seq, SLOTS, BATCH)", "range(count + seq, SLOTS - 1, BATCH)"),
    ("tiles past the list are written", "(offs < tiles) & (first + offs < SLOTS)", "offs < tiles"),
]
