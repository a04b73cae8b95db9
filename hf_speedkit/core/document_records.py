"""What became of the documents of a dataset before packing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentReport:
    """What was kept, cut and dropped of a dataset, in documents and tokens; every token is in exactly one of them.

    Args:
        tokens_per_batch: slots of a row, the longest a document may be.
        overlong: what was done with longer ones: "error", "split", "truncate" or "drop".
        documents_found: documents before anything was done.
        tokens_found: their tokens.
        documents: documents to train on, fragments of split ones included.
        real_tokens: their tokens.
        target_tokens: those that enter the loss: label != -100, the first token of a document left out.
        empty_documents: dropped, they had no tokens.
        targetless_documents: dropped, no token (or none within the row, where documents are cut) was a target.
        overlong_documents: longer than a row, among those with targets.
        dropped_documents: dropped because they were overlong.
        dropped_tokens: tokens of documents and fragments that were dropped whole.
        cut_tokens: tokens cut off documents that were kept.
        fragments: documents to train on that are pieces of split ones.
        orphan_fragments: those that are not the beginning: trained on without what came before them.
        orphan_tokens: their tokens.
    """

    tokens_per_batch: int
    overlong: str
    documents_found: int
    tokens_found: int
    documents: int
    real_tokens: int
    target_tokens: int
    empty_documents: int = 0
    targetless_documents: int = 0
    overlong_documents: int = 0
    dropped_documents: int = 0
    dropped_tokens: int = 0
    cut_tokens: int = 0
    fragments: int = 0
    orphan_fragments: int = 0
    orphan_tokens: int = 0

    @property
    def target_share(self) -> float | None:
        """Target tokens / real tokens, 0..1; None without tokens."""
        return self.target_tokens / self.real_tokens if self.real_tokens else None

    @property
    def lost_share(self) -> float | None:
        """Tokens that were dropped or cut / tokens found, 0..1; None without tokens."""
        return (self.dropped_tokens + self.cut_tokens) / self.tokens_found if self.tokens_found else None

    def sentence(self) -> str:
        """What a log should say: one sentence on what is left, one on what is not (if anything)."""
        share = "" if self.target_share is None else f", {self.target_share:.1%} of them targets"
        kept = f"{self.documents:,} documents with {self.real_tokens:,} tokens{share}."
        losses = [
            _count(self.empty_documents, "dropped as empty"),
            _count(self.targetless_documents, "documents dropped without targets"),
            _count(self.dropped_documents, f"dropped as longer than {self.tokens_per_batch:,}"),
        ]
        if self.overlong == "truncate":
            losses.append(_count(self.overlong_documents, f"truncated to {self.tokens_per_batch:,}"))
        if self.overlong == "split" and self.overlong_documents:
            losses.append(
                f"{self.overlong_documents:,} split, leaving {self.orphan_fragments:,} fragments "
                f"({self.orphan_tokens:,} tokens) without their beginning"
            )
        said = ", ".join(loss for loss in losses if loss)
        if not said:
            return kept
        lost = self.dropped_tokens + self.cut_tokens
        tokens = f": {lost:,} of {self.tokens_found:,} tokens ({self.lost_share:.2%}) lost" if lost else ""
        return f"{kept} Of {self.documents_found:,} found {said}{tokens}."


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number else ""
