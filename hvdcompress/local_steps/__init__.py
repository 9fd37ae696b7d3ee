"""Local steps: each rank trains alone, and the ranks exchange their parameters every ``every`` steps, compressed.

    from hvdcompress.local_steps import LocalSteps

    local = LocalSteps(model, optimizer, every=30)          # on every rank; no DDP wrapper
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        local.step()                                        # exchanges in every 30th call

- algorithm: :class:`LocalSteps`, and the :class:`Fragment` of the model that one exchange covers.
- networks: the collectives of torch.distributed and Horovod that no Compressor has.
- state: the saved state of a rank.
"""

from hvdcompress.local_steps.algorithm import OUTER, Fragment, LocalSteps

__all__ = ["OUTER", "Fragment", "LocalSteps"]
