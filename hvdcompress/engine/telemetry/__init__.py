"""What was done: events, the ledger of bytes and seconds, figures as tables and metrics, and logs."""
