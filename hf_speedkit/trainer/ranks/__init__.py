"""What processes of one job do together: agree, sum, wait, stop, and say it once.

- together: alike, agreement, meeting, reduction, roll_call
- stuck, slow or failed: watch, frames, stragglers
- the end: stop_signal, last_words
"""
