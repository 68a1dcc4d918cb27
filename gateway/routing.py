"""Which side answers a request, in three levels: rules, complexity, and what moves the threshold between the sides.

`unmoved` and `decide` are the pure part; `PolicyRouter` looks up what they need: the prompt's features, the sides, the
house's signals. A model that was named stays; everything here is for `model: "auto"`. A route is a preference: both
sides stay allowed for fallbacks and migration, unless a rule is strict. Privacy and the policy's targets have drawn the
line before.
"""

from __future__ import annotations

from attrs import define, evolve, frozen

from gateway import complexity
from gateway.context import Caller, Constraints, constraints_of
from gateway.dynamic_routing import Reach, Threshold, reach_of, threshold
from gateway.intents import IntentModel, default_model
from gateway.ports import AUTO, Findings, Level, Offer, Routed, check_model, narrowed
from gateway.prompt_reader import PromptReader
from gateway.route_plugins import Asked, Plugins
from gateway.route_rules import Facts, band_of, first_match
from gateway.route_sides import Side, Sides, side_of_target, sides
from gateway.second_opinion import SecondOpinion
from protocol.chat import ChatRequest
from protocol.errors import NotFound
from protocol.policy import Policy
from protocol.policy_routing import IntentRouting, RouteRule, RoutingPolicy, is_edge, unarmed

TOKENS_PER_CHARACTER, TOKENS_PER_CHARACTER_ZH = 0.25, 0.7
"""Rough, to tell short prompts from long ones before anything was tokenised."""


@frozen
class InForce:
    """What follows from a policy alone. armed: routes to the edge count. reasons, edges: of each rule, why it decides
    and whether it names this machine. reach: of level 3. base: the cloud's threshold in words.
    """

    policy: Policy
    armed: bool
    reasons: tuple[str, ...]
    edges: tuple[bool, ...]
    reach: Reach
    base: str


@define
class Verdict:
    """What a level of routing said. side: who answers first."""

    side: Side
    level: Level
    reason: str
    strict: bool = False


def unmoved(facts: Facts, edge: Side, cloud: Side, now: InForce) -> Verdict | None:
    """Level 2, where nothing could move the threshold far enough to change what it says.

    A hard prompt goes to the cloud: the device answers it only when nothing else may.
    """
    if not cloud.up:
        return None
    if facts.hard:
        return Verdict(cloud, "heuristic", "a hard question, short or not")
    routing, reach = now.policy.routing, now.reach
    if facts.tools and routing.tools_in_cloud:
        return Verdict(cloud, "heuristic", "tools are called by the cloud: policy.routing.tools_in_cloud")
    hardness = facts.complexity
    if reach.least <= hardness < reach.most or not edge.up:
        return None
    if hardness < routing.cloud_threshold:
        return Verdict(edge, "heuristic", f"complexity {hardness:.2f} is below {now.base}, whatever moves that")
    return Verdict(cloud, "heuristic", f"complexity {hardness:.2f} reaches {now.base}, whatever moves that")


def decide(facts: Facts, edge: Side, cloud: Side, routing: RoutingPolicy, moved: Threshold) -> Verdict:
    """Levels 2 and 3: complexity against the threshold."""
    there = facts.complexity >= moved.value
    level: Level = "dynamic" if there != (facts.complexity >= routing.cloud_threshold) else "heuristic"
    why = f" ({'; '.join(moved.reasons)})" if moved.moved else ""
    reason = f"complexity {facts.complexity:.2f} {'reaches' if there else 'is below'} {moved.value:.2f}{why}"
    return Verdict(cloud if there else edge, level, reason)


class PolicyRouter:
    """The gateway's Router.

    model: tells intents; the package's own by default, read when the first request has to be routed. second: is asked
    where it abstains and a rule wants to know.
    """

    def __init__(
        self,
        model: IntentModel | None = None,
        plugins: Plugins | None = None,
        second: SecondOpinion | None = None,
    ) -> None:
        self._reader = None if model is None else PromptReader(model)
        self._plugins = Plugins() if plugins is None else plugins
        self._second = second
        self._in_force = in_force(Policy())

    def route(
        self, chat: ChatRequest, caller: Caller, findings: Findings, offer: Offer, policy: Policy, draw: float
    ) -> Routed:
        """Raises NotFound when there is nothing to choose from, NotAllowed for a model that the key may not name."""
        if policy is not self._in_force.policy:
            self._in_force = in_force(policy)
        constraints = narrowed(constraints_of(policy), findings)
        if chat.model != AUTO:
            check_model(caller, chat.model)
            return Routed(constraints, chat.model, "named by the client", "named")
        both = sides(offer, policy.routing, caller, constraints)
        if both.edge is None and both.cloud is None:
            raise NotFound("no model is here to choose from", next_step="pull a model, or name one", field="model")
        facts = self.facts(chat, caller, policy.routing)
        verdict = self._ruled(chat, caller, facts, both, offer, constraints, policy)
        if verdict is None and chat.endpoint == "embedding":
            here = both.edge or both.cloud
            verdict = Verdict(here, "rules", "vectors are made on this machine where it can") if here else None
        if verdict is None:
            verdict = self._weighed(facts, both, offer, caller, policy.routing)
        return _routed(verdict, facts, both, constraints)

    async def consulted(self, chat: ChatRequest, caller: Caller, policy: Policy) -> Caller:
        """The caller with the intent that the second opinion tells, where the classifier abstains."""
        routing = policy.routing
        if self._second is None or chat.model != AUTO or caller.intent is not None:
            return caller
        if not any(rule.when.intent for rule in routing.rules):
            return caller
        text, reader = _read(chat)[0], self._prompts()
        if reader.read(text).intent.probability >= believed_from(routing.intent, reader.model):
            return caller
        intent = await self._second.intent(text)
        return caller if intent is None else evolve(caller, intent=intent)

    def facts(self, chat: ChatRequest, caller: Caller, routing: RoutingPolicy) -> Facts:
        """What is known of a request: by its size, its last turn, and what the client says of it."""
        text, characters, turns = _read(chat)
        reader = self._reader or self._prompts()
        seen = reader.read(text)
        tokens = int(characters * (TOKENS_PER_CHARACTER_ZH if seen.chinese else TOKENS_PER_CHARACTER))
        hardness = complexity.estimate(seen.marks, tokens, turns, len(chat.tools))
        intent = caller.intent
        if intent is None and seen.intent.probability >= believed_from(routing.intent, reader.model):
            intent = seen.intent.name
        return Facts(
            tokens,
            hardness.complexity,
            band_of(hardness.complexity, routing),
            hardness.hard,
            intent,
            "zh" if seen.chinese else "en",
            caller.tenant,
            bool(chat.tools),
            caller.labels,
        )

    def _prompts(self) -> PromptReader:
        if self._reader is None:
            self._reader = PromptReader(default_model())
        return self._reader

    def close(self) -> None:
        """End the plugins' threads."""
        self._plugins.close()

    def _ruled(
        self,
        chat: ChatRequest,
        caller: Caller,
        facts: Facts,
        both: Sides,
        offer: Offer,
        constraints: Constraints,
        policy: Policy,
    ) -> Verdict | None:
        """Plugins, then level 1. A rule whose target cannot answer now says nothing."""
        routing = policy.routing
        if routing.plugins:
            asked = Asked(chat, caller, facts)
            for name, found in list(self._plugins.suggestions(routing.plugins, asked, routing.plugin_deadline_s)):
                rule = RouteRule(found.target, model=found.model)
                side = self._side_of(rule, is_edge(rule.target), facts, both, offer, caller, constraints)
                if side is not None:
                    return Verdict(side, "plugin", f"plugin {name}: {found.reason or found.target}")
        at = first_match(routing.rules, facts)
        if at is None:
            return None
        rule, now = routing.rules[at], self._in_force
        side = self._side_of(rule, now.edges[at], facts, both, offer, caller, constraints)
        return None if side is None else Verdict(side, "rules", now.reasons[at], rule.strict)

    def _side_of(
        self,
        rule: RouteRule,
        at_edge: bool,
        facts: Facts,
        both: Sides,
        offer: Offer,
        caller: Caller,
        constraints: Constraints,
    ) -> Side | None:
        """The side that a rule names, if it can answer now and may; without a model, one of those that were found.

        at_edge: it names this machine.
        """
        if at_edge and (rule.strict or not self._edge_may(facts, both)):
            return None
        if rule.model is None and at_edge:
            side = both.edge
        elif rule.model is None and rule.target.lower() == "cloud":
            side = both.cloud
        else:
            side = side_of_target(rule.target, rule.model, offer, caller, constraints)
        return side if side is not None and (side.up or rule.strict) else None

    def _weighed(self, facts: Facts, both: Sides, offer: Offer, caller: Caller, routing: RoutingPolicy) -> Verdict:
        """Levels 2 and 3: budgets, device and cloud are looked at where they can make a difference."""
        edge, cloud = both.edge, both.cloud
        if edge is None or cloud is None:
            only = edge or cloud
            assert only is not None, "routing begins with a side"
            return Verdict(only, "rules", "the only side that may answer")
        verdict = unmoved(facts, edge, cloud, self._in_force)
        if verdict is not None:
            return verdict
        signals, base = offer.signals(caller), routing.cloud_threshold
        moved = threshold(base, routing.dynamic, signals, edge.views, cloud.views, facts.prompt_tokens)
        return decide(facts, edge, cloud, routing, moved)

    def _edge_may(self, facts: Facts, both: Sides) -> bool:
        """An edge route counts with its fallback armed, and never for a hard prompt that the cloud could take."""
        if both.cloud is None:
            return True
        return self._in_force.armed and not (facts.hard and both.cloud.up)


def in_force(policy: Policy) -> InForce:
    """Worked out when a policy comes into force, not per request."""
    routing = policy.routing
    return InForce(
        policy,
        unarmed(routing, policy.privacy.local_only) is None,
        tuple(f"rule {number}: {rule.target}" for number, rule in enumerate(routing.rules, 1)),
        tuple(is_edge(rule.target) for rule in routing.rules),
        reach_of(routing.cloud_threshold, routing.dynamic),
        f"{routing.cloud_threshold:.2f}",
    )


def believed_from(policy: IntentRouting, model: IntentModel) -> float:
    """The least probability at which an intent counts: the policy's, if it was chosen for this very model."""
    if policy.threshold is not None and policy.encoder == model.id:
        return policy.threshold
    return model.threshold


def _routed(verdict: Verdict, facts: Facts, both: Sides, constraints: Constraints) -> Routed:
    side = verdict.side
    if verdict.strict:
        names = frozenset(view.name for view in side.views)
        constraints = evolve(constraints, targets=names, reason=verdict.reason)
    other = both.of("cloud" if side.start == "device" else "device")
    return Routed(
        constraints,
        side.model,
        verdict.reason,
        verdict.level,
        side.start,
        None if other is None or verdict.strict else other.model,
        facts.intent,
        facts.complexity,
        facts.hard,
    )


def _read(chat: ChatRequest) -> tuple[str, int, int]:
    """(the user's last turn, characters of the whole prompt, turns of the user); token ids have no text."""
    if isinstance(chat.prompt, str):
        return chat.prompt, len(chat.prompt), 1
    text, characters, turns = "", 0, 0
    for message in chat.prompt:
        if isinstance(message, int):
            return "", 4 * len(chat.prompt), 1
        characters += len(message.content)
        if message.role == "user":
            text, turns = message.content, turns + 1
    return text, characters, max(1, turns)
