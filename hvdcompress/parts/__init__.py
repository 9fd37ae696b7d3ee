"""Steps that two or more methods use, each written once: select, feedback, values, pack, route, seed."""
