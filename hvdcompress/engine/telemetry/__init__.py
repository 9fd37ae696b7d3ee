"""Telemetry: events, the ledger of bytes and seconds, tables, metrics and logs."""
