"""The cloud's house: coordinator, registry, policy publishing, tails, handoff endpoint."""
