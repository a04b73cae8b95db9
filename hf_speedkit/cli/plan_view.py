"""How a plan looks in a terminal. Renders; computes nothing but where a length falls in the plot."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hf_speedkit.core.printable import printable

_BINS = 16
_BAR = 40
_BESIDE_BAR = 9 + 1 + 1 + 9
"""Columns beside a bar of the plot: the length, the count and a space each."""
_LEAST_WIDTH = 80


def print_memory(memory: Mapping[str, Any]) -> None:
    """Print one line a setting and the notes, wrapped at the terminal's width with an indent."""
    console = Console(highlight=False)
    if memory["error"] is not None:
        console.print(Text(f"memory: not known, the model cannot be traced: {printable(memory['error'])}"))
    for setting in memory["settings"]:
        color = {"fits": "green", "fits tightly": "yellow", "does not fit": "red"}.get(setting["fit"] or "", "")
        for line in textwrap.wrap(setting["line"], console.width, subsequent_indent="    "):
            console.print(Text(line, style=color))
    for note in memory["notes"]:
        for line in textwrap.wrap(note, console.width, initial_indent="  ", subsequent_indent="    "):
            console.print(Text(line))


def print_plan(result: Mapping[str, Any], lengths: Sequence[int]) -> None:
    """Print the length table, the plot, the ways to batch, and what ranks wait for one another."""
    console = Console(highlight=False)
    settings, documents = result["settings"], result["documents"]
    console.print(
        f"{documents['documents']:,} documents, {documents['tokens']:,} tokens"
        + (f", {documents['empty']:,} empty ones left out" if documents["empty"] else "")
    )
    if documents["documents"]:
        _lengths(console, documents)
        for line in histogram(lengths, bar=max(8, min(_BAR, console.width - _BESIDE_BAR))):
            console.print(Text(line))
    if documents["overlong"]:
        _say(
            console,
            f"{documents['overlong']:,} documents are longer than a row of {settings['tokens_per_batch']:,} slots "
            f"({documents['overlong_tokens_beyond']:,} tokens beyond it); overlong={settings['overlong']}",
        )
    for finding in result["findings"]:
        _say(console, printable(finding), style="yellow")
    if result["batchings"]:
        _batchings(console, result["batchings"], settings)
    if result["stragglers"] is not None:
        _say(console, result["stragglers"]["sentence"])
    elif result["error"] is None:
        _say(console, "waiting of ranks for one another: not known without a model config of a known family")
    if result["error"] is not None:
        for line in result["error"].splitlines():
            _say(console, printable(line), style="bold red")


def _print_whole(console: Console, table: Table) -> None:
    """Print a table as in 80 columns at least: a narrower terminal wraps its lines, rich puts "…" for numbers."""
    Console(highlight=False, width=max(console.width, _LEAST_WIDTH)).print(table)


def _say(console: Console, text: str, *, style: str = "") -> None:
    """One sentence, wrapped between words at the terminal's width; a command in it stays in one piece."""
    for line in textwrap.wrap(
        text, console.width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    ):
        console.print(Text(line, style=style), soft_wrap=True)


def histogram(lengths: Sequence[int], bins: int = _BINS, *, bar: int = _BAR) -> list[str]:
    """Bars of document counts over lengths; bins grow by a constant factor, for lengths have heavy tails."""
    shortest, longest = min(lengths), max(lengths)
    span = math.log(longest / shortest)
    if not span:
        return [f"{longest:>9,} {'#' * bar} {len(lengths):,}"]
    counts = [0] * bins
    for length in lengths:
        counts[min(bins - 1, int(bins * math.log(length / shortest) / span))] += 1
    edges = [round(shortest * math.exp(span * (index + 1) / bins)) for index in range(bins)]
    most = max(counts)
    return [
        f"{edge:>9,} {'#' * math.ceil(bar * count / most):<{bar}} {count:,}"
        for edge, count in zip(edges, counts, strict=True)
    ]


def _lengths(console: Console, documents: Mapping[str, Any]) -> None:
    table = Table(title="tokens per document", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("mean", justify="right")
    names = {"0": "shortest", "0.5": "median", "1": "longest"}
    for quantile in documents["quantiles"]:
        table.add_column(names.get(quantile, f"p{100 * float(quantile):g}"), justify="right")
    table.add_row(f"{documents['mean']:,.0f}", *(f"{value:,}" for value in documents["quantiles"].values()))
    _print_whole(console, table)


def _batchings(console: Console, batchings: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> None:
    table = Table(
        title=f"rows of {settings['tokens_per_batch']:,} slots on {settings['ranks']} "
        f"{'ranks' if settings['ranks'] > 1 else 'rank'}, accumulation {settings['accumulation']}",
        title_justify="left",
        box=box.SIMPLE_HEAD,  # fits into 80 columns
    )
    table.add_column("batching", no_wrap=True)
    headings = ["batches", "fewer", "full", "steps"]
    # One epoch is what the column before it says.
    headings += [f"in {settings['epochs']} epochs"] if settings["epochs"] > 1 else []
    for heading in headings:
        table.add_column(heading, justify="right")
    padded = batchings[0]["batches"]
    for way in batchings:
        cells = [
            way["name"],
            f"{way['batches']:,}",
            f"{1 - way['batches'] / padded:.1%}" if way["batches"] != padded else "-",
            f"{way['full']:.2%}",
            f"{way['steps']:,}",
            f"{way['steps_in_all']:,}",
        ]
        table.add_row(*cells[: 1 + len(headings)])
    _print_whole(console, table)
