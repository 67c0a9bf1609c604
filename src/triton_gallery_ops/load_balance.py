"""The auxiliary loss that balances the load of experts in a mixture.

``load_balance_loss`` is E * sum(f * P): f the choices of each expert, P its
mean probability, both per token (Fedus et al., 2021, arXiv:2101.03961). It is
the number of transformers' ``load_balancing_loss_func``, also with padding, and
DeepSeek-V3's of each sequence. Forward and backward read the logits once each,
and no probabilities are written. Deterministic: floats are added up in a fixed
order, without atomics. The logits have a gradient. Up to 1024 experts.
"""

import torch
import triton
import triton.language as tl
from torch.library import Library, triton_op, wrap_triton

LOAD_BALANCE_NAMESPACE = "triton_gallery"
LOAD_BALANCE_ACC = {
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
LOAD_BALANCE_MASKS = torch.bool, torch.uint8, torch.int32, torch.int64
LOAD_BALANCE_EXPERTS = 1024
LOAD_BALANCE_TOKENS = 2**30
LOAD_BALANCE_TILE = 4096  # logits that a program has at a time, at most
LOAD_BALANCE_ROWS = 256  # tokens that a program has at a time, at most
LOAD_BALANCE_BLOCKS = 264  # programs that add up
LOAD_BALANCE_COLUMNS = 16  # experts that a program finishes
LOAD_BALANCE_SUMS = 2048  # sums that it adds up at a time


@triton.jit
def _load_balance_scores(
    rows, E: tl.constexpr, SIGMOID: tl.constexpr, ACC: tl.constexpr, offs
):
    """Return scores and probabilities of tokens, (BLOCK_T, BLOCK_E) of each."""
    x = tl.load(rows + offs, mask=offs < E, other=-float("inf")).to(ACC)
    if SIGMOID:
        score = 1 / (1 + tl.exp(-x))
    else:
        score = tl.exp(x - tl.max(x, axis=1, keep_dims=True))
    return score, score / tl.sum(score, axis=1, keep_dims=True)


@triton.jit
def _load_balance_kernel(
    logits_ptr,
    experts_ptr,
    mask_ptr,
    sums_ptr,
    counts_ptr,
    tokens_ptr,
    S,
    M,
    ROWS,
    blocks,
    stride,
    E: tl.constexpr,
    k: tl.constexpr,
    SIGMOID: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
):
    pid = tl.program_id(axis=0)
    begin = (pid % blocks) * ROWS  # in the sequence
    rows = tl.minimum(ROWS, S - begin)  # none where it is not above 0
    begin += pid // blocks * S  # of all tokens
    offs_e = tl.arange(0, BLOCK_E)  # (BLOCK_E,)
    # Threads keep sums of their own until the end.
    sums = tl.zeros((BLOCK_T, BLOCK_E), dtype=ACC)
    tokens = tl.zeros((BLOCK_T, 1), dtype=tl.int32)
    for first in range(0, rows, BLOCK_T):
        row = first + tl.arange(0, BLOCK_T)[:, None]  # (BLOCK_T, 1)
        counted = row < rows
        # Clamp to the last row, which is not counted twice.
        token = begin + tl.minimum(row, rows - 1)
        if mask_ptr is not None:
            counted = counted & (tl.load(mask_ptr + token % M) != 0)
        # In int32 a row's offset would overflow past element 2**31.
        ptrs = logits_ptr + token.to(tl.int64) * stride
        _, p = _load_balance_scores(ptrs, E, SIGMOID, ACC, offs_e[None, :])
        sums += tl.where(counted, p, 0)
        tokens += counted.to(tl.int32)
    counts = tl.zeros((BLOCK_E,), dtype=tl.int32)
    experts_ptr += begin.to(tl.int64) * k
    for first in range(0, rows * k, CHUNK):
        choice = first + tl.arange(0, CHUNK)  # (CHUNK,)
        counted = choice < rows * k
        e = tl.load(experts_ptr + choice, mask=counted, other=0)
        if mask_ptr is not None:
            ptrs = mask_ptr + (begin + choice // k) % M
            counted = counted & (tl.load(ptrs, mask=counted, other=0) != 0)
        counted = counted & (e >= 0) & (e < E)
        counts += tl.histogram(e.to(tl.int32), BLOCK_E, mask=counted)
    out = pid.to(tl.int64) * E + offs_e
    tl.store(sums_ptr + out, tl.sum(sums, axis=0), mask=offs_e < E)
    tl.store(counts_ptr + out, counts, mask=offs_e < E)
    tl.store(tokens_ptr + pid, tl.sum(tl.sum(tokens, axis=1), axis=0))


@triton.jit
def _load_balance_finish_kernel(
    sums_ptr,
    counts_ptr,
    tokens_ptr,
    slopes_ptr,
    parts_ptr,
    blocks,
    E: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    sequence, part = tl.program_id(axis=0), tl.program_id(axis=1)
    offs_e = part * BLOCK_E + tl.arange(0, BLOCK_E)[None, :]  # (1, BLOCK_E)
    sums = tl.zeros((BLOCK_B, BLOCK_E), dtype=ACC)
    counts = tl.zeros((BLOCK_B, BLOCK_E), dtype=tl.int32)
    tokens = tl.zeros((BLOCK_B, 1), dtype=tl.int32)
    for first in range(0, blocks, BLOCK_B):
        block = first + tl.arange(0, BLOCK_B)[:, None]  # (BLOCK_B, 1)
        row = sequence.to(tl.int64) * blocks + block
        mask = (block < blocks) & (offs_e < E)
        sums += tl.load(sums_ptr + row * E + offs_e, mask=mask, other=0)
        counts += tl.load(counts_ptr + row * E + offs_e, mask=mask, other=0)
        tokens += tl.load(tokens_ptr + row, mask=block < blocks, other=0)
    n = tl.sum(tokens, axis=0, keep_dims=True).to(ACC)  # (1, 1)
    count = tl.sum(counts, axis=0, keep_dims=True).to(ACC)  # (1, BLOCK_E)
    # The loss is the sum of slopes times sums, so slopes are its derivatives.
    slope = count / n * (E / n) / tl.num_programs(axis=0)
    loss = tl.where(offs_e < E, slope * tl.sum(sums, axis=0, keep_dims=True), 0)
    out = sequence.to(tl.int64) * E + offs_e
    tl.store(slopes_ptr + out, slope, mask=offs_e < E)
    out = sequence * tl.num_programs(axis=1) + part
    tl.store(parts_ptr + out, tl.sum(tl.sum(loss, axis=1), axis=0))


@triton.jit
def _load_balance_backward_kernel(
    grad_ptr,
    logits_ptr,
    mask_ptr,
    slopes_ptr,
    out_ptr,
    S,
    M,
    blocks,
    stride,
    E: tl.constexpr,
    SIGMOID: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    pid = tl.program_id(axis=0)
    sequence = pid // blocks
    row = pid % blocks * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    # Clamp to the last row: the same is stored again.
    token = sequence * S + tl.minimum(row, S - 1)  # (BLOCK_T, 1)
    offs_e = tl.arange(0, BLOCK_E)[None, :]  # (1, BLOCK_E)
    # In int32 a row's offset would overflow past element 2**31.
    ptrs = logits_ptr + token.to(tl.int64) * stride
    score, p = _load_balance_scores(ptrs, E, SIGMOID, ACC, offs_e)
    ptrs = slopes_ptr + sequence.to(tl.int64) * E + offs_e
    slope = tl.load(ptrs, mask=offs_e < E, other=0)
    d = p * (slope - tl.sum(p * slope, axis=1, keep_dims=True))
    if SIGMOID:
        d = d * (1 - score)
    d = d * tl.load(grad_ptr)
    if mask_ptr is not None:
        d = tl.where(tl.load(mask_ptr + token % M) != 0, d, 0)
    out_ptrs = out_ptr + token.to(tl.int64) * E + offs_e
    tl.store(out_ptrs, d.to(out_ptr.dtype.element_ty), mask=offs_e < E)


def _load_balance_check(logits, mask, score, sequences):
    """Raise for what the op does not take of logits, mask and options."""
    name = "load_balance_loss"
    if logits.dtype not in LOAD_BALANCE_ACC:
        raise TypeError(f"{name} takes float logits, not {logits.dtype}")
    most = LOAD_BALANCE_EXPERTS
    if logits.ndim != 2 or not 1 <= logits.shape[1] <= most:
        raise ValueError(
            f"{name} takes logits of (tokens, experts), of up to {most} "
            f"experts, not {tuple(logits.shape)}"
        )
    T = logits.shape[0]
    if T > LOAD_BALANCE_TOKENS:
        raise ValueError(f"{name} takes up to 2**30 tokens, not {T}")
    if score not in ("softmax", "sigmoid"):
        raise ValueError(
            f"{name} takes the scores softmax and sigmoid, not {score}"
        )
    if sequences < 1 or T % sequences:
        raise ValueError(
            f"{name} takes sequences of one length, not {sequences} of "
            f"{T} tokens"
        )
    if mask is None:
        return
    if mask.dtype not in LOAD_BALANCE_MASKS or mask.device != logits.device:
        raise TypeError(
            f"{name} takes a mask of bool, uint8, int32 or int64 on "
            f"{logits.device}, not {mask.dtype} on {mask.device}"
        )
    if T > 0 and (mask.numel() == 0 or T % mask.numel()):
        raise ValueError(
            f"{name} takes a mask whose size divides {T} tokens, not of "
            f"{tuple(mask.shape)}"
        )


def _load_balance_check_experts(logits, experts):
    """Raise for what the op does not take of experts."""
    name = "load_balance_loss"
    known = experts.dtype in (torch.int32, torch.int64)
    if not known or experts.device != logits.device:
        raise TypeError(
            f"{name} takes experts of int32 or int64 on {logits.device}, not "
            f"{experts.dtype} on {experts.device}"
        )
    fits = experts.ndim == 2 and experts.shape[0] == logits.shape[0]
    if not fits or not 1 <= experts.shape[1] <= LOAD_BALANCE_EXPERTS:
        raise ValueError(
            f"{name} takes experts of (tokens, k), not {tuple(experts.shape)} "
            f"for logits of {tuple(logits.shape)}"
        )


def _load_balance_plan(logits, score):
    """Return how to launch for tiles of logits."""
    E = int(logits.shape[1])
    BLOCK_E = triton.next_power_of_2(E)
    # float64 takes twice the registers.
    tile = LOAD_BALANCE_TILE // max(1, logits.element_size() // 4)
    BLOCK_T = min(LOAD_BALANCE_ROWS, tile // BLOCK_E)
    return {
        "E": E,
        "SIGMOID": score == "sigmoid",
        "ACC": LOAD_BALANCE_ACC[logits.dtype],
        "BLOCK_T": BLOCK_T,
        "BLOCK_E": BLOCK_E,
        "num_warps": max(1, BLOCK_T * BLOCK_E * 8 // tile),
    }


def _load_balance_tensors(logits, mask):
    """Return logits with contiguous rows, a contiguous mask, and its size."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    if mask is None:
        return logits, None, 1
    # A bool goes as it is: Inductor of PyTorch 2.11 lowers no view of it.
    mask = mask.contiguous()
    return logits, mask, mask.numel()


def _load_balance_launch(
    logits,
    experts,
    mask=None,
    score="softmax",
    sequences=1,
    kernel=_load_balance_kernel,
    finish_kernel=_load_balance_finish_kernel,
):
    _load_balance_check(logits, mask, score, sequences)
    _load_balance_check_experts(logits, experts)
    logits, mask, M = _load_balance_tensors(logits, mask)
    plan = _load_balance_plan(logits, score)
    E, BLOCK_T, ACC = plan["E"], plan["BLOCK_T"], plan["ACC"]
    S = logits.shape[0] // sequences
    most = triton.cdiv(LOAD_BALANCE_BLOCKS, sequences)
    # min of Python would make a graph for few tokens, and one for many.
    blocks = torch.sym_min(most, triton.cdiv(S, BLOCK_T))
    wide = torch.promote_types(logits.dtype, torch.float32)
    sums = logits.new_empty((sequences * blocks, E), dtype=wide)
    counts = torch.empty_like(sums, dtype=torch.int32)
    tokens = counts.new_empty(sequences * blocks)
    slopes = sums.new_empty((sequences, E))
    columns = min(LOAD_BALANCE_COLUMNS, plan["BLOCK_E"])
    parts = sums.new_empty((sequences, triton.cdiv(E, columns)))
    # Triton launches on the current GPU, which may not be that of logits.
    with torch.accelerator.device_index(logits.device.index):
        if S > 0:
            kernel[(sequences * blocks,)](
                *(logits, experts.contiguous(), mask, sums, counts, tokens),
                *(S, M, BLOCK_T * triton.cdiv(S, BLOCK_T * blocks), blocks),
                logits.stride(0),
                k=int(experts.shape[1]),
                CHUNK=128 * plan["num_warps"],
                **plan,
            )
        finish_kernel[tuple(parts.shape)](
            *(sums, counts, tokens, slopes, parts, blocks),
            E=E,
            ACC=ACC,
            BLOCK_B=LOAD_BALANCE_SUMS // columns,
            BLOCK_E=columns,
        )
    return parts.sum() if parts.numel() > 1 else parts.view(()), slopes


def _load_balance_backward_launch(
    grad,
    logits,
    slopes,
    mask=None,
    score="softmax",
    kernel=_load_balance_backward_kernel,
):
    sequences = int(slopes.shape[0])
    _load_balance_check(logits, mask, score, sequences)
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    S = logits.shape[0] // sequences
    if S > 0:
        logits, mask, M = _load_balance_tensors(logits, mask)
        plan = _load_balance_plan(logits, score)
        blocks = triton.cdiv(S, plan["BLOCK_T"])
        tensors = grad, logits, mask, slopes.contiguous(), out
        sizes = S, M, blocks, logits.stride(0)
        with torch.accelerator.device_index(logits.device.index):
            kernel[(sequences * blocks,)](*tensors, *sizes, **plan)
    return out


@triton_op(f"{LOAD_BALANCE_NAMESPACE}::load_balance", mutates_args={})
def load_balance_forward(
    logits: torch.Tensor,
    experts: torch.Tensor,
    mask: torch.Tensor | None = None,
    score: str = "softmax",
    sequences: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss, and its slopes, of (sequences, E).

    A slope is the derivative of the loss with respect to the probability that a
    token of the sequence gives an expert. It has no gradient.
    """
    kernels = _load_balance_kernel, _load_balance_finish_kernel
    options = mask, score, sequences
    wrapped = map(wrap_triton, kernels)
    return _load_balance_launch(logits, experts, *options, *wrapped)


@triton_op(f"{LOAD_BALANCE_NAMESPACE}::load_balance_backward", mutates_args={})
def load_balance_backward(
    grad: torch.Tensor,
    logits: torch.Tensor,
    slopes: torch.Tensor,
    mask: torch.Tensor | None = None,
    score: str = "softmax",
) -> torch.Tensor:
    """Return the gradient of the logits, given that of the loss.

    Takes what ``load_balance_forward`` took and returned.
    """
    kernel = wrap_triton(_load_balance_backward_kernel)
    inputs = grad, logits, slopes, mask, score
    return _load_balance_backward_launch(*inputs, kernel)


# On a GPU a call goes to the launcher; all else goes on to the triton_op.
LOAD_BALANCE_LIBRARY = Library(LOAD_BALANCE_NAMESPACE, "FRAGMENT")
LOAD_BALANCE_LIBRARY.impl("load_balance", _load_balance_launch, "CUDA")
LOAD_BALANCE_LIBRARY.impl(
    "load_balance_backward", _load_balance_backward_launch, "CUDA"
)


def _load_balance_setup(ctx, inputs, output):
    logits, _, mask, ctx.score, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # slopes have none: no zeros for them
    ctx.save_for_backward(logits, output[1], mask)


def _load_balance_gradient(ctx, grad, _):
    d = None
    if grad is not None:
        d = load_balance_backward(grad, *ctx.saved_tensors, ctx.score)
    return d, None, None, None, None


load_balance_forward.register_autograd(
    _load_balance_gradient, setup_context=_load_balance_setup
)


def load_balance_loss(
    logits: torch.Tensor,
    experts: torch.Tensor,
    mask: torch.Tensor | None = None,
    score: str = "softmax",
    sequences: int = 1,
) -> torch.Tensor:
    """Return the auxiliary loss of a router, E * sum(f * P) over E experts.

    f is how often an expert was chosen, divided by the number of tokens, and P
    the mean of its probability over the tokens. Where all experts are chosen
    equally often, the loss is k, the number of choices of a token. This is the
    loss of transformers; that of Switch Transformer, Megatron-Core and DeepSeek
    is it divided by k.

    Takes ``logits`` of (tokens, experts), float16, bfloat16, float32 or
    float64, of any strides, with up to 1024 experts, and ``experts`` of
    (tokens, k), int32 or int64, such as those of ``moe_routing``. A choice
    outside of [0, E), such as -1, is not counted.

    Tokens whose ``mask`` is 0 do not count, and their gradient is 0, whatever
    their logits are: it is bool, uint8, int32 or int64, of any shape, with an
    element for each token. A smaller mask is repeated, for the logits of
    several layers one after another. The probabilities are the softmax of the
    logits or, with ``score="sigmoid"``, their sigmoid divided by its sum, as in
    DeepSeek-V3 (Liu et al., 2024, arXiv:2412.19437). Its loss of each sequence
    takes ``sequences``, the number of sequences, of one length, that the tokens
    are, one after another; the result is the mean of their losses.

    The loss is float32, or float64 for float64, and NaN where no token counts.
    The gradient of the logits has their dtype, and none itself. Both are
    deterministic. Raises TypeError for other dtypes and devices, and ValueError
    for other shapes and options, and more than 2**30 tokens.

    Rounding: all is in float32, or in float64 for float64; the gradient is
    rounded once.
    """
    return load_balance_forward(logits, experts, mask, score, sequences)[0]
