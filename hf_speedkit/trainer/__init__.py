"""The glue: callbacks and trainer classes for transformers and TRL.

- what one uses: sft, config, attach, callbacks, kernel_callback, throughput_callback, trace_callback, config_rules
- before anything is loaded: hardware, installed_versions, job_settings, launching, machine, last_words, trackers,
  output, run_lock, adapters, memory_check, memory_settings, before_loading, weights
- the data: dataset_source, inputs, conversation_checks, templates, streaming, repeated_rows, stragglers,
  conversation_refusals, positions, preparation, raw_rows
- before step 1: module_mode, startup, preflight, prepared, packed_layers, communication, gradient_memory, zero_copy,
  zero_copy_proof, head_proof
- in the step: loss, loss_head, updates, first_step, nonfinite, expert_balance, garbage, recompute, peak_watch,
  layer_marks, kept_products, offload, offload_choice
- what is measured: micro_batches, observation, counted_steps, traced_steps, trace_marks, job_ledger, reduction,
  mfu_inputs, window_report, sinks, progress, summary
- checkpoints: checkpoints, checkpoint_folder, checkpoint_files, saved_totals, resume, resume_data, sharded_weights,
  export, stop_signal, resume_model
- ranks: agreement, frames, rank_watch
- benches: benchmark, bench_child
"""
