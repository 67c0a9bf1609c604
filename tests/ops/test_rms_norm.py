"""The ops of the recipe RMSNorm: values and gradients in any dtype, shape and layout, with a residual and without."""

# ruff: noqa: N806 - a row has N elements, as in the recipe

import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from case import ON_GPU, Case, Draw, Exact, Refused, accumulator
from compiled import Ask, graphs, ptx
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, Layout, sizes

EPS = 1e-5


def longest(dtype: torch.dtype) -> int:
    """Return how many elements the longest row has that the ops take."""
    return 64 * 1024 // max(4, dtype.itemsize)


def exact(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float = 0.0, casting_mode: str = "gemma"
) -> list[Exact]:
    """Return the norm of rows."""
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return [Exact(y)]
    narrow = (y * (offset + weight)).abs() if casting_mode == "llama" else None
    return [Exact(y * (offset + weight), y.abs() * (abs(offset) + weight.abs()), narrow=narrow)]


def exact_residual(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, *options: Any) -> list[Exact]:
    """Return the norm of a sum, which is rounded in it and in its mean square, and the sum."""
    h = x + residual
    (y,) = exact(h, weight, *options)
    narrow = 2 * y.value.abs() + (0 if y.narrow is None else y.narrow)
    return [y._replace(narrow=narrow), Exact(h, x.abs() + residual.abs(), roundings=2)]


def exact_gradients(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    h: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str = "gemma",
) -> list[Exact]:
    """Return the gradients of rows and weight, and the magnitudes that they add up; they do not depend on the mode."""
    N = h.shape[-1]
    more = torch.zeros_like(h) if dh is None else dh
    factor = torch.ones_like(h[..., :1]) if weight is None else offset + weight
    most = factor if weight is None else abs(offset) + weight.abs()
    g, r = dy * factor, torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    c, of_c = ((t * r * r).mean(-1, keepdim=True) for t in (g * h, (dy * most * h).abs()))
    dx = Exact((g - c * h) * r + more, ((dy * most).abs() + of_c * h.abs()) * r + more.abs())
    terms = (dy * h * r).reshape(h.numel() // max(1, N), N)
    dw = Exact(terms.sum(0), terms.abs().sum(0), roundings=64 + len(terms))
    return [dx, Exact(dy.new_empty(0), made_by_torch=True) if weight is None else dw]


def exact_gradients_residual(
    dy: torch.Tensor,
    dh: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    *options: Any,
) -> list[Exact]:
    """Return the gradients of both terms of a sum, and of the weight if there is one."""
    dx, dw = exact_gradients(dy, dh, x + residual, weight, *options)
    return [dx, dx, *([] if weight is None else [dw])]


def exact_gradients_alone(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, *options: Any) -> list[Exact]:
    """Return the gradients of the norm alone."""
    return exact_gradients(dy, None, x, weight, *options)[: 1 + (weight is not None)]


def matrices(count: int, *options: Any, weight: bool = True, wide: bool = False) -> Callable[..., tuple[Any, ...]]:
    """Return what makes so many tensors of rows, a weight or none, EPS and options; a wide one is float32 at least."""

    def make(draw: Draw, *shape: int) -> tuple[Any, ...]:
        rows = [draw(*shape) for _ in range(count)]
        return (
            *rows,
            draw(shape[-1], dtype=accumulator(draw.dtype) if wide else None) if weight else None,
            EPS,
            *options,
        )

    return make


def without_dh(draw: Draw, *shape: int) -> tuple[Any, ...]:
    """Make arguments for the backward of the norm alone."""
    return draw(*shape), None, draw(*shape), draw(shape[-1]), EPS


def special(draw: Draw) -> list[tuple[Any, ...]]:
    """Make rows of one block and two with a NaN and infinities."""
    cases = []
    for N in (37, 5001):
        x = torch.ones(5, N, dtype=draw.dtype, device=DEVICE)
        x[1, N - 1], x[2, 0], x[3, 5] = torch.nan, torch.inf, -torch.inf
        cases.append((x, x[0], EPS))
    return cases


def refused(
    name: str, error: type[Exception], text: str, *makes: Callable[[Draw], tuple[Any, ...]]
) -> Iterator[Refused]:
    """Yield calls that raise the same."""
    for make in makes:
        yield Refused(lambda draw, make=make: (*make(draw), EPS), error, rf"{name} takes {text}")


def too_long(*dtypes: torch.dtype) -> Iterator[Refused]:
    """Yield, for each dtype, rows that are too long."""
    for dtype in dtypes:
        most = longest(dtype)
        yield Refused(
            lambda draw, dtype=dtype, most=most: (draw(1, dtype=dtype).expand(most + 1),) * 2 + (EPS,),
            ValueError,
            rf"rms_norm takes rows of up to {most} .*{dtype}, not {most + 1}: norms_long",
        )


LEADS = st.sampled_from([(), (0,), (1,), (5,), (2, 0, 3), (2, 3)])
# Lengths of one block and two, even and odd, and more rows than the programs of a backward have tiles.
ROWS = [(17, 5), (5, 1), (17, 5000), (409, 100), (2, 4097), (0, 7), (9, 1000), (2, 8191)]
ROWS += [(4096 // N + 1, N) for N in (1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 257, 512, 1024)]
ROWS += [(2, N) for N in (2048, 2049, 3000, 4096, 5120, 6145, 8192, 8200, 12288, 12289, 16384)]
ROWS += [(3, 0), (13, 9000)]
# Sums are in trees.
OF_ALL = {
    "sizes": ROWS,
    "small": (2, 5),
    "fits": lambda size, dtype: size[-1] <= longest(dtype),
    "shapes": st.tuples(LEADS, sizes(64, 600)).map(lambda drawn: (*drawn[0], drawn[1])),
    "roundings": 64,
}
WITH_OPTIONS = OF_ALL | {"sizes": [(17, 5), (2, 5000), (40, 100), (5, 1), (2, 4097), (0, 7), (3, 0), (2, 8191)]}


def with_options(name: str, *options: Any, **weight: bool) -> Iterator[Case]:
    """Yield the cases of all functions with some options."""
    for call, rows, value, gradients in (
        ("rms_norm", 1, exact, exact_gradients_alone),
        ("rms_norm_residual", 2, exact_residual, exact_gradients_residual),
    ):
        yield Case(
            call,
            matrices(rows, *options, **weight),
            value,
            name=f"{call} {name}",
            autocast=torch.float32,
            gradients=gradients,
            with_gradients=range(rows + 1),
            **WITH_OPTIONS,
        )

    def exact_wide(*arguments: Any) -> list[Exact]:
        dx, dw = exact_gradients(*arguments)
        return [dx, dw._replace(dtype=accumulator)]

    yield Case(
        "rms_norm_backward",
        matrices(3, *options[:1], **weight),
        exact_wide if weight.get("wide") else exact_gradients,
        name=f"rms_norm_backward {name}",
        **WITH_OPTIONS,
    )


OPTIONS = [
    *with_options("without weight", weight=False),
    *with_options("of Gemma", 1.0),
    *with_options("of two dtypes", -0.5, "llama", wide=True),
]
CONTRACT = [
    Case(
        "rms_norm",
        matrices(1),
        exact,
        autocast=torch.float32,
        reference=lambda x, weight, eps: exact(x.double(), weight.double(), eps)[0].value.to(x.dtype),
        special=special,
        gradients=exact_gradients_alone,
        with_gradients=2,
        refused=[
            *refused(
                "rms_norm",
                TypeError,
                r"one float dtype and device, and a weight of any float dtype there, not .*torch\.int32",
                lambda draw: (draw(2, 3).int(), draw(3).int()),
                lambda draw: (draw(2, 3).int(), None),
                lambda draw: (draw(2, 3), draw(3).int()),
            ),
            *refused("rms_norm", TypeError, ".*meta", lambda draw: (draw(2, 3), draw(3).to("meta"))),
            Refused(
                lambda draw: (draw(2, 3), None, EPS, 1.0),
                ValueError,
                r"rms_norm takes an offset of a weight, not 1\.0 without a weight",
            ),
            Refused(
                lambda draw: (draw(2, 3), draw(3), EPS, 0.0, "none"),
                ValueError,
                "rms_norm takes casting_mode='gemma' or 'llama', not 'none'",
            ),
            *refused(
                "rms_norm",
                ValueError,
                r"shapes \(\.\.\., N\) and \(N,\), not \[\(2, 3\)",
                lambda draw: (draw(2, 3), draw(2)),
                lambda draw: (draw(2, 3), draw(2, 3)),
                lambda draw: (draw(2, 3), draw()),
            ),
            *refused("rms_norm", ValueError, "shapes ", lambda draw: (draw(), draw())),
            *too_long(*FLOATS),
        ],
        **OF_ALL,
    ),
    Case(
        "rms_norm_residual",
        matrices(2),
        exact_residual,
        autocast=torch.float32,
        gradients=exact_gradients_residual,
        with_gradients=3,
        refused=[
            *refused(
                "rms_norm_residual",
                TypeError,
                ".*float16",
                lambda draw: (draw(2, 3), draw(2, 3).half(), draw(3)),
            ),
            *refused("rms_norm_residual", TypeError, ".*None", lambda draw: (draw(2, 3), None, draw(3))),
            Refused(
                lambda draw: (draw(2, 3), draw(2, 3), None, EPS, 1.0),
                ValueError,
                "rms_norm_residual takes an offset of a weight, ",
            ),
            Refused(
                lambda draw: (draw(2, 3), draw(2, 3), draw(3), EPS, 0.0, "Llama"),
                ValueError,
                "rms_norm_residual takes casting_mode=",
            ),
            *refused("rms_norm_residual", ValueError, r".*\(1, 3\)", lambda draw: (draw(2, 3), draw(1, 3), draw(3))),
        ],
        **OF_ALL,
    ),
    *(
        Case(
            "rms_norm_residual_",
            matrices(2, *options),
            exact_residual,
            name=f"rms_norm_residual_{name}",
            launcher=False,
            changes=2,
            layouts=["contiguous", "offset"],
            refused=[
                Refused(way, ValueError, f"rms_norm_residual_ {text}")
                for way, text in (
                    (lambda draw: (draw(2, 3), draw(1, 3), draw(3), EPS), "takes shapes"),
                    (lambda draw: (draw(3, 2).T, draw(2, 3), draw(3), EPS), "takes contiguous tensors"),
                    (lambda draw: (draw(2, 3), draw(2, 6)[:, ::2], draw(3), EPS), "takes contiguous tensors"),
                    (lambda draw: (draw(2, 3), draw(2, 3), draw(3), EPS, 0.0, "Llama"), "takes casting_mode="),
                    (lambda draw: (draw(2, 3).requires_grad_(), draw(2, 3), draw(3), EPS), "has no backward"),
                )
            ],
            **OF_ALL,
        )
        for name, options in (("", ()), (" of Gemma", (1.0, "llama")))
    ),
    Case(
        "rms_norm_backward",
        matrices(3),
        exact_gradients,
        refused=[
            *refused(
                "rms_norm_backward",
                ValueError,
                "shapes ",
                lambda draw: (draw(1, 3), None, draw(2, 3), draw(3)),
                lambda draw: (draw(2, 3), draw(1, 3), draw(2, 3), draw(3)),
            ),
        ],
        **OF_ALL,
    ),
    Case("rms_norm_backward", without_dh, exact_gradients, name="rms_norm_backward without dh", **OF_ALL),
    *OPTIONS,
]


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_casting_modes(taken: ModuleType, offset: float, dtype: torch.dtype) -> None:
    """Gemma rounds once; Llama rounds before the product too. Nearly all numbers are those of transformers.

    With a weight of float16 or float32, and x in float16, since the interpreter cuts bfloat16.
    """
    x = Layout("contiguous", 0).make((9, 700), torch.float16, DEVICE)
    weight = Layout("contiguous", 1).make((700,), dtype, DEVICE)
    wide, factor = (exact(x.float(), None, EPS)[0].value), offset + weight.float()
    expected = {"gemma": wide * factor, "llama": wide.half().float() * factor}
    for mode in expected:
        y = taken.rms_norm(x, weight, EPS, offset, mode)
        same = {name: (y == value.half()).double().mean().item() for name, value in expected.items()}
        assert same.pop(mode) > 0.99
        assert max(same.values()) < 0.9
        h_y, h = taken.rms_norm_residual(x, torch.zeros_like(x), weight, EPS, offset, mode)
        assert torch.equal(h_y, y)
        assert torch.equal(h, x)


def test_dtypes_of_weights(taken: ModuleType) -> None:
    """Results have x's dtype, as those of PyTorch, and each gradient that of its argument."""
    for dtype, other in itertools.product(FLOATS, FLOATS):
        if (dtype, other) == (torch.float64, torch.bfloat16) and not ON_GPU:
            continue  # the interpreter makes NaN of some float64 that it casts to bfloat16
        x = Layout("contiguous", 0).make((4, 50), dtype, DEVICE).requires_grad_()
        weight = Layout("contiguous", 1).make((50,), other, DEVICE).requires_grad_()
        y = taken.rms_norm(x, weight, EPS)
        with warnings.catch_warnings(action="ignore"):  # of a path that is not fused
            expected = torch.nn.functional.rms_norm(x, (50,), weight, EPS)
        grads, right = (torch.autograd.grad(out.double().sum(), (x, weight)) for out in (y, expected))
        assert y.dtype == expected.dtype == dtype
        eps = max(torch.finfo(kind).eps for kind in (dtype, other, torch.float32))
        for ours, theirs in ((y, expected), *zip(grads, right, strict=True)):
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours, theirs, rtol=8 * eps, atol=32 * eps)


def traced_options(taken: ModuleType) -> list[int]:
    """Return how many launches the graphs of calls with options have, forward and backward."""
    x, weight = torch.randn(4, 24, requires_grad=True), torch.randn(24, requires_grad=True)
    made = graphs(lambda x: taken.rms_norm(x, None, EPS), x)
    made += graphs(lambda x, w: taken.rms_norm(x, w, EPS, offset=1.0), x, weight)
    made += graphs(lambda x, w: taken.rms_norm(x.bfloat16(), w, EPS, casting_mode="llama"), x, weight)
    made += graphs(lambda x: taken.rms_norm_residual(x, x, None, EPS), x)
    return [sum("triton_kernel" in name for name in graph) for graph in made]


def options_compile(taken: ModuleType) -> None:
    """Compile the kernels with each option."""
    tl = taken.tl
    shape = {"EPS": EPS, "ACC": tl.float32, "VEC": 8, "ADD": False, "BLOCK_M": 1, "BLOCK_N": 1024}
    for rest in (0, 512):
        for options in ({"OFFSET": 1.0}, {"OFFSET": 0.0, "weight_ptr": None}, {"OFFSET": 1.0, "weight_ptr": "fp32"}):
            known = shape | options | {"REST": rest}
            ptx(taken._rms_norm_kernel, "bf16", **known, LLAMA=True)
            sums = {"partial_ptr": "fp32" if options.get("weight_ptr", "bf16") else None}
            ptx(taken._rms_norm_backward_kernel, "bf16", **known, **sums, STAGES=2)


def test_options_compiled(gallery: Path, on_h100: Ask) -> None:
    """Options compile for a GPU and are traced; without a weight the backward is one launch."""
    launches, _ = on_h100(gallery / "fusion" / "rms_norm.py", traced_options, options_compile)
    assert launches == [1, 1, 1, 2, 1, 2, 1, 1]


def test_gradients_of_one_result(taken: ModuleType) -> None:
    """A result that nobody used adds nothing to a gradient; the norm is that of the sum as it was rounded."""
    x, residual, dy = (Layout("contiguous", k).make((12, 50), torch.bfloat16, DEVICE) for k in range(3))
    weight = Layout("contiguous", 3).make((50,), torch.bfloat16, DEVICE)
    leaves = [t.requires_grad_() for t in (x, residual, weight)]
    y, h = taken.rms_norm_residual(*leaves, EPS)
    assert torch.equal(y, taken.rms_norm(h, weight, EPS))
    inputs = h.detach(), weight.detach(), EPS
    for used, given in ((y, (dy, None)), (h, (dy * 0, dy))):
        dx, dw = taken.rms_norm_backward(*given, *inputs)
        for grad, expected in zip(torch.autograd.grad(used, leaves, dy, retain_graph=True), (dx, dx, dw), strict=True):
            assert torch.equal(grad, expected)


def test_plans(taken: ModuleType) -> None:
    """As many loads wait in shared memory as fit, and vectors divide a row and its distance to the next."""
    rows = torch.empty(10**6, 12288, dtype=torch.bfloat16, device="meta")
    for dtype, stages in ((torch.bfloat16, 2), (torch.float32, 1)):
        assert taken._rms_norm_plan_backward(rows.to(dtype), EPS, 12288, False)[1]["STAGES"] == stages
    assert taken._rms_norm_plan_backward(rows, EPS, 12288, False, weight_size=4)[1]["STAGES"] == 1
    for N, stride, vec in ((1000, 1000, 8), (1000, 1004, 4), (1000, 1001, 1), (1001, 1000, 1)):
        assert taken._rms_norm_plan(rows[:1, :N], EPS, stride)["VEC"] == vec


def test_steps_of_the_ladder(recipe: ModuleType) -> None:
    """Every step is right, where it is not slow or fast."""
    for N in (5, 1000, 5000):
        x, residual = (torch.randn(9, N, generator=torch.Generator().manual_seed(k)).to(recipe.DEVICE) for k in (0, 1))
        for name, (step, _) in recipe.STEPS.items():
            y = torch.full_like(x, torch.nan)
            step(x, y, residual)
            if "with" not in name and "backward" not in name:
                h = x + residual if "residual" in name else x
                torch.testing.assert_close(y, torch.nn.functional.rms_norm(h, (N,), h[0], 1e-6))
        torch.testing.assert_close(recipe.norm_rows(x, x[0]), torch.nn.functional.rms_norm(x, (N,), x[0], 1e-6))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_wide_accumulator(taken: ModuleType, dtype: torch.dtype) -> None:
    """The square of 300 is infinite in float16."""
    x = torch.full((2, 100), 300.0, dtype=dtype, device=DEVICE)
    assert torch.equal(taken.rms_norm(x, torch.ones_like(x[0]), EPS), torch.ones_like(x))


@pytest.mark.needs_gpu_memory(15)
def test_beyond_int32(taken: ModuleType) -> None:
    """A tensor may have more than 2**31 elements."""
    x = torch.ones(2**19 + 1, 2**12, dtype=torch.float16, device=DEVICE)
    x[-1] = 2
    ones = torch.ones_like(x[0])
    y, h = taken.rms_norm_residual(x, x, ones, EPS)
    assert y.sub_(1).abs_().max() < 1e-3
    assert (h[-1] == 4).all()
    del y, h
    dx, _ = taken.rms_norm_backward(x, None, x, ones, EPS)
    assert dx.abs_().max() < 1e-2


def test_gpu_that_does_not_tell_its_shared_memory(taken: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of AMD's, torch has no such property."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=304))
    assert taken._rms_norm_gpu.__wrapped__(torch.device("cuda")) == (304, 64 * 1024)


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "a mean over the block",
        "r = tl.rsqrt(squares / N + EPS)\n    whole",
        "r = tl.rsqrt(squares / BLOCK_N + EPS)\n    whole",
    ),
    ("a second block without its squares", "tl.sum(x * x) + tl.sum(x_rest * x_rest)", "tl.sum(x * x)"),
    ("a first of two blocks without its squares", "tl.sum(x * x) + tl.sum(x_rest", "tl.sum(x_rest"),
    ("a second block without its weight", "_rms_norm_scale(x_rest, r, last,", "_rms_norm_scale(x_rest, r, 1.0,"),
    ("norm stored without a mask", "tl.store(y_ptrs, y, mask=mask)", "tl.store(y_ptrs, y)"),
    ("a load without a mask", "tl.load(ptrs, mask=mask, other=0, eviction_policy=EVICTION)", "tl.load(ptrs)"),
    ("no offset", "            factor += OFFSET", "            factor += 0"),
    ("a factor without a weight", "    factor = 1.0\n", "    factor = 2.0\n"),
    ("Llama rounded once", "x = x.to(NARROW).to(ACC)", "x = x.to(ACC)"),
    ("Gemma rounded twice", "y_ptr.dtype.element_ty if LLAMA else None", "y_ptr.dtype.element_ty"),
    ("an offset lost by the backward", "stride_hm, has_dh, offset, weight", "stride_hm, has_dh, 0.0, weight"),
    ("a residual taken for adjacent", "residual_ptr + offs_m * stride_rm", "residual_ptr + offs_m * N"),
    (
        "rows behind the last",
        "and the same values are stored.\n    offs_m = tl.minimum(offs_m, M - 1)\n",
        "and the same values are stored.\n",
    ),
    ("vectors across rows", "math.gcd(N, *strides, 16 // x", "math.gcd(*strides, 16 // x"),
    ("dx stored without a mask", "dx_ptr + rows + offs_n, dx, mask=mask)", "dx_ptr + rows + offs_n, dx)"),
    ("a weight gradient of the last rows", "            dw += dy * (h * r)", "            dw = dy * (h * r)"),
    (
        "a weight gradient of the last rest",
        "                dw_rest += dy_rest * (h_rest * r)",
        "                dw_rest = dy_rest * (h_rest * r)",
    ),
    ("a slope without the second block", "            products += tl.sum(", "            tl.sum("),
    (
        "rows counted twice",
        "        mask = None if REST else (offs_m < M) & (offs_n < N)\n",
        "        offs_m = tl.minimum(offs_m, M - 1)\n        mask = None if REST else offs_n < N\n",
    ),
    ("half an accumulator, normed", "torch.float16: tl.float32", "torch.float16: tl.float16"),
    ("h read with the stride of dy", "h_ptr + offs_m * stride_hm", "h_ptr + offs_m * N"),
    ("no gradient of h", "    if ADD:\n            dx += ", "    if False:\n            dx += "),
    ("twice the gradient of the residual", "    return dx, dx, None if", "    return dx, 2 * dx, None if"),
]
