"""A process that records the figures of one lesson in Triton's interpreter: `python -m …process SCRIPT KEY`.

The script is the lesson's, as readers download it. It is executed as a module, so that what it does as a program does
not run. The recording is printed as JSON.
"""

import os

os.environ.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")

import contextlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Any

import msgspec
import torch

from triton_gallery.recipe.declaration import Launch, StepThrough, declaration
from triton_gallery.step_through.assemble import assemble
from triton_gallery.step_through.cells import Named
from triton_gallery.step_through.record import PROGRAMS, REGISTERS, integers, kernel_function, record
from triton_gallery.step_through.sentences import place, short
from triton_gallery.step_through.trace import Figure, Recording, Trace


def main(script: Path, key: str) -> Recording:
    """Record the figures of a lesson."""
    start = monotonic()
    try:
        text = script.read_text(encoding="utf-8")
        declared = declaration(script, text).of_op.step_through
        namespace = _execute(script, text)
        return Recording(key, [_figure(each, namespace) for each in declared], seconds=monotonic() - start)
    except Exception as error:
        return Recording(key, failure=f"{type(error).__name__}: {error}", seconds=monotonic() - start)


def _execute(script: Path, text: str) -> dict[str, Any]:
    """Execute a lesson as a module."""
    module = ModuleType("lesson")
    module.__file__ = str(script)
    sys.modules["lesson"] = module
    with contextlib.redirect_stdout(sys.stderr):
        exec(compile(text, script, "exec"), module.__dict__)
    return module.__dict__


def _figure(declared: StepThrough, namespace: Mapping[str, Any]) -> Figure:
    """Record the launches of a figure."""
    traces = []
    for launch in [_completed(launch, declared) for launch in declared.launches] or [declared]:
        try:
            traces.append(_trace(launch, namespace))
        except Exception as error:
            where = f"{launch.kernel}, {launch.label}" if launch.label else launch.kernel
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            raise ValueError(f"the figure of {where}: {kind}{error}") from error
    return Figure(declared.caption, declared.kernel, declared.layout, traces)


def _completed(launch: Launch, figure: StepThrough) -> Launch:
    """Return a launch with what it leaves out as the figure has it."""
    shared = ("kernel", "inputs", "call", "expected", "registers", "start")
    values = {name: getattr(launch, name) or getattr(figure, name) for name in shared}
    at_once = figure.at_once if launch.at_once is None else launch.at_once
    return msgspec.structs.replace(launch, at_once=at_once, **values)


def _trace(launch: Launch, namespace: Mapping[str, Any]) -> Trace:
    """Record a launch and check its result.

    Raises:
        ValueError: if it cannot be shown, or its result is not as declared.
    """
    if len(launch.registers) > REGISTERS:
        raise ValueError(f"it shows {len(launch.registers)} registers; {REGISTERS} are allowed")
    if not launch.expected:
        raise ValueError("it declares no expected result")
    scope = {**namespace, "torch": torch, "integers": integers}
    for name, expression in launch.inputs.items():
        scope[name] = eval(expression, scope)
    expected = {name: torch.as_tensor(eval(expression, scope)) for name, expression in launch.expected.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's, of infinity
        recorder = record(
            kernel_function(namespace, launch.kernel),
            lambda: eval(launch.call, scope),
            registers=launch.registers,
            outside=launch.outside,
            wave=(launch.at_once or PROGRAMS) if launch.race else 0,
        )
    if missing := {*launch.registers} - {name for ran in recorder.ran for name in ran.values}:
        raise ValueError(f"no program binds {', '.join(sorted(missing))}")
    verdict, is_wrong = _compare(recorder.tensors, expected)
    if (launch.wrong and not is_wrong) or (is_wrong and not launch.wrong and not launch.outside):
        raise ValueError(f"its result is declared {'wrong' if launch.wrong else 'right'}, but: {verdict}")
    outside = dict.fromkeys(lanes.tensor for lanes in recorder.accesses_made if lanes.outside)
    if launch.outside and not outside:
        raise ValueError("it declares that lanes point outside of tensors, but none does")
    if outside:
        names = " and ".join(f"`{recorder.tensors[tensor].name}`" for tensor in outside)
        faults = f"The kernel touches memory outside of {names}, which a GPU may refuse or carry out."
        verdict, is_wrong = f"{verdict} {faults}" if is_wrong else faults, True
    return assemble(launch, recorder, verdict, is_wrong)


def _compare(tensors: Sequence[Named], expected: Mapping[str, torch.Tensor]) -> tuple[str, bool]:
    """Return how the result compares with what is expected, in a sentence, and whether it differs."""
    by_name = {named.name: named.tensor for named in tensors}
    for name, value in expected.items():
        if name not in by_name:
            raise ValueError(f"the kernel has no tensor {name}; it has {', '.join(by_name)}")
        actual = by_name[name].double()
        if actual.numel() != value.numel():
            raise ValueError(f"{name} has shape {tuple(actual.shape)}, what is expected {tuple(value.shape)}")
        in_float64 = value.double().reshape(actual.shape)
        is_wrong = ~torch.isclose(actual, in_float64, rtol=1e-4, atol=1e-5, equal_nan=True)
        if is_wrong.any():
            index = tuple(is_wrong.nonzero()[0].tolist())
            where = place([index], is_block=True, name=name) if index else f"`{name}`"
            number = int(is_wrong.sum())
            others = f", and {number - 1} more {'is' if number == 2 else 'are'} wrong" if number > 1 else ""
            values = short(actual[index].item()), short(in_float64[index].item())
            return f"{where} is {values[0]}, but should be {values[1]}{others}.", True
    return f"{' and '.join(f'`{name}`' for name in expected)} as in PyTorch.", False


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(main(Path(sys.argv[1]), sys.argv[2])))
