"""Residuals in a folder next to a framework's checkpoint: saved, loaded, replaced, removed; links are followed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import hvdcompress  # noqa: E402
from hvdcompress import ddp  # noqa: E402
from hvdcompress.engine.saving import checkpoint  # noqa: E402
from hvdcompress.integrations import rank_files  # noqa: E402
from hvdcompress.local_steps import LocalSteps  # noqa: E402


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


def test_residuals_are_saved_loaded_and_removed(compressor: ddp.Compressor, tmp_path: Path) -> None:
    """Files of ranks that no longer exist are replaced; the user's own files stay until the folder is removed."""
    folder = tmp_path / "a" / rank_files.NAME
    folder.mkdir(parents=True)
    for name in ("step-3-rank-1-of-2.safetensors", "notes.txt"):
        (folder / name).touch()
    compressor.save(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["notes.txt", "step-1-rank-0-of-1.safetensors"]
    kept = compressor.residual("weight")
    compressor.release()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rank_files.load(compressor, folder)
    assert kept.abs().max() > 0 and torch.equal(compressor.residual("weight"), kept)
    rank_files.remove(folder)
    rank_files.remove(folder)  # it may be gone already
    assert not folder.exists()
    with pytest.warns(UserWarning, match="residuals start at zero"):
        rank_files.load(compressor, folder)


def test_states_of_other_kinds_of_runs(compressor: ddp.Compressor, tmp_path: Path) -> None:
    """A plain run's checkpoint has no folder. A run of the other kind continues without its state, and replaces it."""
    layer = torch.nn.Linear(40, 40)
    with LocalSteps(layer, torch.optim.SGD(layer.parameters(), lr=0.1), every=2) as local:
        for loads in (compressor, local):
            with pytest.warns(UserWarning, match="no saved state.*residuals start at zero"):
                rank_files.load(loads, tmp_path)
        for saves, loads in ((compressor, local), (local, compressor)):
            saves.save(tmp_path)
            rank_files.load(saves, tmp_path)
            with pytest.warns(UserWarning, match=r"of (gradients|local steps), not of.*residuals start at zero"):
                rank_files.load(loads, tmp_path)
        saved = checkpoint.from_bytes(*local.state_dict().values())
        checkpoint.save({**saved, "world": 2}, tmp_path / "two")
        with pytest.raises(FileNotFoundError, match="all 2 ranks"):
            rank_files.load(local, tmp_path / "two")


@pytest.mark.slow
def test_lightning_strategies_and_folders(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch.strategies import StrategyRegistry

    from hvdcompress.integrations.lightning import CompressedDDP, folder_of

    for id in hvdcompress.available():
        strategy = StrategyRegistry.get(f"hvdcompress_{id}")
        assert isinstance(strategy, CompressedDDP) and strategy.method == id
    assert CompressedDDP("topk", find_unused_parameters=True)._ddp_kwargs == {"find_unused_parameters": True}
    with pytest.raises(ValueError, match="local paths only"):
        folder_of("s3://bucket/last.ckpt")

    saved, link = tmp_path / "acc=0.97.ckpt", tmp_path / "last.ckpt"
    saved.touch()
    link.symlink_to(saved.name)
    folder = folder_of(link)
    assert folder == folder_of(saved) == tmp_path / "acc=0.97.hvdcompress"
    folder.mkdir()
    strategy.remove_checkpoint(link)
    assert saved.exists() and folder.is_dir() and not link.is_symlink()
    strategy.remove_checkpoint(saved)
    assert not list(tmp_path.iterdir()), "residuals are removed with their checkpoint"
