"""The script torch_plain.py with compressed gradients.

horovodrun -np 2 python examples/torch_compressed.py
"""

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits

from hvdcompress.horovod.torch import Compressor

hvd.init()
torch.manual_seed(0)
torch.set_num_threads(1)

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)
train = torch.arange(len(labels)) % 5 != 0

model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
compressor = Compressor("auto", model.named_parameters())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compressor)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

mine = train.nonzero().flatten()[hvd.rank() :: hvd.size()]
for _ in range(600):
    batch = mine[torch.randint(len(mine), (32,))]
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
    loss.backward()
    optimizer.step()

accuracy = (model(images[~train]).argmax(1) == labels[~train]).float().mean().item()
if hvd.rank() == 0:
    print(f"loss {loss.item():.4f}, held-out accuracy {accuracy:.1%}")
    print(compressor.summary())
