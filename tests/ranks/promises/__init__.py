"""What every driver promises: each test here is run through every driver, in its launches."""
