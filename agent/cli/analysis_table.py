"""A model's analysis for a person: a bounded table of its cuts, best first, or as JSON with all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from split_models.analysis import Analysis, CutFigures, Sides
from split_models.graph import GraphTensor

MOST_ROWS = 12
_NAME_CELLS = 34


def table(analysis: Analysis, everything: bool = False) -> Sequence[str]:
    """The lines to print: what the model is, what was assumed, whole here and there, then cuts."""
    lines = [_heading(analysis)] if analysis.operators else []
    lines += [f"note: {note}" for note in analysis.notes]
    if analysis.why_none:
        return [*lines, f"{analysis.model} cannot be cut: {analysis.why_none}"]
    shown = analysis.cuts if everything else analysis.cuts[:MOST_ROWS]
    lines += [_conditions(analysis), _columns()]
    lines += [_row(figures) for figures in shown]
    kind = "measured" if analysis.measured else "guessed"
    lines.append(
        f"whole model here {_ms(analysis.whole_s)} ms ({kind}); raw input to the server {_ms(analysis.cloud_s)} ms"
    )
    if len(shown) < len(analysis.cuts):
        lines.append(f"{len(analysis.cuts) - len(shown)} more cuts; --all lists them")
    return lines


def document(analysis: Analysis) -> dict[str, Any]:
    """The same for machines, every cut included."""
    return {
        "model": analysis.model,
        "format": analysis.format,
        "inputs": [_port(tensor) for tensor in analysis.inputs],
        "outputs": [_port(tensor) for tensor in analysis.outputs],
        "operators": analysis.operators,
        "flops": analysis.flops,
        "whole_s": analysis.whole_s,
        "cloud_s": analysis.cloud_s,
        "measured": analysis.measured,
        "notes": list(analysis.notes),
        "why_none": analysis.why_none,
        "cuts": [_cut(figures) for figures in analysis.cuts],
    }


def _heading(analysis: Analysis) -> str:
    several = len(analysis.cuts) - analysis.single_cuts
    ports = f"{_ports(analysis.inputs)} -> {_ports(analysis.outputs)}"
    cuts = f"{analysis.single_cuts} cuts of one tensor, {several} of several"
    return f"{ports}; {analysis.operators} operators, {analysis.flops / 1e9:.2f} GFLOP; {cuts}"


def _ports(tensors: Sequence[GraphTensor]) -> str:
    text = ", ".join(f"{tensor.name} {'x'.join(map(str, tensor.shape)) or 'scalar'}" for tensor in tensors[:4])
    return text + (f" and {len(tensors) - 4} more" if len(tensors) > 4 else "")


def _conditions(analysis: Analysis) -> str:
    said = analysis.conditions
    return (
        f"best first at {said.up_bytes_per_s * 8e-6:g} Mbit/s up, {said.rtt_s * 1e3:g} ms round trip and a server"
        f" {said.server_speed_ratio:g} times as fast:"
    )


def _columns() -> str:
    sizes = f"{'KiB raw':>9} {'KiB sent':>13}"
    return f"{'cut':<5} {'crosses':<{_NAME_CELLS}} {sizes} {'head ms':>15} {'tail ms':>15} {'total':>8}"


def _row(figures: CutFigures) -> str:
    sent = f"{figures.wire_bytes / 1024:.1f} {figures.codec}"
    head = _pair(figures.predicted.head_s, figures.measured.head_s if figures.measured else None)
    tail = _pair(figures.predicted.tail_s, figures.measured.tail_s if figures.measured else None)
    names = ", ".join(tensor.name for tensor in figures.cut.crossing) + (" (an input)" if figures.sends_input else "")
    names = names if len(names) <= _NAME_CELLS else names[: _NAME_CELLS - 3] + "..."
    size, total = f"{figures.raw_bytes / 1024:.1f}", _ms(figures.total_s)
    return f"{figures.cut.id:<5} {names:<{_NAME_CELLS}} {size:>9} {sent:>13} {head:>15} {tail:>15} {total:>8}"


def _pair(predicted_s: float, measured_s: float | None) -> str:
    """Predicted, then measured."""
    return f"{_ms(predicted_s)} / {_ms(measured_s) if measured_s is not None else '-'}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _port(tensor: GraphTensor) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}


def _cut(figures: CutFigures) -> dict[str, Any]:
    return {
        "id": figures.cut.id,
        "crossing": [_port(tensor) for tensor in figures.cut.crossing],
        "raw_bytes": figures.raw_bytes,
        "wire_bytes": figures.wire_bytes,
        "codec": figures.codec,
        "predicted": _sides(figures.predicted),
        "measured": _sides(figures.measured) if figures.measured else None,
        "total_s": figures.total_s,
        "sends_input": figures.sends_input,
    }


def _sides(sides: Sides) -> dict[str, float]:
    return {"head_s": sides.head_s, "tail_s": sides.tail_s}
