"""Names of a tensor model's ports, and the check of its inputs before any runtime sees them."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.errors import BadRequest
from protocol.tensors import Tensor, TensorSpec, check_against


def match_inputs(inputs: Sequence[Tensor], specs: Sequence[TensorSpec]) -> list[Tensor]:
    """`inputs` in the order of `specs`. Raises BadRequest for missing, unknown or doubled names, and misfits."""
    by_name = {tensor.name: tensor for tensor in inputs}
    if len(by_name) != len(inputs):
        raise BadRequest("an input is given twice", field="inputs")
    wanted = [spec.name for spec in specs]
    for name in by_name:
        if name not in wanted:
            raise BadRequest(f"the model has no input {name[:64]!r}; it takes {', '.join(wanted)}", field=name[:64])
    for spec in specs:
        if spec.name not in by_name:
            raise BadRequest(f"input {spec.name!r} is missing", field=spec.name)
        check_against(by_name[spec.name], spec)
    return [by_name[name] for name in wanted]


def unique_names(tensors: Sequence[tuple[int, str]]) -> dict[int, str]:
    """By index, for (index, name) pairs: the own name where no earlier pair took it, else that and the index.

    For formats that find tensors by index, where names may be empty or repeat.
    """
    found: dict[int, str] = {}
    taken: set[str] = set()
    for index, own in tensors:
        if index in found:
            continue
        name = own if own and own not in taken else f"{own or 'tensor'}_{index}"
        while name in taken:
            name += "_"
        taken.add(name)
        found[index] = name
    return found
