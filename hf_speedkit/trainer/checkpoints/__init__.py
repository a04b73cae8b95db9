"""Checkpoints that are whole or not there, and the model at the end.

- the trainer's part, which saves and goes on: safe
- on the disk: files, folder, run_lock
- stopped and going on: interrupt, resume, resume_model, other_model, sharded_weights
- the model at the end, of a live run and of a checkpoint: final_model, export
"""
