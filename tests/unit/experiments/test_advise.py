"""The adviser: its time line against steps worked out by hand, its choices, profiles, and (marked) real ranks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from experiments import __main__ as cli
from experiments.advise import run, verdict
from experiments.advise.calibrate import FARTHEST, REFERENCE, calibrate
from experiments.advise.choose import DENSE, Candidate, Case, candidates
from experiments.advise.codecs import Known
from experiments.advise.exchanges import buckets_of, status, units_of
from experiments.advise.profile import Profile
from experiments.advise.timeline import Call, Link, Step, Times, Unit, simulate
from experiments.configfile import MethodEntry
from experiments.scale.cost import Codec
from hvdcompress.plan import BY_NAME, load, plan_of

SUM, GATHER = ("AllReduce", "float32", None), ("AllGather", "uint8", None)


def unit(name, line, kind=SUM, **given):
    """One tensor of one collective, of which so many bytes pass."""
    return Unit(name, (name,), (Call(kind, int(line), float(line)),), **given)


def no_codec(method):
    return Codec(), Codec()


# -- the time line, by hand ------------------------------------------------------------------------------


def test_a_tensor_behind_the_backward_pass():
    """1000 bytes at 8000 bit/s are a second, of which the backward pass hides none: the tensor is its last one."""
    step = simulate(Times({"a": 2.0}, 2.0, forward=1.0, update=0.5), [unit("a", 1000)], Link(8000), 2)
    assert step.seconds == pytest.approx(1 + 2 + 1 + 0.5)
    assert step.exposed == pytest.approx(1.0) and step.link == pytest.approx(1.0) and step.hidden == []


def test_what_is_ready_early_is_hidden():
    """b's second is over before the backward pass is; a's begins at its end."""
    times = Times({"b": 1.0, "a": 3.0}, 3.0)
    step = simulate(times, [unit("a", 500), unit("b", 1000)], Link(8000), 2)
    assert step.seconds == pytest.approx(3.5) and step.hidden == ["b"]


def test_tensors_queue_behind_each_other():
    """Of other kinds, so they do not travel as one: c 0-2, b 2-3, a 3-4, though all are ready by 1."""
    times = Times({"c": 0.0, "b": 0.5, "a": 1.0}, 1.0)
    kinds = [("AllReduce", dtype, None) for dtype in ("float32", "float16", "int32")]
    units = [unit("a", 1000, kinds[0]), unit("b", 1000, kinds[1]), unit("c", 2000, kinds[2])]
    assert simulate(times, units, Link(8000), 2).seconds == pytest.approx(4.0)


def test_what_comes_within_a_cycle_joins():
    """A round of 1 s, of which 0.5 s are a cycle: b joins c, which ends at 1; a comes too late."""
    times = Times({"c": 0.0, "b": 0.4, "a": 0.6}, 0.6)
    units = [unit(name, 0) for name in "abc"]
    step = simulate(times, units, Link(8e12, round=1.0, window=0.5), 2)
    assert step.link == pytest.approx(2.0) and step.seconds == pytest.approx(1.6)
    assert simulate(Times({"a": 0.0}, 0.0), [unit("a", 0)], Link(8e12, round=1.0, window=0.5), 2).seconds == 1.0


def test_encoding_delays_what_follows():
    """a is ready at 1 but b's second of encoding comes first: a is sent from 2 to 3."""
    times = Times({"b": 0.0, "a": 1.0}, 1.0)
    units = [unit("a", 1000), unit("b", 0, encode=1.0)]
    assert simulate(times, units, Link(8000), 2).seconds == pytest.approx(3.0)


def test_decoding_waits_for_the_bytes():
    """b's bytes come at 1, a's at 2; b is decoded meanwhile, a afterwards."""
    times = Times({"b": 0.0, "a": 0.0}, 0.0)
    units = [unit("a", 1000, decode=0.25), unit("b", 1000, GATHER, decode=0.5)]
    assert simulate(times, units, Link(8000), 2).seconds == pytest.approx(2.25)


def test_rounds_follow_each_other():
    """Two rounds of a second each, with the codec's second in halves before them."""
    two = Unit("a", ("a",), (Call(SUM, 1000, 1000.0), Call(GATHER, 1000, 1000.0)), encode=1.0, decode=0.5)
    assert simulate(Times({"a": 0.0}, 0.0), [two], Link(8000), 2).seconds == pytest.approx(3.5)


def test_computing_slows_down_while_the_link_is_busy():
    """With half the speed left, 2 s of backward pass take 3: 1 s of progress in the link's 2 s, then 1 s more."""
    times = Times({"b": 0.0, "a": 2.0}, 2.0)
    units = [unit("b", 2000)]
    assert simulate(times, units, Link(8000, overlap=0.5), 2).seconds == pytest.approx(3.0)
    assert simulate(times, units, Link(8000, overlap=0.0), 2).seconds == pytest.approx(4.0)
    waits = Times({"b": 0.0, "a": 2.0}, 2.0, waits=True)
    assert simulate(waits, units, Link(8000, overlap=0.0), 2).seconds == pytest.approx(2.0)


def test_a_call_costs_the_processor():
    times = Times({"a": 0.0}, 0.0)
    plain = unit("a", 1000, encode=0.5, decode=0.0)
    with_probe = Unit("a", ("a",), plain.calls, 0.5, 0.0, (Call(SUM, 8, 0.0),))
    assert simulate(times, [with_probe], Link(8000, call=0.25), 2).seconds == pytest.approx(0.25 + 0.5 + 0.25 + 1.0)


# -- plans ------------------------------------------------------------------------------------------------


def test_a_dense_plan_is_its_tensors_one_by_one():
    shapes = {"w": (300, 300), "b": (300,)}
    units = units_of(load({"method": "none"}), shapes, 4, no_codec)
    assert {one.name: one.calls for one in units} == {
        "w": (Call(SUM, 360000, 2 * 3 / 4 * 360000),),
        "b": (Call(SUM, 1200, 2 * 3 / 4 * 1200),),
    }
    assert all(not one.extra for one in units) and not status(load({"method": "none"}), 4)


def test_small_tensors_travel_together_as_the_driver_groups_them():
    shapes = {f"w{number}": (100, 100) for number in range(5)}
    plan = plan_of("topk", density=0.01)
    [one] = units_of(plan, shapes, 4, no_codec)
    assert one.members == tuple(shapes) == tuple(m.name for m in buckets_of(plan, shapes)[0].members)
    assert len(one.calls) == 1 and one.calls[0].kind[0] == "AllGather" and len(one.extra) == 5


def test_codecs_and_sharing_reach_the_units():
    asked = []

    def codec(method):
        asked.append(method.id)
        return Codec(element=1e-6), Codec(piece=1e-3)

    [one] = units_of(plan_of("topk", density=0.01), {"w": (1000, 1000)}, 4, codec, shared=2.0)
    assert asked == ["topk"]
    assert one.encode == pytest.approx(2.0) and one.decode == pytest.approx(2 * 4e-3)


# -- choosing ---------------------------------------------------------------------------------------------

LARGE = {"first": (1000, 1000), "middle": (1200, 1000), "last": (1000, 1100)}
MB = 4e6


EACH = replace(BY_NAME, bucket_elements=1_000_000)  #: none of LARGE's tensors travels with another


def case(rate=8e6, ready=(0.1, 0.05, 0.0), backward=0.1, codec=no_codec, grouping=BY_NAME, **given):
    times = Times(dict(zip(LARGE, ready, strict=True)), backward)
    return Case(LARGE, times, Link(rate, **given), 2, codec, grouping=grouping)


def entries(*given):
    return [MethodEntry.model_validate({"label": one["method"], **one}) for one in given]


TOPK = {"method": "topk", "density": 0.01}


def test_hidden_tensors_stay_dense():
    """At 8 Mbit/s 4.8 MB are 4.8 s: what is ready 20 s before the end is hidden, the first layer's gradient is not."""
    slow = case(ready=(20.0, 1.0, 0.0), backward=20.0, grouping=EACH)
    plan = slow.greedy(TOPK)
    assert plan is not None
    by_name = {m.name: b.program.main.id for b in buckets_of(plan, LARGE) for m in b.members}
    assert by_name == {"first": "topk", "middle": "none", "last": "none"}
    everywhere, partly = slow.predict(load(TOPK)), slow.predict(plan)
    assert partly.seconds <= everywhere.seconds * 1.001


def test_everything_exposed_is_compressed():
    assert case().greedy(TOPK) is None, "the method everywhere is the plan"
    found = candidates(case(), entries(TOPK), lambda words: None)
    assert [one.label for one in found] == [DENSE, "topk"] and found[1].compressed == 3


def test_a_codec_that_costs_more_than_it_saves_is_left_out():
    def slow(method):
        return Codec(tensor=0.0 if method.id == "none" else 60.0), Codec()

    assert case(codec=slow).greedy(TOPK) is None
    found = candidates(case(codec=slow), entries(TOPK), lambda words: None)
    advice = verdict.advise(case(codec=slow), found, 0.1)
    assert advice.verdict == verdict.DONT and advice.best.label == DENSE and not advice.unsure


def test_break_even_is_where_both_steps_are_equal():
    """Nothing overlaps and one tensor: dense D bytes, compressed C, codec s: rate = 8 (D - C) / s."""
    shapes = {"w": (1000, 1000)}

    def codec(method):
        return Codec(tensor=0.0 if method.id == "none" else 0.5), Codec()

    one = Case(shapes, Times({"w": 0.0}, 0.0), Link(1e9), 2, codec)
    plan = load({"method": "fp16"})
    units = units_of(plan, shapes, 2, codec)
    carried = sum(call.line for call in (*units[0].calls, *units[0].extra)) + sum(c.line for c in status(plan, 2))
    assert one.break_even(plan) == pytest.approx(8 * (4e6 - carried) / 0.5, rel=1e-3)
    assert one.break_even(load({"method": "none"})) == 0.0
    known_by = Case(shapes, one.times, Link(1e9, share=0.5), 2, codec)
    assert known_by.break_even(plan) == pytest.approx(2 * one.break_even(plan), rel=1e-3)


@pytest.mark.parametrize(
    "rate,given,settings,expected",
    [
        (8e6, {}, TOPK, verdict.PLAN),
        (8e12, {}, TOPK, verdict.DONT),
        (8e6, {}, {"method": "fp16"}, "fp16"),
        (8e12, {"round": 0.2}, TOPK, verdict.FUSE),
    ],
)
def test_verdicts(rate, given, settings, expected):
    here = case(rate, **given)
    advice = verdict.advise(here, candidates(here, entries(settings), lambda words: None), 0.1)
    assert advice.verdict == expected


def test_a_simple_plan_comes_before_one_that_is_better_within_the_error():
    here = case()
    dense = Candidate(DENSE, "none", here.dense, Step(1.0, 0.9, 0.9, 0.0), 0, 3)
    whole = Candidate("whole", "topk", load(TOPK), Step(0.5, 0.4, 0.4, 0.0), 3, 3)
    for seconds, expected in ((0.44, "whole"), (0.4, "partly")):
        partly = Candidate("partly", "topk", load(TOPK), Step(seconds, 0.3, 0.3, 0.0), 2, 3, partly=True)
        assert verdict.advise(here, [dense, whole, partly], 0.1).best.label == expected


# -- profiles ---------------------------------------------------------------------------------------------


CODEC = {"encode": [1e-4, 1e-9, 0.0, 0.0], "decode": [1e-4, 1e-9, 0.0, 0.0]}


def good(**changed):
    return {
        "version": 1,
        "name": "small",
        "ranks": 2,
        "tensors": {"w": [1000, 1000], "b": [10]},
        "times": {"forward": 0.01, "backward": 0.02, "update": 0.001, "ready": {"w": 0.02, "b": 1e-05}},
        "link": {"rate": 1e8, "message": 5e-05, "round": 0.001, "call": 0.0001, "overlap": 0.5},
        "codecs": {"topk density=0.01": CODEC},
    } | changed


def test_a_profile_is_read_as_it_was_written(tmp_path):
    profile = Profile.open(good())
    profile.save(tmp_path / "profile.json")
    assert Profile.open(tmp_path / "profile.json").to_dict() == profile.to_dict()
    json.loads((tmp_path / "profile.json").read_text())


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_a_measured_dense_step_brings_the_link_into_line(factor):
    """Whatever dominates, the dense step is then the measured one; the link changes by 4 at most."""
    profile = Profile.open(good())
    plain = run.case_of(profile)
    for link in (plain.given, Link(1e12, round=0.01)):
        case = plain.over(link)
        seconds = case.times.alone + factor * case.predict(case.dense).exposed
        found = calibrate(case, seconds)
        assert case.over(found).predict(case.dense).seconds == pytest.approx(seconds, rel=0.01)
        assert (found.rate == link.rate) == (link.round == 0.01)
    measured = run.case_of(Profile.open(good(dense=1000.0))).given
    assert measured.rate == pytest.approx(plain.given.rate / FARTHEST)


@pytest.mark.parametrize("more", [0.0, 1e-4, 1e-3])
def test_a_measured_compressed_step_gives_what_a_gradient_costs_besides(more):
    """It is in every plan but the dense one, for each gradient, and none is below nothing."""
    codecs = {"scalecom density=0.0167": CODEC, "topk density=0.01": CODEC}
    plain = run.case_of(Profile.open(good(dense=1.0, codecs=codecs)))
    plan, other = load(REFERENCE), load(TOPK)
    seconds = plain.with_handling(more).predict(plan).seconds
    found = run.case_of(Profile.open(good(dense=1.0, codecs=codecs, compressed=seconds)))
    assert found.handling == pytest.approx(more, rel=0.01, abs=1e-8)
    assert found.predict(plan).seconds == pytest.approx(seconds, rel=1e-6)
    assert found.predict(other).seconds - plain.predict(other).seconds >= more * len(plain.tensors) / 2
    assert found.predict(found.dense).seconds == plain.predict(plain.dense).seconds
    assert run.case_of(Profile.open(good(dense=1.0, codecs=codecs, compressed=1e-6))).handling == pytest.approx(
        0.0, abs=1e-8
    )


def test_ranks_that_share_processors_take_longer():
    profile = Profile.open(good(shared=2.0))
    assert profile.times_if(1.0).backward == pytest.approx(0.01)
    assert profile.times_if(4.0).ready["w"] == pytest.approx(0.04)
    waiting = good(shared=2.0)
    waiting["times"]["waits"] = True
    assert Profile.open(waiting).times_if(4.0).backward == pytest.approx(0.02)


# -- measuring in one process -----------------------------------------------------------------------------


def test_a_codec_is_timed_through_the_engine():
    known = Known({})
    before, after = known(plan_of("topk", density=0.01).program.main)
    large = before.seconds(1 << 20, 2, 0) + after.seconds(1 << 20, 2, 0)
    assert 1e-5 < large < 5 and large > before.seconds(4096, 2, 0)
    assert list(known.codecs) == ["topk density=0.01"]
    assert known(plan_of("none").program.main) == (Codec(), Codec())


# -- the command ------------------------------------------------------------------------------------------


def invoke(*words):
    return CliRunner().invoke(cli.app, ["advise", *map(str, words)])


def test_a_purchase_is_planned_from_options(tmp_path):
    file, plan, plot = tmp_path / "profile.json", tmp_path / "plan.yaml", tmp_path / "plot.svg"
    Profile.open(good()).save(file)
    given = ["--profile", file, "--methods", "topk 1 %"]
    done = invoke(*given, "--link", "10mbit,50us", "--ranks", "2", "--plan", plan, "--plot", plot)
    assert done.exit_code == 0, done.output
    assert "Verdict: this plan" in done.output and "Accuracy" in done.output
    assert load(plan).program.main.id == "topk", "the plan can be used as it is"
    assert plot.read_text().startswith("<svg")
    data = json.loads(invoke(*given, "--link", "10mbit,50us", "--format", "json").output)
    assert load(data["plan"]).program.main.id == "topk" and data["seconds"] < data["dense_seconds"]
    assert "don't compress" in invoke(*given, "--link", "100gbit,1us", "--shared", "1").output
