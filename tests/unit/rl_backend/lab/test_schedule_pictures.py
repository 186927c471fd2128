"""Pictures and texts of pipeline schedules: what is drawn where, and which numbers are said."""

from __future__ import annotations

import re

import pytest

from rl_backend.lab import schedule as view
from rl_backend.lab.picture import Picture, Rectangle, Text
from rl_backend.pipeline import Costs, Schedule, Timeline, make_schedule, simulate
from rl_backend.pipeline.measured import MeasuredPass

ONE = (1.0, 1.0, 1.0)


def simulated(
    name: str, pp: int, micro_batches: int, *, forward_only: bool = False, costs: Costs | None = None
) -> tuple[Schedule, Timeline]:
    schedule = make_schedule(name, pp, micro_batches, forward_only=forward_only)
    return schedule, simulate(schedule, costs or Costs(1.0, 1.0, 1.0, 0.0))


def words(picture: Picture) -> list[str]:
    return [shape.content for shape in picture.shapes if isinstance(shape, Text)]


def tips(picture: Picture, pattern: str) -> list[tuple[Rectangle, str]]:
    rectangles = [shape for shape in picture.shapes if isinstance(shape, Rectangle)]
    return [(each, each.tip) for each in rectangles if each.tip is not None and re.search(pattern, each.tip)]


def facts_of(schedule: Schedule, timeline: Timeline) -> dict[str, object]:
    return view.schedule_facts(schedule, timeline, ONE, 0.0)


def test_a_picture_of_forward_passes_alone_has_no_activations() -> None:
    trained, forward = (view.draw_schedule(*simulated("1f1b", 2, 3, forward_only=only), "") for only in (False, True))
    assert "activations held" in words(trained) and tips(trained, "held$")
    assert [word for word in words(trained) if word.startswith("peak")] == ["peak 2", "peak 1"]
    assert not [word for word in words(forward) if word.startswith(("peak", "activations", "backward"))]
    assert not tips(forward, "held$") and len(tips(forward, "forward, stage")) == 6


def test_two_shades_tell_the_first_stage_of_a_rank_from_its_other_ones() -> None:
    one, two = (view.draw_schedule(*simulated(name, 2, 4), "") for name in ("1f1b", "interleaved-1f1b"))
    note = "dark: first stage of the rank"
    assert note in words(two) and note not in words(one)
    _, dark, pale = view.KINDS[view.Kind.FORWARD]
    fills = {stage: {each.fill for each, _ in tips(two, f"^forward, stage {stage},")} for stage in range(4)}
    assert fills == {0: {dark}, 1: {dark}, 2: {pale}, 3: {pale}}
    legend = [shape.fill for shape in one.shapes if isinstance(shape, Rectangle) and (shape.y, shape.tip) == (52, None)]
    assert legend == [dark, view.KINDS[view.Kind.BACKWARD][1]]


def test_held_activations_are_released_by_the_backward_pass_for_weights() -> None:
    # One micro-batch on one rank: F from 0 to 1, B to 3, W to 7.
    schedule, timeline = simulated("zb-h1", 1, 1, costs=Costs(1.0, 2.0, 4.0, 0.0))
    kinds = [span.action.kind for span in timeline.spans[0]]
    assert view.Kind.BACKWARD_INPUT in kinds and timeline.makespan == 7
    picture = view.draw_schedule(schedule, timeline, "")
    ((held, tip),) = tips(picture, "held$")
    assert tip.startswith("1 ") and held.x == view.LEFT
    assert held.width == pytest.approx(picture.width - view.LEFT - view.RIGHT) and held.height == view.STRIP - 3


def test_the_strip_of_a_rank_is_as_high_as_its_share_of_the_most_that_any_holds() -> None:
    picture = view.draw_schedule(*simulated("1f1b", 4, 8), "")
    found = [(int(tip.split()[0]), each.height) for each, tip in tips(picture, "held$")]
    assert {number for number, _ in found} == {1, 2, 3, 4}
    assert all(height == pytest.approx((view.STRIP - 3) * number / 4) for number, height in found)


def test_a_picture_is_as_wide_as_its_computations_need_within_limits() -> None:
    few, some, many = (view.draw_schedule(*simulated("1f1b", 2, number), "").width for number in (1, 16, 400))
    assert (few, many) == (view.NARROWEST, view.WIDEST)
    assert some == pytest.approx(view.LEFT + view.RIGHT + view.PER_COMPUTATION * simulated("1f1b", 2, 16)[1].makespan)
    assert view.draw_schedule(*simulated("1f1b", 2, 400), "", until=1.0).width == view.MIDDLING


def test_a_box_has_its_number_only_where_there_is_room_for_it() -> None:
    schedule, timeline = simulated("1f1b", 1, 1000)
    numbers = {word for word in words(view.draw_schedule(schedule, timeline, "")) if word.isdigit()}
    assert "999" not in numbers
    small = {word for word in words(view.draw_schedule(*simulated("1f1b", 1, 4), "")) if re.fullmatch("[0-3]", word)}
    assert small == {"0", "1", "2", "3"}


@pytest.mark.parametrize(("micro_batches", "whole"), [(1, False), (30, True)])
def test_the_axis_ends_with_the_step_and_has_whole_numbers_where_it_is_long(micro_batches: int, whole: bool) -> None:
    schedule, timeline = simulated("1f1b", 2, micro_batches, costs=Costs(0.21, 0.3, 0.3, 0.0))
    picture = view.draw_schedule(schedule, timeline, "")
    below = max(shape.y for shape in picture.shapes if isinstance(shape, Text))
    ticks = [float(shape.content) for shape in picture.shapes if isinstance(shape, Text) and shape.y == below]
    assert len(ticks) > 3 and max(ticks) <= timeline.makespan
    assert all(tick.is_integer() for tick in ticks) == whole


def test_the_two_pictures_of_a_measured_pass_have_one_axis_and_stand_below_each_other() -> None:
    schedule, measured = simulated("1f1b", 2, 4)
    _, predicted = simulated("1f1b", 2, 4, costs=Costs(0.5, 0.5, 0.5, 0.0))
    picture = view.draw_pass(MeasuredPass("actor", 0, schedule, measured, predicted))
    alone = view.draw_schedule(schedule, measured, "", until=measured.makespan)
    assert (picture.width, picture.height) == (alone.width, 2 * alone.height)
    above, below = (
        [pair for pair in tips(picture, "^forward") if (pair[0].y > alone.height) is lower] for lower in (False, True)
    )
    assert len(above) == len(below) == 8
    assert [each.y + alone.height for each, _ in above] == [each.y for each, _ in below]
    ends = [
        max(each.x + each.width for each, _ in tips(picture, "^backward") if (each.y > alone.height) is lower)
        for lower in (False, True)
    ]
    assert ends[0] + 1 == pytest.approx(picture.width - view.RIGHT)
    assert ends[1] + 1 - view.LEFT == pytest.approx((picture.width - view.LEFT - view.RIGHT) / 2)


def test_the_text_of_a_schedule_gives_the_idle_time_inside_each_rank() -> None:
    schedule, timeline = simulated("1f1b", 2, 1)
    text = view.schedule_text(schedule, timeline, facts_of(schedule, timeline))
    rows = [line.split() for line in text.splitlines()[-2:]]
    # The first rank waits for the whole of the other's three between its forward and its backward pass.
    assert rows == [["0", "0", "0", "6", "50.0%", "1"], ["1", "1", "1", "4", "0.0%", "1"]]
    assert "forward passes alone" not in text
    forward, passes = simulated("1f1b", 2, 1, forward_only=True)
    assert view.schedule_text(forward, passes, facts_of(forward, passes)).splitlines()[0].endswith(", forward passes alone")


def test_schedules_are_compared_by_what_a_whole_rank_holds() -> None:
    made = {name: facts_of(*simulated(name, 4, 8)) for name in ("1f1b", "zbv")}
    assert {name: max(facts["peak_activations"]) for name, facts in made.items()} == {"1f1b": 4, "zbv": 8}  # type: ignore[call-overload]
    lines = view.comparison_text({**made, "gpipe": {"error": "cannot be had"}}).splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["1f1b", "zbv", "gpipe"]
    assert [line.split()[-1] for line in lines[:2]] == ["4", "4"] and lines[2].endswith("cannot be had")


def test_the_text_of_a_measured_pass_has_both_sides_beside_each_other() -> None:
    schedule, measured = simulated("zbv", 4, 8)
    _, predicted = simulated("1f1b", 4, 8, costs=Costs(1.0, 1.0, 1.0, 0.5))
    lines = view.pass_text(MeasuredPass("critic", 0, schedule, measured, predicted)).splitlines()
    sides = measured, predicted
    assert lines[-3].split()[1::2] == [f"{side.makespan:g}" for side in sides]
    assert lines[-2].split()[-2:] == [f"{side.bubble_makespan:.1%}" for side in sides]
    assert lines[-1].split()[-2:] == [f"{side.bubble_span:.1%}" for side in sides]
