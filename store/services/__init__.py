"""What the store does with stored messages by itself: transactions, retries."""
