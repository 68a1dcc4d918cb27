"""What `models add` and `models analyse` do with a model file: the analysis that its format has."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from agent.cli.progress import ProgressBar
from engines.model_files import sniff
from protocol.errors import ConfigError
from protocol.models import CatalogueEntry
from split_models.analyse_file import Asked, analyse_file
from split_models.analysis import Analysis, Conditions
from split_models.backend import CUTTABLE, backend_of
from split_models.input_shapes import parse_shapes, read_sample, resolve
from split_models.recipes import recipe


def fixed_shapes(file: Path, texts: Sequence[str], sample: Path | None) -> Mapping[str, tuple[int, ...]]:
    """The input shapes that the user gave, in words or by a sample; they become those of the catalogue entry.

    Raises ConfigError for a format whose shapes cannot be fixed, and for shapes that do not fit.
    """
    asked = parse_shapes(texts)
    if not asked and sample is None:
        return {}
    kind = sniff(file)
    if kind not in CUTTABLE:
        raise ConfigError(f"{kind} models have no input shapes", next_step="leave it out", field="input_shape")
    ports = backend_of(kind).inputs(file)
    sampled = read_sample(sample, ports) if sample is not None else ()
    resolve(ports, asked, sampled)
    return {tensor.name: tensor.shape for tensor in sampled} | asked


def analysis_of(file: Path, entry: CatalogueEntry, options: argparse.Namespace) -> Analysis | None:
    """The analysis of a model that can be cut; None for formats that cannot."""
    if entry.format not in CUTTABLE:
        return None
    asked = Asked(
        shapes=_shapes_of(file, entry, options),
        sample=options.sample,
        conditions=conditions_of(options),
        measure=not options.no_measure,
    )
    with ProgressBar(f"analyse {entry.name}", unit="steps") as bar:
        return analyse_file(file, entry.format, asked, name=entry.name, progress=bar.update)


def _shapes_of(file: Path, entry: CatalogueEntry, options: argparse.Namespace) -> Mapping[str, tuple[int, ...]]:
    """What the user says now, else the entry, else the recipe; a sample speaks for itself."""
    asked = parse_shapes(options.input_shape)
    if options.sample is not None:
        return asked
    known = dict(entry.input_shapes)
    if not known and entry.recipe is not None:
        ports = backend_of(entry.format).inputs(file)
        known = {ports[0].name: recipe(entry.recipe).input_shape} if len(ports) == 1 else {}
    return known | asked


def conditions_of(options: argparse.Namespace) -> Conditions:
    """For which link and server cuts are ranked.

    Raises ConfigError unless rate and speed are above 0 and the round trip is not below it.
    """
    for name, value, least in (
        ("uplink_mbit", options.uplink_mbit, 1e-6),
        ("server_speed", options.server_speed, 1e-6),
        ("rtt_ms", options.rtt_ms, 0.0),
    ):
        if not least <= value < 1e9:
            raise ConfigError(f"--{name.replace('_', '-')} cannot be {value:g}", next_step="give a size", field=name)
    return Conditions(options.uplink_mbit / 8e-6, options.rtt_ms / 1e3, options.server_speed)
