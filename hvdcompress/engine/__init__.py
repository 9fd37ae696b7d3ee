"""One rank's side of every exchange, without I/O: state, steps, agreement; drivers add a transport."""
