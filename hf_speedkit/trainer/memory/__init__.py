"""What a step keeps on the device: planned before anything is loaded, then fitted to the memory there is.

- the plan: check, settings
- layers computed twice, as few as need be: recompute, peak_watch, layer_marks
- kept from the forward pass instead: kept_products, offload, offload_choice
"""
