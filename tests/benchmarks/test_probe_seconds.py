"""benchmarks/probe_seconds.py: what it writes, from what doctor really says (on a CPU, where little can be probed)."""

import json

import probe_seconds

from hf_speedkit.cli.doctor import diagnose_model
from hf_speedkit.cli.doctor_view import as_json
from hf_speedkit.kernels.stack import read_stack


def test_the_file_holds_machine_definitions_and_seconds_of_both_states():
    from support import tiny_hybrid

    found = json.loads(
        as_json(diagnose_model("m", tiny_hybrid().config, stack=read_stack(), slots=64, probe=True, device="cpu"))
    )
    written = probe_seconds.result({"cold": (found, 90.0), "warm": (found, 9.0)}, slots=8192, measured_at="now")
    assert json.loads(json.dumps(written, allow_nan=False)) == written
    assert [(run["caches"], run["process_s"]) for run in written["runs"]] == [("cold", 90.0), ("warm", 9.0)]
    assert {function["function"] for function in written["runs"][0]["functions"]} >= {"attention"}
    assert written["environment"]["packages"]["torch"]
    assert written["what"]
    assert set(written["definitions"]) == {"process_s", "probe_s", "first_call_s", "call_s"}
    assert all(run["probe_s"] > 0 for run in written["runs"])
