"""Vital signs of a run, and warnings when it learns nothing."""

from __future__ import annotations

from tests.mutations.fault import Fault

_SIGNS = "actors/run/vital_signs.py"
_TESTS = "tests/unit/actors/run/test_vital_signs.py"
_TOLD = f"{_TESTS}::test_a_cause_is_told_once_when_it_has_lasted_and_numbers_near_it_are_not"
_SAMPLES = f"{_TESTS}::test_metrics_of_samples_count_lengths_ends_and_groups_of_equal_rewards"

FAULTS = [
    Fault(
        "warned-at-the-first-sign",
        _SIGNS,
        "            if self._lasted[name] >= STEPS and",
        "            if self._lasted[name] and",
        (_TOLD,),
        "one unlucky step would be called a run that learns nothing",
    ),
    Fault(
        "steps-in-between-do-not-count",
        _SIGNS,
        "self._lasted.get(name, 0) + 1 if shown else 0\n",
        "self._lasted.get(name, 0) + int(shown)\n",
        (_TOLD,),
        "a healthy run would be warned after its fifth unlucky step",
    ),
    Fault(
        "told-in-every-step",
        _SIGNS,
        " and name not in self._told and not explained:\n",
        " and not explained:\n",
        (_TOLD,),
        "one warning would hide all other lines",
    ),
    Fault(
        "consequences-told-beside-their-cause",
        _SIGNS,
        " and name not in self._told and not explained:\n",
        " and name not in self._told:\n",
        (f"{_TESTS}::test_several_causes_are_several_sentences_and_a_consequence_is_none",),
        "equal rewards would also be told as a zero gradient, with other advice",
    ),
    Fault(
        "equal-groups-warned-of-where-advantages-differ",
        _SIGNS,
        """ == 1 and metrics.get("zero_advantages", 1.0) == 1\n""",
        " == 1\n",
        (f"{_TESTS}::test_equal_rewards_of_groups_are_no_cause_where_advantages_compare_more_than_a_group",),
        "runs whose advantages compare a whole batch would be told that they learn nothing",
    ),
    Fault(
        "warnings-told-again-after-a-resume",
        _SIGNS,
        """set(earlier.get("told", ()))""",
        "set()",
        (f"{_TESTS}::test_what_lasts_and_what_was_told_survive_a_resume",),
        "every resume would warn anew",
    ),
    Fault(
        "a-resumed-run-forgets-what-lasts",
        "actors/run/run.py",
        """VitalSigns(saved.get("vital_signs"))""",
        "VitalSigns()",
        (f"{_TESTS}::test_a_resumed_run_goes_on_counting_what_lasts",),
        "a run that is resumed every few steps would never be warned",
    ),
    Fault(
        "warnings-are-logged-and-not-printed",
        "actors/run/run.py",
        """            warn(warning, self.label)\n""",
        "            pass\n",
        (f"{_TESTS}::test_a_run_prints_and_logs_warnings_and_measures_speed_and_memory",),
        "nobody who watches a run would see that it learns nothing",
    ),
    Fault(
        "equal-groups-are-those-without-reward",
        _SIGNS,
        "statistics.fmean(len(set(rewards)) == 1 for rewards in compared)",
        "statistics.fmean(not any(rewards) for rewards in compared)",
        (_SAMPLES,),
        "groups that are solved teach nothing either",
    ),
    Fault(
        "spread-of-a-sample-of-rewards",
        _SIGNS,
        "statistics.pstdev(rewards)",
        "statistics.stdev(rewards)",
        (_SAMPLES,),
        "a step with one response would fail, and small steps would have too much spread",
    ),
    Fault(
        "responses-that-ended-count-as-cut-off",
        _SIGNS,
        """sample.finish_reason == "length" for sample""",
        """bool(sample.finish_reason) for sample""",
        (_SAMPLES,),
        "every run would be told to raise its response length",
    ),
]
