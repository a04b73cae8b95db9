"""Clocks and counters of a training step. Nothing here adds a host sync to the hot path."""
