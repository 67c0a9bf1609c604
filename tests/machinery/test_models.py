"""Models as they are, with Liger's kernels and with the ops: what is measured, recorded, refused and shown."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from project import Project
from test_libraries import BY, COMMIT, DATE, ENVIRONMENT, article, cells, shown

from triton_gallery.libraries import models
from triton_gallery.libraries.model_rows import (
    KINDS,
    TRAIN,
    WAYS,
    Case,
    ModelRow,
    Profile,
    Training,
    load_all,
    merge,
    ops_hash,
)
from triton_gallery.recipe.device import Slot
from triton_gallery.records.files import BadRecordError

MS = {"plain": 75.0, "Liger": 70.0, "ours": 60.0}


def a_row(case: Case, **changes: Any) -> ModelRow:
    """Return a made-up row of a case."""
    training = None
    if case.work == TRAIN:
        kinds = dict(zip(KINDS, (20.0, 10.0, 4.0, 3.0, 2.0, 1.0), strict=True))
        losses = [12.0, 11.0, 10.0 + 0.001 * WAYS.index(case.way)]
        training = Training(19.25 - WAYS.index(case.way), losses, Profile(MS[case.way], kinds))
    ms, code = MS[case.way], ops_hash() if case.way == "ours" else None
    about = (code, ENVIRONMENT, DATE, COMMIT, {"transformers": "5.24.0", "liger-kernel": "0.8.5"})
    tokens = 8192 if training else 128
    return structs.replace(
        ModelRow(case, models.SIZES[case.size], *about, [ms, ms - 1, ms + 1], tokens, training), **changes
    )


def of_model(words: str) -> list[Case]:
    """Return the cases that have these words."""
    return [case for case in models.cases() if {*words.split()} <= {*str(case).split()}]


def keep(folder: Path, rows: list[ModelRow]) -> Path:
    """Put rows into their file; return it."""
    return merge(folder, rows, [("models", case) for case in models.cases()])[0]


# What is recorded
def test_rows_are_kept_and_replaced(tmp_path: Path) -> None:
    """In the order of the cases; those that are measured again are replaced, and no others."""
    chosen = of_model("train base-2048")
    path = keep(tmp_path, [a_row(case) for case in reversed(chosen)])
    assert path == tmp_path / "test-gpu-9000" / "models.json"
    assert [row.case for row in load_all(tmp_path)] == chosen
    newer = a_row(chosen[2], date="2026-05-06T07:08:09+00:00", ms=[50.0, 49.0, 51.0])
    keep(tmp_path, [newer])
    assert load_all(tmp_path) == [newer if case == newer.case else a_row(case) for case in chosen]


def test_figures_of_a_row() -> None:
    row = a_row(of_model("train base-2048 ours eager")[0])
    assert row.training
    assert row.training.profile.idle == 60 - 40
    assert row.tokens_per_second == pytest.approx(8192 / 0.06)
    assert row.is_fresh
    assert not structs.replace(row, code_hash="0" * 16).is_fresh
    assert a_row(of_model("train base-2048 plain eager")[0]).is_fresh, "no op is in it"


BREAKS = {
    "newer schema": ('"schema": 1', '"schema": 2', "of version 2, this project reads version 1"),
    "another way": ('"way": "plain"', '"way": "<b>"', "matching regex"),
    "another kind": ('"norms"', '"evil"', "its kinds are not"),
    "no GPU": ('"capability": "9.0"', '"capability": null', "its device is no GPU"),
    "no training": ('"work": "train"', '"work": "generate"', "those of a case of training"),
    "another device": ("9000", "9001", "that of another device"),
}


@pytest.mark.parametrize("how", BREAKS)
def test_bad_record_is_refused(tmp_path: Path, how: str) -> None:
    old, new, reason = BREAKS[how]
    path = keep(tmp_path, [a_row(of_model("train base-2048 plain eager")[0])])
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(BadRecordError, match=reason):
        load_all(tmp_path)


# What is measured
def test_cases_are_told_apart() -> None:
    every = [*models.cases()]
    assert len({*map(str, every)}) == len(every) == 48
    assert [*map(str, of_model("generate base-32 Liger"))] == [
        f"generate base-32 Liger {state}" for state in ("eager", "compiled")
    ]


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", "products"),
        ("void pytorch_flash::flash_bwd_kernel<cutlass::bfloat16_t>", "attention"),
        ("_varlen_attention_dkdv_kernel", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("_rms_norm_backward_kernel", "norms"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2", "norms"),
        ("_linear_cross_entropy_kernel", "loss"),
        ("void cunn_SoftMaxForward<LogSoftMaxForwardEpilogue>", "loss"),
        ("multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("_rope_kernel", "the rest"),
        ("Memcpy DtoD (Device -> Device)", "the rest"),
    ],
)
def test_kernels_have_a_kind(kernel: str, kind: str) -> None:
    assert models.kind_of(kernel) == kind


def test_rate_lies_within_the_times() -> None:
    assert models.rate([4.0, 30.0, 3.0]) == pytest.approx([4.0, 3.4, 19.6])


def test_rounds_fit_the_memory() -> None:
    """Whoever takes its most of a round finds it, while all others hold theirs; an H200 needs two rounds."""
    every, memory = [*models.cases()], 0.9 * 139.8
    run = models.Run(1000, memory)
    rounds = [*run.rounds(every)]
    assert [case for members in rounds for case in members] == every
    assert len(rounds) == 2
    for members in rounds:
        waiting = sum(map(models.held, members))
        assert all(waiting - models.held(case) + models.peak(case) <= memory for case in members)
    assert len([*models.Run(1000, 1.0).rounds(every)]) == len(every), "a small GPU has a try at each"
    run.end()


MEASURED = {  # GiB that tensors took on an H200, of the cases whose estimate is nearest to it
    "train small-2048 plain eager": 16.6,
    "train small-16384 plain eager": 31.2,
    "train small-16384 Liger compiled": 15.1,
    "train base-2048 plain eager": 22.5,
    "train base-2048 Liger compiled": 13.2,
    "train wide-2048 plain eager": 28.9,
    "train wide-16384 plain eager": 47.1,
    "train wide-16384 Liger compiled": 29.8,
}


@pytest.mark.parametrize("words", MEASURED)
def test_estimates_are_above_what_was_measured(words: str) -> None:
    """CUDA took 0.7 GiB of a process besides."""
    (case,) = of_model(words)
    assert MEASURED[words] + 0.7 < models.peak(case) < MEASURED[words] + 10


SCRIPT = """
import json, sys, time

case = json.loads(sys.argv[-1])
print("a library says this")
if case["way"] == "Liger":
    sys.exit("no module named liger")
print("room", flush=True)
sys.stdin.readline()
print("ready", flush=True)
sys.stdin.readline()
if case["way"] == "ours" and case["compiled"]:
    time.sleep(1000)
print(json.dumps({"ms": [2.0, 1.0, 3.0], "tokens": 10, "training": %s}), flush=True)
time.sleep(1000)  # as a process may take long to end
"""


@pytest.fixture
def acted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have processes that only act as if they measured, on a GPU; return the folder of records."""
    script = tmp_path / "acted.py"
    training = {"gib": 2.0, "losses": [3.0, 2.0], "profile": {"wall": 2.0, "kinds": dict.fromkeys(KINDS, 0.25)}}
    script.write_text(SCRIPT % training)
    monkeypatch.setattr(models, "COMMAND", [sys.executable, str(script)])
    monkeypatch.setattr(models, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(models, "detect", lambda: [Slot(structs.replace(ENVIRONMENT, memory=150 * 10**9), "0")])
    return tmp_path / "records"


def test_cases_are_recorded_as_they_end(acted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What fails is named with the reason, and so is what time did not allow."""
    status = models.main(["train", "base-2048", "--seconds", "10"])
    output = capsys.readouterr().out
    assert status == 1
    assert "train base-2048 plain eager: 2.0 ms, 5000 tokens/s, 2.0 GiB, loss 3.0000 to 2.0000" in output
    assert "idle 0.5" in output
    assert "train base-2048 Liger eager: failed: no module named liger" in output
    assert "not run, as 10 s were over: train base-2048 ours compiled\n" in output
    assert [str(row.case) for row in load_all(acted)] == [
        *("train base-2048 plain eager", "train base-2048 ours eager", "train base-2048 plain compiled")
    ]
    assert [row.code_hash for row in load_all(acted)] == [None, ops_hash(), None]


def test_all_was_measured(acted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert models.main(["plain", "base-2048"]) == 0
    assert "not run" not in capsys.readouterr().out
    assert len(load_all(acted)) == 2
    (acted / "test-gpu-9000" / "models.json").write_text("{")
    assert models.main(["plain", "base-2048"]) == 2, "no GPU works for a record that could not be written"


# What is shown
@pytest.fixture(scope="module")
def built(make_project: Callable[..., Project]) -> Project:
    """Return a built gallery whose home page and guide show models."""
    project = make_project()
    project.write(one="x = 1")
    docs = project.root / "docs"
    (docs / "guide").mkdir()
    (docs / "guide" / "transformers.md").write_text("# In a model\n\n```{models}\n```\n")
    index = (docs / "index.md").read_text().replace("recipes/index", "recipes/index\nguide/transformers")
    (docs / "index.md").write_text(f"{index}\n```{{models-line}}\n```\n")
    status, output = project.build()
    assert status == 0, output
    return project


def test_page_without_a_record(project: Project) -> None:
    assert "There is no record of make models yet." in article(project, "guide/transformers").text
    assert "whole model" not in article(project, "index").text


def test_pages_show_the_record(project: Project) -> None:
    chosen = of_model("train base-2048") + of_model("generate base-32 eager")
    older = [a_row(case, code_hash="0" * 16) if "ours eager" in str(case) else a_row(case) for case in chosen]
    keep(project.root / "docs" / "_records", older)
    page = shown(project, "guide/transformers")
    text = " ".join(page.text.split())
    assert (
        "make models on Test GPU 9000 · 2026-01-02 · driver 1.2 · torch 2.99 · triton 3.99 · transformers 5.24.0 · "
        "liger-kernel 0.8.5 · commit 0123456789" in text
    )
    assert f"Layers of the Llamas: base, 8 of 2048. A batch is sequences {BY.strip()} tokens" in text
    model, of_kinds = f"base, 4{BY}2048", ["20.0", "10.0", "4.0", "3.0", "2.0", "1.0"]
    modes = ["eager, of older code", "compiled"]
    rows = [[cell.replace("\N{NO-BREAK SPACE}", " ") for cell in row] for row in cells(page)]
    assert rows[:2] == [[model, mode, "75.0", "70.0", "60.0", "19.2", "18.2", "17.2"] for mode in modes]
    rates = ["109227", "117029", "136533", "1.25", "1.17"]
    assert rows[2:4] == [[f"train, {model}", mode, *rates] for mode in modes]
    rates = ["1707", "1829", "2133", "1.25", "1.17"]
    assert rows[4] == [f"generate, base, 32{BY}128", modes[0], *rates]
    ways = ["plain, eager", "Liger, eager", "patched, eager, of older code"]
    ways += ["plain, compiled", "Liger, compiled", "patched, compiled"]
    idle = ["35.0", "30.0", "20.0"] * 2
    assert rows[5:] == [[model, way, *of_kinds, time] for way, time in zip(ways, idle, strict=True)]
    (chart,) = page.select(".chart")
    names = ["plain, eager", "Liger, eager", "Triton, patched, eager"]
    series = {series.text.strip(): series["data-rates"] for series in chart.select(".series[data-rates]")}
    assert [*series] == [name.replace("eager", state) for state in ("eager", "compiled") for name in names]
    assert series["plain, eager"] == "12 11 10"
    assert "Liger, eager 1.0e-04; Triton, patched, eager 2.0e-04; plain, compiled 0.0e+00" in page.text
    home = " ".join(article(project, "index").text.split())
    assert (
        f"a training step of a Llama of 8 layers of 2048, 4{BY}2048 tokens under torch.compile takes 60.0 ms with the "
        "ops, 70.0 ms with Liger-Kernel and 75.0 ms without, and 17.2 GiB instead of 19.2 (Test GPU 9000, 2026-01-02)"
        in home
    )


def test_check_records_names_cases_with_older_ops(project: Project) -> None:
    first, second = of_model("train base-2048 ours")
    keep(project.root / "docs" / "_records", [a_row(first, code_hash="0" * 16), a_row(second)])
    status, output = project.run("check-records")
    assert status == 1
    assert output.splitlines()[-1] == f"make models was run with older code: {first}"
