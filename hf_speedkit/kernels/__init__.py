"""Which implementation each layer runs, whether it is right, and what to do when it is the slow one."""
