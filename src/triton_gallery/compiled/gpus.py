"""The GPUs that kernels are compiled for, and what a kernel may use of each.

NVIDIA's figures are from the table of technical specifications in the CUDA C++ Programming Guide, AMD's from the white
paper of CDNA 3 and LLVM's user guide for the AMDGPU backend.
"""

import math
from dataclasses import dataclass

GRAIN = 256  # registers are given to a warp in units of so many, on NVIDIA's GPUs
RESERVED = 1024  # bytes of shared memory that CUDA takes for each program


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    Attributes:
        key: how Triton's compiler calls it, short: `sm_90`, `gfx942`.
        name: how people call it.
        cards: some of this kind.
        shared: bytes of shared memory that one program may have.
        shared_unit: bytes of shared memory of a multiprocessor.
        warps: how many a multiprocessor holds.
        programs: how many a multiprocessor holds.
        registers: 32-bit registers of a multiprocessor.
        tensor_memory: columns of tensor memory that one program may have.
    """

    key: str
    name: str
    cards: str
    shared: int
    shared_unit: int
    warps: int
    programs: int
    registers: int = 65536
    tensor_memory: int = 0

    @property
    def is_amd(self) -> bool:
        """Whether AMD's compiler makes its code, with warps of 64 threads."""
        return self.key.startswith("gfx")

    @property
    def capability(self) -> str | None:
        """NVIDIA's compute capability, "9.0" for instance; None of another's GPU."""
        number = self.key.removeprefix("sm_")
        return None if self.is_amd else f"{number[:-1]}.{number[-1]}"

    @property
    def warp(self) -> int:
        """Threads of a warp."""
        return 64 if self.is_amd else 32

    def occupancy(self, warps: int, registers: int, shared: int) -> tuple[float, str]:
        """Return the part of a multiprocessor's warps that it can hold of a kernel's, and what keeps it from more.

        Args:
            warps: of a program.
            registers: of a thread.
            shared: bytes of shared memory of a program.
        """
        if self.is_amd:  # four vector units, each with registers of its own
            lanes = self.registers // 4 // self.warp
            by_registers = 4 * min(self.warps // 4, lanes // max(8, 8 * math.ceil(registers / 8))) // warps
            by_shared = self.shared_unit // shared if shared else self.programs
        else:
            of_warp = GRAIN * math.ceil(max(1, registers) * self.warp / GRAIN)
            by_registers = self.registers // of_warp // warps
            by_shared = self.shared_unit // (shared + RESERVED)
        most = min(self.programs, self.warps // warps)
        limits = {"registers": by_registers, "shared memory": by_shared, "warps": most}
        held = min(limits.values())
        return held * warps / self.warps, ", ".join(name for name, limit in limits.items() if limit == held)


KIB = 1024
GPUS = [
    Gpu("sm_80", "A100", "A30", 163 * KIB, 164 * KIB, warps=64, programs=32),
    Gpu("sm_89", "L4, RTX 40", "L40S, RTX 4090", 99 * KIB, 100 * KIB, warps=48, programs=24),
    Gpu("sm_90", "H100, H200", "GH200", 227 * KIB, 228 * KIB, warps=64, programs=32),
    Gpu("sm_100", "B200", "GB200", 227 * KIB, 228 * KIB, warps=64, programs=32, tensor_memory=512),
    Gpu("sm_120", "RTX 50", "RTX 5090, RTX PRO 6000", 99 * KIB, 100 * KIB, warps=48, programs=24),
    Gpu("gfx942", "MI300", "MI300X, MI325X", 64 * KIB, 64 * KIB, warps=32, programs=32, registers=131072),
]
