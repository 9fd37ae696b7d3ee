"""Residuals next to a framework's checkpoint: stale files go, a missing folder is warned of, links are followed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from hvdcompress import ddp  # noqa: E402
from hvdcompress.integrations import rank_files  # noqa: E402


@pytest.fixture
def compressor() -> Iterator[ddp.Compressor]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    layer = torch.nn.Linear(40, 40)
    model = torch.nn.parallel.DistributedDataParallel(layer)
    made = ddp.attach(model, "topk", density=0.01)
    model(torch.ones(2, 40)).sum().backward()
    yield made
    made.close()
    torch.distributed.destroy_process_group()


def test_files_of_another_number_of_ranks_go(compressor: ddp.Compressor, tmp_path: Path) -> None:
    folder = tmp_path / "a" / rank_files.NAME
    folder.mkdir(parents=True)
    (folder / "rank-1-of-2.safetensors").touch()
    (folder / "step-3-rank-1-of-2.safetensors").touch()
    (folder / "notes.txt").touch()
    rank_files.save(compressor, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["notes.txt", "step-1-rank-0-of-1.safetensors"]
    kept = compressor.residual("weight")
    compressor.release()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rank_files.load(compressor, folder)
    assert kept.abs().max() > 0 and torch.equal(compressor.residual("weight"), kept)
    rank_files.remove(folder)
    rank_files.remove(folder)
    assert not folder.exists()


def test_a_checkpoint_without_residuals_is_warned_of(compressor: ddp.Compressor, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="residuals start at zero"):
        rank_files.load(compressor, tmp_path / "none")


@pytest.mark.slow
def test_lightnings_names_and_folders(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch.strategies import StrategyRegistry

    import hvdcompress
    from hvdcompress.integrations.lightning import CompressedDDP, folder_of

    for id in hvdcompress.available():
        strategy = StrategyRegistry.get(f"hvdcompress_{id}")
        assert isinstance(strategy, CompressedDDP) and strategy.method == id
    assert CompressedDDP("topk", find_unused_parameters=True)._ddp_kwargs == {"find_unused_parameters": True}
    (tmp_path / "acc=0.97.ckpt").touch()
    (tmp_path / "last.ckpt").symlink_to("acc=0.97.ckpt")
    assert folder_of(tmp_path / "last.ckpt") == tmp_path / "acc=0.97.hvdcompress"
    with pytest.raises(ValueError, match="local paths only"):
        folder_of("s3://bucket/last.ckpt")


@pytest.mark.slow
def test_lightning_removes_residuals_with_their_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from hvdcompress.integrations.lightning import CompressedDDP, folder_of

    strategy = CompressedDDP()
    checkpoint, link = tmp_path / "a.ckpt", tmp_path / "last.ckpt"
    checkpoint.touch()
    link.symlink_to("a.ckpt")
    folder_of(checkpoint).mkdir()
    strategy.remove_checkpoint(link)
    assert checkpoint.exists() and folder_of(checkpoint).is_dir() and not link.is_symlink()
    strategy.remove_checkpoint(checkpoint)
    assert not list(tmp_path.iterdir())
