"""Reads the history rows of an offline wandb run (0.31): 32 KiB blocks of checksummed, possibly split records."""

import json
import struct

BLOCK = 32 * 1024


def history(path):
    """The rows logged to the run, in order, as dictionaries."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts, rows = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK  # a block's tail too short for a record's head is padding
            continue
        _checksum, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last of several
            record = wandb_internal_pb2.Record.FromString(parts)
            if record.HasField("history"):
                items = record.history.item
                rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
            parts = b""
    return rows
