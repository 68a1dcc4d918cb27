"""Which fixed shapes a model is analysed and cut for: asked for, taken from a sample, or guessed and said so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from protocol.errors import ConfigError
from protocol.tensors import Tensor

PICTURE_SIDE = 224
SEQUENCE = 128
OTHER = 64
MAX_ELEMENTS = 1 << 28
"""Of one input: a slip of the keyboard in a shape should not ask for gigabytes."""

_INTEGERS = ("INT64", "INT32", "UINT8", "BOOL")


@frozen
class InputPort:
    """One input as the file has it: sizes are numbers, names of free dimensions, or None."""

    name: str
    datatype: str
    sizes: tuple[int | str | None, ...]

    def named(self, place: int) -> str | None:
        """The name that a free dimension shares with others; exporters also write `?`, which is none."""
        size = self.sizes[place]
        return size if isinstance(size, str) and any(c.isalnum() for c in size) else None


@frozen
class Resolved:
    """Fixed shapes by input, and one sentence for each that nobody gave."""

    shapes: Mapping[str, tuple[int, ...]]
    notes: tuple[str, ...]


def parse_shapes(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """`name=1x3x224x224` each. Raises ConfigError."""
    found: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, _, sizes = text.rpartition("=")
        parts = sizes.lower().replace(",", "x").split("x")
        if not name or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
            raise ConfigError(
                f"{text[:80]!r} is not NAME=1x3x224x224", next_step="give each size as a number", field="input_shape"
            )
        if name in found:
            raise ConfigError(f"input {name!r} is given twice", next_step="name each input once", field="input_shape")
        found[name] = tuple(int(part) for part in parts)
    return found


def read_sample(file: Path, inputs: Sequence[InputPort]) -> tuple[Tensor, ...]:
    """Tensors from a .npz (arrays by input name) or a .npy (the only input). Raises ConfigError."""
    import numpy as np

    from engines.arrays import to_tensor

    try:
        loaded: Any = np.load(file, allow_pickle=False)
        arrays = dict(loaded.items()) if hasattr(loaded, "items") else {inputs[0].name: loaded}
    except (OSError, ValueError, EOFError) as err:
        raise ConfigError(
            f"{file} is no .npy or .npz file of plain arrays", next_step="save it with numpy.savez", field="sample"
        ) from err
    if not hasattr(loaded, "items") and len(inputs) != 1:
        raise ConfigError(
            f"the model has {len(inputs)} inputs, a .npy file holds one array",
            next_step=f"save {', '.join(port.name for port in inputs)} in a .npz file",
            field="sample",
        )
    ports = {port.name: port for port in inputs}
    for name, array in arrays.items():
        if name not in ports:
            raise ConfigError(f"the model has no input {name!r}, it has {sorted(ports)}", field="sample")
        datatype = to_tensor(name, array).datatype
        if datatype != ports[name].datatype:
            raise ConfigError(f"input {name!r} takes {ports[name].datatype}, the sample is {datatype}", field="sample")
    return tuple(to_tensor(name, array) for name, array in arrays.items())


def resolve(
    inputs: Sequence[InputPort], asked: Mapping[str, tuple[int, ...]], sample: Sequence[Tensor] = ()
) -> Resolved:
    """A fixed shape for every input; `asked` beats the sample, both beat guesses.

    A free dimension that has a name is the same everywhere. Raises ConfigError for unknown inputs and misfits.
    """
    given = {tensor.name: tensor.shape for tensor in sample} | dict(asked)
    ports = {port.name: port for port in inputs}
    sizes: dict[str, int] = {}
    for name, shape in given.items():
        if name not in ports:
            raise ConfigError(f"the model has no input {name!r}, it has {sorted(ports)}", field="input_shapes")
        _bind(ports[name], shape, sizes)
    shapes: dict[str, tuple[int, ...]] = {}
    notes: list[str] = []
    for port in inputs:
        shapes[port.name] = given.get(port.name) or _guess(port, sizes, notes)
        elements = 1
        for size in shapes[port.name]:
            elements *= size
        if elements > MAX_ELEMENTS:
            raise ConfigError(f"input {port.name!r} would hold {elements} values", field="input_shapes")
    return Resolved(shapes, tuple(notes))


def _bind(port: InputPort, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
    fits = len(port.sizes) == len(shape) and all(size > 0 for size in shape)
    for place, (wanted, size) in enumerate(zip(port.sizes, shape, strict=False)):
        if isinstance(wanted, int) and wanted != size:
            fits = False
        name = port.named(place)
        if name is not None and sizes.setdefault(name, size) != size:
            raise ConfigError(f"the dimension {name!r} cannot be both {sizes[name]} and {size}", field="input_shapes")
    if not fits:
        raise ConfigError(
            f"{'x'.join(map(str, shape))} does not fit input {port.name!r}, {_shown(port.sizes)}",
            next_step="give as many sizes as it has, and its fixed ones unchanged",
            field="input_shapes",
        )


def _guess(port: InputPort, sizes: dict[str, int], notes: list[str]) -> tuple[int, ...]:
    shape: list[int] = []
    guessed = False
    for place, wanted in enumerate(port.sizes):
        name = port.named(place)
        if isinstance(wanted, int):
            shape.append(wanted)
        elif name in sizes:
            shape.append(sizes[name])
        else:
            shape.append(_default(port, place))
            guessed = True
            if name is not None:
                sizes[name] = shape[-1]
    if guessed:
        taken = "x".join(map(str, shape))
        notes.append(f"input {port.name} is {_shown(port.sizes)} in the file and was taken as {taken}")
    return tuple(shape)


def _default(port: InputPort, place: int) -> int:
    """A batch of 1; the sides of a picture where channels show one; a sequence of tokens for integers."""
    wanted = port.sizes[place]
    if place == 0 or (isinstance(wanted, str) and "batch" in wanted.lower()):
        return 1
    if len(port.sizes) == 4:
        channels = 3 if port.sizes[3] in (1, 3, 4) else 1
        return 3 if place == channels else PICTURE_SIDE
    if port.datatype in _INTEGERS or (isinstance(wanted, str) and "seq" in wanted.lower()):
        return SEQUENCE
    return OTHER


def _shown(sizes: Sequence[int | str | None]) -> str:
    if any(isinstance(size, str) and len(size) > 1 for size in sizes):
        return " x ".join("?" if size is None else str(size) for size in sizes)
    return "x".join("?" if size is None else str(size) for size in sizes) or "a single value"
