"""The Python side of a host app: the bridge to Kotlin, and what the service calls."""
