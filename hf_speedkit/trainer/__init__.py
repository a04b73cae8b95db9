"""The glue: callbacks and trainer classes for transformers and TRL.

The modules here are those that a script imports; what they are made of lies in rooms of its own, named by subject.

- what one uses: sft, config, attach, callbacks, kernel_callback, throughput_callback, trace_callback, config_rules,
  combination_rules, launcher_rules, number_rules, precision_rules, setting_names
- what a job calls before its model is loaded: broken_installs, hardware, installed_versions, job_settings,
  hub_access, launching, machine, trackers, optional_packages, output, adapters, stored_weights, before_loading
- what it loads: dataset_source, weights, whole_weights
- where its numbers go: sinks, summary
- benches: benchmark, bench_child
- rooms: data, checkpoints, proof, step, metrics, memory, sharded, ranks
"""
