"""The privacy section of a policy: what stays on the device, and what is taken out of a text before it leaves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from attrs import field, frozen

from protocol.errors import ProtocolError

Kind = Literal["email", "phone", "id_card", "card", "iban", "secret", "ip", "name"]
"""What detectors find: e-mail addresses, phone numbers, identity card numbers, payment cards, bank accounts, keys and
passwords, IP addresses, and names from the policy's list."""

KINDS: tuple[Kind, ...] = get_args(Kind)

MAX_NAMES = 2000


@frozen
class PrivacyPolicy:
    """What may leave the device.

    local_only: no byte of a prompt or an answer leaves the device.
    local_only_labels: label -> values; a request with one of them stays on the device (`*`: any value).
    local_only_kinds: a request in which one of these is found stays on the device.
    redact_kinds: found before a request may leave, these are replaced by placeholders and put back into the answer.
    names: people, places and projects to be treated as `name`, whatever their case.
    images_leave: false: a request with an image stays on the device, for no detector looks into it.
    """

    local_only: bool = False
    local_only_labels: Mapping[str, tuple[str, ...]] = field(factory=dict)
    local_only_kinds: tuple[Kind, ...] = ()
    redact_kinds: tuple[Kind, ...] = KINDS
    names: tuple[str, ...] = ()
    images_leave: bool = True


def check_privacy(privacy: PrivacyPolicy) -> None:
    """Raise ProtocolError naming the first field that makes no sense."""
    if len(privacy.names) > MAX_NAMES:
        raise ProtocolError(
            f"privacy.names has {len(privacy.names)} names, at most {MAX_NAMES} are taken", field="privacy.names"
        )
    for at, name in enumerate(privacy.names):
        if len(name.strip()) < 2:
            raise ProtocolError(
                f"privacy.names[{at}] is {name!r}; a name has two characters at least", field=f"privacy.names[{at}]"
            )
