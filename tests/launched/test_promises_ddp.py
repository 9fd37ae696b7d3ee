"""Every promise under PyTorch's DDP, and what the driver alone has; see ``promise_launches.py``."""

from tests.launched.promise_launches import launched_tests

test_promise, test_case = launched_tests("ddp")
