"""(ModelOutput, TokenBatch) -> loss and metrics, one file per objective."""
