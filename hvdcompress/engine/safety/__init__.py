"""Safety: the watchdog against ranks that wait forever, alarms against failed ranks, checksums against divergence."""
