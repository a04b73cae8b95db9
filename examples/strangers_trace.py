"""Read a trace that hf_speedkit did not record: what torch.profiler writes, with the verdict in words and as numbers.

Give a file of your own (.json or .json.gz): python examples/strangers_trace.py trace.json.gz
"""

import sys
from pathlib import Path

import tiny
import torch

from hf_speedkit import diagnose, summarize_trace

if len(sys.argv) > 1:
    path = Path(sys.argv[1])
else:
    path = Path("strangers_trace.json")
    model, tokens = tiny.model(), torch.randint(256, (1, 128))
    with torch.profiler.profile() as recorded:
        model(input_ids=tokens, labels=tokens).loss.backward()
    recorded.export_chrome_trace(str(path))

summary = summarize_trace(path)
for finding in diagnose(summary):
    print(f"{finding.severity.value} {finding.rule}: {finding.message}")
    print(*(f"    {line}" for line in finding.evidence), sep="\n")
for operation in summary.cpu_ops[:5]:
    print(f"{operation.name:<40} {operation.calls:>6} calls")
