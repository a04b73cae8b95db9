"""Facts and arithmetic: frozen records and pure functions. Standard library only, no torch, no clock, no I/O.

- the vocabulary: records, errors, printable
- facts: devices, families, tested_versions, needed_versions
- FLOPs: flops, layer_flops
- memory: memory, memory_sizes, memory_plan, memory_choice, memory_words
- documents and checkpoints: document_records, checkpoint_records
- tokens and rates: stepsum, rates, throughput, window_metrics, window_findings, metric, metrics, step_parts, summary
- ranks: ranks, sharding
- traces: trace_records, trace_rows, trace_signals, kernel_groups, diagnosis, trace_causes, trace_limits, trace_brief,
  trace_compare, trace_ranks, timeline
- runs and benches: step_log, run_report, run_limits, plot, bench_records, bench_table, run_means
"""
