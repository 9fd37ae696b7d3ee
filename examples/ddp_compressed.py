"""The script ddp_plain.py with compressed gradients.

torchrun --nproc-per-node 2 examples/ddp_compressed.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits

from hvdcompress import ddp

dist.init_process_group("gloo")
torch.manual_seed(0)
torch.set_num_threads(1)

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)
train = torch.arange(len(labels)) % 5 != 0

model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
model = torch.nn.parallel.DistributedDataParallel(model)
compressor = ddp.attach(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

mine = train.nonzero().flatten()[dist.get_rank() :: dist.get_world_size()]
for _ in range(600):
    batch = mine[torch.randint(len(mine), (32,))]
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
    loss.backward()
    optimizer.step()

accuracy = (model(images[~train]).argmax(1) == labels[~train]).float().mean().item()
if dist.get_rank() == 0:
    print(f"loss {loss.item():.4f}, held-out accuracy {accuracy:.1%}")
    print(compressor.summary())
dist.destroy_process_group()
