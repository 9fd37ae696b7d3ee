"""How long an exchange takes, beside stock Horovod and DDP."""
