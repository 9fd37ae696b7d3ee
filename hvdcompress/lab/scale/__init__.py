"""What an exchange costs among many workers: model, fit, prediction; the ring written out."""
