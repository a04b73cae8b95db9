"""The glue: callbacks and trainer classes for transformers and TRL."""
