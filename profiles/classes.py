"""The shipped map of device classes, read from the package's TOML file."""

from __future__ import annotations

import tomllib
from importlib import resources
from typing import Any

from profiles.facts import Facts
from profiles.strategy import KINDS, ClassMap, DeviceClass, Seen, Strategy
from protocol.errors import ConfigError

_BOUNDS = {"speed_ratio", "start", "arms", "hedge_ratio", "max_models_mb", "threads"}
_OF_CLASS = {"title", "match", "cores", "archs", "npus", "figures", "mobilenet_v2_s", "resnet50_s"}


def shipped_classes() -> ClassMap:
    """The map that comes with this release."""
    text = resources.files("profiles").joinpath("classes.toml").read_text(encoding="utf-8")
    return parse_classes(text, "classes.toml")


def parse_classes(text: str, what: str) -> ClassMap:
    """[class.NAME] tables in their order, and [unknown]. Raises ConfigError naming the field."""
    try:
        document = tomllib.loads(text)
        classes = tuple(_class(name, table) for name, table in document.get("class", {}).items())
        unknown = document.get("unknown", {})
        return ClassMap(classes, _strategy("unknown", unknown), str(unknown.get("title", "unknown device")))
    except (tomllib.TOMLDecodeError, TypeError, ValueError, KeyError, AttributeError) as err:
        raise ConfigError(f"{what}: {err}", next_step="correct the line that it names") from err


def seen_of(facts: Facts, flops_per_s: tuple[float, ...] = (), *, slowed: bool = False) -> Seen:
    """What the strategy map wants to know of a device."""
    names = tuple(name for name in (facts.model, facts.soc, facts.cpu) if name)
    npu = next((name for name in facts.accelerators if name == "jetson"), None)
    return Seen(names, facts.arch, npu, flops_per_s, slowed)


def _class(name: str, table: dict[str, Any]) -> DeviceClass:
    unknown = sorted(set(table) - _OF_CLASS - _BOUNDS)
    if unknown:
        raise ValueError(f"class.{name}.{unknown[0]} is no field")
    light_s, dense_s = float(table["mobilenet_v2_s"]), float(table["resnet50_s"])
    if not (0 < light_s < float("inf") and 0 < dense_s < float("inf")):
        raise ValueError(f"class.{name}: seconds are more than 0")
    return DeviceClass(
        name=name,
        title=str(table.get("title", name)),
        mobilenet_v2_s=light_s,
        resnet50_s=dense_s,
        strategy=_strategy(f"class.{name}", table),
        figures=str(table.get("figures", "")),
        match=tuple(str(part).lower() for part in table.get("match", ())),
        cores=tuple(map(str, table.get("cores", ()))),
        archs=tuple(str(arch).lower() for arch in table.get("archs", ())),
        npus=tuple(map(str, table.get("npus", ()))),
    )


def _strategy(where: str, table: dict[str, Any]) -> Strategy:
    megabytes = table.get("max_models_mb")
    found = Strategy(
        speed_ratio=float(table.get("speed_ratio", 1.0)),
        start=tuple(map(str, table.get("start", ("device",)))),
        arms=tuple(map(str, table.get("arms", KINDS))),
        hedge_ratio=float(table.get("hedge_ratio", 1.0)),
        max_models_bytes=None if megabytes is None else int(megabytes) << 20,
        threads=int(table.get("threads", 0)),
    )
    kinds = set(found.start) | set(found.arms)
    if not kinds <= set(KINDS) or "device" not in found.arms:
        raise ValueError(f"{where}: start and arms are of {', '.join(KINDS)}, and the device always answers")
    if not (found.speed_ratio > 0 and 0 <= found.hedge_ratio <= 1 and found.threads >= 0):
        raise ValueError(f"{where}: speed_ratio is more than 0, hedge_ratio within 0 and 1, threads no less than 0")
    return found
