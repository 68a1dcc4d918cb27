"""The device's house: config, composition, discovery, control, policy, registration, local server, CLI."""
