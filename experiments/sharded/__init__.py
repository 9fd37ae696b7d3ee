"""FSDP2 whose reduce-scatter and all-gather are compressed: bytes and times on emulated links, and accuracy."""
