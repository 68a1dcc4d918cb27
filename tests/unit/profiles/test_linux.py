"""Facts from fake file systems: three Pis, a container, a laptop, garbage, and nothing at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from profiles.facts import (
    Facts,
    collect,
    cpu_identity,
    device_profile,
    model_budget_bytes,
    usable_cores,
    usable_memory_bytes,
)
from profiles.linux import HostNumbers, accelerators, collect_linux, decode_throttle, temperature_c, throttle
from profiles.power import read_power
from protocol.decode import encode
from protocol.device import Measured
from tests.unit.profiles.fake_root import build, raspberry_pi

PIS = {
    "Raspberry Pi 3 Model B Plus Rev 1.3": ("bcm2837", "0xd03", "fp asimd evtstrm crc32 cpuid", 931_000, 4096, 0x8FB),
    "Raspberry Pi 4 Model B Rev 1.5": ("bcm2711", "0xd08", "fp asimd evtstrm crc32 cpuid", 3_884_000, 4096, 0x8FB),
    "Raspberry Pi 5 Model B Rev 1.0": (
        "bcm2712",
        "0xd0b",
        "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp",
        8_245_000,
        16_384,
        0x119FFB,
    ),
}


@pytest.mark.parametrize("model", list(PIS))
def test_a_pi(tmp_path: Path, model: str) -> None:
    chip, part, features, memory_kb, page_bytes, hwcap = PIS[model]
    build(tmp_path, raspberry_pi(model, chip, part, features, memory_kb, "50005"))
    facts = collect_linux(tmp_path, HostNumbers("aarch64", page_bytes, hwcap, 0, 4))
    assert facts.model == model
    assert facts.soc == f"brcm,{chip}"
    assert (facts.cores, facts.cores_present) == (4, 4)
    assert facts.memory_bytes == facts.memory_total_bytes == memory_kb * 1024
    assert facts.page_bytes == page_bytes
    assert facts.os == "Debian GNU/Linux 12 (bookworm)"
    assert (facts.temperature_c, facts.governor) == (48.312, "ondemand")
    assert (facts.frequency_hz, facts.frequency_max_hz) == (1_500_000_000, 1_800_000_000)
    assert facts.throttle == decode_throttle(0x50005)
    assert facts.stalled_ratio == {"cpu": 0.125}
    assert facts.power is None
    assert ("asimddp" in facts.cpu_features) == ("Pi 5" in model)
    assert ("atomics" in facts.cpu_features) == ("Pi 5" in model)
    profile = device_profile(facts, "pi")
    assert (profile.soc, profile.cores, profile.page_bytes) == (model, 4, page_bytes)


@pytest.mark.parametrize(("hwcap", "fast"), [(0x8FB, False), (0x119FFB, True)])
def test_features_come_from_the_auxiliary_vector_too(tmp_path: Path, hwcap: int, fast: bool) -> None:
    facts = collect_linux(tmp_path, HostNumbers("aarch64", 4096, hwcap, 0, 4))
    assert ({"asimddp", "atomics", "asimdhp"} <= facts.cpu_features) is fast
    assert "asimd" in facts.cpu_features


def test_the_same_bits_mean_nothing_on_another_architecture(tmp_path: Path) -> None:
    assert collect_linux(tmp_path, HostNumbers("x86_64", 4096, 0x119FFB, 0, 4)).cpu_features == frozenset()


def test_without_a_device_tree_the_part_number_names_the_core(tmp_path: Path) -> None:
    files = raspberry_pi("x", "y", "0xd0b", "asimd", 1000, "0")
    files.pop("proc/device-tree/compatible")
    assert collect_linux(build(tmp_path, files)).soc == "Cortex-A76"


def test_a_container_is_believed_over_meminfo(tmp_path: Path) -> None:
    build(
        tmp_path,
        {
            "proc/meminfo": "MemTotal:       32000000 kB\n",
            "proc/cpuinfo": "".join(f"processor\t: {n}\nflags\t\t: fpu avx avx2 fma\n\n" for n in range(16)),
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "536870912\n",
            "sys/fs/cgroup/cpu.max": "150000 100000\n",
        },
    )
    facts = collect_linux(tmp_path, HostNumbers("x86_64", 4096, None, None, 16))
    assert (facts.memory_bytes, facts.memory_total_bytes) == (512 << 20, 32_000_000 * 1024)
    assert (facts.cores, facts.cores_present) == (1.5, 16)
    assert device_profile(facts, "d").cores == 2
    assert facts.cpu_features == {"avx", "avx2", "fma"}


def test_a_limit_of_a_parent_group_counts(tmp_path: Path) -> None:
    build(
        tmp_path,
        {
            "proc/meminfo": "MemTotal:       32000000 kB\n",
            "proc/self/cgroup": "0::/system.slice/midstream.service\n",
            "sys/fs/cgroup/system.slice/memory.max": "1073741824\n",
            "sys/fs/cgroup/system.slice/midstream.service/memory.max": "max\n",
            "sys/fs/cgroup/system.slice/midstream.service/cpu.max": "max 100000\n",
        },
    )
    facts = collect_linux(tmp_path)
    assert (facts.memory_bytes, facts.cores) == (1 << 30, None)


def test_the_older_cgroups(tmp_path: Path) -> None:
    build(
        tmp_path,
        {
            "proc/meminfo": "MemTotal:       32000000 kB\n",
            "proc/self/cgroup": "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": "268435456\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000\n",
        },
    )
    facts = collect_linux(tmp_path)
    assert (facts.memory_bytes, facts.cores) == (256 << 20, 2.0)


def test_a_group_path_cannot_leave_its_folder(tmp_path: Path) -> None:
    build(tmp_path, {"proc/self/cgroup": "0::/../../../../secret\n", "secret/memory.max": "1\n"})
    assert collect_linux(tmp_path / "below").memory_bytes is None
    assert collect_linux(tmp_path).memory_bytes is None


def test_nothing_at_all_is_all_unknown(tmp_path: Path) -> None:
    assert collect_linux(tmp_path) == Facts()
    assert collect(tmp_path) == Facts()
    profile = device_profile(Facts(), "d")
    assert (profile.cores, profile.memory_bytes, profile.soc, profile.npu, profile.power) == (None,) * 5


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_garbage_is_unknown_and_never_an_error(tmp_path: Path, data: st.DataObject) -> None:
    files = raspberry_pi("x", "y", "0xd08", "asimd", 1000, "0") | {
        "sys/fs/cgroup/memory.max": "",
        "sys/fs/cgroup/cpu.max": "",
        "sys/class/power_supply/BAT0/type": "Battery",
        "sys/class/power_supply/BAT0/capacity": "",
        "sys/class/power_supply/BAT0/status": "",
    }
    garbage = st.sampled_from([b"", b"\0", b"\xff\xfe", b"-1", b"9" * 40, b"max", b"1 0", b"0-9999999", b"nan"])
    build(tmp_path, {name: data.draw(garbage | st.binary(max_size=12)) for name in files})
    facts = collect_linux(tmp_path)
    device_profile(facts, "d")
    assert facts.cores is None or facts.cores > 0
    assert facts.temperature_c is None or -60 <= facts.temperature_c <= 160
    assert facts.battery_ratio is None or 0 <= facts.battery_ratio <= 1


def test_folders_where_files_should_be(tmp_path: Path) -> None:
    names = raspberry_pi("x", "y", "0xd08", "asimd", 1000, "0")
    assert collect_linux(build(tmp_path, {f"{name}/": "" for name in names})).memory_bytes is None


def test_gaps_in_cpufreq_are_no_error(tmp_path: Path) -> None:
    """SY5: psutil 7.2.2 raises FileNotFoundError when scaling_cur_freq is there and scaling_max_freq is not."""
    files = raspberry_pi("x", "y", "0xd08", "asimd", 1000, "0")
    files.pop("sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq")
    facts = collect_linux(build(tmp_path / "a", files))
    assert (facts.frequency_hz, facts.frequency_max_hz) == (1_500_000_000, None)
    files.pop("sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq")
    files["sys/devices/system/cpu/cpu1/cpufreq/cpuinfo_max_freq"] = "2400000\n"
    facts = collect_linux(build(tmp_path / "b", files))
    assert (facts.frequency_hz, facts.frequency_max_hz) == (None, 2_400_000_000)


def test_missing_or_mad_sensors_give_no_temperature(tmp_path: Path) -> None:
    """SY5: psutil's sensors may be an empty mapping; a disconnected sensor shows -274 degrees."""
    assert temperature_c(tmp_path) is None
    zones = "sys/class/thermal/thermal_zone"
    build(tmp_path, {f"{zones}0/temp": "-274000\n", f"{zones}0/type": "cpu"})
    assert temperature_c(tmp_path) is None
    build(tmp_path, {f"{zones}1/temp": "70000\n", f"{zones}1/type": "gpu"})
    assert temperature_c(tmp_path) == 70.0
    build(tmp_path, {f"{zones}2/temp": "50000\n", f"{zones}2/type": "soc-thermal"})
    assert temperature_c(tmp_path) == 50.0  # a zone of the CPU counts before a hotter one of something else


@pytest.mark.parametrize(
    ("word", "now", "since"),
    [
        ("0", set(), set()),
        ("0x0", set(), set()),
        ("1", {"under_voltage"}, set()),
        ("50005", {"under_voltage", "throttled"}, {"under_voltage", "throttled"}),
        ("50000", set(), {"under_voltage", "throttled"}),
        ("f000a", {"frequency_capped", "soft_temperature_limit"},
         {"under_voltage", "frequency_capped", "throttled", "soft_temperature_limit"}),
    ],
)  # fmt: skip
def test_throttle_bits_now_and_since_boot(tmp_path: Path, word: str, now: set[str], since: set[str]) -> None:
    """SY6: under-voltage shows only by polling; bits 0-3 are now, bits 16-19 stick until the next boot."""
    build(tmp_path, {"sys/devices/platform/soc/soc:firmware/get_throttled": word + "\n"})
    found = throttle(tmp_path)
    assert found is not None
    assert set(found.now) == now
    assert set(found.since_boot) == since


def test_no_firmware_no_throttle_word(tmp_path: Path) -> None:
    assert throttle(tmp_path) is None
    assert throttle(build(tmp_path, {"sys/devices/platform/soc/soc:firmware/get_throttled": "VCHI failed"})) is None


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({}, ()),
        ({"dev/apex_0": ""}, ("coral-edgetpu",)),
        ({"dev/hailo0": ""}, ("hailo",)),
        ({"sys/bus/platform/drivers/RKNPU/bind": ""}, ("rknpu",)),
        ({"etc/nv_tegra_release": ""}, ("jetson",)),
        ({"proc/device-tree/compatible": b"nvidia,p3450\0nvidia,tegra210\0"}, ("jetson",)),
        ({"dev/accel/accel0": "", "dev/dri/renderD128": ""}, ("npu-accel", "gpu-render")),
    ],
)
def test_accelerators_by_their_device_files(tmp_path: Path, files: dict[str, str], want: tuple[str, ...]) -> None:
    assert accelerators(build(tmp_path, files)) == want
    npu = device_profile(Facts(accelerators=want), "d").npu
    assert npu == (None if want in ((), ("gpu-render",)) else want[0])


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({}, (None, None)),
        ({"BAT0/type": "Battery", "BAT0/status": "Discharging", "BAT0/capacity": "42"}, ("battery", 0.42)),
        ({"BAT0/type": "Battery", "BAT0/status": "Charging", "BAT0/capacity": "90"}, ("mains", 0.9)),
        ({"AC/type": "Mains", "AC/online": "1", "BAT0/type": "Battery", "BAT0/status": "Full"}, ("mains", None)),
        ({"AC/type": "Mains", "AC/online": "1"}, ("mains", None)),
        ({"AC/type": "Mains", "AC/online": "0"}, (None, None)),
        ({"m/type": "Battery", "m/scope": "Device", "m/status": "Discharging", "m/capacity": "10"}, (None, None)),
        ({"BAT0/type": "Battery", "BAT0/status": "Unknown", "BAT0/capacity": "400"}, (None, None)),
    ],
)
def test_power(tmp_path: Path, files: dict[str, str], want: tuple[str | None, float | None]) -> None:
    build(tmp_path, {f"sys/class/power_supply/{name}": content for name, content in files.items()})
    assert read_power(tmp_path) == want


def test_this_machine_is_known_and_its_profile_fits_a_topic() -> None:
    facts = collect()
    assert facts.page_bytes
    assert facts.cores
    assert facts.memory_bytes
    assert facts.arch
    measured = tuple(Measured(f"{n:064d}", "onnx", 4, f"head:{n:03d}:int8", 0.1, 0.01) for n in range(20))
    assert len(encode(device_profile(facts, "d", measured=measured))) <= 8 << 10


def test_the_cpu_identity_changes_with_what_matters_only() -> None:
    facts = Facts(soc="s", cores=4, temperature_c=40.0, cpu_features=frozenset({"a", "b"}))
    assert cpu_identity(facts) == cpu_identity(Facts(soc="s", cores=4, cpu_features=frozenset({"b", "a"})))
    assert cpu_identity(facts) != cpu_identity(Facts(soc="s", cores=2, cpu_features=frozenset({"a", "b"})))


def test_measured_memory_bandwidth_is_shown() -> None:
    measured = (Measured("", "", 1, "memory_bandwidth", 0.25, 0.0),)
    assert device_profile(Facts(), "d", measured=measured).memory_bytes_per_s == (1 << 30) / 0.25


@pytest.mark.parametrize(
    ("quota", "cores"), [("150000 100000", 1), ("250000 100000", 2), ("50000 100000", 1), ("max 100000", 4)]
)
def test_threads_and_budgets_follow_the_container(tmp_path: Path, quota: str, cores: int) -> None:
    files = {
        "proc/meminfo": "MemTotal:        8388608 kB\n",
        "proc/self/cgroup": "0::/kubepods/pod1\n",
        "sys/devices/system/cpu/online": "0-3\n",
        "sys/fs/cgroup/kubepods/memory.max": "2147483648\n",
        "sys/fs/cgroup/kubepods/pod1/memory.max": "1073741824\n",
        "sys/fs/cgroup/kubepods/pod1/cpu.max": f"{quota}\n",
    }
    root = build(tmp_path, files)
    assert usable_cores(root) == cores
    assert usable_memory_bytes(root) == 1 << 30
    assert model_budget_bytes(256 << 20, root) == 1 << 29, "half"
    assert model_budget_bytes(600 << 20, root) == 600 << 20, "at least"
    assert model_budget_bytes(2 << 30, root) == 3 << 28, "the container is not filled"


def test_budgets_where_nothing_is_told(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == 1
    assert usable_memory_bytes(tmp_path) is None
    assert model_budget_bytes(256 << 20, tmp_path) == 256 << 20


def test_this_machine_has_cores_and_memory() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
    assert (usable_memory_bytes() or 0) > 0
