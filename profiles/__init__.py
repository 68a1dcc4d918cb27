"""The device: SoC facts, benchmark schedule and documents, rates."""
