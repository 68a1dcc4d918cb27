"""What the doctor says of boards that are not here: fake /proc, /sys, /run and /etc below a folder."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.doctor import Finding
from agent.doctor_board import (
    board_checks,
    check_card,
    check_heat,
    check_pages,
    check_power,
    check_time,
    check_wifi,
    check_word,
    from_vcgencmd,
    native_libraries,
)
from profiles.board import cards, configured_power_save, power_save_of, time_source, under_voltage_alarm
from profiles.elf import least_alignment_bytes
from profiles.facts import Throttle
from profiles.linux import decode_throttle, temperature_c, throttle
from tests.unit.profiles.fake_root import build, raspberry_pi

WORD = "sys/devices/platform/soc/soc:firmware/get_throttled"
PI = raspberry_pi("Raspberry Pi 4 Model B Rev 1.4", "bcm2711", "0xd08", "fp asimd crc32", 4_000_000, "0")
WLAN = {"sys/class/net/wlan0/wireless/": "", "sys/class/net/eth0/": "", "sys/class/net/lo/": ""}
DAY_S = 86_400


def seen(findings: Iterable[Finding]) -> list[tuple[str, bool]]:
    """Level of each finding and whether it has a next step, which every one that is not well must have."""
    found = [(finding.level, bool(finding.next_step)) for finding in findings]
    assert all(step == (level != "ok") for level, step in found)
    return found


def sentence(findings: Iterable[Finding]) -> tuple[str, str, str]:
    (finding,) = findings
    seen([finding])
    return finding.level, finding.text, finding.next_step


def card(written_bytes: int, up_s: float, name: str = "mmcblk0") -> Mapping[str, str]:
    return {
        "proc/uptime": f"{up_s:.2f} 100.00\n",
        f"sys/block/{name}/stat": f"  100 0 8000 50 200 0 {written_bytes // 512} 900 0 1 1\n",
        f"sys/block/{name}/device/type": "SD\n",
        f"sys/block/{name}boot0/stat": "1 1 1 1 1 1 999999999 1 1 1 1\n",
    }


def test_under_voltage_and_throttling_now_and_since_boot(tmp_path: Path) -> None:
    root = build(tmp_path, PI | {WORD: "50005\n"})
    level, text, step = sentence(check_power(throttle(root), None))
    assert (level, text) == ("warning", "slowed down now: throttled, under-voltage")
    assert "power supply" in step
    build(root, {WORD: "50000\n"})
    level, text, step = sentence(check_power(throttle(root), None))
    assert level == "warning" and text.startswith("since boot it happened, and not now: throttled, under-voltage")
    assert "power supply" in step and "reboot" in step
    build(root, {WORD: "80001\n"})
    now, before = check_power(throttle(root), None)
    assert "under-voltage" in now.text and "power supply" in now.next_step
    assert "soft-temperature-limit" in before.text and "heat sink" in before.next_step
    build(root, {WORD: "0\n"})
    assert sentence(check_power(throttle(root), False))[0] == "ok"


@given(st.integers(0, (1 << 20) - 1))
def test_every_throttle_word_is_a_sentence_with_a_next_step(word: int) -> None:
    relevant = word & 0xF000F
    findings = list(check_power(decode_throttle(word), None))
    levels = {level for level, _ in seen(findings)}
    assert levels == ({"warning"} if relevant else {"ok"})
    told = " ".join(finding.text for finding in findings)
    for bit, name in enumerate(("under-voltage", "frequency-capped", "throttled", "soft-temperature-limit")):
        assert (name in told) == bool(word >> bit & 1 or word >> (16 + bit) & 1)


def test_the_kernels_alarm_stands_in_for_the_throttle_word(tmp_path: Path) -> None:
    alarm = {"sys/class/hwmon/hwmon1/name": "rpi_volt\n", "sys/class/hwmon/hwmon1/in0_lcrit_alarm": "1\n"}
    root = build(tmp_path, {"sys/class/hwmon/hwmon0/name": "cpu_thermal\n", **alarm})
    assert under_voltage_alarm(root) is True
    level, text, _ = sentence(check_power(throttle(root), under_voltage_alarm(root)))
    assert (level, "under-voltage" in text) == ("warning", True)
    assert sentence(check_power(None, None)) == (
        "ok", "this machine does not tell of under-voltage, or has no such limits", "",
    )  # fmt: skip


def test_the_firmwares_tool_is_asked_where_sysfs_is_silent(tmp_path: Path) -> None:
    tool = tmp_path / "vcgencmd"
    tool.write_text("#!/bin/sh\n[ \"$1\" = get_throttled ] && echo 'throttled=0x50001'\n")
    tool.chmod(0o755)
    found = from_vcgencmd(lambda name: str(tool) if name == "vcgencmd" else None)
    assert found == Throttle(frozenset({"under_voltage"}), frozenset({"under_voltage", "throttled"}))
    tool.write_text("#!/bin/sh\necho VCHI initialization failed\n")
    assert from_vcgencmd(lambda name: str(tool)) is None
    assert from_vcgencmd(lambda name: None) is None


def test_a_hot_board(tmp_path: Path) -> None:
    assert sentence(check_heat(temperature_c(build(tmp_path, PI)))) == ("ok", "48 degrees Celsius", "")
    build(tmp_path, {"sys/class/thermal/thermal_zone0/temp": "81500\n"})
    level, text, step = sentence(check_heat(temperature_c(tmp_path)))
    assert level == "warning" and "82 degrees" in text and "fan" in step
    assert sentence(check_heat(None))[0] == "ok"


def test_wifi_power_save_is_named_with_the_way_to_end_it(tmp_path: Path) -> None:
    root = build(tmp_path, PI | WLAN)
    level, text, step = sentence(check_wifi(root, lambda name: True))
    assert level == "warning" and text.startswith("wlan0 saves power")
    assert "wifi.powersave = 2" in step and "iw dev wlan0 set power_save off" in step
    assert sentence(check_wifi(root, lambda name: False)) == ("ok", "wlan0 does not save power", "")
    level, text, _ = sentence(check_wifi(root, lambda name: None))
    assert (level, "iw dev wlan0 get power_save" in text) == ("ok", True), "unknown is no fault"
    build(root, {"etc/NetworkManager/conf.d/20-off.conf": "[connection]\nwifi.powersave = 3\n"})
    assert configured_power_save(root) is True
    assert sentence(check_wifi(root, lambda name: None))[0] == "warning"
    assert sentence(check_wifi(root, lambda name: False))[0] == "ok", "what the driver says counts"
    build(root, {"etc/NetworkManager/conf.d/99.conf": "[connection]\nwifi.powersave=2\n"})
    assert configured_power_save(root) is False, "the last file wins"
    assert list(check_wifi(build(tmp_path / "wired", {"sys/class/net/eth0/": ""}), lambda name: True)) == []


def test_the_drivers_answer_is_read_as_the_kernel_lays_it_out() -> None:
    name = b"wlan0".ljust(16, b"\0")
    assert power_save_of(name + struct.pack("iBBH", 0, 0, 1, 0) + bytes(8)) is False
    assert power_save_of(name + struct.pack("iBBH", 0, 0, 0, 0x1000) + bytes(8)) is True


def test_a_32_bit_system_on_a_64_bit_kernel_is_told_apart() -> None:
    level, text, step = sentence(check_word(4, "aarch64"))
    assert level == "warning" and "32-bit system on a 64-bit kernel" in text and "64-bit Raspberry Pi OS" in step
    level, text, step = sentence(check_word(4, "armv7l"))
    assert level == "warning" and "32-bit Python" in text and "forward requests" in step
    assert sentence(check_word(8, "aarch64"))[0] == "ok"


def elf(*alignments: int) -> bytes:
    """A 64-bit shared library's headers, one LOAD segment per alignment and one NOTE that does not count."""
    table = b"".join(struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, 0, 0, alignment) for alignment in alignments)
    table += struct.pack("<IIQQQQQQ", 4, 4, 0, 0, 0, 0, 0, 4)
    head = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 3, 183, 1, 0, 64, 0, 0, 64, 56, 0, 0, 0, 0)
    head = head[:56] + struct.pack("<H", len(alignments) + 1) + head[58:]
    return head + table


def test_libraries_for_small_pages_are_named_on_a_pi_5(tmp_path: Path) -> None:
    good, bad, other = tmp_path / "good.so", tmp_path / "bad.so", tmp_path / "other.so"
    good.write_bytes(elf(0x10000, 0x10000))
    bad.write_bytes(elf(0x10000, 0x1000))
    other.write_bytes(b"#!/bin/sh")
    libraries = {"jemalloc-thing": [good, bad], "fine": [good, other], "gone": [tmp_path / "no.so"]}
    level, text, step = sentence(check_pages(16384, libraries))
    assert level == "error" and text.startswith("jemalloc-thing was linked for smaller memory pages")
    assert "kernel=kernel8.img" in step
    assert sentence(check_pages(16384, {"fine": [good, other]}))[0] == "ok"
    assert sentence(check_pages(4096, libraries)) == ("ok", "memory pages of 4096 bytes", "")


def test_real_libraries_have_an_alignment() -> None:
    found = {name: [least_alignment_bytes(file) for file in files] for name, files in native_libraries().items()}
    assert "numpy" in found
    assert all(alignment is None or alignment >= 4096 for values in found.values() for alignment in values)
    assert any(found["numpy"])


@given(st.binary(max_size=200))
def test_garbage_is_no_library(data: bytes) -> None:
    import tempfile

    with tempfile.NamedTemporaryFile() as file:
        for content in (data, elf(0x4000)[: len(data)], elf(0x4000)[:64] + data):
            Path(file.name).write_bytes(content)
            found = least_alignment_bytes(Path(file.name))
            assert found is None or found >= 0


def test_a_clock_that_nobody_set_is_a_warning_only_where_it_stops_with_the_power(tmp_path: Path) -> None:
    root = build(tmp_path, PI | {"run/systemd/timesync/": ""})
    level, text, step = sentence(check_time(root))
    assert level == "warning" and "no time server was heard" in text and "timedatectl" in step
    build(root, {"sys/class/rtc/rtc0/since_epoch": "86400\n"})
    assert time_source(root).has_rtc is False, "a clock without a battery begins anew"
    build(root, {"sys/class/rtc/rtc0/since_epoch": "1790000000\n"})
    assert sentence(check_time(root))[0] == "ok"
    build(root, {"run/systemd/timesync/synchronized": ""})
    assert sentence(check_time(root)) == ("ok", "the time comes from a time server", "")
    assert sentence(check_time(build(tmp_path / "other", {"proc/": ""})))[0] == "ok"


def test_what_is_written_to_the_card_a_day(tmp_path: Path) -> None:
    (found,) = cards(build(tmp_path, card(20 << 30, DAY_S)))
    assert (found.name, found.kind, found.written_bytes) == ("mmcblk0", "SD", 20 << 30)
    level, text, step = sentence(check_card(tmp_path))
    assert level == "warning" and text.startswith("mmcblk0: 21.5 GB written a day") and "iotop" in step
    build(tmp_path, card(1 << 30, DAY_S))
    level, text, _ = sentence(check_card(tmp_path))
    assert (level, text) == ("ok", "mmcblk0: 1.1 GB written a day, as the mean since boot")
    build(tmp_path, card(5 << 30, 600))
    level, text, _ = sentence(check_card(tmp_path))
    assert level == "ok" and "too early" in text
    assert list(check_card(build(tmp_path / "disk", {"proc/uptime": "9 9\n", "sys/block/sda/": ""}))) == []


@pytest.mark.parametrize("stat", ["", "1 2", "a b c d e f g h", "1 2 3 4 5 6 -7 8"])
def test_odd_counters_are_no_card(tmp_path: Path, stat: str) -> None:
    assert cards(build(tmp_path, {"proc/uptime": "5000 1", "sys/block/mmcblk0/stat": stat})) == ()


def test_all_checks_run_here_and_on_an_empty_root(tmp_path: Path) -> None:
    for root in (Path("/"), tmp_path):
        findings = [finding for _, check in board_checks(root) for finding in check()]
        seen(findings)
        assert {"system", "pages", "power", "heat", "time"} <= {finding.check for finding in findings}
    assert os.sysconf("SC_PAGE_SIZE") >= 4096
