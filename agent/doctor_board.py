"""The doctor's checks of the board itself: power, heat, Wi-Fi, memory pages, word size, clock, SD card.

All read files below a root, so that a Raspberry Pi that is not here can be examined.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from agent.doctor import Checker, Finding
from profiles.board import cards, configured_power_save, time_source, under_voltage_alarm, wifi_interfaces
from profiles.board import wifi_power_save as live_power_save
from profiles.elf import least_alignment_bytes
from profiles.facts import Throttle
from profiles.linux import decode_throttle, temperature_c, throttle

USUAL_PAGE_BYTES = 4096
HOT_C = 80.0
"""A Raspberry Pi slows down at 80 degrees Celsius, and at 85 for good."""
WRITES_BYTES_PER_S = 100 << 10
"""8.8 GB a day: a cheap card of 16 GB is written full every second day."""
EARLY_S = 3600.0
"""Before this the writes of the boot are most of what the counters hold."""
VCGENCMD_S = 5.0

WEAK = "use the board's own power supply (5 V with 3 A for a Pi 4, 5 A for a Pi 5), a short cable, fewer USB devices"
HEAT = "give it a heat sink or a fan, and air"
PowerSave = Callable[[str], bool | None]


def board_checks(root: Path = Path("/")) -> list[tuple[str, Checker]]:
    """The checks of this machine."""
    return [
        ("system", lambda: check_word(struct.calcsize("P"), platform.machine())),
        ("pages", lambda: check_pages(page_bytes(), native_libraries())),
        ("power", lambda: check_power(throttle(root) or from_vcgencmd(), under_voltage_alarm(root))),
        ("heat", lambda: check_heat(temperature_c(root))),
        ("wifi", lambda: check_wifi(root, live_power_save)),
        ("time", lambda: check_time(root)),
        ("card", lambda: check_card(root)),
    ]


def page_bytes() -> int:
    """Of the running kernel."""
    import mmap

    return mmap.PAGESIZE


def check_word(pointer_bytes: int, machine: str) -> Iterable[Finding]:
    """No inference engine has wheels for 32-bit systems, which a Pi may run on a 64-bit kernel."""
    if pointer_bytes >= 8:
        yield Finding("system", "ok", f"{machine}, Python {platform.python_version()}, 64-bit")
        return
    text = f"{machine} with 32-bit Python: no inference engine has wheels for it"
    step = "use a 64-bit system; this device can still be managed and can forward requests"
    if machine in ("aarch64", "x86_64"):
        text = f"a 32-bit system on a 64-bit kernel ({machine}): no inference engine has wheels for it"
        step = "install the 64-bit Raspberry Pi OS; until then this device can be managed and can forward requests"
    yield Finding("system", "warning", text, step)


def check_pages(size_bytes: int, libraries: Mapping[str, Sequence[Path]]) -> Iterable[Finding]:
    """On a kernel with larger pages, each installed native library must have been linked for them."""
    if size_bytes == USUAL_PAGE_BYTES:
        yield Finding("pages", "ok", f"memory pages of {size_bytes} bytes")
        return
    small = {name for name, files in libraries.items() if any(_too_small(file, size_bytes) for file in files)}
    for name in sorted(small):
        yield Finding(
            "pages", "error", f"{name} was linked for smaller memory pages than this kernel's {size_bytes} bytes",
            f"update {name}, or boot the kernel with 4 KiB pages (kernel=kernel8.img in config.txt of a Pi 5)",
        )  # fmt: skip
    if not small:
        yield Finding(
            "pages", "ok", f"memory pages of {size_bytes} bytes, and all native libraries are linked for them"
        )


def native_libraries() -> dict[str, list[Path]]:
    """Shared libraries of every installed distribution, by its name."""
    found: dict[str, list[Path]] = {}
    for distribution in importlib.metadata.distributions():
        for file in distribution.files or ():
            if ".so" in file.suffixes:
                found.setdefault(distribution.name, []).append(Path(str(distribution.locate_file(file))))
    return found


def _too_small(file: Path, size_bytes: int) -> bool:
    alignment = least_alignment_bytes(file)
    return alignment is not None and alignment < size_bytes


def from_vcgencmd(find: Callable[[str], str | None] = shutil.which) -> Throttle | None:
    """The throttle word from the firmware's own tool, for kernels without it in sysfs."""
    tool = find("vcgencmd")
    if tool is None:
        return None
    try:
        done = subprocess.run([tool, "get_throttled"], capture_output=True, text=True, check=False, timeout=VCGENCMD_S)
        return decode_throttle(int(done.stdout.strip().removeprefix("throttled="), 16))
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def check_power(word: Throttle | None, alarm: bool | None) -> Iterable[Finding]:
    """Weak supplies and heat, now and since boot; the firmware tells by polling only."""
    if word is None and alarm is None:
        yield Finding("power", "ok", "this machine does not tell of under-voltage, or has no such limits")
        return
    word = word or Throttle(frozenset(), frozenset())
    now = word.now | ({"under_voltage"} if alarm else set())
    before = word.since_boot - now
    if now:
        yield Finding("power", "warning", f"slowed down now: {_named(now)}", _remedy(now))
    if before:
        text = f"since boot it happened, and not now: {_named(before)}"
        yield Finding("power", "warning", text, f"{_remedy(before)}; reboot and measure again")
    if not now and not before:
        yield Finding("power", "ok", "neither power nor heat has slowed this board down since boot")


def _named(names: Iterable[str]) -> str:
    return ", ".join(sorted(name.replace("_", "-") for name in names))


def _remedy(names: Iterable[str]) -> str:
    """Under-voltage comes from the supply, everything else from heat unless the supply is weak, too."""
    weak = "under_voltage" in names
    hot = "soft_temperature_limit" in names or not weak
    return "; ".join(step for step, wanted in ((WEAK, weak), (HEAT, hot)) if wanted)


def check_heat(celsius: float | None) -> Iterable[Finding]:
    """Near the limit inference slows down by itself."""
    if celsius is None:
        yield Finding("heat", "ok", "no temperature sensor is known here")
    elif celsius >= HOT_C:
        yield Finding("heat", "warning", f"{celsius:.0f} degrees Celsius: a board slows down at {HOT_C:.0f}", HEAT)
    else:
        yield Finding("heat", "ok", f"{celsius:.0f} degrees Celsius")


def check_wifi(root: Path, power_save: PowerSave) -> Iterable[Finding]:
    """Power save delays the first packet after a pause by 50 to 2000 ms (raspberrypi/linux#7533)."""
    for name in wifi_interfaces(root):
        saves = power_save(name)
        asked = configured_power_save(root)
        if saves is None and asked is None:
            yield Finding("wifi", "ok", f"{name} does not tell whether it saves power: iw dev {name} get power_save")
        elif saves or (saves is None and asked):
            yield Finding(
                "wifi", "warning", f"{name} saves power: after a pause a request waits 0.05 to 2 s for the radio",
                "wifi.powersave = 2 below [connection] in a file of /etc/NetworkManager/conf.d, then restart "
                f"NetworkManager; until the next boot: iw dev {name} set power_save off",
            )  # fmt: skip
        else:
            yield Finding("wifi", "ok", f"{name} does not save power")


def check_time(root: Path) -> Iterable[Finding]:
    """Without a clock that runs on, the time is a guess until a time server was heard."""
    source = time_source(root)
    if source.synchronised is False and not source.has_rtc:
        yield Finding(
            "time", "warning", "no time server was heard since boot, and this board's clock stops with its power",
            "check `timedatectl` and that UDP port 123 passes; TLS to the coordinator waits for a right clock",
        )  # fmt: skip
    elif source.synchronised is False:
        yield Finding("time", "ok", "no time server was heard since boot; the board's clock ran on")
    elif source.synchronised:
        yield Finding("time", "ok", "the time comes from a time server")
    else:
        yield Finding("time", "ok", "nothing here tells where the time comes from")


def check_card(root: Path) -> Iterable[Finding]:
    """Cards wear out by writing; counters run since boot."""
    for card in cards(root):
        day_bytes = card.bytes_per_s * 86_400
        text = f"{card.name}: {day_bytes / 1e9:.1f} GB written a day, as the mean since boot"
        if card.up_s < EARLY_S:
            yield Finding("card", "ok", f"{card.name}: {card.written_bytes / 1e6:.0f} MB written since boot; too early")
        elif card.bytes_per_s > WRITES_BYTES_PER_S:
            yield Finding(
                "card", "warning", f"{text}: that wears a card out",
                "find the writer with `iotop -ao`; Storage=volatile in journald.conf keeps logs in memory; "
                "put state_dir and models_dir on a USB disk",
            )  # fmt: skip
        else:
            yield Finding("card", "ok", text)
