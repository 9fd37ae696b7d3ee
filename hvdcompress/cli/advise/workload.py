"""The user's training: functions that make the model, batches, the loss and the optimizer."""

from __future__ import annotations

import importlib
import os
import random
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from hvdcompress.cli.advise.ranks import Ranks, UserError

RATE = 1e-4  #: learning rate in place of a missing ``--optimizer``: no model diverges while it is measured


class Workload:
    """A training that can be started again and again; its methods raise UserError if a function of the user fails.

    Args:
        given: {option: "module:function"}; "--loss" and "--optimizer" may be missing.
    """

    def __init__(self, given: Mapping[str, str]):
        self.given = given
        self._functions = {option: _find(option, words) for option, words in given.items()}

    def _call(self, option: str, *args: Any, returns: type = object) -> Any:
        words = f"{option} {self.given[option]}"
        try:
            found = self._functions[option](*args)
        except Exception as error:
            advice = "; batches must not end, so begin again with the first" * isinstance(error, StopIteration)
            raise UserError(f"{words} raised {_described(error)}{advice}") from error
        if not isinstance(found, returns):
            raise UserError(f"{words} must return a torch {returns.__name__}, not a {type(found).__name__}")
        return found

    def start(self, rank: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """Return a new model and its optimizer. All ranks have the same weights, and later batches of their own."""
        _seed_all(0)
        model = self._call("--model", returns=torch.nn.Module)
        if "--optimizer" in self.given:
            optimizer = self._call("--optimizer", model, returns=torch.optim.Optimizer)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
        _seed_all(1 + rank)
        return model, optimizer

    def batch(self) -> Any:
        """Return this rank's next batch."""
        return self._call("--data")

    def loss(self, module: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss of a batch: by default the cross-entropy of a pair of inputs and classes."""
        if "--loss" in self.given:
            return self._call("--loss", module, batch, returns=torch.Tensor)
        try:
            inputs, classes = batch
            return F.cross_entropy(module(inputs).flatten(0, -2), classes.flatten())
        except Exception as error:
            advice = "unless the loss is the cross-entropy of pairs of inputs and classes, give --loss"
            raise UserError(f"model and loss raised {_described(error)}; {advice}") from error

    def check(self, ranks: Ranks) -> list[int]:
        """Take a step on every rank without an exchange, so that errors show before ranks wait for each other.

        Returns:
            The numbers of elements of the trained parameters.

        Raises:
            AdviseError: on all ranks, if a function fails on one of them.
        """
        with ranks.together():
            model, optimizer = self.start(ranks.rank)
            loss = self.loss(model, self.batch())
            loss.backward()
            optimizer.step()
            trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
            if unused := [name for name, p in trained.items() if p.grad is None]:
                advice = "freeze it (requires_grad=False), or use it in the loss"
                raise UserError(f"--model: the parameter {unused[0]!r} gets no gradient: {advice}")
        return [p.numel() for p in trained.values()]


def _find(option: str, words: str) -> Callable[..., Any]:
    module, _, name = words.partition(":")
    if not module or not name:
        raise UserError(f"{option} {words}: write MODULE:FUNCTION, such as mine:make_model for a file mine.py")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:
        raise UserError(f"{option} {words}: importing it in {os.getcwd()} raised {_described(error)}") from error


def _described(error: Exception) -> str:
    """Return an exception with the line of the user's file that it comes from."""
    library = ("site-packages", "<frozen", os.path.dirname(os.__file__), os.path.dirname(__file__))
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(folder in frame.filename for folder in library)]
    where = f" ({os.path.relpath(own[-1].filename)}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{where}"


def _seed_all(seed: int) -> None:
    """Seed every generator that a user's function may draw from."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
