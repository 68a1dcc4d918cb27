"""What stands fixed for one request: its id, its deadline, the policy it began under, and where it may go."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

from protocol.policy import Policy
from protocol.trace import TraceContext

NO_TRACE = TraceContext("", "", sampled=False)
"""Of a request that came by no front door."""


@frozen
class Constraints:
    """The set inside which dispatch, race, migration and fallback choose; nothing leaves it later.

    `targets` None means every name. `reason` says which rule drew the line, for errors and records.
    """

    local_only: bool = False
    targets: frozenset[str] | None = None
    reason: str = ""

    def allows(self, name: str, local: bool) -> bool:
        """Whether a target of this name and place may see the request; `cloud` means every `cloud:PROVIDER` too."""
        if self.local_only and not local:
            return False
        return self.targets is None or name in self.targets or name.partition(":")[0] in self.targets


@frozen
class Caller:
    """Who asks, and what they said about the request.

    tenant, key_id: from the key; a loopback client has none and is `local`. user, conversation_id, intent, labels: what
    the request says of itself, by headers or metadata. models: models that the key may name; None means every model.
    traceparent: the header of that name, as it came.
    """

    tenant: str = "local"
    key_id: str | None = None
    user: str | None = None
    conversation_id: str | None = None
    intent: str | None = None
    labels: Mapping[str, str] = field(factory=dict)
    models: frozenset[str] | None = None
    traceparent: str = ""


LOCAL = Caller()
"""A client on this machine, without a key."""


@frozen
class RequestContext:
    """One request under way. `deadline_at_s` is monotonic; `policy` is read once and stays for the whole request.

    trace: its span. decided_s: seconds from its arrival until its engines were known.
    """

    id: str
    model: str
    deadline_at_s: float
    policy: Policy
    constraints: Constraints
    caller: Caller = LOCAL
    trace: TraceContext = NO_TRACE
    decided_s: float = 0.0


_drawn: tuple[Policy, Constraints] | None = None
"""The last policy that was asked for, by the object: it is the same one for all requests until another is in force."""


def constraints_of(policy: Policy) -> Constraints:
    """The allowed set that a policy draws: privacy first, then the routing targets."""
    global _drawn
    drawn = _drawn
    if drawn is None or drawn[0] is not policy:
        drawn = _drawn = policy, _constraints_of(policy)
    return drawn[1]


def _constraints_of(policy: Policy) -> Constraints:
    if policy.privacy.local_only:
        return Constraints(True, None, "policy.privacy.local_only keeps prompts and answers on the device")
    return Constraints(False, frozenset(policy.routing.targets), "policy.routing.targets")
