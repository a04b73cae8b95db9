"""Facts and arithmetic: frozen records and pure functions. Standard library only, no torch, no clock, no I/O."""
