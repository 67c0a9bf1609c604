"""One process of the run: its share of the GPU's memory, which cases run, and a count of what is not taken."""

import hashlib
import os
import re
from collections import Counter, defaultdict

import pytest
import torch

if not torch.cuda.is_available():  # before anything imports triton
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config):
    config.addinivalue_line("markers", "composed: an option that is one line of PyTorch around an op")


def pytest_collection_modifyitems(config, items):
    """Keep that share of each test's cases that PEERS_SHARE says, always the same ones."""
    share = float(os.environ.get("PEERS_SHARE") or 1)
    tests = defaultdict(list)
    for item in items:
        tests[item.path, getattr(item, "originalname", item.name)].append(item)
    out = set()
    for cases in tests.values():
        ranked = sorted(cases, key=lambda item: hashlib.md5(item.name.encode()).hexdigest())
        out.update(ranked[max(1, round(share * len(cases))) :])
    config.hook.pytest_deselected(items=[item for item in items if item in out])
    items[:] = [item for item in items if item not in out]


@pytest.fixture(scope="session", autouse=True)
def interpreted(quick_interpreter):
    """Have the interpreter run the kernels, unless there is a GPU."""


@pytest.fixture(autouse=True)
def fresh():
    """Each test has its own random numbers and its share of the GPU's memory, and gives back what it took."""
    torch.manual_seed(0)
    if torch.cuda.is_available():
        workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        torch.cuda.set_per_process_memory_fraction(min(0.85 / workers, 0.5))
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > 2 << 30:
        torch.cuda.empty_cache()


def pytest_terminal_summary(terminalreporter):
    """Count the cases by peer, and the skips by reason: what the ops do not take, and what needs a GPU."""
    peer = lambda report: re.sub(r".*test_([a-z]+).*", r"\1", report.nodeid.split("::")[0])  # noqa: E731
    totals, reasons = defaultdict(Counter), Counter()
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            what = outcome
            if outcome == "skipped":
                what, _, why = re.sub(r"^Skipped: ", "", report.longrepr[2]).partition(": ")
                reasons[what, peer(report), why] += 1
            totals[peer(report)][what] += 1
            totals[peer(report)]["composed"] += outcome == "passed" and "composed" in report.keywords
    for (what, who, why), count in sorted(reasons.items()):
        terminalreporter.write_line(f"{count:5d}  {who:10s} {what}: {why}")
    for who, counts in sorted(totals.items()):
        terminalreporter.write_line(
            f"{who}: " + ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        )
