"""Dispatch against random routing at equal budget, on recorded lengths, arrivals and TTFTs."""
