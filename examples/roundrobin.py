"""An example method: all ranks send the same piece of the gradient, and the next step sends the next piece.

python examples/roundrobin.py    # runs the conformance suite on the method
"""

import numpy as np

from hvdcompress.method import AllReduce, Count, FeedbackName, Method, Reduced, Sparse, method
from hvdcompress.testing import check_method


@method("roundrobin")
class RoundRobin(Method):
    """Sends one of ``pieces`` equal pieces in each step, in turn."""

    paper = "an example"
    sends = "n/pieces values, summed; no index"
    sparse = True  # a step sends some elements exactly, and leaves out the others
    needs_feedback = True  # without a residual, most of each gradient would be lost

    pieces: Count = 4
    """Number of pieces that a gradient is cut into."""
    feedback: FeedbackName = "plain"

    def length(self, n: int) -> int:
        """Return the number of elements of a piece."""
        return -(-n // self.pieces)

    def num_bytes(self, spec, world_size):
        return 4 * self.length(spec.size)

    def exchange(self, x, state, ctx, work):
        ops = work.ops
        k = self.length(ctx.spec.size)
        start = min(ctx.step % self.pieces * k, ctx.spec.size - k)  # the last piece ends where the gradient ends
        index = ops.asarray(np.arange(start, start + k, dtype=np.int32), like=x)
        values = ops.take(x, index)
        total = yield AllReduce(values)  # the driver sums over ranks and resumes the generator with the sum
        return Reduced(total=Sparse(index, total), own=Sparse(index, values) if ctx.needs_own else None)


if __name__ == "__main__":
    check_method(RoundRobin(pieces=3))
    print("every check passed")
