"""A user-defined driver: ranks are threads, and the network is one queue per rank.

python examples/threads_driver.py    # four ranks fit a linear model with top-k
"""

import threading
from dataclasses import replace
from queue import Queue

import numpy as np

from hvdcompress.engine import compressor, lockstep
from hvdcompress.engine.agreement import SharedConfig
from hvdcompress.engine.levels import network_over
from hvdcompress.engine.step import Step
from hvdcompress.method import TensorSpec
from hvdcompress.plan import IN_ORDER, plan_of


class QueueTransport:
    """Send each request to all ranks; each rank computes the result of a collective from the requests of all ranks."""

    ordered = True  # collectives are matched by number, so all ranks must start them in the same order
    native_broadcast = True  # a broadcast is as fast as a sum, so the engine may send broadcasts
    variable_lengths = True  # the payloads of an all-gather may have different lengths
    shards_sums = False  # a sum is one collective

    def __init__(self, rank, mailboxes):
        self.rank = rank
        self.world_size = len(mailboxes)
        self.mailboxes = mailboxes
        self.started = 0
        self.requests = {}  # number of a collective -> the requests received so far, by rank

    def start(self, name, request):
        """Start a collective; return its number as the handle."""
        self.started += 1
        if request.payload is not None:  # the engine reuses its memory as soon as this rank has the result
            request = replace(request, payload=request.payload.copy())
        for mailbox in self.mailboxes:
            mailbox.put((self.started, self.rank, request))
        return self.started

    def ready(self, handle):
        """Return whether the result is available (``wait`` would not block)."""
        while not self.mailboxes[self.rank].empty():
            self._receive()
        return len(self.requests.get(handle, ())) == self.world_size

    def wait(self, handle):
        """Wait for a collective and return its result."""
        while not self.ready(handle):
            self._receive()
        requests = self.requests.pop(handle)
        return lockstep.carry_out([requests[rank] for rank in range(self.world_size)])[self.rank]

    def idle(self, handle):
        """Wait until a request arrives."""
        self._receive()

    def _receive(self):
        number, rank, request = self.mailboxes[self.rank].get(timeout=30)
        self.requests.setdefault(number, {})[rank] = request


class Compressor(compressor.Compressor):
    """Average named arrays over threads."""

    def __init__(self, method, transport, **settings):
        super().__init__(plan_of(method, watchdog=False, **settings), transport.rank, transport.world_size)
        self._network = network_over(transport, self.rank_state.observers)

    def average(self, gradients):
        """Replace named float32 arrays with their compressed averages over all ranks."""
        specs = [TensorSpec(name, array.shape) for name, array in gradients.items()]
        config = SharedConfig(self.plan.to_dict(), {spec.name: str(spec.shape) for spec in specs})
        self.rank_state.begin_round()
        step = self._step = Step(self.rank_state, self._network, config)
        step.factor = 1.0 / self.rank_state.world_size
        try:
            step.send_status()
            for bucket in self.plan.buckets(specs, IN_ORDER, self.rank_state.ages()):
                vectors = [gradients[member.name].reshape(-1) for member in bucket.members]
                step.add(bucket, range(len(vectors)), vectors)
            step.finish()
            self.ledger.steps += step.finite
        except BaseException:
            step.abandon()
            raise
        finally:
            self._step = None


def train(rank, mailboxes, weights):
    """Fit y = x·w; each rank has its own data."""
    random = np.random.default_rng(rank)
    comp = Compressor("topk", QueueTransport(rank, mailboxes), density=0.1, min_elements=1)
    w = np.zeros_like(weights)
    for _ in range(400):
        x = random.normal(size=(32, len(w))).astype(np.float32)
        gradient = x.T @ (x @ w - x @ weights) / len(x)
        comp.average({"w": gradient})
        w -= 0.02 * gradient
    if rank == 0:
        print(f"distance to the solution: {np.linalg.norm(w - weights):.3f} of {np.linalg.norm(weights):.3f}")
        print(comp.summary())


if __name__ == "__main__":
    mailboxes = [Queue() for _ in range(4)]
    weights = np.random.default_rng(9).normal(size=200).astype(np.float32)
    ranks = [threading.Thread(target=train, args=(rank, mailboxes, weights)) for rank in range(4)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
