"""From documents of any length to rows of one fixed shape, and the proof that documents do not see one another."""
