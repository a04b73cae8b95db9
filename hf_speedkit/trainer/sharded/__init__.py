"""FSDP2: what it has made of a model, and its gathers corrected.

- what a model's units are: units
- sent and looked at before step 1: buffers, prepared, preflight
- corrected for the time of training: communication, ahead, gradient_memory, put_back, zero_copy,
  zero_copy_proof
"""
