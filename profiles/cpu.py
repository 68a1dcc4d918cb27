"""CPU features that decide which engine build runs well, from /proc/cpuinfo or the auxiliary vector.

Choose by feature, not by the board's name: A53 and A72 (Pi 3, Pi 4) have no atomics and no dot product, A76 (Pi 5) has.
"""

from __future__ import annotations

import re
from pathlib import Path

from profiles.files import read_text

# What an engine build may need; a profile with all 150 flags of a PC would not fit its topic.
_INTERESTING = frozenset(
    {
        "asimd", "asimddp", "asimdhp", "atomics", "bf16", "crc32", "fphp", "i8mm", "neon", "sve", "sve2", "vfpv4",
        "amx_bf16", "amx_int8", "amx_tile", "avx", "avx2", "avx512_bf16", "avx512_vnni", "avx512f", "avx_vnni", "bmi2",
        "f16c", "fma", "sse4_2", "ssse3",
    }
)  # fmt: skip

# linux/arch/arm64/include/uapi/asm/hwcap.h
_HWCAP_ARM64 = {1: "asimd", 7: "crc32", 8: "atomics", 9: "fphp", 10: "asimdhp", 20: "asimddp", 22: "sve"}
_HWCAP2_ARM64 = {1: "sve2", 13: "i8mm", 14: "bf16"}

_ARM_PARTS = {
    "0xb76": "ARM1176", "0xc07": "Cortex-A7", "0xd03": "Cortex-A53", "0xd04": "Cortex-A35", "0xd05": "Cortex-A55",
    "0xd07": "Cortex-A57", "0xd08": "Cortex-A72", "0xd0a": "Cortex-A75", "0xd0b": "Cortex-A76", "0xd41": "Cortex-A78",
    "0xd42": "Cortex-A78AE", "0xd46": "Cortex-A510", "0xd47": "Cortex-A710", "0xd4d": "Cortex-A715",
    "0xd4e": "Cortex-X3", "0x804": "Kryo-4xx-Gold", "0x805": "Kryo-4xx-Silver",
}  # fmt: skip


def features_from_cpuinfo(cpuinfo: str) -> frozenset[str]:
    """Features that all CPUs listed share; a big.LITTLE pair may differ."""
    lines = re.findall(r"^(?:Features|flags)\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    sets = [frozenset(line.split()) & _INTERESTING for line in lines]
    return frozenset.intersection(*sets) if sets else frozenset()


def features_from_hwcap(arch: str | None, hwcap: int | None, hwcap2: int | None) -> frozenset[str]:
    """Features from AT_HWCAP and AT_HWCAP2, for 64-bit Arm only: the bits mean something else elsewhere."""
    if arch not in ("aarch64", "arm64"):
        return frozenset()
    first = {name for bit, name in _HWCAP_ARM64.items() if (hwcap or 0) >> bit & 1}
    second = {name for bit, name in _HWCAP2_ARM64.items() if (hwcap2 or 0) >> bit & 1}
    return frozenset(first | second)


def soc_name(root: Path, cpuinfo: str) -> str | None:
    """The chip: from the device tree's compatible list, else from CPU part numbers."""
    for entry in reversed((read_text(root / "proc/device-tree/compatible") or "").split()):
        if re.fullmatch(r"[a-z0-9-]{1,32},[A-Za-z0-9._-]{1,64}", entry):
            return entry
    parts = re.findall(r"^CPU part\s*:\s*(0x[0-9a-f]{1,4})$", cpuinfo, re.MULTILINE)
    names = sorted({_ARM_PARTS.get(part, f"arm-part-{part}") for part in parts})
    return "+".join(names)[:128] or None
