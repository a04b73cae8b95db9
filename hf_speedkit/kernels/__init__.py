"""Which implementation each layer runs, whether it is right, and what to do when it is the slow one.

- find: inspection, layout, requirements, modeling_files, imports, hub, liger, model_checks, config_checks, demands,
  flash_packages, experts, verdicts, refusal, faults
- know: compatibility, compatibility_rows, known, stack, caches
- prove: probe, probe_targets, probe_inputs, probe_batch, skeleton, reference, fused_parity, gated_delta_parity,
  attention_parity, lora_parity, ran, layer_probe, patience
- put in place: attention, fla_convolution, fused_layers, fused_forwards, gated_delta_forward,
  fused_attention, lora_forward, bindings, full_precision
- our own: loss_head, loss_head_triton, adamw, adamw_triton, qk_rotary, qk_rotary_triton, output_gate,
  output_gate_triton, lora
- memory of a layer: memory_trace, live_bytes, saved_tensors, stand_ins, traced_adapters
"""
