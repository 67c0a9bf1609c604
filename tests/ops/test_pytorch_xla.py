"""The recipe PyTorch/XLA: its ops, its graphs, and its companion, which has to be of the recipe as it is."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from guard import guarded
from hypothesis import given
from hypothesis import strategies as st
from inputs import Layout, layouts, sizes
from torch.nn.functional import scaled_dot_product_attention

jax = pytest.importorskip("jax", reason="the recipe needs JAX")

BLOCK = 1024  # of the recipe
HEAD = 64
PAYLOAD = re.compile(r'backend_config = "[^"]*"')
CALL = re.compile(r"%(\w+) = stablehlo\.custom_call @triton_kernel_call\((.*?)\) .* -> (tuple<)?tensor<(\w+)>")


@pytest.fixture(scope="module")
def file(gallery: Path) -> Path:
    """Return the companion's path."""
    return gallery / "xla" / "pytorch_xla.json"


@pytest.fixture(scope="module")
def companion(file: Path) -> dict[str, Any]:
    """Return the companion."""
    return json.loads(file.read_text())


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
@given(size=sizes(BLOCK, 4 * BLOCK), x=layouts(), y=layouts())
def test_add(recipe: ModuleType, dtype: torch.dtype, size: int, x: Layout, y: Layout) -> None:
    """The sum of two tensors is rounded correctly, or exact, whatever their layout."""
    a = x.make((size,), torch.float32, recipe.DEVICE)
    b = y.make((size,), torch.float32, recipe.DEVICE)
    expected = (a.double() + b.double()).float()
    if dtype == torch.int64:  # more than 32 bits
        a, b = (1000 * a).to(dtype) * 2**32, (1000 * b).to(dtype)
        expected = a + b
    torch.testing.assert_close(guarded(recipe.add, a, b), expected, rtol=0, atol=0)


@given(
    heads=st.tuples(st.integers(0, 2), st.integers(1, 2)),
    length=st.sampled_from([0, 1, 2, 63, 64, 65, 128, 129]) | st.integers(0, 140),
    layout=layouts(),
    large=st.booleans(),
)
def test_attention_has_a_float32_accumulator(
    recipe: ModuleType, heads: tuple[int, int], length: int, layout: Layout, large: bool
) -> None:
    """Attention is off by two roundings to float16 at most; large scores overflow nothing."""
    shape = (*heads, length, HEAD)
    q, k, v = (
        Layout(layout.name, layout.seed + i).make(shape, torch.float16, recipe.DEVICE) * (8 if large and i < 2 else 1)
        for i in range(3)
    )
    expected = scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    out = guarded(recipe.attention, q, k, v)
    assert out.dtype == torch.float16
    atol = 2**-10 * v.abs().max().item() if v.numel() else 0
    torch.testing.assert_close(out.double(), expected, rtol=2**-10, atol=atol)


def test_attention_float32_accumulator_on_long_rows(recipe: ModuleType) -> None:
    """A sum of equal weights over many keys loses nothing, which it would in float16."""
    length = 4096 if recipe.DEVICE.type == "cuda" else 600
    v = torch.ones(1, 1, length, HEAD, dtype=torch.float16, device=recipe.DEVICE)
    q = torch.zeros_like(v)
    torch.testing.assert_close(recipe.attention(q, q, v), v, rtol=0, atol=2**-10)


def test_refuses(recipe: ModuleType) -> None:
    """What the ops do not take, they name."""
    x = torch.ones(4, device=recipe.DEVICE)
    for wrong in (x.half(), x.long(), x[:3], x[None]):
        with pytest.raises(ValueError, match="two tensors of one dtype and shape"):
            recipe.add(x, wrong)
    q = torch.ones(1, 1, 4, HEAD, dtype=torch.float16, device=recipe.DEVICE)
    for wrong in (q.float(), q[..., :32], q[0], q[:, :, :2]):
        with pytest.raises(ValueError, match="three float16"):
            recipe.attention(q, q, wrong)
    with pytest.raises(ValueError, match="three float16"):
        recipe.attention(q[..., :32], q[..., :32], q[..., :32])


def test_companion_is_of_this_recipe(recipe: ModuleType, companion: dict[str, Any]) -> None:
    """Nothing that was traced has changed since; if this fails, trace again as the recipe tells."""
    assert companion["traced"] == recipe.digest(recipe.TRACED)
    assert companion["look"] == recipe.digest([recipe.look])
    assert set(companion["graphs"]) == set(recipe.programs())


def test_a_change_makes_the_companion_stale(recipe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of each function counts, and so do the constants."""
    digests = {recipe.digest(recipe.TRACED[:n]) for n in range(len(recipe.TRACED) + 1)}
    assert len(digests) == len(recipe.TRACED) + 1
    monkeypatch.setattr(recipe, "CONSTANTS", (*recipe.CONSTANTS, 1))
    assert recipe.digest(recipe.TRACED) not in digests


def test_companion_is_small_and_tells_nothing_of_its_makers_machine(file: Path, companion: dict[str, Any]) -> None:
    """It is kept in git, and built anywhere alike."""
    assert file.stat().st_size < 1_000_000
    for graph in companion["graphs"].values():
        for text in (unpack(graph), base64.b64decode(graph["code"])):
            assert not re.search(rb"/(home|work|tmp|root|usr)/", text)


def test_requirements_are_those_of_the_page_and_of_the_companion(gallery: Path, companion: dict[str, Any]) -> None:
    """The file that `make` uses, the line that a reader copies, and what traced the companion agree."""
    lines = (gallery / "xla" / "pytorch_xla.requirements.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    page = (gallery / "xla" / "pytorch_xla.py").read_text()
    page = page.partition(".. code-block:: text")[2].partition("tracing/bin/python")[0]
    assert all(re.search(rf"[ ]{re.escape(pin)}\s", page) for pin in pins)
    assert len(re.findall(r"\w==\d", page)) == len(pins)
    made = companion["environment"]
    for pin in pins:
        name, _, version = pin.partition("==")
        assert made.get(name, version) == version
    assert set(made) == {"Python", "torch_xla", "torch", "triton", "jax", "jaxlib"}
    assert made["Python"].startswith(("3.11.", "3.12."))


def test_releases(companion: dict[str, Any]) -> None:
    """The table bears the page's claims out; the release that traced has all of the documented way."""
    releases = companion["releases"]
    everything = {"triton_call", "_xla_gpu_custom_call", "_xla_custom_call", "GPU client"}
    supported = {release: {name for name in everything if row[name]} for release, row in releases.items()}
    assert supported[companion["environment"]["torch_xla"]] == everything
    assert supported["2.9.0"] == {"_xla_custom_call"}
    assert all(supported[release] == everything for release in releases if re.match(r"2\.[4-8]\.", release))
    assert "deprecated" in releases["2.8.1"]["says"]
    assert "not supported" in releases["2.9.0"]["says"]
    assert {"GPU client"} in supported.values(), "a release before triton_call"


def unpack(graph: dict[str, Any]) -> bytes:
    """Return the payload in a graph."""
    code = base64.b64decode(graph["code"])
    return zlib.decompressobj().decompress(code[code.index(b"x\x9c") :])


@pytest.mark.parametrize(
    ("kind", "count", "around", "kernel"),
    [
        ("counts", 2, ("subtract(", "add("), b".entry add_kernel"),
        ("layer", 2, ("dot(", "dot("), b".entry attention_kernel"),
    ],
)
def test_graphs_have_the_custom_call(
    companion: dict[str, Any], kind: str, count: int, around: tuple[str, str], kernel: bytes
) -> None:
    """One call in each, between ordinary operators; PTX for the GPU named; a layout, but not where it is left out."""
    graphs = {name: graph for name, graph in companion["graphs"].items() if name.startswith(kind)}
    assert len(graphs) == count
    for name, graph in graphs.items():
        hlo = graph["hlo"]
        (line,) = re.findall(r".* custom-call\(.*", hlo)
        assert 'custom_call_target="triton_kernel_call"' in line
        assert ("operand_layout_constraints={" in line) == ("general" not in name)
        before, after = hlo.split(line)
        assert around[0] in before
        assert around[1] in after
        payload = unpack(graph)
        assert b".target sm_90a" in payload
        assert kernel in payload


def test_int64_stays_int64(companion: dict[str, Any]) -> None:
    """The graph has int64 alone, and the kernel's additions have 64 bits."""
    for name in ("counts", "counts, general"):
        graph = companion["graphs"][name]
        assert set(re.findall(r"\b[fsu]\d+(?=\[)", graph["hlo"])) == {"s64"}
        assert re.search(rb"ld\.global\.(v2\.)?b64", unpack(graph))
        assert b"add.s64" in unpack(graph)


def test_demands(companion: dict[str, Any]) -> None:
    """PyTorch names the one Triton that traced; torch_xla names nothing of what it needs."""
    assert companion["demands"]["torch"] == [f"triton=={companion['environment']['triton']}"]
    assert companion["demands"]["torch_xla"] == companion["demands"]["triton"] == []


def without_kernel(graph: dict[str, Any], stand_in: str) -> dict[str, Any]:
    """Return a graph that the CPU can execute, with StableHLO in the place of the custom call."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    with ir.Context() as context:
        stablehlo.register_dialect(context)
        module = str(stablehlo.deserialize_portable_artifact(context, base64.b64decode(graph["code"])))
    module = PAYLOAD.sub("payload", module)
    name, operands, packed, kind = CALL.search(module).groups()
    lines = stand_in.format(*operands.split(", "), name=name, kind=f"tensor<{kind}>")
    module = CALL.sub(lambda _: "CALL", module)
    module = re.sub("CALL.*", lambda _: lines, module)
    if packed:
        module = re.sub(rf"%\w+ = stablehlo\.get_tuple_element %{name}\[0\].*", "", module)
        # %11 = get_tuple_element %10[0] is gone: what used %11 uses %10
        module = re.sub(rf"%{int(name) + 1}\b", f"%{name}", module)
    return graph | {"code": base64.b64encode(module.encode()).decode()}


@pytest.mark.parametrize("name", ["counts", "counts, general", "layer", "layer, general"])
def test_graphs_compute_their_programs(recipe: ModuleType, companion: dict[str, Any], name: str) -> None:
    """With something simple in the place of the kernel, the CPU computes what the program says: operands in order."""
    graph, (program, op, shapes, dtype) = companion["graphs"][name], recipe.programs()[name]
    if op is recipe.add:
        stand_in, op = "%{name} = stablehlo.add {0}, {1} : {kind}", torch.add
    else:
        stand_in = "%d = stablehlo.subtract {1}, {2} : {kind}\n%{name} = stablehlo.multiply {0}, %d : {kind}"

        def op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return q * (k - v)

    run = recipe.executable(without_kernel(graph, stand_in), "cpu")
    x = [tensor.cpu() for tensor in recipe.inputs(shapes, dtype)]
    cpu = jax.devices("cpu")[0]
    with jax.enable_x64(True):
        out = torch.from_dlpack(run(*(jax.device_put(tensor.numpy(), cpu) for tensor in x)))
    expected = program(*(tensor.double() for tensor in x), op)
    rtol = 0 if dtype == torch.int64 else 2**-6
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=rtol)


without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the script as it runs without a GPU")


def run_script(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the recipe in a folder, as a reader would."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "pytorch_xla.py"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@without_gpu
def test_script_with_companion(gallery: Path, file: Path, tmp_path: Path) -> None:
    """It shows the graphs, and the CPU's refusal."""
    for path in (gallery / "xla" / "pytorch_xla.py", file):
        shutil.copy(path, tmp_path)
    run = run_script(tmp_path)
    assert run.returncode == 0, run.stderr
    assert 'custom_call_target="triton_kernel_call"' in run.stdout
    assert "No registered implementation" in run.stdout
    assert max(map(len, run.stdout.splitlines())) <= 100
    assert "PAYLOAD" in run.stdout


@without_gpu
def test_script_without_companion(gallery: Path, tmp_path: Path) -> None:
    """It checks its kernels and exercises, and says where to read on."""
    shutil.copy(gallery / "xla" / "pytorch_xla.py", tmp_path)
    run = run_script(tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        "No pytorch_xla.json here: nothing to execute. See the section 'Trace'.",
        "serve: not solved yet",
        "kernel_reads: not solved yet",
        "[0.0, -1.5881868392106856e-23]",
    ]


@without_gpu
def test_script_refuses_a_stale_companion(gallery: Path, file: Path, tmp_path: Path) -> None:
    """Another kernel than the one in the graph stops the page."""
    source = (gallery / "xla" / "pytorch_xla.py").read_text()
    assert source.count("mask = offs < N") == 1
    (tmp_path / "pytorch_xla.py").write_text(source.replace("mask = offs < N", "mask = offs <= N - 1"))
    shutil.copy(file, tmp_path)
    run = run_script(tmp_path)
    assert run.returncode == 1
    last = run.stderr.strip().splitlines()[-1]
    assert last == "RuntimeError: pytorch_xla.json is not of this recipe: trace again"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make test-gpu")
@pytest.mark.needs_gpu_memory(12)
def test_graphs_on_a_gpu(recipe: ModuleType, companion: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the traced kernels compute is as good as PyTorch; without a layout, attention is wrong."""
    if torch.cuda.get_device_capability() != recipe.CAPABILITY:
        pytest.skip("traced for another GPU")
    for name, graph in companion["graphs"].items():
        monkeypatch.setattr(recipe, "run", {name: recipe.executable(graph)}, raising=False)
        for _ in range(3):
            error, torchs = recipe.compare(name)
            assert (error <= 2 * torchs) == (name != "layer, general"), name


# Ops for test_on_gpu.py, with inputs that fit them.
OPS = [
    ("add", lambda normal, M, N: (normal(M, N), normal(M, N))),
    ("attention", lambda normal, M, N: tuple(normal(3, 2, 3, M, 64).half())),
]

# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("an accumulator that is not rescaled", "v, acc * shrink[:, None])", "v, acc)"),
    ("attention stored without a mask", "acc / total[:, None], mask=offs_m[:, None] < T)", "acc / total[:, None])"),
]
