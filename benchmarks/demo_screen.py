"""What `make demo` ends with, kept as the file that README's screen comes from; two CPU cores, a minute or two.

python benchmarks/demo_screen.py            # runs the tiny job, then writes the result and README's screen
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from hf_speedkit.core.records import to_dict
from hf_speedkit.measure.environment import collect_environment

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "cpu_demo.json"
SETTINGS = "recipes/tiny_sft.yaml"
SCREEN = re.compile(r"(?<=^```text\n)hf_speedkit: what happened\n.*?(?=^```$)", re.MULTILINE | re.DOTALL)


def run_demo() -> list[str]:
    """Lines of the closing table, with the folder that the demo itself writes to."""
    launch = [str(Path(sys.executable).with_name("accelerate")), "launch", "recipes/qwen27b_sft.py"]
    with tempfile.TemporaryDirectory(prefix="speedkit_demo_") as folder:
        command = [*launch, "--config", SETTINGS, "--output_dir", folder]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    table = done.stdout[done.stdout.index("hf_speedkit: what happened") :]
    shown = table.replace(folder, "runs/tiny_sft")
    return [_refilled(line) for line in shown.splitlines() if line.strip()]


def _refilled(line: str) -> str:
    """A row whose text became shorter, as wide as the others."""
    text = line.rstrip()
    return f"{text[:-1].rstrip():<109}│" if text.endswith("│") else text


def main() -> None:
    """Run the demo, write the result, bring README up to date."""
    screen = run_demo()
    result = {
        "what": "the closing table of make demo",
        "settings": {"recipe": SETTINGS},
        "environment": to_dict(collect_environment()),
        "screen": screen,
    }
    RESULT.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    readme = ROOT / "README.md"
    text = "\n".join(screen) + "\n"
    readme.write_text(SCREEN.sub(lambda _: text, readme.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
