"""From the rows a user has to documents of tokens; what would be trained on wrongly is refused or said.

- rows before tokenization: before_weights, inputs, raw_rows, answer_rows, empty_contents,
  token_masks, other_formats, unread_columns
- chat templates and masks: conversation_checks, conversation_refusals, conversation_roles, template_faults, templates,
  tool_calls, template_day
- documents: preparation, positions, document_ends
- a stream: streaming
- a resumed run: resume
"""
