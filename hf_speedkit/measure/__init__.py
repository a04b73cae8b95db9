"""Clocks and counters of a training step. Nothing here adds a host sync to the hot path.

- a step: step_clock, launches, compilations, profilers, device_memory
- the GPU and the machine: gpu_sampler, nvml, gpm, environment, interleaved, host_memory
- recording a trace: trace_recorder, trace_trim
- reading one: trace, trace_reader, trace_bytes, trace_events, trace_columns, trace_intervals, trace_steps, trace_work,
  trace_device, trace_modules, trace_losses, trace_tables
"""
