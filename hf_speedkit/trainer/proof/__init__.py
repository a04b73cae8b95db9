"""What is shown before step 1, and in it: kernels, documents kept apart, the loss head.

- the order of it all: startup
- one proof each: head_proof, flattening, collated, first_step
- while they run: module_mode
"""
