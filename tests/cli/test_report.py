"""`hf-speedkit report`: the page's structure, escaping, gaps, exit codes; once in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import zlib
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import step_logs as logs
from trace_files import DATA, steady_trace
from typer.testing import CliRunner

from hf_speedkit.cli.main import app

HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(1)>&\x1b[31m\u202e]]>"


def run(*arguments):
    result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, ["report", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def out(tmp_path):
    return tmp_path / "page.html"


def page_of(out, *arguments):
    result = run(*arguments, "--out", out)
    assert result.exit_code == 0, result.output
    return out.read_text()


class Page(HTMLParser):
    """Tags of a page and whether they are closed."""

    VOID = frozenset({"meta", "br", "img", "link"})

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self._open = [], [], []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self._open.pop() == tag


def drawings(page, kind="wide"):
    return [ElementTree.fromstring(svg) for svg in re.findall(rf'<div class="{kind}">(<svg.*?</svg>)', page, re.S)]


def paths(svg, style):
    return [node.get("d") for node in svg.iter("path") if style in (node.get("class") or "").split()]


def test_one_run_gives_one_page_that_is_whole_and_needs_nothing_else(tmp_path, out):
    text = page_of(out, logs.write(tmp_path / "first", logs.run(40)))
    page = Page(text)
    assert "script" not in page.tags
    assert not {"img", "link", "iframe", "object", "embed", "form", "base"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name in ("href", "src", "srcset", "xlink:href", "style")
                or name.startswith("on")]  # fmt: skip
    assert "default-src 'none'" in text
    assert not re.search(r"https?://|url\(|@import", text)
    assert str(tmp_path) not in text


def test_speed_and_utilisation_share_a_time_axis_and_utilisation_is_fixed_to_100(tmp_path, out):
    lines = [logs.window(line["step"], utilization=50.0) if line["kind"] == "window" else line for line in logs.run(40)]
    page = page_of(out, logs.write(tmp_path / "first", lines))
    speed = drawings(page)[0]
    (real,), (slots,), (util,) = (paths(speed, style) for style in ("real", "slots", "util"))
    assert [re.findall(r"H([\d.]+)", path) for path in (real, slots)] == [re.findall(r"H([\d.]+)", util)] * 2
    # 50 % lies half way between the ends of the axis, whatever the values are: 20 px at the top, 266 at the bottom.
    assert re.match(r"M58 143H", util)
    words = [node.text for node in speed.iter("text")]
    assert {"tokens/s", "util. %", "0", "50", "100", "elapsed time of the run"} <= set(words)


def test_gaps_stay_gaps(tmp_path, out):
    lines = [logs.window(20, rate=None, utilization=None) if (line["kind"], line["step"]) == ("window", 20) else line
             for line in logs.run(40)]  # fmt: skip
    for kind in ("wide", "narrow"):
        speed = drawings(page_of(out, logs.write(tmp_path / "first", lines)), kind)[0]
        for style in ("real", "slots", "util"):
            assert paths(speed, style)[0].count("M") == 2


@pytest.mark.parametrize("title", ["Tokens per second and GPU utilisation", "Where a step's time goes",
                                   "FLOP utilisation (MFU, HFU, OFU)", "GPU memory in use", "Loss"])  # fmt: skip
def test_every_chart_is_there_with_a_unit(tmp_path, out, title):
    page = page_of(out, logs.write(tmp_path / "first", logs.run(40)))
    found = {svg.get("aria-label"): svg for svg in drawings(page)}
    assert [node.text for node in found[title].iter("text") if node.get("class") == "unit"]


def test_step_parts_are_stacked_and_named(tmp_path, out):
    page = page_of(out, logs.write(tmp_path / "first", logs.run(40)))
    (stack,) = (svg for svg in drawings(page) if svg.get("aria-label") == "Where a step's time goes")
    assert all(paths(stack, style)[0] for style in ("p0", "p1", "p2"))
    for name in ("data wait", "host", "waiting for the device", "rest", "device span"):
        assert f"</i>{name}</span>" in page


def test_what_was_not_measured_is_named_and_never_drawn_as_0(tmp_path, out):
    lines = [logs.window(line["step"], utilization=None) if line["kind"] == "window" else line for line in logs.run(10)]
    page = page_of(out, logs.write(tmp_path / "cpu", lines))
    assert not paths(drawings(page)[0], "util")
    assert "Not measured: GPU utilisation (needs an NVIDIA GPU and nvidia-ml-py); GPU memory" in page
    assert "Tokens per second and GPU utilisation" not in page


def test_excluded_steps_pauses_and_resumption_are_marked(tmp_path, out):
    first = [{**line, "eval_time_s": 9.0} if (line["kind"], line["step"]) == ("step", 6) else line
             for line in logs.run(20)]  # fmt: skip
    page = page_of(out, logs.write(tmp_path / "resumed", [*first, *logs.run(20, start=10)]))
    titles = {node.text for node in drawings(page)[0].iter("title")}
    assert {"warm-up, 0.5 s: in no rate", "evaluation, 9 s", "resumed after step 10"} <= titles
    assert "10 steps are left out, run again by a later session" in page


def test_the_header_holds_environment_totals_and_steady_rates(tmp_path, out):
    page = page_of(out, logs.write(tmp_path / "first", logs.run(40)))
    for name, value in (("real tokens per second", "3,600"), ("steps", "40"), ("ranks", "2"), ("MFU", "36 %"),
                        ("real tokens", "72,000"), ("packing efficiency", "90 %"),
                        ("left out", "1 warm-up (0.5 s)")):  # fmt: skip
        assert f"<dt>{name}</dt><dd>{value}</dd>" in page
    assert "Ran on: 2 x NVIDIA Test; driver 580.1; 16 CPU cores; Python 3.11.7; torch 2.11.0+cu130" in page


def test_several_runs_stand_side_by_side_on_the_same_scales(tmp_path, out):
    bad = {"nonfinite": True, "save_time_s": 0.4}
    slow, fast = (
        logs.write(
            tmp_path / name,
            [{**line, **bad} if name == "slow" and line.get("step") == 6 else line for line in logs.run(40, rate=rate)],
        )
        for name, rate in (("slow", 900), ("fast", 3600))
    )
    page = page_of(out, slow, fast / "speedkit_steps.jsonl")
    Page(page)
    together, left, right, *_ = drawings(page)
    assert paths(together, "r0")
    assert paths(together, "r1")
    ticks = [[node.text for node in svg.iter("text") if "tick" in node.get("class")] for svg in (left, right)]
    assert ticks[0] == ticks[1]
    assert [svg.get("aria-label").split(":")[0] for svg in (left, right)] == ["slow", "fast"]
    assert "<td>real tokens per second</td><td>900</td><td>3,600</td>" in page
    assert "<td>steps with NaN</td><td>1</td><td>none</td>" in page  # looked for, and there was none
    assert "<td>pauses</td><td>saving 0.4 s</td><td>none</td>" in page
    # The last label, "1 min 20 s", ends inside the picture.
    for svg in (*drawings(page), *drawings(page, "narrow")):
        width = float(svg.get("viewBox").split()[2])
        for node in svg.iter("text"):
            share = {"mid": 0.5, "end": 0.0}.get(node.get("class").split()[-1])
            assert share is None or float(node.get("x")) + 7 * share * len(node.text) <= width, node.text


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (("a", "b"), ["a", "b"]),
        (("one/out", "two/out"), ["one/out", "two/out"]),
        (("home/ada/out", "home/bob/out"), ["out (1)", "out (2)"]),
        (("home/ada/x/out", "home/ada/y/out"), ["x/out", "y/out"]),
    ],
)
def test_runs_of_one_name_are_told_apart_without_a_users_name(tmp_path, folders, names):
    runs = [logs.write(tmp_path / folder, logs.run(5)) for folder in folders]
    assert [shown["name"] for shown in json.loads(run(*runs, "--json").output)["runs"]] == names


def test_text_of_a_log_is_text_on_the_page(tmp_path, out):
    lines = logs.run(10)
    lines[0]["environment"] = {"python": HOSTILE, "packages": {HOSTILE: HOSTILE}, "devices": [HOSTILE],
                               "driver": HOSTILE, "cpu_count": HOSTILE, "commit": HOSTILE}  # fmt: skip
    lines[1]["excluded"] = HOSTILE
    lines[6]["metrics"][HOSTILE] = HOSTILE
    page = page_of(out, logs.write(tmp_path / "<b onclick=alert(1)>run", lines))
    assert_harmless(page)
    assert "&lt;b onclick=alert(1)&gt;run" in page


def test_text_of_a_trace_is_text_on_the_page(tmp_path, out):
    trace = steady_trace(kernels=40, kernel_us=500, every_us=9).op(HOSTILE, 900, 90).launch(905, HOSTILE, 910, 80)
    trace.top_level["deviceProperties"] = [{"id": 0, "name": HOSTILE}]
    path = trace.write(tmp_path / "<img src=x onerror=alert(1)>.json")
    page = page_of(out, logs.write(tmp_path / "first", logs.run(10)), "--trace", path)
    assert_harmless(page)
    assert "&lt;img src=x onerror=alert(1)&gt;.json" in page


def assert_harmless(page):
    parsed = Page(page)
    assert not {"script", "img", "b onclick=alert(1)"} & set(parsed.tags)
    assert not [name for name, _ in parsed.attributes if name.startswith("on")]
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert "&lt;/script&gt;" in page


def test_a_trace_shows_verdict_findings_tables_and_the_picture(tmp_path, out):
    trace = steady_trace(kernels=2000, kernel_us=2, every_us=30).write(tmp_path / "host.json.gz")
    page = page_of(out, logs.write(tmp_path / "first", logs.run(10)), "--trace", trace)
    for words in (
        '<p class="verdict problem">Host-bound',
        "<b>host_bound</b>",
        "What to do: start fewer, larger kernels",
        "CPU operations, self time",
        "GPU kernels: 2,000 launches",
        "idle, host in: CPU operations",
    ):
        assert words in page
    picture = drawings(page)[-1]
    assert picture.get("aria-label") == "device time of the step by group"
    (bars,) = (node.get("d") for node in picture.iter("path") if node.get("fill") == "#e08a1e")
    assert bars.count("M") == 300


def test_traces_beside_the_log_are_found_and_a_broken_one_is_a_remark(tmp_path, out):
    folder = logs.write(tmp_path / "first", logs.run(10))
    (folder / "traces").mkdir()
    shutil.copy(DATA / "trace_causes.json", folder / "traces" / "a.json")
    (folder / "traces" / "b.json").write_text("hello")
    page = page_of(out, folder)
    assert "<h2>Trace a.json</h2>" in page
    assert "Trace left out: b.json" in page


def test_json_holds_the_same_numbers_and_writes_no_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    document = json.loads(run(logs.write(tmp_path / "first", logs.run(40)), "--json",
                              "--trace", DATA / "trace_causes.json").output)  # fmt: skip
    assert document["runs"][0]["rates"]["speed/real_tokens_per_second"] == pytest.approx(3600)
    assert document["runs"][0]["tokens"]["real"] == 72_000
    assert document["traces"][0]["verdict"]
    assert not list(tmp_path.glob("*.html"))


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["none"], 2, "no such run: none"),
        ([], 2, "Missing argument"),
        (["bare"], 2, "no speedkit_steps.jsonl in bare"),
        (["bare"], 2, "from hf_speedkit import JsonlSink, and attach(trainer, ThroughputCallback("),
        (["good", "--trace", "none.json"], 2, "no such file: none.json"),
        (["good", "--out", "none/page.html"], 2, "not a file in a directory that exists"),
        (["good", "--out", "good/speedkit_steps.jsonl"], 2, "would overwrite what it reads"),
        (["good", "--out", "page.pdf"], 2, "of runs a page (.html)"),
        (["empty"], 1, "is empty"),
        (["started"], 1, "holds no steps"),
        (["newer"], 1, "this version reads format 1"),
        (["good", "--trace", "text.json"], 1, "not a Chrome trace"),
        (["."], 2, ". is no run; runs in it: cut, empty, good, marked, newer, started"),
        (["good"], 0, "page.html: 1 run, 0 traces"),
        (["cut"], 0, "the last line is cut off"),
        (["marked"], 0, "page.html: 1 run, 0 traces"),
    ],
)
def test_exit_codes_and_instructions(tmp_path, monkeypatch, arguments, code, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bare").mkdir()
    (tmp_path / "text.json").write_text("hello")
    logs.write(tmp_path / "good", logs.run(5))
    logs.write(tmp_path / "empty", [])
    logs.write(tmp_path / "started", [logs.session()])
    logs.write(tmp_path / "newer", [logs.session(format=99), logs.step(1)])
    logs.write(tmp_path / "cut", logs.run(5), tail='{"kind": "st')
    marked = logs.write(tmp_path / "marked", logs.run(5)) / "speedkit_steps.jsonl"
    marked.write_text("\ufeff" + marked.read_text(), encoding="utf-8")  # as some editors save it
    if arguments and "--out" not in arguments:
        arguments = [*arguments, "--out", "page.html"]
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert words in re.sub(r"[\s│]+", " ", result.output)
    assert (tmp_path / "page.html").exists() is (code == 0)


def test_ten_thousand_windows_make_a_small_page(tmp_path, out):
    lines = [logs.session()]
    for number in range(1, 10_001):
        lines += [logs.step(number), logs.window(number, 3000 + number % 700, 90 + number % 10)]
    page = page_of(out, logs.write(tmp_path / "long", lines))
    assert len(page) < 600_000
    assert paths(drawings(page)[0], "real")[0].count("M") == 1


def test_the_page_says_what_limits_a_step_and_where_formula_and_counter_disagree(tmp_path, out):
    parts = {"data_wait": 0.01, "host_only": 0.2, "overlapped": 0.2, "device_only": 0.09, "exposed_comm": 0.0}
    counted = {"speed/launches": 25_031, "speed/host_wait_s": 0.02, "speed/ofu": 15.0}
    lines = [logs.session(), *(logs.step(number) for number in range(1, 6))]
    lines.append(logs.window(5, **counted, **{f"speed/part_{name}_s": value for name, value in parts.items()}))
    page = page_of(out, logs.write(tmp_path / "counted", lines))
    assert "host (1 window)" in page
    assert "for 40% of the step the device waits for the host" in page
    assert "25,031" in page
    assert "MFU by formula is 36.0 %, by the tensor pipes&#x27; counter 15.0 %" in page


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
         "--disable-component-update --disable-sync --enable-logging=stderr --virtual-time-budget=4000 "
         "--hide-scrollbars --window-size=1200,1000")  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
def test_a_browser_shows_both_curves_and_has_nothing_to_complain_of(tmp_path, out):
    page_of(out, logs.write(tmp_path / "first", logs.run(40)))
    picture = tmp_path / "page.png"
    done = subprocess.run(
        [CHROMIUM, *FLAGS.split(), f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={picture}", out.as_uri()],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "CONSOLE" not in done.stderr
    colours = colours_of(picture)
    # A curve is about 1,000 px long and 2 px thick; the legend's swatch alone has 140.
    assert colours.get((31, 95, 191), 0) > 1_000
    assert colours.get((217, 96, 13), 0) > 1_000


def colours_of(path):
    """How many pixels a PNG (8 bit, RGB or RGBA) has of each colour."""
    data, at, body = path.read_bytes(), 8, b""
    while at < len(data):
        (length,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        chunk = data[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, depth, colour = struct.unpack(">IIBB", chunk[:10])
            assert (depth, colour) in ((8, 2), (8, 6))
        if kind == b"IDAT":
            body += chunk
        at += 12 + length
    size = 3 if colour == 2 else 4
    raw, stride, counts = zlib.decompress(body), width * size, {}
    previous = bytearray(stride)
    for row in range(height):
        start = row * (stride + 1)
        line = unfiltered(raw[start], bytearray(raw[start + 1 : start + 1 + stride]), previous, size)
        for x in range(0, stride, size):
            key = (line[x], line[x + 1], line[x + 2])
            counts[key] = counts.get(key, 0) + 1
        previous = line
    return counts


def unfiltered(kind, line, above, size):
    """One row of a PNG without its filter (PNG specification, section 9)."""
    for i in range(len(line) if kind else 0):
        left, up, corner = (line[i - size], above[i], above[i - size]) if i >= size else (0, above[i], 0)
        if kind == 4:
            guess = left + up - corner
            _, _, base = min((abs(guess - value), order, value) for order, value in enumerate((left, up, corner)))
        else:
            base = (0, left, up, (left + up) // 2)[kind]
        line[i] = (line[i] + base) & 255
    return line
