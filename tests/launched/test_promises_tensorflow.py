"""Every promise under Horovod for TensorFlow, and what the driver's framework alone has; see ``test_promises.py``."""

from door_launches import launched_tests

test_promise, test_case = launched_tests("tensorflow")
