"""Prints what is in memory and in registers after each statement of `stepped_kernels.py`, as JSON.

For each figure and launch: what tensors hold before it, and for each program, in the interpreter's order, its number,
what tensors hold when it begins, and after each statement what they hold and what each register holds.
"""

import json
import sys
from pathlib import Path

from triton_gallery.step_through import process, record

Recorder = record.Recorder
launches = []


class Noting(Recorder):
    """Notes memory besides."""

    def launched(self, code, arguments) -> None:
        """Begin notes."""
        super().launched(code, arguments)
        self.notes = {"before": self._memory(), "programs": []}
        launches.append(self.notes)

    def _memory(self) -> dict[str, list]:
        return {named.name: named.tensor.double().flatten().tolist() for named in self.tensors}

    def _enter(self, frame):
        tracer = super()._enter(frame)
        self.notes["programs"].append({"program": self._program, "start": self._memory(), "steps": []})
        return tracer

    def _close(self, frame) -> None:
        ends = self._now is not None
        super()._close(frame)
        if ends:
            held = {
                name: record._numbers(name, frame.f_locals[name]).astype(float).flatten().tolist()
                for name in self._registers
                if name in frame.f_locals
            }
            self.notes["programs"][-1]["steps"].append({"memory": self._memory(), "registers": held})


record.Recorder = Noting
recording = process.main(Path(sys.argv[1]), "")
assert not recording.failure, recording.failure
print(json.dumps(launches))
