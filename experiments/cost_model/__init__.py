"""What an exchange costs among any number of ranks: bytes and rounds from the methods, seconds from a fitted model."""
