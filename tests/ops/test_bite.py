"""The tests of the ops find what they are for: with the masks taken out of a recipe, its tests fail."""

import multiprocessing
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from guard import PAD, guarded

HERE = Path(__file__).parent

# The recipe, what is taken out of it, and what takes its place.
BREAKS = {
    "store without a mask": (
        "first_steps/vector_add",
        "tl.store(out_ptr + offs, total, mask=mask)",
        "tl.store(out_ptr + offs, total)",
    ),
    "truth values added": ("first_steps/vector_add", "total = x | y", "total = x ^ y"),
    "load without a mask": (
        "first_steps/row_sum",
        "mask=offs_n < N, other=0)  # (BLOCK_N,)\n        acc",
        "other=None)\n        acc",
    ),
    "half an accumulator": ("first_steps/row_sum", "torch.float16: tl.float32", "torch.float16: tl.float16"),
    "transpose stored without a mask": (
        "first_steps/strides",
        "tl.store(out_ptrs, x, mask=mask)",
        "tl.store(out_ptrs, x)",
    ),
    "transpose with half a mask": ("first_steps/strides", "mask = (offs_m < M) & (offs_n < N)", "mask = offs_m < M"),
    "transpose of adjacent columns": (
        "first_steps/strides",
        "offs_m * stride_xm + offs_n * stride_xn",
        "offs_m * stride_xm + offs_n",
    ),
    "tiles counted by rows": (
        "first_steps/strides",
        "pid // tiles_n, pid % tiles_n, tiles_m",
        "pid // tiles_m, pid % tiles_n, tiles_m",
    ),
    "rows stored without a mask": ("first_steps/autotune", "tl.sum(acc, axis=1), mask=mask_m)", "tl.sum(acc, axis=1))"),
    "a ragged tail called even": ("first_steps/autotune", 'args["N"] % args["BLOCK_N"] == 0', 'args["N"] % 2 == 0'),
    "a vector's stride left out": ("first_steps/autotune", "x_ptr + offs_n * stride_xn", "x_ptr + offs_n"),
    "half an accumulator, tuned": ("first_steps/autotune", "torch.float16: tl.float32,", "torch.float16: tl.float16,"),
    "a grid from a constant": ("first_steps/autotune", 'args["BLOCK_M"]),)](', "4),)]("),
    "sum stored without a mask": (
        "pytorch/torch_compile",
        "tl.store(out_ptr + offs, x + y, mask=mask)",
        "tl.store(out_ptr + offs, x + y)",
    ),
    "a grid rounded down": (
        "pytorch/torch_compile",
        'triton.cdiv(out.numel(), meta["BLOCK"])',
        'out.numel() // meta["BLOCK"]',
    ),
    "a gradient stored without a mask": ("pytorch/triton_op", "grad * x * s, mask=mask)", "grad * x * s)"),
    "half a gradient": ("pytorch/triton_op", "s * (1 + x * (1 - s)), mask=mask)", "s, mask=mask)"),
    "half a second gradient": ("pytorch/triton_op", "grad * (a * y * ddh + b * dh)", "grad * a * y * ddh"),
    "tiles stored with half a mask": (
        "pytorch/subsystems",
        "acc, mask=mask_m & mask_n)",
        "acc, mask=mask_m)",
    ),
    "the ragged end of a product": ("pytorch/subsystems", "mask_k = offs_k < K - k", "mask_k = offs_k < K"),
    "squares stored without a mask": (
        "pytorch/which_api",
        "tl.store(out_ptr + offs, x * x, mask=offs < N)",
        "tl.store(out_ptr + offs, x * x)",
    ),
    "rows loaded without a mask": (
        "pytorch/aot_inductor",
        "mask=mask, other=0)  # (BLOCK_N,)",
        "other=None)  # (BLOCK_N,)",
    ),
    "rows counted by one axis": ("pytorch/aot_inductor", "math.prod(x.shape[:-1])", "x.shape[0]"),
    "lerp stored without a mask": (
        "pytorch/cuda_graphs",
        "tl.where(w < 0.5, near_x, near_end), mask=mask)",
        "tl.where(w < 0.5, near_x, near_end))",
    ),
    "lerp by one formula": ("pytorch/cuda_graphs", "tl.where(w < 0.5, near_x, near_end)", "near_x"),
    "softcap stored without a mask": (
        "xla/jax_call",
        "tl.where(x < 0, -out, out), mask=offs < N)",
        "tl.where(x < 0, -out, out))",
    ),
    "keys behind the end": ("xla/jax_call", "keep = start + offs_n < T if MASKED else every", "keep = every"),
    "an accumulator that is not rescaled": ("xla/pytorch_xla", "v, acc * shrink[:, None])", "v, acc)"),
    "attention stored without a mask": (
        "xla/pytorch_xla",
        "acc / total[:, None], mask=offs_m[:, None] < T)",
        "acc / total[:, None])",
    ),
    "softmax stored without half a mask": ("fusion/softmax", "y, (offs_m < M) & (offs_n < N))", "y, offs_n < N)"),
    "a row padded with zeros": (
        "fusion/softmax",
        "x_rows + offs_n, offs_n < N, HIDDEN)",
        "x_rows + offs_n, offs_n < N, 0)",
    ),
    "a sum that is not corrected": ("fusion/softmax", "            s *= exp(m - larger)\n", ""),
    "rows taken for adjacent": (
        "fusion/softmax",
        "tl.minimum(offs_m, M - 1) * stride_vecs * VEC",
        "tl.minimum(offs_m, M - 1) * N_vecs * VEC",
    ),
    "a last block that is empty": (
        "fusion/softmax",
        "            last = (N - 1) // BLOCK_N * BLOCK_N\n",
        "            last = N // BLOCK_N * BLOCK_N\n",
    ),
    "edges that are left out of the sum": ("fusion/softmax", "axis=0) + tl.sum(e, axis=0))", "axis=0))"),
    "edges before the body alone": ("fusion/softmax", "tl.where(edge < head, edge, edge + length)", "edge"),
    "vectors across rows": (
        "fusion/softmax",
        "VEC = math.gcd(N, stride, 16 // size)",
        "VEC = math.gcd(stride, 16 // size)",
    ),
    "a mean over the block": (
        "fusion/rms_norm",
        "axis=1, keep_dims=True) / N + EPS)\n        tl.store",
        "axis=1, keep_dims=True) / BLOCK_N + EPS)\n        tl.store",
    ),
    "dx stored without a mask": (
        "fusion/rms_norm",
        "tl.store(dx_ptr + offs_m * N + offs_n, dx, mask=mask)",
        "tl.store(dx_ptr + offs_m * N + offs_n, dx)",
    ),
    "a weight gradient of the last rows": (
        "fusion/rms_norm",
        "            dw += dy * (x * r)\n",
        "            dw = dy * (x * r)\n",
    ),
    "half an accumulator, normed": (
        "fusion/rms_norm",
        "torch.float16: tl.float32, torch.bfloat16",
        "torch.float16: tl.float16, torch.bfloat16",
    ),
    "dy read with the stride of x": ("fusion/rms_norm", "dy_ptr + offs_m * stride_dym", "dy_ptr + offs_m * stride_xm"),
    "swiglu stored without a mask": (
        "fusion/swiglu",
        "tl.store(out_ptr + offs_m * stride_out + offs_n, out, mask)",
        "tl.store(out_ptr + offs_m * stride_out + offs_n, out)",
    ),
    "a row too many": ("fusion/swiglu", "(offs_m < M) &", "(offs_m < M + 1) &"),
    "a wrong derivative": (
        "fusion/swiglu",
        "s * (1 + gate * (1 - s))  # (BLOCK_M",
        "s * (1 - gate * (1 - s))  # (BLOCK_M",
    ),
    "units that do not divide": (
        "fusion/swiglu",
        "unit if all(n % unit == 0 for n in sizes) else 1",
        "unit if N % 2 == 0 else 1",
    ),
    "a copy left out": ("fusion/swiglu", "return x if x.stride(1) == 1 else x.contiguous()", "return x"),
    "differences behind the end of a row": (
        "fusion/layer_norm",
        "d = tl.where(block < N, x - mean[:, None], 0)",
        "d = x - mean[:, None]",
    ),
    "Welford's columns merged without their count": ("fusion/layer_norm", "squares + k * d * d", "squares + d * d"),
    "a mean without a gradient": ("fusion/layer_norm", "dx = g - sum_g[:, None] / N - x", "dx = g - x"),
    "partial sums over each other": (
        "fusion/layer_norm",
        "partial_ptr + 2 * pid.to(tl.int64) * N",
        "partial_ptr + pid.to(tl.int64) * N",
    ),
    "the sums of one block for all": ("fusion/layer_norm", "sums.sum(0) if turn == 2", "sums[0] if turn == 2"),
    "a norm stored without a mask": (
        "fusion/layer_norm",
        "tl.store(y_rows + offs_n, y, mask_m & (offs_n < N))",
        "tl.store(y_rows + offs_n, y, mask_m)",
    ),
    "squares in half precision": (
        "fusion/layer_norm",
        "ACC = {torch.float16: tl.float32",
        "ACC = {torch.float16: tl.float16",
    ),
    "half a rotation stored without a mask": (
        "fusion/rope",
        "tl.store(out_ptrs + offs_d, x1 * cos - x2 * sin, mask)",
        "tl.store(out_ptrs + offs_d, x1 * cos - x2 * sin)",
    ),
    "pairs stored without a mask": ("fusion/rope", "tl.reshape(y, x.shape), mask)", "tl.reshape(y, x.shape))"),
    "turned the other way": ("fusion/rope", "    if CONJUGATE:", "    if not CONJUGATE:"),
    "the gradient turned on": ("fusion/rope", "ctx.interleaved, not ctx.conjugate", "ctx.interleaved, ctx.conjugate"),
    "keys counted as queries": ("fusion/rope", "rows = (h < Hk) & (t < T)", "rows = (h < Hq) & (t < T)"),
    "keys behind the queries": ("fusion/rope", "h -= groups_q * BLOCK_H", "h -= groups_q"),
    "heads taken for positions": (
        "fusion/rope",
        "x = b * stride_kb + h * stride_kh + t * stride_kt",
        "x = b * stride_kb + h * stride_kt + t * stride_kh",
    ),
    "odd strides in units of eight": ("fusion/rope", "for n in (D // 2, *strides))", "for n in (D // 2,))"),
    "dropout stored without a mask": (
        "fusion/dropout",
        "tl.where(bits >= limit, x * scale, 0), mask)",
        "tl.where(bits >= limit, x * scale, 0))",
    ),
    "the words of a call in another order": (
        "fusion/dropout",
        "tl.join(tl.join(w0, w2), tl.join(w1, w3))",
        "tl.join(tl.join(w0, w1), tl.join(w2, w3))",
    ),
    "one half of each word twice": ("fusion/dropout", "tl.join(bits << 16, bits)", "tl.join(bits << 16, bits << 16)"),
    "every program counts from 0": (
        "fusion/dropout",
        "n = tl.cast(first, tl.int64) // PER + tl.arange",
        "n = tl.cast(first, tl.int64) * 0 + tl.arange",
    ),
    "a seed of 32 bits": (
        "fusion/dropout",
        "w0, w1, w2, w3 = tl.randint4x(seed, n)",
        "w0, w1, w2, w3 = tl.randint4x(seed.to(tl.int32), n)",
    ),
    "another mask for the gradient": (
        "fusion/dropout",
        "dropout(grad, ctx.p, *ctx.saved_tensors)",
        "dropout(grad, ctx.p, ctx.saved_tensors[0] + 1)",
    ),
    "the scale of another p": (
        "fusion/dropout",
        "kept = 2147483648 - tl.cast(limit, tl.int64)",
        "kept = 2147483648 - tl.cast(limit, tl.int64) // 2",
    ),
    "an edge stored without a mask": (
        "fusion/cross_entropy",
        "exp(x_e - top) * a - b, mask_e)",
        "exp(x_e - top) * a - b)",
    ),
    "rows that end with their last whole vector": (
        "fusion/cross_entropy",
        'x_e = tl.load(x_ptr + x_row + offs_e, mask_e, float("-inf"))',
        'x_e = tl.load(x_ptr + x_row + offs_e, edge < head, float("-inf"))',
    ),
    "a sum that does not follow its maximum": ("fusion/cross_entropy", "        s *= exp(m - larger)\n", ""),
    "ignored rows in the mean": (
        "fusion/cross_entropy",
        "(target != ignore_index).sum(dtype=wide)",
        "(target == target).sum(dtype=wide)",
    ),
    "smoothing left out of the gradient": (
        "fusion/cross_entropy",
        "a, b = tl.where(used, c / s, 0), c * SMOOTHING / N",
        "a, b = tl.where(used, c / s, 0), c * 0",
    ),
    "a target that is not subtracted": (
        "fusion/cross_entropy",
        "exp(x_t - top) * a - b - c * (1 - SMOOTHING)",
        "exp(x_t - top) * a - b",
    ),
    "a body stored without a mask": (
        "fusion/cross_entropy",
        "tl.store(d_body + offs, d, mask, eviction_policy=DROP)",
        "tl.store(d_body + offs, d, eviction_policy=DROP)",
    ),
    "sums stored without a mask": (
        "fusion/cumsum",
        "tl.store(y_rows + offs, turned(y, VEC, REVERSE), mask)",
        "tl.store(y_rows + offs, turned(y, VEC, REVERSE))",
    ),
    "tiles of a chain stored without a mask": (
        "fusion/cumsum",
        "y + carry.to(ACC), offs < N)",
        "y + carry.to(ACC))",
    ),
    "a carry that forgets": (
        "fusion/cumsum",
        "carry += tl.sum(x, axis=1, keep_dims=True)",
        "carry = carry * 0 + tl.sum(x, axis=1, keep_dims=True)",
    ),
    "a carry rounded to float32": (
        "fusion/cumsum",
        "carry = tl.zeros((BLOCK_M, 1), dtype=tl.float64)",
        "carry = tl.zeros((BLOCK_M, 1), dtype=tl.float32)",
    ),
    "a group that closes with its own sum": (
        "fusion/cumsum",
        "publish(word_ptr, carry + total)",
        "publish(word_ptr, total)",
    ),
    "a group that leaves out the one before": (
        "fusion/cumsum",
        "tile // GROUP * GROUP - 1 + tl.arange(0, GROUP)",
        "tile // GROUP * GROUP + tl.arange(0, GROUP)",
    ),
    "vectors that are not turned": (
        "fusion/cumsum",
        "if REVERSE and VEC >> log > 1:",
        "if REVERSE and VEC >> log > 4:",
    ),
    "no element before the first piece": (
        "fusion/topk",
        "tl.where(edge < head, edge, edge + length)",
        "edge + length",
    ),
    "numbers of elements from the first piece": ("fusion/topk", "pack(x, head + offs,", "pack(x, offs,"),
    "indices stored without a mask": ("fusion/topk", "index.to(tl.int64), mask)", "index.to(tl.int64))"),
    "negative floats in reverse": ("fusion/topk", "tl.where(bits < 0, bits ^ TOP, bits)", "bits"),
    "places without their last bit": ("fusion/topk", "| (index ^ LAST)", "| (index ^ LAST) & -2"),
    "NaN by its bits": ("fusion/topk", "return tl.where(x == x, key, TOP)", "return key"),
    "sets of neighbours": ("fusion/topk", "piece += SETS * tl.arange(0, EACH)", "piece += tl.arange(0, EACH)"),
    "two zeros": ("fusion/topk", "bits = tl.where(x == 0, 0, bits)", "bits = bits"),
    "parts that all begin at the first": (
        "fusion/topk",
        "first = part * SETS * EACH",
        "first = 0 * part * SETS * EACH",
    ),
}


# Processes that are forked off one that has imported what takes long
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["hypothesis.strategies", "pandas", "pytest", "torch._dynamo", "triton.testing"])


def run_tests(gallery: Path, name: str) -> tuple[int | None, str]:
    """Run the property tests of a recipe on another gallery; return the exit status and what they printed."""
    log = gallery.with_name("log")
    arguments = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=bite", f"--gallery={gallery}"]
    arguments += ["-k", "float32 or bool or accumulator", str(HERE / f"test_{Path(name).name}.py")]
    process = SERVER.Process(target=in_a_process, args=(arguments, log))
    process.start()
    process.join(300)
    process.kill()
    return process.exitcode, log.read_text()


def in_a_process(arguments: list[str], log: Path) -> None:
    """Run pytest with its output in a file."""
    with open(log, "wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.exit(pytest.main(arguments))


def copy_gallery(gallery: Path, to: Path) -> Path:
    """Return a copy of the gallery."""
    return Path(shutil.copytree(gallery, to / "gallery", ignore=shutil.ignore_patterns("__pycache__")))


def test_copy_passes(gallery: Path, tmp_path: Path) -> None:
    """A copy as it is passes, so that failures mean something; of each recipe its own tests say so."""
    status, output = run_tests(copy_gallery(gallery, tmp_path), "first_steps/vector_add")
    assert status == 0, output


@pytest.mark.anywhere
@pytest.mark.parametrize("what", BREAKS)
def test_broken_recipe_fails(gallery: Path, tmp_path: Path, what: str) -> None:
    """A recipe that is broken in one place fails its tests (and does not crash, or fail to be collected)."""
    name, old, new = BREAKS[what]
    copy = copy_gallery(gallery, tmp_path)
    file = copy / f"{name}.py"
    source = file.read_text()
    assert source.count(old) == 1
    # Without its checks, which would stop the import: the tests have to notice by themselves.
    file.write_text(source.replace(old, new).partition("# The check\n")[0])
    status, output = run_tests(copy, name)
    assert status == 1, output
    assert "AssertionError" in output


@pytest.mark.parametrize("index", [-PAD, -1, 5, PAD - 1])
def test_guard_finds_stores_out_of_bounds(index: int) -> None:
    """One byte beside an allocation is enough, on either side."""

    def op() -> torch.Tensor:
        out = torch.empty(5, dtype=torch.uint8)
        memory = torch.empty(0, dtype=torch.uint8).set_(out.untyped_storage())
        memory[out.storage_offset() + index] ^= 1
        return out

    with pytest.raises(AssertionError, match=r"a store (before the start|behind the end)"):
        guarded(op)


def test_guard_looks_into_ops() -> None:
    """What an op of torch.library allocates is guarded too."""

    @torch.library.custom_op("triton_gallery_tests::overrun", mutates_args=())
    def overrun(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        memory = torch.empty(0, dtype=torch.float32).set_(out.untyped_storage())
        if out.storage_offset():  # between guards
            memory[out.storage_offset() + out.numel()] = 0
        return out

    for op in (overrun, torch.ops.triton_gallery_tests.overrun, torch.ops.triton_gallery_tests.overrun.default):
        with pytest.raises(AssertionError, match="behind the end"):
            guarded(op, torch.ones(5))


def test_guard_finds_changed_inputs_and_poisons_outputs() -> None:
    """An op may not write to its inputs, and has to write all of its output."""
    with pytest.raises(AssertionError, match="a store to an input"):
        guarded(lambda x: x.neg_(), torch.ones(3))
    assert guarded(torch.empty_like, torch.ones(2, 3).T).isnan().all()
    assert torch.equal(guarded(torch.zeros_like, torch.ones(2, 3)), torch.zeros(2, 3))
