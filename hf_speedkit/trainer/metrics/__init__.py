"""What is measured of a run, from the model's inputs to the lines that are logged.

- counted in a step: observation, micro_batches, returned_losses, repeated_rows, counted_steps
- put against time and peak: job_ledger, mfu_inputs, frozen_weights, device_peak, saved_totals
- said: notices, window_report, progress, nonfinite
- steps that are traced: trace_sessions, traced_steps, trace_marks
"""
