"""What `make peers` measures is the same work, on the same inputs, for every library."""

import dataclasses
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

import peers
import pytest
import torch

from triton_gallery.device import Environment
from triton_gallery.peers import load_all
from triton_gallery.recipes import load

SMALL = 24
ON_GPU = torch.cuda.is_available()


def installed() -> list[str]:
    """Return the libraries that can run here; the interpreter does not run all of their kernels."""
    found = []
    for name, peer in peers.PEERS.items():
        try:
            version(peer.package)
        except PackageNotFoundError:
            continue
        found.append(name)
    return found if ON_GPU else []


@pytest.mark.parametrize(
    ("work", "backward"),
    [
        pytest.param(work, direction == "backward", id=f"{work.name}, {direction}")
        for work in peers.WORKS
        for direction in work.directions
    ],
)
def test_all_libraries_do_the_same(
    work: peers.Work, backward: bool, load_recipe: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "recipe_module", lambda recipe: load_recipe(f"{recipe}.py"))
    shape = tuple(min(size, SMALL) for size in work.shapes[0])
    trial = peers.Trial(work, shape, torch.float32, "cuda" if ON_GPU else "cpu")
    functions = peers.contestants(work, installed())
    if not ON_GPU:
        del functions["torch.compile"]
    assert list(functions)[:2] == ["Triton", "PyTorch"]
    ours = tuple(tensor.clone() for tensor in trial.call(functions["Triton"], backward)())
    for name, function in functions.items():
        trial.check(name, trial.call(function, backward)(), ours)


def test_masks_may_differ_but_not_what_is_kept() -> None:
    one = peers.Trial(dataclasses.replace(trial().work, alike=peers.kept_by_both), (8,), torch.float32, "cpu")
    ours = torch.tensor([2.0, 0, 4, 6])
    one.check("Liger", (torch.tensor([0.0, 3, 4, 6]),), (ours,))
    for wrong in ([0.0, 3, 2, 3], [0.0, 0, 0, 0]):
        with pytest.raises(AssertionError, match="Liger has another result than ours"):
            one.check("Liger", (torch.tensor(wrong),), (ours,))


class Greedy(torch.autograd.Function):
    """x * y, which writes the gradients over its inputs."""

    @staticmethod
    def forward(ctx, x, y):
        """Multiply."""
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, grad):
        """Leave nothing as it was."""
        x, y = (tensor.data for tensor in ctx.saved_tensors)
        dx, dy = grad * y, grad * x
        x.copy_(dx)
        y.copy_(dy)
        grad.data.zero_()
        return x, y


def trial() -> peers.Trial:
    """Return a trial of a product of two vectors."""
    work = peers.Work(
        "things/one",
        ours=lambda module: torch.mul,
        torch=lambda torch: torch.mul,
        shapes=[(8,)],
        inputs=lambda random, shape: (random(shape), random(shape)),
    )
    return peers.Trial(work, (8,), torch.float32, "cpu")


def test_inputs_are_restored_before_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    one = trial()
    expected = one.call(torch.mul, backward=True)()
    call = one.call(Greedy.apply, backward=True)
    got = []

    def do_bench(call, rep, quantiles, grad_to_none):
        for _ in range(3):
            for tensor in grad_to_none:
                tensor.grad = None
            got.append([gradient.clone() for gradient in call()])
        return [1.0, 2.0, 0.5]

    monkeypatch.setattr("triton.testing.do_bench", do_bench)
    assert peers.measure(call, 10**9, one) == [1000.0, 500.0, 2000.0]
    for gradients in got:
        one.check("Greedy", tuple(gradients), expected)


def test_another_result_is_not_timed() -> None:
    one = trial()
    ours = one.call(torch.mul, backward=False)()
    one.check("PyTorch", tuple(tensor.bfloat16() for tensor in ours), ours)
    for wrong in (torch.add, lambda x, y: 1.05 * x * y, lambda x, y: x * y * torch.nan):
        with pytest.raises(AssertionError, match="one: Liger has another result than ours"):
            one.check("Liger", one.call(wrong, backward=False)(), ours)


def test_a_whole_run_is_recorded(
    load_recipe: Callable[[str], ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All but the timing and the other libraries is what a GPU host does."""
    gpu = Environment("Test GPU 9000", "0", "9.0", 1, "1.2", "13.0", "2.99", "3.99", "3.11")
    softmax, rms_norm = (
        dataclasses.replace(work, shapes=[(8, SMALL), (2, SMALL)], peers={}, dtype="float32")
        for work in peers.WORKS[:2]
    )
    softmax = dataclasses.replace(softmax, peers={"Other": lambda module: module.sqrt})
    monkeypatch.setattr(peers, "PEERS", {"Other": peers.Peer("torch", "math")})
    monkeypatch.setattr(peers, "WORKS", [softmax, rms_norm])
    monkeypatch.setattr(peers, "RECORDS", tmp_path)
    monkeypatch.setattr(peers, "DEVICE", "cuda" if ON_GPU else "cpu")
    monkeypatch.setattr(peers, "detect", lambda: [gpu])
    monkeypatch.setattr(peers, "recipe_module", lambda recipe: load_recipe(f"{recipe}.py"))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr("triton.testing.do_bench", lambda call, **_: [1e-6, 2e-6, 5e-7])

    assert peers.main([softmax.recipe]) == 0
    assert "Nothing was recorded" in capsys.readouterr().out
    assert load_all(tmp_path) == []

    assert peers.main([]) == 0
    (run,) = load_all(tmp_path)
    assert f"wrote {run.path}" in capsys.readouterr().out
    assert run.packages == {"torch": version("torch")}
    assert run.stale(load(peers.GALLERY)) == []
    assert len(run.rows) == 8
    assert [row.work for row in run.rows[:4]] == ["softmax, forward"] * 2 + ["softmax, backward"] * 2
    assert list(run.rows[0].rates) == ["Triton", "PyTorch", "torch.compile", "Other", "Roof"]
    assert run.rows[0].rates["Other"] is None, "it takes no tensors"
    median, low, high = run.rows[0].rates["Triton"]
    assert low < median < high
    assert median == round(2 * 8 * SMALL * 4)
