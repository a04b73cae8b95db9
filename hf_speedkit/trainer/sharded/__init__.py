"""FSDP2: what it has made of a model, and its gathers corrected.

- looked at before step 1: prepared, preflight
- corrected for the time of training: communication, gradient_memory, zero_copy, zero_copy_proof
"""
