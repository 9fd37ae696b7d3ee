"""One all-reduce: every rank of ``hvdcompress doctor``'s self-test runs this module."""

from __future__ import annotations

PASSED = "hvdcompress self-test passed"


def main() -> None:
    """Sum one tensor over all ranks and check the result."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    total = hvd.allreduce(torch.full((1000,), float(hvd.rank() + 1)), op=hvd.Sum, name="selftest")
    wanted = float(sum(range(1, hvd.size() + 1)))
    if hvd.size() < 2 or not bool((total == wanted).all()):
        raise SystemExit(f"rank {hvd.rank()} of {hvd.size()}: the all-reduce gave {total[0]}, not {wanted}")
    print(PASSED, flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
