"""Services of a running store: transactions, retries, checkpoint."""
