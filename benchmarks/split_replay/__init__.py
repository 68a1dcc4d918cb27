"""Ours against every fixed arm and an oracle over real network traces."""
