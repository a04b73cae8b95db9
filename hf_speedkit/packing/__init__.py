"""From documents of any length to rows of one fixed shape, and the proof that documents do not see one another.

- documents: documents, boundaries, document_columns, row_rules
- a plan: strategies, planner, balance, forecast
- rows: sampler, collator
- a stream: stream, stream_documents, stream_source
- the proof: isolation, operations, placement, refusal
"""
