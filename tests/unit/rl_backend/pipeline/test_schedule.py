"""Bubbles and activations of the pipeline schedules against the papers' formulas."""

from __future__ import annotations

import pytest

from rl_backend.contracts import ConfigError
from rl_backend.pipeline import SCHEDULES, Action, Costs, Kind, Timeline, make_schedule, simulate

SIZES = [(p, times * p) for p in (4, 8) for times in (1, 2, 4)]


def timeline(name: str, pp_size: int, num_micro_batches: int, costs: Costs | None = None, **options: int) -> Timeline:
    return simulate(make_schedule(name, pp_size, num_micro_batches, costs=costs, **options), costs)  # type: ignore[arg-type]


def idle(of: Timeline) -> tuple[float, float]:
    """Time that a rank idles, in the whole step and between its own first start and last end, at most."""
    spans = [own[-1].end - own[0].start for own in of.spans]
    return of.makespan - min(of.busy), max(span - busy for span, busy in zip(spans, of.busy, strict=True))


@pytest.mark.shows("pipelines: 1F1B and interleaved 1F1B have the bubble (p-1)/(vm+p-1)")
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_1f1b_and_its_interleaved_form_have_the_bubble_of_the_formula(p: int, m: int) -> None:
    plain = timeline("1f1b", p, m)
    assert plain.bubble_makespan == pytest.approx((p - 1) / (m + p - 1))
    assert plain.bubble_span == pytest.approx((p - 1) / (m + p - 1))
    assert plain.peak_activations == tuple(p - rank for rank in range(p))
    for v in (2, 3):
        interleaved = timeline("interleaved-1f1b", p, m, stages_per_rank=v)
        assert interleaved.bubble_makespan == pytest.approx((p - 1) / (v * m + p - 1))
        assert interleaved.bubble_span == pytest.approx((p - 1) / (v * m + p - 1))
        assert interleaved.peak_activations[0] == min(v * m, 2 * (p - 1) + (v - 1) * p + 1)


@pytest.mark.shows("pipelines: ZB-H1 and ZB-H2 have the bubbles and activations of arXiv 2401.10241, table 2")
@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 1.0, 0.5), (1.1, 1.3, 1.0)])
def test_zb_h1_and_zb_h2_have_the_bubbles_of_the_formulas(p: int, m: int, times: tuple[float, float, float]) -> None:
    forward, inputs, weights = times
    costs = Costs(*times)
    first = timeline("zb-h1", p, m, costs)
    assert idle(first) == (pytest.approx((p - 1) * (forward + inputs - weights)),) * 2
    assert first.peak_activations == (p,) * p
    if m >= 2 * p:
        second = timeline("zb-h2", p, m, costs)
        assert idle(second)[1] == pytest.approx((p - 1) * (forward + inputs - 2 * weights))
        assert second.peak_activations == (2 * p - 1,) * p


ZBV_BUBBLE = {
    (4, 4): (11.2, 11.2),
    (4, 8): (5.9, 0),
    (4, 16): (3.1, 0),
    (8, 8): (12.8, 12.8),
    (8, 16): (6.8, 0),
    (8, 32): (3.6, 0),
}


@pytest.mark.shows(
    "pipelines: from m = 2p on ZB-H2 and ZBV idle only before a rank's start and after its end, ZBV in 1F1B's memory"
)
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zbv_has_no_bubble_inside_a_rank_and_the_activations_of_1f1b(p: int, m: int) -> None:
    zbv = timeline("zbv", p, m)
    makespan, span = ZBV_BUBBLE[p, m]
    assert 100 * zbv.bubble_makespan <= makespan
    assert 100 * zbv.bubble_span <= span + 1e-9
    assert max(zbv.peak_activations) == 2 * p
    if m >= 2 * p:
        assert zbv.peak_activations == (2 * p,) * p
        # What no schedule can do without: the last rank starts after p - 1 forward passes.
        assert zbv.makespan == pytest.approx(6 * m + p - 1)
        dualpipev = timeline("dualpipev", p, m)
        assert dualpipev.makespan == pytest.approx(6 * m + p - 1)
        assert dualpipev.peak_activations == (2 * p + 1,) * p


@pytest.mark.parametrize("p", [2, 3, 5, 6])
def test_the_formulas_hold_from_the_number_of_micro_batches_that_the_page_says(p: int) -> None:
    assert timeline("zbv", p, p).makespan == pytest.approx(6 * p + p - 1)
    assert timeline("zb-h1", p, p).makespan == pytest.approx(3 * p + p - 1)
    for name in ("zbv", "zb-h2"):
        assert timeline(name, p, 2 * p - 1).bubble_span == pytest.approx(0, abs=1e-12)
        assert timeline(name, p, 2 * p - 2).bubble_span > 0


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_rank_has_no_bubble(name: str) -> None:
    assert timeline(name, 1, 4).bubble_makespan == pytest.approx(0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_forward_passes_alone_fill_the_pipeline_once(name: str) -> None:
    schedule = make_schedule(name, 4, 6, forward_only=True)
    v = schedule.stages_per_rank
    fills = 2 if SCHEDULES[name].stages_per_rank == 2 else 1
    # Six micro-batches are not whole groups of four, so the interleaved one waits for the last two between its stages.
    waits = 2 if name == "interleaved-1f1b" else 0
    assert simulate(schedule).makespan == pytest.approx(6 * v + fills * 3 + waits)
    assert schedule.peak_activations == (0,) * 4


def test_zbv_fits_its_order_to_the_costs() -> None:
    costs = Costs(1.0, 0.9, 1.1)
    assert timeline("zbv", 4, 8, costs).makespan < simulate(make_schedule("zbv", 4, 8), costs).makespan


def test_stages_of_different_size_take_their_own_time() -> None:
    costs = Costs((1.0, 2.0), (3.0, 4.0), (5.0, 6.0))
    whole = timeline("1f1b", 2, 1, costs)
    assert [[(span.start, span.end) for span in own] for own in whole.spans] == [[(0, 1), (13, 21)], [(1, 3), (3, 13)]]
    # Of 2 ranks' 21 units, the first works 9 and the second 12; the first idles 12 of its 21, the second never.
    assert whole.bubble_makespan == pytest.approx(0.5)
    assert whole.bubble_span == pytest.approx(12 / 21)
    split = timeline("zb-h1", 2, 1, costs).spans
    assert [[(span.start, span.end) for span in own] for own in split] == [
        [(0, 1), (7, 10), (10, 15)],
        [(1, 3), (3, 7), (7, 13)],
    ]


def test_communication_takes_time_but_not_a_ranks() -> None:
    costs = Costs(communication=0.25)
    assert timeline("1f1b", 4, 1, costs).makespan == pytest.approx(4 * 3 + 6 * 0.25)
    # Both middle stages of a V are on one rank, and nothing is sent between them.
    assert timeline("zbv", 2, 1, costs).makespan == pytest.approx(4 + 4 + 1 + 4 * 0.25)
    busy = timeline("1f1b", 4, 8, costs)
    assert busy.busy == (24.0,) * 4


def test_transfers_of_one_direction_follow_each_other() -> None:
    # Both forward results are ready by 2, and each transfer takes 5: the second arrives at 11, not at 7.
    costs = Costs(communication=5.0)
    first, last = timeline("1f1b", 2, 2, costs).spans
    assert [(span.start, span.end) for span in last] == [(6, 7), (7, 9), (11, 12), (12, 14)]
    assert [(span.start, span.end) for span in first] == [(0, 1), (1, 2), (14, 16), (19, 21)]


def test_a_receive_is_posted_before_what_the_rank_computes_while_the_data_is_sent() -> None:
    (first, last) = make_schedule("1f1b", 2, 3).actions
    assert " ".join(map(str, last)) == ("1RECV_F0 1F0 1RECV_F1 1BW0 1SEND_B0 1F1 1BW1 1RECV_F2 1SEND_B1 1F2 1BW2 1SEND_B2")
    assert " ".join(map(str, first)) == ("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0BW0 0F2 0SEND_F2 0RECV_B1 0BW1 0RECV_B2 0BW2")


def test_activations_are_held_from_forward_to_the_weights_gradient() -> None:
    schedule = make_schedule("zb-h1", 2, 2)
    computed = [action for action in schedule.actions[1] if action.kind in (Kind.FORWARD, Kind.BACKWARD_WEIGHT)]
    assert computed == [Action(Kind.FORWARD, 1, 0), Action(Kind.FORWARD, 1, 1)] + [
        Action(Kind.BACKWARD_WEIGHT, 1, micro_batch) for micro_batch in range(2)
    ]
    assert schedule.peak_activations == (2, 2)


def test_stages_are_where_the_placement_says() -> None:
    looped = make_schedule("interleaved-1f1b", 3, 3, stages_per_rank=2)
    assert [looped.stages_of(rank) for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]
    folded = make_schedule("zbv", 3, 3)
    assert [folded.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert folded.stages_per_rank == 2
    assert make_schedule("1f1b", 3, 3).stages_per_rank == 1


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_splits_the_backward_pass_if_it_says_so(name: str) -> None:
    actions = [action for own in make_schedule(name, 2, 4).actions for action in own]
    assert any(action.kind is Kind.BACKWARD_WEIGHT for action in actions) is SCHEDULES[name].splits_backward


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_makes_no_sense_is_refused(bad: float) -> None:
    with pytest.raises(ConfigError, match=r"^Costs\.backward_input=.*: must be above 0$"):
        Costs(1.0, bad)
    with pytest.raises(ConfigError, match=r"^Costs\.forward=.*: must be above 0$"):
        Costs((1.0, bad))
    if bad:
        with pytest.raises(ConfigError, match=r"^Costs\.communication=.*: must be 0 or more$"):
            Costs(communication=bad)


def test_times_for_another_number_of_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^Costs\.forward=\(1, 2, 3\): has 3 times for 4 stages$"):
        make_schedule("zbv", 2, 2, costs=Costs((1, 2, 3)))
    with pytest.raises(ConfigError, match=r"^Costs\.forward=\(1, 2, 3\): has 3 times for 2 stages$"):
        simulate(make_schedule("1f1b", 2, 2), Costs((1, 2, 3)))
