"""The cost model: bytes for any number of ranks, the fit, predictions and the command ``scale``."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from experiments import nets
from experiments.__main__ import app
from experiments.configfile import MethodsFile
from experiments.cost_model import fitted, imagined, model, scale
from experiments.cost_model.fitted import Fitted
from experiments.cost_model.imagined import Request
from experiments.cost_model.model import Codec
from experiments.report import results
from hvdcompress import registry
from hvdcompress.engine.nodes import Nodes
from hvdcompress.loopback import Loopback
from hvdcompress.plan import IN_ORDER, plan_of
from hvdcompress.testing import numbers

TRUTH = {"message": 5e-5, "link": 1.06, "byte": 1e-9, "call": 2e-4, "round": 3e-3, "codec": 0.9}
SHAPES = {"conv": (16, 8, 3, 3), "matrix": (24, 40), "vector": (131,)}
#: every method, and settings with other collectives: routes, value codecs, known components, buckets
VARIANTS = [
    *((id, {}) for id in registry.available() if id not in ("gradiveq", "oktopk")),  # oktopk's lengths follow the data
    ("gradiveq", {"dense_steps": 2, "compressed_steps": 2, "matrix_rank": 1}),
    ("gradiveq", {"dense_steps": 2, "compressed_steps": 2, "matrix_rank": 1, "values": "qsgd8"}),
    *((id, {"route": "scatter"}) for id in ("qsgd", "signsgd", "terngrad")),
    ("terngrad", {"route": "gather"}),
    ("scalecom", {"select": "exact", "values": "qsgd4"}),
    ("powersgd", {"values": "bf16", "matrix_rank": 1}),
    ("topk", {"density": 0.1, "values": "rangefloat8"}),
    ("topk", {"bucket_elements": 2000}),
    ("topk", {"bucket_elements": 2000, "values": "qsgd4"}),
]
variants = pytest.mark.parametrize("id,settings", VARIANTS)


# -- bytes -----------------------------------------------------------------------------------------


def ledger_of(plan, world_size):
    """Run real ranks up to the method's last phase, and return the ledger of the last step."""
    net, main = Loopback(plan, world_size, grouping=IN_ORDER), plan.program.main
    last_step = next(step for step in range(100) if main.phase_of(step) == imagined.last_phase(main))
    for step in range(last_step + 1):
        net.ledger.reset()
        net.allreduce([{n: numbers(s, rank, step) for n, s in SHAPES.items()} for rank in range(world_size)])
    return net.ledger


@variants
@pytest.mark.parametrize("world_size", [2, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_bytes_and_collectives_equal_the_ledger_of_real_ranks(id, settings, world_size):
    plan = plan_of(id, min_elements=1, **settings)
    found, status = (model.work(plan, tensors, world_size, driver="mpi4py") for tensors in (SHAPES, {}))
    ledger = ledger_of(plan, world_size)
    assert found.sent - status.sent == max(map(ledger.bytes_sent, range(world_size)))
    assert round(found.on_wire - status.on_wire) == max(map(ledger.bytes_on_wire, range(world_size)))
    assert found.calls - status.calls == ledger.collectives()


@variants
@pytest.mark.parametrize("num_nodes,local_size", [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_bytes_of_two_levels_equal_the_ledger_of_real_ranks(id, settings, num_nodes, local_size):
    nodes = Nodes(num_nodes, local_size)
    plan = plan_of(id, min_elements=1, nodes=num_nodes, **settings)
    found, status = (model.two_levels(plan, tensors, nodes, driver="mpi4py") for tensors in (SHAPES, {}))
    ledger = ledger_of(plan, num_nodes * local_size)
    ranks = range(num_nodes * local_size)
    assert found.sent - status.sent == max(map(ledger.bytes_sent, ranks))
    assert round(found.on_wire - status.on_wire) == max(map(ledger.bytes_on_wire, ranks))
    assert found.inside == max(map(ledger.bytes_inside_node, ranks))


@pytest.mark.parametrize(
    "kind,receives,messages,hops,on_host",
    [
        ("AllGather", None, 3, 4, 7 * 800),
        ("AllReduce", None, 6, 8, 2 * 7 / 8 * 800),
        ("AllToAll", None, 6, 1, 2 * 6 / 8 * 800),
        ("AllToAll", [0, 100], 0, 1, 0),  # only from another rank of the host
        ("AllToAll", [0, 0, 100], 1, 0, 100),
    ],
)
def test_messages_and_bytes_of_hosts_with_two_ranks(kind, receives, messages, hops, on_host):
    begun = [(0, [Request.of(kind, "uint8", 100 if receives else 800, 8, receives)])]
    found = model.work_of(begun, 8, local_size=2)
    assert (found.messages, found.hops, found.on_host) == (messages, hops, on_host)
    alone = model.work_of(begun, 8, local_size=8)
    assert (alone.messages, alone.on_host) == (0, 0), "on one host there is no link"


def test_owners_of_two_levels_share_the_work():
    plan = plan_of("topk", bucket_elements=0, min_elements=1)
    tensors = dict.fromkeys("abcdefgh", (1000,))
    found = model.two_levels(plan, tensors, Nodes(2, 4), lambda _: Codec(tensor=1.0), "mpi4py")
    statuses = model.work(plan, {}, 8, driver="mpi4py", local_size=4)
    assert found.codec == 2, "each rank owns two of eight tensors"
    assert (found.calls, found.rounds) == (2 + 2 + 2 * 8, 2 + 1 + 2), "of the statuses, the method and the two levels"
    assert found.hops - statuses.hops == 2 * 3 * 8


def test_work_includes_the_drivers_own_collectives():
    plan, tensors = plan_of("topk", bucket_elements=0), {"a": (2000,), "b": (3000,)}
    horovod, mpi = (model.work(plan, tensors, 4, driver=driver) for driver in ("horovod", "mpi4py"))
    assert mpi.sent - horovod.sent == 2 * 8 * 8 - (2 * 8 + 8 * 8), "two statuses; one, and a placeholder per tensor"
    assert (horovod.calls, mpi.calls, horovod.rounds, mpi.rounds) == (2 * 2 + 1, 2 + 2, 2, 3)
    assert model.work(plan_of("none"), tensors, 4).calls == 3, "Horovod reduces these itself: no placeholders"


@pytest.mark.parametrize(
    "kind,lengths,turns",
    [
        ("AllReduce", [100] * 50, 2),
        ("AllReduce", [model.FUSED] * 3, 3 * 2),
        ("AllGather", [100] * 50, 1),
        ("AllGather", [model.FUSED // 4] * 50, 50),  # the gathered result must fit
    ],
)
def test_horovod_fuses_collectives_that_fit(kind, lengths, turns):
    assert model.turns(kind, lengths, 4) == turns


def test_horovod_does_not_fuse_all_to_alls():
    request = Request.of("AllToAll", "uint8", 100, 64)
    assert model.work_of([(0, [request])] * 50, 64).messages == 50 * 63


# -- the fit ---------------------------------------------------------------------------------------


def points():
    """Exchanges that take exactly the seconds of a model with the constants TRUTH."""
    found = []
    for id in ("topk", "scalecom", "qsgd", "powersgd", "none"):
        for p in (2, 3, 4):
            work = model.work(plan_of(id), nets.get("resnet32"), p, lambda method: Codec(1e-4, 2e-9, 1e-5, 1e-9))
            place = {"label": id, "set": "resnet32", "shared": max(1.0, p / 2)}
            found += [{**place, "rate": rate, **work._asdict()} for rate in (1e8, 1e9)]
    frame = pd.DataFrame(found)
    return frame.assign(seconds=model.costs(TRUTH, frame).sum(axis=1))


def test_the_fit_recovers_the_constants():
    assert fitted.fit_constants(points()) == pytest.approx(TRUTH, rel=1e-6)
    with pytest.raises(ValueError, match="5 measured exchanges are too few"):
        fitted.fit_constants(points()[:5])
    inconsistent = points().assign(seconds=lambda frame: frame["seconds"] / (1 + frame["rounds"]))
    assert min(fitted.fit_constants(inconsistent).values()) >= 0


def test_held_out_errors_are_of_exchanges_that_the_fit_has_not_seen():
    wrong = points()
    wrong.loc[wrong["label"] == "qsgd", "seconds"] *= 2
    found = fitted.hold_out(wrong)
    assert found["a method, in turn"]["points"] == len(wrong) and found["a method, in turn"]["worst"] > 0.4


@pytest.mark.parametrize("driver", ["horovod", "mpi4py"])
def test_published_constants_are_the_fit_of_the_published_points(driver):
    published = Fitted.open(driver)
    assert fitted.fit_constants(published.points) == pytest.approx(published.constants, rel=1e-9, abs=1e-12)


# -- predictions -----------------------------------------------------------------------------------


def predicted(*rates, workers=(2, 64, 4096), **hosts):
    methods = ["none", "topk", {"method": "scalecom", "label": "sc"}]
    entries = MethodsFile.open({"name": "t", "tasks": ["any"], "methods": methods}).methods
    known = {fitted.name_of(entry.plan.program.main): Codec(1e-4, 2e-9, 1e-5, 1e-9) for entry in entries}
    given = Fitted("horovod", TRUTH, known, {}, points())
    return scale.predict(given, entries, nets.get("resnet32"), rates, workers, **hosts)


def test_gathers_grow_with_the_ranks_and_sums_do_not():
    """The payloads of 4096 ranks are not made: decoded, they would take 8 GB."""
    frame = predicted("100mbit", "1gbit")
    slow, fast = (frame[frame["rate"] == rate].set_index(["method", "workers"]) for rate in ("100mbit", "1gbit"))
    assert slow["on_wire"]["topk", 4096] > 1000 * slow["on_wire"]["topk", 2]
    assert slow["on_wire"]["sc", 4096] < 3 * slow["on_wire"]["sc", 2]
    assert (slow["seconds"] > fast["seconds"]).all() and slow["on_wire"].equals(fast["on_wire"])


def test_two_levels_gather_from_fewer_ranks():
    frame = predicted("1gbit", workers=(8, 64, 512), local_size=8)
    np.testing.assert_allclose(frame["seconds"], frame[[*model.CONSTANTS, "local"]].sum(axis=1))
    on_host = frame.set_index(["levels", "method", "workers"])["on_host"]
    assert on_host[1, "topk", 512] / on_host[2, "topk", 512] == pytest.approx(511 / 63, rel=0.05), "and headers"
    local = [predicted("1gbit", workers=(64,), local_size=8, inside=r)["local"].sum() for r in ("80gbit", "800mbit")]
    assert local[1] > 10 * local[0], "bytes inside a host cost more on a slower link"


def test_the_command_fits_predicts_and_writes(tmp_path):
    def run(*options):
        words = ["scale", "--set", "resnet32", "--methods", "topk 0.5 %,fp16", "--out", str(tmp_path), *options]
        return CliRunner().invoke(app, words)

    done = run("--rate", "10mbit,1gbit", "--fit", str(results.save("measured", points(), tmp_path)))
    assert done.exit_code == 0 and "of resnet32 at 10mbit" in done.output, done.output
    assert set(results.load("scale-resnet32", tmp_path)["method"]) == {"dense", "fp16", "topk 0.5 %"}

    hosts = run("--fitted", str(tmp_path), "--workers", "8,16", "--per-host", "4", "--inside", "10gbit")
    assert hosts.exit_code == 0 and "2 levels, by workers" in hosts.output, hosts.output
    bad = run("--fitted", str(tmp_path), "--workers", "6", "--per-host", "4")
    assert bad.exit_code == 2 and "there must be 2 at least, and 4 on each host" in bad.output
