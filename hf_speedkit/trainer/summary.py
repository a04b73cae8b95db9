"""The table at the end of a run. It renders a RunSummary and computes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hf_speedkit.core.records import KernelCheck, KernelVerdict
from hf_speedkit.core.summary import RunSummary
from hf_speedkit.core.throughput import RunTotals
from hf_speedkit.core.window_findings import step_limit

_WIDTH = 110
Row = tuple[str, str]


def print_summary(summary: RunSummary, *, notes: Sequence[str] = (), console: Console | None = None) -> None:
    """Print the closing table.

    Args:
        summary: what the run came to (`SpeedSFTTrainer.summary()`).
        notes: lines about the data that only the caller knows, shown first.
        console: where to; standard output, at a fixed width when it is no terminal.
    """
    if console is None:
        console = Console()
        if not console.is_terminal:
            console = Console(width=_WIDTH)
    table = Table(title="hf_speedkit: what happened", title_justify="left", show_header=False, min_width=80)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for rows in _sections(summary, notes):
        table.add_section()
        for name, value in rows:
            table.add_row(escape(name), escape(value))
    console.print(table)


def _sections(summary: RunSummary, notes: Sequence[str]) -> Iterator[list[Row]]:
    yield [*(("data", note) for note in notes), *_document_rows(summary)]
    yield list(_packing_rows(summary))
    yield list(_speed_rows(summary))
    yield list(_loss_rows(summary))
    yield list(_kernel_rows(summary.kernels))
    yield list(_isolation_rows(summary))
    yield list(_look_rows(summary))


def _document_rows(summary: RunSummary) -> list[Row]:
    return [("documents", summary.documents.sentence())] if summary.documents is not None else []


def _packing_rows(summary: RunSummary) -> Iterator[Row]:
    packing = summary.packing
    if packing is None:
        yield from _unplanned_rows(summary)
        return
    yield (
        "packs",
        f"{packing.packs:,} rows of {packing.tokens_per_batch:,} slots an epoch ({packing.strategy})",
    )
    yield "packing efficiency", f"{packing.packing_efficiency:.1%} of slots hold a token"
    yield (
        "2-D padding",
        f"{packing.padded_batches:,} batches (rows x longest <= {packing.tokens_per_batch:,}) for the same documents, "
        f"{packing.padded_efficiency:.1%} full: packing needs {packing.fewer_batches:.0%} fewer",
    )


def _unplanned_rows(summary: RunSummary) -> Iterator[Row]:
    """Padded batches, a stream packed as it is read, and a run that has not begun."""
    tokens = None if summary.totals is None else summary.totals.session
    if summary.packed_slots is None:
        yield "packing", "off"
    elif tokens is not None and not tokens.slots:
        yield "packing", f"rows of {summary.packed_slots:,} slots, planned when training begins"
    else:
        yield "packs", f"rows of {summary.packed_slots:,} slots, packed online from a stream"
        if tokens is not None and tokens.real is not None:
            yield "packing efficiency", f"{tokens.real / tokens.slots:.1%} of slots hold a token"


def _speed_rows(summary: RunSummary) -> Iterator[Row]:
    totals = summary.totals
    if totals is None:
        yield "speed", "not measured"
        return
    for name, key in (("slots", "slots"), ("real tokens", "real_tokens"), ("target tokens", "target_tokens")):
        rate = totals.rates.get(f"speed/{key}_per_second")
        if rate is not None:
            each = f" ({rate / summary.world_size:,.0f} per device)" if summary.world_size > 1 else ""
            yield f"{name} / s", f"{rate:,.0f}{each}"
    tokens = totals.session
    if summary.resumed_at:
        yield "resumed", f"after step {summary.resumed_at:,}; what follows is of this session"
    yield (
        "trained on",
        f"{tokens.slots:,} slots, {_number(tokens.real)} real and {_number(tokens.target)} target tokens, "
        f"{_number(tokens.documents)} documents in {_steps(totals.session_steps)}",
    )
    yield from _time_rows(totals)
    yield from _rate_rows(totals.rates)
    if totals.nonfinite_steps:
        yield "non-finite steps", f"{totals.nonfinite_steps:,}"


def _time_rows(totals: RunTotals) -> Iterator[Row]:
    step = totals.rates.get("speed/step_time_s")
    if step is not None:
        parts = [
            f"{label} {totals.rates[key]:.3f} s ({totals.rates[key] / step:.1%})"
            for label, key in (
                ("data wait", "speed/data_wait_s"),
                ("host", "speed/host_time_s"),
                ("device", "speed/device_time_s"),
            )
            if key in totals.rates
        ]
        yield "step time", f"{step:.3f} s, mean of {_steps(totals.steady_steps, 'steady ')}: " + ", ".join(parts)
    outside = {
        "evaluation": totals.eval_time_s,
        "saving": totals.save_time_s,
        "logging": totals.log_time_s,
    }
    spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in outside.items() if seconds >= 0.05)
    if spent:
        yield "not in step time", spent


def _rate_rows(rates: Mapping[str, float]) -> Iterator[Row]:
    if "speed/mfu" in rates:
        again = f", {rates['speed/hfu']:.1f} % with recompute" if "speed/hfu" in rates else ""
        yield "MFU", f"{rates['speed/mfu']:.1f} %{again}"
    if "speed/launches" in rates:
        yield (
            "a counted step",
            f"{rates['speed/launches']:,.0f} launches by {rates['speed/launch_calls']:,.0f} calls, device busy "
            f"{rates['speed/device_busy_s']:.3f} s, host waiting {rates['speed/host_wait_s']:.3f} s",
        )
        limit = step_limit(rates)
        if limit is not None:
            yield "", limit.message


def _loss_rows(summary: RunSummary) -> Iterator[Row]:
    loss = summary.loss
    if loss is not None and loss.first_step == loss.last_step:
        yield "loss", f"{loss.last:.3f} (step {loss.last_step}, the only one logged)"
    elif loss is not None:
        yield (
            "loss",
            f"{loss.first:.3f} (step {loss.first_step}) -> {loss.last:.3f} (step {loss.last_step}), {loss.change:+.0%}",
        )


def _kernel_rows(checks: Sequence[KernelCheck]) -> Iterator[Row]:
    if not checks:
        yield "kernels", "not looked at"
    ordered = sorted(checks, key=lambda check: (check.verdict.value, check.evidence))
    for (verdict, evidence), group in groupby(ordered, key=lambda check: (check.verdict, check.evidence)):
        names = ", ".join(f"{check.function} ({check.layers} of {check.layers_total} layers)" for check in group)
        yield f"kernels {verdict.value}", f"{names}: {evidence}"
    if any(check.verdict is KernelVerdict.FALLBACK for check in checks):
        yield "", "a fallback is right but slow; on a GPU it would have stopped the run before step 1"


def _isolation_rows(summary: RunSummary) -> Iterator[Row]:
    report = summary.isolation
    if report is None:
        yield "isolation", "not checked"
        return
    yield (
        "isolation",
        f"proven on {report.documents} packed documents: output change {report.output_change:.1g}, "
        f"gradient at other documents {report.gradient_leak:.1g} (own {report.own_gradient:.2g})",
    )
    if report.operations:
        yield "", f"one by one: {', '.join(report.operations)}"
    spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in summary.startup_s.items() if seconds >= 0.05)
    if spent:
        yield "proofs took", spent
    for line in summary.changed_layers:
        yield "put in place", line


def _look_rows(summary: RunSummary) -> Iterator[Row]:
    yield "look at it", _where_the_model_is(Path(summary.output_dir))
    if summary.step_log is not None:
        yield "", f"one JSON line a step in {summary.output_dir}/{summary.step_log}"
    for path in summary.traces:
        yield "", f"a traced step: hf-speedkit trace {path}"
    if summary.report_to:
        yield "", f"curves in {', '.join(summary.report_to)}, under train/speed/"
    else:
        yield "", "curves: pip install wandb, then --report_to wandb (WANDB_MODE=offline needs no account)"


def _where_the_model_is(folder: Path) -> str:
    if any(folder.glob("*.safetensors")):
        return f"model in {folder}"
    saved = sorted(folder.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime)
    return f"checkpoint in {saved[-1]}" if saved else f"model not saved: trainer.save_model({str(folder)!r})"


def _steps(count: int, kind: str = "") -> str:
    return f"{count:,} {kind}step" + ("" if count == 1 else "s")


def _number(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"
