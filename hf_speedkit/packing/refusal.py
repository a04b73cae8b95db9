"""What a failed isolation proof says, and how it is mended."""

from __future__ import annotations

import math

from hf_speedkit.core.errors import IsolationError
from hf_speedkit.core.records import IsolationReport

_PADDING = "train this model with packing=False and padding_free=False"
KERNELS_OR_PADDING = (
    f"install the kernels that take document boundaries (`hf-speedkit doctor MODEL` names them), or {_PADDING}"
)


def isolation_error(report: IsolationReport) -> IsolationError:
    """The refusal for a failed report, as an instruction."""
    if report.own_gradient == 0.0 or report.others_change == 0.0:
        return IsolationError(
            "the isolation probe could not tell: the model does not react to its own input",
            evidence=(
                f"gradient at the document's own embeddings {report.own_gradient:.1e}",
                f"change of the replaced documents {report.others_change:.1e}; both must be above zero",
            ),
            mend="check that the model is not all zeros and that the probed documents have more than one token",
        )
    # `_largest` counts NaN as infinite. Gemma 3n has no gradient at a document that no loss comes from: 0 x infinity.
    nowhere = report.gradient_leak == math.inf and not report.leaks
    if math.inf in (report.own_gradient, report.others_change) or nowhere:
        return IsolationError(
            "the isolation probe could not tell: the model's log-probabilities or their gradient are not finite",
            evidence=(
                f"gradient at the document's own embeddings {report.own_gradient:.1e}",
                f"at other documents' {report.gradient_leak:.1e}; change of the replaced documents "
                f"{report.others_change:.1e}",
            ),
            mend=f"look for NaN in the weights (a damaged checkpoint), compute in bf16 or fp32, or {_PADDING}",
        )
    apart = max(report.output_change, report.gradient_leak) <= report.tolerance and not report.leaks
    if apart and report.placement_change is not None:
        return IsolationError(
            "a document's log-probabilities depend on where in the row it lies",
            evidence=(
                f"document {report.probed_document} of {report.documents}: they change by up to "
                f"{report.placement_change:.1e} at the row's start",
                "documents do not see one another; positions, or what attention looks at, are those of the row",
            ),
            mend=_PADDING,
        )
    named = f" through {', '.join(report.leaks)}" if report.leaks else ""
    return IsolationError(
        f"documents in one packed row see one another{named}",
        evidence=(
            f"document {report.probed_document} of {report.documents}: its log-probabilities moved by "
            f"{report.output_change:.1e} when the other documents were replaced (allowed {report.tolerance:.1e})",
            f"its gradient at other documents' embeddings is {report.gradient_leak:.1e} "
            f"(own {report.own_gradient:.1e})",
            f"operations looked at: {', '.join(report.operations) or 'none could be told apart'}",
        ),
        mend=f'attn_implementation="sdpa", which reads where documents begin, or {_PADDING}'
        if report.leaks == ("attention",)
        else KERNELS_OR_PADDING,
    )
