"""The op of the recipe 4-bit weights, 16-bit activations."""

# ruff: noqa: N806 - M, N and K are sizes, as in the recipe

import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from case import Case, Draw, Exact, Refused, assert_close
from compiled import Ask, graphs
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, Layout, first_quickly
from torch.nn.functional import linear

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy's infinities, in the interpreter
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
HALVES = FLOATS[:2]
# test_mutants.py looks for float32 in the names of tests.
halves = pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: f"{dtype}, its accumulator float32")


def half_of(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scales for x of some dtype."""
    return dtype if dtype in HALVES else torch.bfloat16


def weights(draw: Draw, N: int, K: int, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make packed weights of any bits, and scales with zero points from 0 to 16."""
    words = draw(-(-K // 128), N, 16, dtype=torch.int32)
    scales = draw(groups, N, dtype=half_of(draw.dtype)) / 8
    zeros = (draw(groups, N, dtype=torch.float32) * 4 + 8).round().clamp(0, 16)
    return words, torch.stack([scales, zeros.to(scales.dtype)], -1)


def arguments(draw: Draw, lead: tuple[int, ...], N: int, K: int, groups: int, has_bias: bool) -> tuple[Any, ...]:
    """Make x, packed weights, scales and zero points, and a bias or None."""
    x = draw(*lead, K)
    bias = draw(N) if has_bias else None
    return x, *weights(draw, N, K, groups), bias


def codes_of(packed: torch.Tensor, K: int) -> torch.Tensor:
    """Return the codes (N, K) of packed words, one at a time: as the op's documentation says where each is."""
    blocks, N, _ = packed.shape
    codes = torch.empty(N, 128 * blocks, dtype=torch.int64, device=packed.device)
    for column in range(128 * blocks):
        block, within = divmod(column, 128)
        i, c, t, h = within // 32, within // 8 % 4, within // 2 % 4, within % 2
        codes[:, column] = (packed[block, :, 4 * t + i].long() >> (4 * c + 16 * h)) & 15
    return codes[:, :K]


def dense(packed: torch.Tensor, pairs: torch.Tensor, K: int) -> torch.Tensor:
    """Return the weights in float64."""
    scales, zeros = (
        pairs[..., i].double().T.repeat_interleave(K // pairs.shape[0] if pairs.shape[0] else 1, 1) for i in (0, 1)
    )
    return (codes_of(packed, K).double() - zeros) * scales


def exact(x: torch.Tensor, packed: torch.Tensor, pairs: torch.Tensor, bias: torch.Tensor | None) -> list[Exact]:
    """Return the product; weights are rounded on the way if groups are small, or if rows are many."""
    K = x.shape[-1]
    weight = dense(packed, pairs, K)
    terms = linear(x.abs(), weight.abs(), None if bias is None else bias.abs())
    are_rounded = x.shape[:-1].numel() > 64 or pairs.shape[0] * 128 > K
    is_torch = x.shape[:-1].numel() > 64 or terms.numel() == 0 or K == 0
    return [
        Exact(
            linear(x, weight, bias),
            terms,
            narrow=terms if are_rounded else None,
            roundings=K + 24,
            made_by_torch=is_torch,
        )
    ]


def exact_gradients(
    grad: torch.Tensor, x: torch.Tensor, packed: torch.Tensor, pairs: torch.Tensor, bias: torch.Tensor | None
) -> list[Exact]:
    """Return the gradients of x and of the bias."""
    weight = dense(packed, pairs, x.shape[-1])
    dx = Exact(grad @ weight, grad.abs() @ weight.abs())
    rows = grad.reshape(-1, grad.shape[-1])
    return [dx] if bias is None else [dx, Exact(rows.sum(0), rows.abs().sum(0))]


def special(draw: Draw) -> list[tuple[Any, ...]]:
    """Make rows that NaN follows; then a NaN and an infinity in one row each. No weight is rounded on the way."""
    made = []
    for nan, infinity in ((1.0, 1.0), (torch.nan, torch.inf)):
        x = torch.ones(5, 266, dtype=draw.dtype, device=DEVICE)
        x[:, 256:] = torch.nan
        x[1, 3], x[3, 255] = nan, infinity
        made.append((x[:, :256], *weights(draw, 70, 256, 2), None))
    return made


def reference(x: torch.Tensor, packed: torch.Tensor, pairs: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the product of float64, rounded once."""
    return linear(x.double(), dense(packed, pairs, x.shape[-1]), None if bias is None else bias.double()).to(x.dtype)


# Rows, N, K, groups, bias: a sum in parts and in one; each tile; each kind of group; a last block that is not full
SIZES = [((5,), 65, 1024, 8, True), ((17,), 70, 512, 2, False), ((1,), 1030, 256, 4, True), ((70,), 130, 256, 2, False)]
SIZES += [((33,), 40, 96, 3, True), ((2, 3), 9, 160, 1, True), ((150,), 65, 128, 1, True), ((3, 0), 5, 64, 1, True)]
SIZES += [((64,), 64, 384, 12, False), ((129,), 129, 192, 3, True), ((16,), 8, 1792, 14, True), ((), 1, 32, 1, False)]
SIZES += [((4,), 0, 64, 1, False), ((3,), 4, 0, 1, True), ((2,), 100, 1920, 5, False), ((144,), 200, 128, 4, False)]
SMALL = ((2, 3), 5, 128, 2, True)
TYPES = "int4_matmul takes packed weights of int32, scales and zeros of float16 or bfloat16, not"
OF_X = "int4_matmul takes x of float32, float64 or the dtype of scales and zeros, not"
FORMS = r"int4_matmul takes K a multiple of 32, packed weights \(K / 128 rounded up, N, 16\) and"
GROUPS = "int4_matmul takes groups of 32, 64 or a multiple of 128 columns, or one for each row, not"


def changed(place: int, value: Any, size: tuple[Any, ...] = SMALL) -> Any:
    """Return what makes arguments of which one is what a function makes of it."""

    def made(draw: Draw) -> tuple[Any, ...]:
        given = [*arguments(draw, *size)]
        given[place] = value(given[place])
        return (*given,)

    return made


HALF = Case(
    "int4_matmul",
    arguments,
    exact,
    autocast="asked",
    sizes=SIZES,
    small=SMALL,
    in_layouts=((2, 3), 70, 256, 2, True),
    many=((64,), 70_003, 256, 2, True),
    shapes=st.tuples(
        st.sampled_from([(), (1,), (0,), (17,), (64,), (70,), (2, 3), (5, 0)]),
        st.sampled_from([1, 7, 63, 64, 65, 150]),
        st.sampled_from([128, 384]),
        st.sampled_from([1, 2, 4]),
        st.booleans(),
    ).filter(lambda size: size[2] // size[3] in (32, 64, 128, 384)),
    name="int4_matmul, its accumulator float32",
    dtypes=HALVES,
    reference=reference,
    special=special,
    gradients=exact_gradients,
    with_gradients=(0, 3),
    second_gradients=True,
    refused=[
        Refused(changed(1, lambda t: t.long()), TypeError, f"{TYPES} torch.int64 and torch"),
        Refused(changed(2, lambda t: t.float()), TypeError, f"{OF_X} torch.float16 and torch.float32"),
        Refused(changed(0, lambda t: t.int()), TypeError, f"{OF_X} torch.int32 and"),
        Refused(changed(0, lambda t: t.bfloat16()), TypeError, f"{OF_X} torch.bfloat16 and torch.float16"),
        Refused(changed(0, lambda t: t[..., :96]), ValueError, GROUPS + " 2 groups for K of 96"),
        Refused(changed(0, lambda t: t[..., :127]), ValueError, FORMS),
        Refused(changed(0, lambda t: torch.cat([t, t], -1)), ValueError, FORMS),
        Refused(changed(0, lambda t: t[0, 0, 0]), ValueError, r"int4_matmul takes x \(\.\.\., K\) on the device of"),
        Refused(changed(1, lambda t: t.to("meta")), ValueError, "int4_matmul takes x .* and meta"),
        Refused(
            changed(2, lambda t: t.to("meta")), ValueError, "int4_matmul takes tensors on one device, not on .* meta"
        ),
        Refused(changed(1, lambda t: t[..., :8]), ValueError, FORMS),
        Refused(changed(2, lambda t: t[:, :4]), ValueError, FORMS),
        Refused(changed(2, lambda t: t[..., 0]), ValueError, FORMS),
        Refused(changed(2, lambda t: t[:0]), ValueError, GROUPS),
        Refused(changed(2, lambda t: torch.cat([t, t, t, t])), ValueError, GROUPS + " 8 groups for K of 128"),
        Refused(
            changed(3, lambda t: t[1:]), ValueError, r"int4_matmul takes a bias \(5,\) of torch.float16, not \(4,\)"
        ),
        Refused(changed(3, lambda t: t.float()), ValueError, r"int4_matmul takes a bias .* of torch.float32"),
    ],
)
CONTRACT = [
    HALF,
    replace(
        HALF,
        name="int4_matmul of wide x",
        dtypes=FLOATS[2:],
        sizes=SIZES[:6],
        special=None,
        refused=[],
        exact=lambda *given: [right._replace(narrow=None, made_by_torch=True) for right in exact(*given)],
    ),
    Case(
        "int4_matmul_dequantize",
        lambda draw, N, K, groups: (*weights(draw, N, K, groups), K, draw.dtype),
        lambda packed, pairs, K, dtype: [Exact(dense(packed, pairs, K))],
        sizes=[(65, 256, 2), (130, 96, 3), (7, 192, 3), (64, 160, 1), (0, 64, 1), (3, 0, 1), (1, 32, 1), (70, 512, 2)],
        small=(3, 128, 2),
        many=(70_003, 256, 2),
        shapes=None,
        roundings=1,
        launcher=True,
        refused=[
            Refused(
                lambda draw: (*weights(draw, 3, 128, 1), 128, torch.int32),
                TypeError,
                "int4_matmul_dequantize gives floats, not torch.int32",
            ),
            Refused(lambda draw: (*weights(draw, 3, 128, 1), 160, draw.dtype), ValueError, FORMS),
        ],
    ),
]


def make(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return random numbers of a shape."""
    return Layout("contiguous", seed).make(shape, dtype, DEVICE)


def numbers(most: int, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return random integers from 0 to a highest one."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, most + 1, shape, generator=generator).to(DEVICE)


@pytest.mark.parametrize(("N", "K", "groups"), [(5, 256, 2), (70, 96, 3), (3, 160, 1), (9, 1792, 14), (0, 32, 1)])
def test_pack_float32(taken: ModuleType, N: int, K: int, groups: int) -> None:
    """Each code is where the documentation says; scales and zero points stand in pairs."""
    codes, zeros = numbers(15, N, K), numbers(16, groups, N, seed=1)
    scales = make((groups, N), torch.bfloat16)
    packed, pairs = taken.int4_matmul_pack(codes, scales, zeros)
    assert packed.dtype == torch.int32
    assert packed.shape == (-(-K // 128), N, 16)
    assert torch.equal(codes_of(packed, K), codes)
    assert torch.equal(pairs[..., 0], scales)
    assert torch.equal(pairs[..., 1], zeros.bfloat16())
    narrow, eights = taken.int4_matmul_pack(codes.T.contiguous().T.to(torch.uint8), scales)
    assert torch.equal(narrow, packed)
    assert (eights[..., 1] == 8).all()
    expected = (codes.double() - zeros.T.repeat_interleave(K // groups, 1)) * scales.double().T.repeat_interleave(
        K // groups, 1
    )
    assert torch.equal(taken.int4_matmul_dequantize(packed, pairs, K, torch.float64), expected)


PACK_FORMS = r"int4_matmul_pack takes codes \(N, K\) with K a multiple of 32, scales and zeros"


@pytest.mark.parametrize(
    ("codes", "scales", "zeros", "error", "match"),
    [
        ((5, 33), (1, 5), None, ValueError, PACK_FORMS),
        ((5, 64), (1, 6), None, ValueError, PACK_FORMS),
        ((5, 64), (1, 5), (2, 5), ValueError, PACK_FORMS),
        ((5, 64, 1), (1, 5), None, ValueError, PACK_FORMS),
        ((5, 96), (2, 5), None, ValueError, GROUPS + " 2 groups for K of 96"),
        ((5, 96), (5, 5), None, ValueError, GROUPS),
        ((5, 96), (0, 5), None, ValueError, GROUPS),
        ((5, 320), (2, 5), None, ValueError, GROUPS),
    ],
)
def test_pack_refuses(
    taken: ModuleType, codes: Any, scales: Any, zeros: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=f"^{match}"):
        taken.int4_matmul_pack(
            numbers(15, *codes), make(scales, torch.float16), None if zeros is None else numbers(16, *zeros)
        )


def test_pack_refuses_numbers_float32(taken: ModuleType) -> None:
    """Codes and zero points out of range, and other dtypes."""
    codes, scales = numbers(15, 3, 64), make((1, 3), torch.float16)
    for wrong in (-1, 16):
        with pytest.raises(ValueError, match=r"^int4_matmul_pack takes codes that are whole numbers from 0 to 15"):
            taken.int4_matmul_pack(codes.index_fill(1, torch.tensor(3, device=DEVICE), wrong), scales)
    for zero in (-1.0, 7.5, 17.0, torch.nan):
        with pytest.raises(ValueError, match=r"^int4_matmul_pack takes zeros that are whole numbers from 0 to 16"):
            taken.int4_matmul_pack(codes, scales, torch.full_like(scales, zero))
    for given in ((codes.float(), scales), (codes, scales.float())):
        with pytest.raises(TypeError, match=r"^int4_matmul_pack takes integers and scales of float16 or bfloat16, not"):
            taken.int4_matmul_pack(*given)


def in_words(codes: torch.Tensor, dim: int, order: tuple[int, ...] = (*range(8),)) -> torch.Tensor:
    """Return words of eight codes along a dimension, as a quantizer packs them: that of `order[i]` is shifted 4 i."""
    codes = codes.movedim(dim, 0)
    words = torch.zeros(codes.shape[0] // 8, *codes.shape[1:], dtype=torch.int64, device=codes.device)
    for row in range(len(words)):
        for i in range(8):
            words[row] |= codes[8 * row + order[i]] << (4 * i)
    return words.to(torch.int32).movedim(0, dim).contiguous()


@pytest.mark.parametrize("has_index", [False, True])
def test_from_gptq_float32(taken: ModuleType, has_index: bool) -> None:
    """Eight rows of K to a word, zero points less by one."""
    N, K, groups = 24, 256, 2
    codes, zeros, scales = numbers(15, N, K), 1 + numbers(15, groups, N, seed=1), make((groups, N), torch.float16)
    index = torch.arange(K, device=DEVICE, dtype=torch.int32) // 128
    given = in_words(codes.T, 0), in_words(zeros - 1, 1), scales
    packed, pairs = taken.int4_matmul_from_gptq(*given, *([index] if has_index else []))
    right = taken.int4_matmul_pack(codes, scales, zeros)
    assert torch.equal(packed, right[0])
    assert torch.equal(pairs, right[1])
    with pytest.raises(ValueError, match=r"^int4_matmul_from_gptq takes groups in order: quantize with desc_act=False"):
        taken.int4_matmul_from_gptq(*given, index.flip(0))


def test_from_awq_float32(taken: ModuleType) -> None:
    """Eight columns of N to a word, the even ones first."""
    N, K, groups = 24, 256, 2
    codes, zeros, scales = numbers(15, N, K), numbers(15, groups, N, seed=1), make((groups, N), torch.float16)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    packed, pairs = taken.int4_matmul_from_awq(in_words(codes.T, 1, order), in_words(zeros, 1, order), scales)
    right = taken.int4_matmul_pack(codes, scales, zeros)
    assert torch.equal(packed, right[0])
    assert torch.equal(pairs, right[1])


@halves
@pytest.mark.parametrize("M", first_quickly(3, 40, 70))
def test_integers_are_exact(taken: ModuleType, dtype: torch.dtype, M: int) -> None:
    """Every code and zero point is itself, and every column counts once."""
    N, K, groups = 70, 640, 5
    codes = (torch.arange(K) + 3 * torch.arange(N)[:, None]).to(DEVICE) % 16
    zeros = (torch.arange(groups)[:, None] * 5 + torch.arange(N)).to(DEVICE) % 17
    packed, pairs = taken.int4_matmul_pack(codes, torch.ones(groups, N, dtype=dtype, device=DEVICE), zeros)
    weight = codes - zeros.T.repeat_interleave(128, 1)
    x = torch.zeros(M, K, dtype=dtype, device=DEVICE)
    for first in range(0, K, M):  # a one in each row: the result is the columns of the weights
        rows = torch.arange(min(M, K - first), device=DEVICE)
        x.zero_()[rows, first + rows] = 1
        y = taken.int4_matmul(x, packed, pairs)
        assert torch.equal(y[rows].T.double(), weight[:, first + rows].double())


@halves
def test_layouts_of_weights(taken: ModuleType, dtype: torch.dtype) -> None:
    """Packed weights, scales and a bias that are not contiguous."""
    x, packed, pairs, bias = arguments(Draw(dtype), (5,), 70, 256, 2, True)
    expected = taken.int4_matmul(x, packed, pairs, bias)
    apart = [torch.stack([t, t], -1)[..., 0] for t in (packed, pairs, bias)]
    assert not any(t.is_contiguous() for t in apart)
    assert torch.equal(taken.int4_matmul(x, *apart), expected)
    assert torch.equal(
        taken.int4_matmul_dequantize(*apart[:2], 256, dtype), taken.int4_matmul_dequantize(packed, pairs, 256, dtype)
    )


def test_no_gradient_for_scales_float32(taken: ModuleType) -> None:
    """It is refused, not zero."""
    x, packed, pairs, _ = arguments(Draw(torch.float32), (5,), 7, 128, 1, False)
    with pytest.raises(RuntimeError, match=r"^int4_matmul has no gradient for scales and zeros"):
        taken.int4_matmul(x, packed, pairs.requires_grad_())


# Multiprocessors, bytes of a program, rows that are not left to PyTorch
GPUS = {"H200": (132, 227 * 1024, 1024), "A100": (108, 163 * 1024, 64), "MI300": (304, 64 * 1024, 64)}


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_plans_float32(taken: ModuleType, monkeypatch: pytest.MonkeyPatch, gpu: tuple[int, int, int]) -> None:
    """All of K is summed, no part in vain, by no more programs than the GPU holds; stages fit."""
    monkeypatch.setattr(taken, "_int4_matmul_gpu", lambda device: gpu)
    processors, shared, rows = gpu
    for N in (1, 64, 2048, 5000, 8192, 14336, 151936):
        for K in (32, 128, 160, 1792, 8192, 14336):
            for M in (1, 16, 17, 33, 64, 65, 129, 1024):
                splits, steps, tile = taken._int4_matmul_plan(M, N, K, DEVICE)
                blocks = -(-K // 128)
                assert (splits - 1) * steps < blocks <= splits * steps
                tiles = -(-M // tile["BLOCK_M"]) * -(-N // tile["BLOCK_N"])
                assert splits == 1 or splits * tiles <= 4 * processors
                if rows >= M:
                    stage = 256 * tile["BLOCK_M"] + 68 * tile["BLOCK_N"]
                    assert 1 < tile["num_stages"] <= shared // stage
                assert tile["BLOCK_M"] >= min(M, 128)


@halves
def test_parts_are_added_in_order(taken: ModuleType, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part is a sum of its own; any number of them makes the result, with the bias added once."""
    x, packed, pairs, bias = arguments(Draw(dtype), (5,), 70, 1664, 13, True)
    plan = taken._int4_matmul_plan
    for splits, steps in ((1, 13), (2, 7), (5, 3), (13, 1)):
        monkeypatch.setattr(taken, "_int4_matmul_plan", lambda *given, s=(splits, steps): (*s, plan(*given)[2]))
        y = taken.int4_matmul(x, packed, pairs, bias)
        assert_close(HALF, dtype, y, *exact(x.double(), packed, pairs.double(), bias.double()))


@halves
def test_parts_are_not_rounded(taken: ModuleType, dtype: torch.dtype) -> None:
    """Two parts that half precision does not hold, and whose sum it does."""
    packed, pairs = taken.int4_matmul_pack(
        torch.full((3, 256), 15, device=DEVICE),
        torch.ones(2, 3, dtype=dtype, device=DEVICE),
        torch.zeros(2, 3, device=DEVICE),
    )
    x = torch.full((2, 256), 3.0, dtype=dtype, device=DEVICE)
    x[:, 0], x[:, 128:] = 4, -3
    assert (taken.int4_matmul(x, packed, pairs) == 15).all()


@pytest.mark.needs_gpu_memory(4)
@needs_a_gpu
def test_beyond_int32(taken: ModuleType) -> None:
    """More than 2**31 codes, and a result of more than 2**31 elements: the last row and column count."""
    N, K = 2**18 + 64, 2**14
    packed = torch.full((128, N, 16), 0x11111111 * 7, dtype=torch.int32, device=DEVICE)  # each code is 7
    packed[-1, -1] = 0x11111111 * 8 - 2**32
    pairs = torch.ones(128, N, 2, dtype=torch.bfloat16, device=DEVICE)
    pairs[..., 1] = 7
    y = taken.int4_matmul(torch.ones(2, K, dtype=torch.bfloat16, device=DEVICE), packed, pairs)
    assert (y[:, :-1] == 0).all()
    assert (y[:, -1] == 128).all()


def compiled_kernels(recipe: ModuleType) -> dict[str, Any]:
    """Return the machine code of the inner loop of each tile and kind of group, as counts of instructions."""
    import triton
    import triton.language as tl
    from compiled import _said

    from triton_gallery_ops import int4_matmul as op

    def compiled(m: int, n: int, warps: int, stages: int, groups: int, half: str) -> Any:
        kernel, dtype = op._int4_matmul_kernel, {"fp16": tl.float16, "bf16": tl.bfloat16}[half]
        known: dict[str, Any] = {"BIAS": True, "FULL": True, "SPAN": 1, "GROUPS": groups, "HALF": dtype, "DOT": dtype}
        known |= {"BLOCK_M": m, "BLOCK_N": n}
        types = {name: "*" + half if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
        types |= {"w_ptr": "*i32", "g_ptr": "*i32"} | dict.fromkeys(known, "constexpr")
        by_16 = {
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(types)
            if name in ("N", "K") or types[name].startswith("*")
        }
        source = triton.compiler.ASTSource(kernel, types, known, by_16)
        target = triton.runtime.driver.active.get_current_target()
        return triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages})

    tried = [(tile, 1, "bf16") for tile in op.INT4_MATMUL_TILES]
    tried += [(op.INT4_MATMUL_TILES[0], 1, "fp16")]
    tried += [(tile, groups, "bf16") for tile in op.INT4_MATMUL_TILES[::3] for groups in (2, 4)]
    results = {}
    for (m, n, warps, stages, _), groups, half in tried:
        made = compiled(m, n, warps, stages, groups, half)
        code = _said(triton.knobs.nvidia.nvdisasm.path, "--print-code", cubin=made.asm["cubin"])
        usage = _said(triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin=made.asm["cubin"])
        spilled = int(re.findall(r"STACK:(\d+)", usage)[0])
        results[f"{m}x{n}, {groups} groups, {half}"] = (inner_loop(code), made.metadata.shared, spilled)
    return results


def inner_loop(code: str) -> list[str]:
    """Return the instructions of the longest loop."""
    lines, places, longest = code.splitlines(), {}, []
    for place, line in enumerate(lines):
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            places[label[1]] = place
        branch = re.search(r"\bBRA\b.*`?\(?(\.L_x_\d+)", line)
        if branch and branch[1] in places and place - places[branch[1]] > len(longest):
            longest = lines[places[branch[1]] : place]
    found = (re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", line) for line in longest)
    return [match[1] for match in found if match]


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Weights go from shared memory to the tensor cores in registers, two at a time, with no conversion."""
    (results,) = on_h100(gallery / "low_precision" / "int4_matmul.py", compiled_kernels)
    assert len(results) == 9
    words = 8  # of each thread and block, in every tile
    for name, (loop, shared, spilled) in results.items():
        assert shared <= 227 * 1024, name
        assert spilled == 0, name
        assert sum(op.startswith("HGMMA") for op in loop) == 8, name
        assert not [op for op in loop if op.startswith(("STS", "STSM", "LDSM"))], name
        # A subtraction for two codes; conversions are those of zero points alone.
        assert 4 * words <= sum(op.startswith("HADD2") for op in loop) <= 4 * words + 8, name
        assert sum(op.startswith(("I2F", "F2F")) for op in loop) == 0, name
        assert sum(op.startswith("LOP3") for op in loop) <= 4 * words + 12, name
        assert "LDS.128" in loop, name
        assert [op for op in loop if op.startswith("LDGSTS") and op.endswith("128")], name


def traced(recipe: ModuleType) -> list[list[str]]:
    """Return the graphs of a sum that is split, of one that is not, and of many rows."""
    from triton_gallery_ops.int4_matmul import int4_matmul

    made = []
    for M, K in ((4, 1024), (4, 128), (300, 128)):
        x, packed, pairs = torch.randn(M, K), torch.zeros(K // 128, 100, 16), torch.zeros(K // 128, 100, 2)
        made += graphs(int4_matmul, x.bfloat16(), packed.int(), pairs.bfloat16())
    return made


def test_torch_compile_copies_nothing(gallery: Path, on_h100: Ask) -> None:
    """No input counts as written; with many rows there is one kernel, and PyTorch's product."""
    (traced_graphs,) = on_h100(gallery / "low_precision" / "int4_matmul.py", traced)
    launches = [[call for call in graph if call.startswith("triton_kernel_wrapper")] for graph in traced_graphs]
    assert [len(calls) for calls in launches] == [2, 1, 1]
    for graph in traced_graphs:
        assert not [call for call in graph if re.match(r"aten\.(clone|copy)", call)], graph


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "columns past K",
        "            mask = mask & (block * 128 + offs_k < K)\n",
        "            mask = mask & (offs_k >= 0)\n",
    ),
    ("rows past M stored", "acc, mask=(offs_m < M) & (offs_n < N))", "acc, mask=(offs_m >= 0) & (offs_n < N))"),
    ("columns past N stored", "acc, mask=(offs_m < M) & (offs_n < N))", "acc, mask=(offs_m < M) & (offs_n >= 0))"),
    ("halves of a word exchanged", "tl.join(low.to(DOT), high.to(DOT))", "tl.join(high.to(DOT), low.to(DOT))"),
    (
        "codes of a word exchanged",
        "halves = tl.join(tl.join(c0, c2), tl.join(c1, c3))",
        "halves = tl.join(tl.join(c0, c1), tl.join(c2, c3))",
    ),
    (
        "words of a group exchanged",
        ".permute(0, 2, 3, 1, 4).reshape(BLOCK_N, 128), scale",
        ".reshape(BLOCK_N, 128), scale",
    ),
    ("one zero point for all", "zero = (pairs >> 16)", "zero = (pairs >> 16 & 0 | 0x4100)"),
    ("a code without its lowest bit", "& 0x000F000F) + bits\n    c2", "& 0x000E000E) + bits\n    c2"),
    ("the wrong group", "first = block // SPAN * GROUPS", "first = block * GROUPS"),
    ("groups of a block taken for one", '"GROUPS": 1 if groups == 1 else max(1, 128 // size)', '"GROUPS": 1'),
    ("the last part too long", "tl.minimum(first + steps, tl.cdiv(K, 128))", "(first + steps)"),
    ("parts over each other", "y_ptr + pid_k.to(tl.int64) * M * N + offs_m", "y_ptr + offs_m"),
    ("parts in half precision", "(splits, M, N), dtype=torch.float32)", "(splits, M, N), dtype=x.dtype)"),
    ("the bias in each part", "BIAS=BIAS and splits == 1", "BIAS=BIAS"),
    ("no bias for a split sum", 'options = {"BIAS": BIAS, "SPLITS"', 'options = {"BIAS": False, "SPLITS"'),
    (
        "the last part left out",
        "tl.static_range(SPLITS):\n        part_ptrs",
        "tl.static_range(SPLITS - 1):\n        part_ptrs",
    ),
    ("added past the end", "    mask = offs < size\n", "    mask = offs < size + BLOCK\n"),
    ("weights written past N", "w, mask=(offs_n < N) & (offs_k < K))", "w, mask=(offs_n >= 0) & (offs_k < K))"),
    ("weights written past K", "w, mask=(offs_n < N) & (offs_k < K))", "w, mask=(offs_n < N) & (offs_k >= 0))"),
    ("zero points that are not checked", '("zeros", zeros, 16)', '("zeros", zeros, 2**40)'),
    ("GPTQ's zero points as they are stored", "_int4_matmul_unpack(qzeros) + 1)", "_int4_matmul_unpack(qzeros))"),
    ("AWQ's columns in order", "INT4_MATMUL_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)", "INT4_MATMUL_AWQ = (*range(8),)"),
    ("more programs than the GPU holds", "held * processors // tiles)", "4 * held * processors // tiles)"),
    ("stages that no shared memory holds", "max(1, min(stages, fit))", "stages"),
    ("a gradient of scales that is not refused", "    if ctx.needs_input_grad[2]:\n", "    if False:\n"),
    (
        "no launcher for GPUs",
        'INT4_MATMUL_LIBRARY.impl("int4_matmul", _int4_matmul_launch, "CUDA")\n',
        "",
    ),
]
