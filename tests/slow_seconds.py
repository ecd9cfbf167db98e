"""How long slow tests take: seconds on two cores where two tests run at once, with the fixtures that the first of a file makes.

A test has the row with the longest beginning of its name. What took longer in a part of the slow tests is named at its end.
"""

from __future__ import annotations

SECONDS = {
    "": 30.0,
    "tests/connectors/ray/": 60.0,
    "tests/examples/": 150.0,
    "tests/examples/test_geometry.py": 600.0,
    "tests/flows/": 150.0,
    "tests/flows/test_deployed_runs.py": 180.0,
    "tests/flows/test_fsdp_runs.py::test_a_killed_run_with_adapters": 240.0,
    "tests/flows/test_fsdp_runs.py::test_a_run_goes_on": 300.0,
    "tests/flows/test_late_storage.py": 460.0,
    "tests/flows/test_object_storage.py::test_commands_on_a_run_in_a_bucket": 325.0,
    "tests/flows/test_oversampling.py": 190.0,
    "tests/flows/test_picture_runs.py": 240.0,
    "tests/flows/test_pipeline_runs.py": 170.0,
    "tests/flows/test_presets.py": 80.0,
    "tests/flows/test_presets.py::test_a_preset_learns_what_its_recipe_promises": 600.0,
    "tests/flows/test_pretrained_on_cpu.py": 3600.0,
    "tests/flows/test_pretrained_on_cpu.py::test_the_first_step": 300.0,
    "tests/flows/test_random_strikes.py": 250.0,
    "tests/flows/test_shards.py": 230.0,
    "tests/flows/test_small_driver.py": 260.0,
    "tests/flows/test_stopped_runs.py::test_a_rank_that_is_stopped": 180.0,
    "tests/flows/test_stopped_runs.py::test_a_run_that_stands_still_again": 310.0,
    "tests/flows/test_takeover.py": 210.0,
    "tests/flows/test_tampered_forms.py": 165.0,
    "tests/flows/test_training_run.py": 200.0,
    "tests/flows/test_turns_in_shards.py": 240.0,
    "tests/flows/test_two_nodes.py": 285.0,
    "tests/flows/test_two_nodes.py::test_engines_on_loopback": 130.0,
    "tests/flows/test_two_nodes.py::test_where_a_node_cannot_reach": 190.0,
    "tests/flows/viewer/": 60.0,
    "tests/pairs/": 60.0,
}


def seconds_of(test: str) -> float:
    """Seconds that a test may take, by its name."""
    return SECONDS[max((row for row in SECONDS if test.startswith(row)), key=len)]
