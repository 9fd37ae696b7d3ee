"""What keeps ranks from waiting for ever and from drifting apart: the watchdog, alarms, and checksums."""
