"""The engine: exchanges of one rank without I/O (state, steps, agreement). Drivers add a transport."""
