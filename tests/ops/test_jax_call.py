"""The recipe Triton in a JAX program: its kernels' numbers, and what XLA gets of them."""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from guard import guarded
from hypothesis import example, given, settings
from hypothesis import strategies as st
from inputs import Layout, sizes

if importlib.util.find_spec("jax") is None or importlib.util.find_spec("jax_triton") is None:
    pytest.skip("needs jax and jax-triton", allow_module_level=True)

OLD = importlib.metadata.version("jax-triton").startswith("0.3.")  # the newest for Python 3.11
BLOCK = 1024  # of shift_kernel
HALVES = [torch.float16, torch.bfloat16]
# The interpreter computes with the bits of bfloat16. The recipe's stand-in gives it float32, direct launches cannot.
DIRECT = [torch.float16, torch.bfloat16] if torch.cuda.is_available() else [torch.float16]

# Evaluated where kernels are compiled and nothing is executed. Names are those of the recipe.
TOP = """
import inspect, json, types
from functools import partial

import numpy as np, torch, triton, triton.language as tl
import jax, jax.numpy as jnp, jax_triton as jt

target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
stand_in = types.SimpleNamespace(get_current_target=lambda: target)
triton.runtime.driver.set_active(stand_in)
"""
CLAIMS = """
def qkv(T=256, H=64, dtype=jnp.bfloat16):
    return [jnp.ones((2, T, 3, H), dtype)] * 3

def total(*arrays):
    return causal_attention(*arrays).astype(jnp.float32).sum()

x, seven = jnp.ones((7, 9)), partial(shift, by=7)
claims = {
    "chain": lower(chain, x),
    "float": lower(partial(shift, by=0.5), x),
    "float32": lower(partial(shift, by=np.float32(0.5)), x),
    "array": lower(shift, x, np.float32(30)),
    "one": lower(partial(shift, by=1), x),
    "int64": lower(seven, np.arange(64)),
    "vmap": lower(jax.vmap(seven), x),
    "grad": lower(jax.grad(lambda x: seven(x).sum()), x),
    "sequential_vmap": lower(jax.vmap(jax.custom_batching.sequential_vmap(seven)), x),
    "fold": lower(jax.vmap(fold(seven)), x),
    "fold twice": lower(jax.vmap(jax.vmap(fold(seven))), jnp.ones((3, 7, 9))),
}
with jax.enable_x64(True):
    claims["int64, enable_x64"] = lower(seven, np.arange(64))
for H, T in ((32, 256), (64, 256), (128, 256), (64, 1)):
    claims[f"attention {H} {T}"] = lower(attend, *qkv(T, H))
tuned = triton.autotune([triton.Config({"BLOCK": block}) for block in (256, 1024)], key=["N"])(shift_kernel)
claims["tuned"] = lower(lambda x: triton_call(x, 7, x.size, kernel=tuned, out_type=x, grid=lambda meta: (1,)), x)
claims["batched attention"] = lower(jax.vmap(fold(attend)), *(jnp.stack([x] * 5) for x in qkv()))
claims["gradients"] = lower(jax.vmap(jax.value_and_grad(total, (0, 1, 2))), *(jnp.stack([x] * 5) for x in qkv()))
print(json.dumps(claims))
"""


def through_jax(recipe: ModuleType, function: Callable) -> Callable[..., torch.Tensor]:
    """Return a function of JAX as one of tensors."""

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        return torch.from_dlpack(function(*map(recipe.jax.dlpack.from_dlpack, tensors)))

    return call


def seven(recipe: ModuleType) -> Callable:
    """Return the recipe's elementwise function of an array."""
    return partial(recipe.shift, by=7)


DTYPES = [torch.float32, torch.int64, *DIRECT]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=10)  # guards cost more than this kernel
@given(size=sizes(BLOCK, 4 * BLOCK).filter(bool), by=st.sampled_from([1, 5, 2**31]))
def test_shift_launched_by_triton(recipe: ModuleType, dtype: torch.dtype, size: int, by: int) -> None:
    """The kernel stays inside its arrays, and adds."""
    by = by if dtype == torch.int64 else min(by, 5)
    x = (40 * Layout("contiguous", size).make((size,), torch.float32, recipe.DEVICE)).to(dtype)

    def launch(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        recipe.shift_kernel[(-(-size // BLOCK),)](x, by, size, out, BLOCK=BLOCK)
        return out

    torch.testing.assert_close(guarded(launch, x), x + by)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@given(
    shape=st.lists(st.sampled_from([1, 2, 7, 33]), min_size=0, max_size=3),
    transposed=st.booleans(),
    jitted=st.booleans(),
)
def test_shift_in_jax(recipe: ModuleType, dtype: torch.dtype, shape: list[int], transposed: bool, jitted: bool) -> None:
    """Through XLA the numbers are the same, also of an array that PyTorch had transposed."""
    x = Layout("transposed" if transposed else "contiguous", 1).make(tuple(shape), dtype, recipe.DEVICE)
    function = recipe.jax.jit(seven(recipe)) if jitted else seven(recipe)
    out = through_jax(recipe, function)(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out, x + 7)


@pytest.mark.parametrize("x64", [False, True])
def test_int64_in_jax(recipe: ModuleType, x64: bool) -> None:
    """Operands are int64 if JAX is told so; else they are truncated, without an error."""
    jax, x = recipe.jax, torch.arange(3000, device=recipe.DEVICE) + 2**40
    with jax.enable_x64(x64):
        out = jax.jit(seven(recipe))(jax.dlpack.from_dlpack(x))
    assert out.dtype == ("int64" if x64 else "int32")
    assert out.tolist() == ((x if x64 else x - 2**40) + 7).tolist()


def attention64(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the reference, computed in another way than the recipe's."""
    q, k, v = (t.double() for t in tensors)
    scores = torch.einsum("btnh,bsnh->bnts", q, k) / q.shape[-1] ** 0.5
    ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill(ahead, -torch.inf)
    return torch.einsum("bnts,bsnh->btnh", scores.softmax(dim=-1), v)


def assert_attends(out: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Assert two roundings of a mean of values, and a little for float32."""
    value = tensors[2]
    atol = 1.25 * torch.finfo(value.dtype).eps * value.abs().max().item()
    assert out.dtype == value.dtype
    torch.testing.assert_close(out.double(), attention64(tensors), rtol=0, atol=atol)


def normal(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> list[torch.Tensor]:
    """Return queries, keys and values."""
    return [Layout("contiguous", seed + n).make(shape, dtype, device) for n in range(3)]


LENGTHS = st.sampled_from([1, 2, 16, 63, 64, 65, 127, 128, 129, 192, 200])
HEADS = st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)])  # batch and heads


@pytest.mark.parametrize("dtype", DIRECT, ids=str)
@settings(max_examples=6)
@given(heads=HEADS, T=LENGTHS, H=st.sampled_from([32, 64, 128]), seed=st.integers(0, 99))
@example(heads=(2, 2), T=129, H=32, seed=0)
def test_attention_and_its_accumulator(
    recipe: ModuleType, dtype: torch.dtype, heads: tuple[int, int], T: int, H: int, seed: int
) -> None:
    """The kernel stays inside its arrays, writes all of its output, and is right."""
    tensors = normal((heads[0], T, heads[1], H), dtype, recipe.DEVICE, seed)

    def launch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q)
        grid = (-(-T // 128), heads[0] * heads[1])
        sizes = {"N": heads[1], "H": H, "BLOCK_M": 128, "BLOCK_N": 64}
        recipe.attention_kernel[grid](q, k, v, T, out, **sizes, num_warps=8)
        return out

    assert_attends(guarded(launch, *tensors), tensors)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@settings(max_examples=8)
@given(heads=HEADS, T=LENGTHS, H=st.sampled_from([32, 64]), seed=st.integers(0, 99))
@example(heads=(1, 1), T=0, H=64, seed=0)
def test_attention_in_jax(
    recipe: ModuleType, dtype: torch.dtype, heads: tuple[int, int], T: int, H: int, seed: int
) -> None:
    tensors = normal((heads[0], T, heads[1], H), dtype, recipe.DEVICE, seed)
    out = through_jax(recipe, recipe.causal_attention)(*tensors)
    assert out.shape == tensors[0].shape
    if T:
        assert_attends(out, tensors)


@pytest.mark.parametrize("shared", [None, 1], ids=["all batched", "one key for all"])
def test_attention_under_vmap(recipe: ModuleType, shared: int | None) -> None:
    """The folded batch comes back in order, and an argument without the new axis is repeated."""
    jax = recipe.jax
    tensors = [t.to(torch.bfloat16) for t in normal((3, 2, 70, 2, 32), torch.float32, recipe.DEVICE, 5)]
    axes = [None if n == shared else 0 for n in range(3)]
    given_ = [t if axis == 0 else t[0] for t, axis in zip(tensors, axes, strict=True)]
    function = jax.jit(jax.vmap(recipe.causal_attention, in_axes=axes))
    out = through_jax(recipe, function)(*given_)
    for n in range(3):
        sample = [t[n] if axis == 0 else t for t, axis in zip(given_, axes, strict=True)]
        assert_attends(out[n], sample)


def test_attention_gradient(recipe: ModuleType) -> None:
    """The gradients are those of the reference; vmap of grad and grad of vmap agree with them."""
    jax = recipe.jax
    tensors = normal((2, 65, 1, 32), torch.bfloat16, recipe.DEVICE, 3)
    inputs = [t.double().requires_grad_() for t in tensors]
    attention64(inputs).sum().backward()
    arrays = [jax.dlpack.from_dlpack(t) for t in tensors]

    def total(*arrays: object) -> object:
        return recipe.causal_attention(*arrays).astype("float32").sum()

    for function in (
        lambda q, k, v: jax.grad(total, argnums=(0, 1, 2))(q, k, v),
        lambda q, k, v: [x[:, 0] for x in jax.vmap(jax.grad(total, (0, 1, 2)))(q[:, None], k[:, None], v[:, None])],
    ):
        for actual, x in zip(jax.jit(function)(*arrays), inputs, strict=True):
            # A sum of T terms, each with rounded factors.
            atol = 4 * 2**-8 * max(1.0, x.grad.abs().max().item())
            torch.testing.assert_close(torch.from_dlpack(actual).double(), x.grad, rtol=0, atol=atol)


def test_refuses(recipe: ModuleType) -> None:
    """What the op does not take, it names."""
    jnp = recipe.jnp
    x = jnp.ones((1, 4, 1, 64), jnp.float16)
    with pytest.raises(TypeError, match=r"float16 or bfloat16, not .*float32"):
        recipe.causal_attention(*[x.astype(jnp.float32)] * 3)
    for other in (x.astype(jnp.bfloat16), x[:, :2]):
        with pytest.raises(TypeError, match="takes one shape"):
            recipe.causal_attention(x, other, x)
    for wrong in (x[0], x[..., :48]):
        with pytest.raises(ValueError, match="32, 64 or 128"):
            recipe.causal_attention(wrong, wrong, wrong)


def test_environment_is_left_alone(recipe: ModuleType) -> None:
    """jax_triton empties TRITON_CACHE_DIR, or deletes it; the recipe restores it."""
    restoring = re.search(r"(?m)^with patch.dict.*\n    import jax_triton.*\n", Path(recipe.__file__).read_text())[0]
    outputs = []
    for line in ("import jax_triton\n", restoring):
        code = f"import os\nfrom unittest.mock import patch\n{line}print(os.environ.get('TRITON_CACHE_DIR'))"
        environment = os.environ | {"TRITON_CACHE_DIR": "here"}
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        outputs.append(run.stdout.strip())
    alone, restored = outputs
    assert alone == ("" if OLD else "None"), "jax_triton has mended it: drop patch.dict from the recipe, and the text"
    assert restored == "here"
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" in os.environ


@pytest.fixture(scope="module")
def claims(recipe: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return StableHLO, lowered for CUDA in a process without the interpreter and without a GPU."""
    source = Path(recipe.__file__).read_text()
    names = ["shift_kernel", "triton_call", "shift", "chain", "lower", "attention_kernel", "attend", "fold"]
    names.append("causal_attention")
    parts = [re.search(rf"(?m)^(?:@.*\n)*def {name}\((?:.*\n)+?(?=\n\n)", source)[0] for name in names]
    parts.append(re.search(r"(?m)^causal_xla = (?:.*\n)+?(?=\n)", source)[0])
    script = tmp_path_factory.mktemp("claims") / "claims.py"
    script.write_text("\n".join([TOP, *parts, CLAIMS]))
    environment = os.environ | {"TRITON_INTERPRET": "0", "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    # What jax_triton deprecates, the recipe has no more.
    strict = [f"-Werror::DeprecationWarning:{module}" for module in ("__main__", "jax_triton.triton_lib")]
    command = [sys.executable, *strict, script]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def calls(text: str) -> int:
    """Return how many custom calls of Triton a program has."""
    return text.count("stablehlo.custom_call @triton_kernel_call")


def test_kernel_is_one_custom_call(recipe: ModuleType, claims: dict[str, str]) -> None:
    """It stands between XLA's operations, and its payload has the kernel as PTX and as Triton IR."""
    lines = re.findall(r"stablehlo\.(\w+)", claims["chain"])
    assert lines == ["constant", "broadcast_in_dim", "multiply", "custom_call", "add"]
    assert calls(claims["chain"]) == 1
    payload = recipe.payload(claims["chain"])
    assert payload.count(".visible .entry shift_kernel(") == 1
    assert ".target sm_90a" in payload
    assert "tt.func public @shift_kernel(" in payload


@pytest.mark.parametrize(("H", "T"), [(32, 256), (64, 256), (128, 256), (64, 1)])
def test_attention_is_lowered(recipe: ModuleType, claims: dict[str, str], H: int, T: int) -> None:
    """For Hopper's tensor cores, with full vectors, and only one kernel."""
    text = claims[f"attention {H} {T}"]
    assert calls(text) == 1
    payload = recipe.payload(text)
    assert ".visible .entry attention_kernel(" in payload
    assert "wgmma.mma_async" in payload
    assert re.search(r"cp\.async\.cg.*0x10,", payload)
    assert ".f64" not in payload


def parameters(recipe: ModuleType, text: str) -> list[str]:
    """Return the types of a kernel's arguments, in PTX."""
    entry = re.search(r"(?s)\.entry .*?\)", recipe.payload(text))[0]
    return re.findall(r"\.param \.(\w+)", entry)


def test_numbers(recipe: ModuleType, claims: dict[str, str]) -> None:
    """A Python float is float64 in jax_triton 0.3.1, 1 is a constexpr, and an array is a pointer."""
    assert parameters(recipe, claims["chain"]) == ["u64", "u32", "u32", "u64", "u64", "u64"]
    assert parameters(recipe, claims["float"]) == ["u64", "f64" if OLD else "f32", "u32", "u64", "u64", "u64"]
    assert parameters(recipe, claims["one"]) == ["u64", "u32", "u64", "u64", "u64"]
    assert "pointer<fp32>" in claims["array"]
    assert recipe.result(claims["array"]).startswith("IncompatibleTypeError")
    if OLD:  # 0.4.1 deprecates NumPy's number
        assert parameters(recipe, claims["float32"])[1] == "f32"


@pytest.mark.parametrize(("name", "kind"), [("int64", "i32"), ("int64, enable_x64", "i64")])
def test_int64_is_lowered(recipe: ModuleType, claims: dict[str, str], name: str, kind: str) -> None:
    """The kernel reads and writes int64 only if JAX may."""
    assert recipe.result(claims[name]) == f"custom call with ptr<{kind}>, i32, i32, ptr<{kind}>"
    assert f"tensor<64x{kind}>" in claims[name]
    assert ("ld.global.b64" in recipe.payload(claims[name]) or "v2.b64" in recipe.payload(claims[name])) == (
        kind == "i64"
    )


def test_vmap_and_grad(claims: dict[str, str]) -> None:
    """Neither works by itself; `sequential_vmap` makes a loop, `fold` one larger call."""
    assert claims["vmap"].startswith("NotImplementedError: jax_triton.triton_call does not support batching")
    assert claims["grad"].startswith("NotImplementedError: jax_triton.triton_call does not support automatic")
    assert "stablehlo.while" in claims["sequential_vmap"]
    for name in ("fold", "fold twice", "batched attention"):
        assert calls(claims[name]) == 1
        assert "stablehlo.while" not in claims[name]
    assert "tensor<63xf32>" in claims["fold"]
    assert "tensor<10x256x3x64xbf16>" in claims["batched attention"]


def test_gradients_under_vmap_are_lowered(claims: dict[str, str]) -> None:
    """The forward is one launch for the whole batch, the backward is XLA's."""
    assert calls(claims["gradients"]) == 1
    assert "tensor<10x256x3x64xbf16>" in claims["gradients"]


def test_all_configs_of_a_tuner_are_in_the_payload(recipe: ModuleType, claims: dict[str, str]) -> None:
    assert calls(claims["tuned"]) == 1
    assert recipe.payload(claims["tuned"]).count(".visible .entry shift_kernel(") == 2


def test_without_a_vjp_there_is_no_reverse_mode(recipe: ModuleType) -> None:
    """That is why `custom_vjp` stands outside."""
    jax, jnp = recipe.jax, recipe.jnp
    sine = recipe.fold(jnp.sin)
    assert jax.jvp(sine, (jnp.zeros(5),), (jnp.ones(5),))[1].tolist() == [1] * 5
    with pytest.raises(ValueError, match="does not support reverse-mode"):
        jax.grad(lambda x: sine(x).sum())(jnp.ones(5))


def test_pallas_has_vmap_and_an_interpreter(recipe: ModuleType) -> None:
    """What the recipe says of Pallas."""
    pl = pytest.importorskip("jax.experimental.pallas")
    jax, jnp = recipe.jax, recipe.jnp

    def kernel(x_ref: object, out_ref: object) -> None:
        out_ref[...] = 7 + x_ref[...]

    def shift(x: object) -> object:
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)

    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_allclose(jax.vmap(shift)(x), 7 + np.asarray(x))


def test_xla_fuses_its_own_addition_alone(recipe: ModuleType) -> None:
    """Around the custom call there are two more kernels, and five more passes over memory."""
    kernels = ["fusion", "custom-call", "fusion"]
    assert recipe.passes(partial(recipe.chain, function=recipe.shift)) == (kernels, 7)
    assert recipe.passes(partial(recipe.chain, function=recipe.jnp.add)) == (["fusion"], 2)


def test_installed_packages_demand_what_the_table_says(recipe: ModuleType) -> None:
    """The dictionaries of the page are the metadata of the wheels, as far as they are installed here."""
    release = importlib.metadata.version("jax-triton")
    assert set(recipe.RANGES) >= {release}
    assert recipe.demanded("jax-triton") == recipe.RANGES[release]
    torch_release = importlib.metadata.version("torch").partition("+")[0]
    if (pin := recipe.demanded("torch")) != "none" and torch_release in recipe.PINS:
        assert pin == f"=={recipe.PINS[torch_release]}"


def test_clock_measures_one_call_of_twenty(recipe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each look at the clock takes a second, a call takes a twentieth of one."""
    ticks = iter(range(1000))
    monkeypatch.setattr(recipe.time, "perf_counter", lambda: next(ticks))
    assert recipe.milliseconds(seven(recipe), recipe.jnp.ones(3)) == 1000 / 20


def test_64_bits_are_converted_in_spite_of_copy_false(recipe: ModuleType) -> None:
    x = torch.ones(64, dtype=torch.float64, device=recipe.DEVICE)
    array = recipe.jax.dlpack.from_dlpack(x, copy=False)
    assert array.dtype == np.float32
    assert array.unsafe_buffer_pointer() != x.data_ptr()


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make test-gpu")


@needs_gpu
def test_ten_runs_have_the_same_bits(recipe: ModuleType) -> None:
    tensors = normal((2, 1031, 3, 64), torch.bfloat16, recipe.DEVICE, 0)
    attention = through_jax(recipe, recipe.jax.jit(recipe.causal_attention))
    first = attention(*tensors)
    for _ in range(9):
        assert torch.equal(attention(*tensors).view(torch.int16), first.view(torch.int16))


@pytest.mark.needs_gpu_memory(10)
def test_shift_beyond_int32(recipe: ModuleType) -> None:
    x = torch.zeros(2**31 + 5, dtype=torch.float16, device=recipe.DEVICE)
    x[-1] = 40
    out = through_jax(recipe, seven(recipe))(x)
    assert out[-1] == 47
    assert (out[:-1] == 7).all()


@pytest.mark.needs_gpu_memory(24)
@pytest.mark.parametrize("shape", [(1, 16411, 1024, 128), (5, 4096, 1024, 128)], ids=["positions", "batches"])
def test_attention_beyond_int32(recipe: ModuleType, shape: tuple[int, ...]) -> None:
    """The last queries of the last head, which are behind element 2**31, as are their keys."""
    tensors = [torch.randn(shape, dtype=torch.bfloat16, device=recipe.DEVICE) for _ in range(3)]
    out = through_jax(recipe, recipe.jax.jit(recipe.causal_attention))(*tensors)
    query, key, value = (t[-1, :, -1].double() for t in tensors)
    expected = (query[-5:] @ key.T / shape[3] ** 0.5).softmax(dim=-1) @ value
    atol = 1.25 * 2**-7 * value.abs().max().item()
    torch.testing.assert_close(out[-1, -5:, -1].double(), expected, rtol=0, atol=atol)


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "shift stored without a mask",
        "tl.store(out_ptr + offs, x + by, mask=offs < N)",
        "tl.store(out_ptr + offs, x + by)",
    ),
    ("queries that see later keys", "offs_m[:, None] >= offs_n[None, :]", "offs_m[:, None] >= offs_n[None, :] - 1"),
]
