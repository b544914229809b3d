"""Chooses the tests that CI leaves out, by how long each took, and lists them in slow.txt.

Of every test function CI runs all variants that take up to ``SHORT_S`` seconds, and of the others
one: the longest that takes up to ``VARIANT_S``, nearly always one on several ranks, or the
shortest where all take longer, if it takes up to ``LONGEST_S``. What ``ALWAYS`` names runs, however
long it takes. All else is marked ``slow`` (``make slow``). Tests that the file of times does not
have stay as they are listed.

example:
    python -m pytest -n 3 --dist loadfile -m "not long" --junitxml=times.xml
    python tests/choose_slow.py times.xml
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

LIST = Path(__file__).with_name("slow.txt")
SHORT_S, VARIANT_S, LONGEST_S = 0.5, 1.5, 3.0

ALWAYS = """
attacks/test_attacks.py::test_a_few_damaged_checkpoints_are_survived[2]
attacks/test_attacks.py::test_a_wrong_gradient_is_noticed
cli/test_plan.py::test_planning_needs_no_torch[torch is left alone]
planning/test_bounds.py::test_more_work_never_lowers_the_bound
planning/test_comparison.py::test_the_guide_compares
planning/test_never_beaten.py::test_a_few_plans_of_models
planning/test_planner.py::test_any_batch_in_any_world
planning/test_scale.py::test_no_static_schedule_is_missed
report/test_page.py::test_a_browser_draws_every_figure[how1]
running/adopt/test_adapted.py::test_a_wrong_stage_is_found
running/adopt/test_adapted.py::test_losses_that_are_wrong_of_places_are_refused
running/adopt/test_guide.py::test_the_loop_of_the_guide_runs
running/adopt/test_losses_of_parts.py::test_losses_that_are_none_are_refused
running/adopt/test_losses_of_parts.py::test_losses_that_are_sums_over_tokens_are_exact[labels]
running/adopt/test_ordinary_use.py::test_models_of_texts_and_images_on_texts
running/adopt/test_wrappers.py::test_batches_sharded_within_autocast[True]
running/adopt/test_replicas.py::test_replicas_of_axes[4-2-True]
running/adopt/test_transformers.py::test_under_fsdp2_with_blocks_computed_again
running/adopt/test_transformers.py::test_verified[running.adopt.foreign:gpt]
running/adopt/test_transformers.py::test_verify_finds_a_gradient_that_is_missing
running/cli/test_commands.py::test_native_runs_are_exact[methods0]
running/cli/test_train.py::test_a_killed_run_resumes_to_the_same_bits
running/cli/test_train.py::test_a_run_trains_and_says_so
running/cli/test_train.py::test_another_number_of_ranks_goes_on_with_the_same_samples
running/cli/test_train.py::test_other_signals_keep_it_too[10]
running/engine/test_announced_plans.py::test_runs_with_coming_batches[2]
running/engine/test_attached.py::test_a_loop_goes_on[2-2-alone-True]
running/engine/test_attached.py::test_plans_are_made_beside
running/engine/test_clips.py::test_any_plans_equal_one_process[alone-1]
running/engine/test_clips.py::test_any_plans_equal_one_process[alone-4]
running/engine/test_drawn_runs.py::test_two_ranks_train_as_one_process_would
running/engine/test_given_batches.py::test_a_run_plans_for_itself
running/engine/test_given_batches.py::test_steps_equal_one_process[tokens-alone-2]
running/engine/test_given_guide.py::test_the_guide_runs_as_it_reads
running/engine/test_given_refused.py::test_refused_on_all_ranks
running/engine/test_iteration_order.py::test_an_epoch_trains_every_sample_once_as_one_process_would
running/engine/test_loop_doors.py::test_a_loop_that_is_left_loses_no_batch
running/engine/test_loop_doors.py::test_a_loss_that_is_no_sum_is_refused_on_every_rank[2]
running/engine/test_loop_doors.py::test_dropout_goes_on_with_the_same_numbers
running/engine/test_loop_doors.py::test_gradients_are_left_alone_within_a_step[sharded]
running/engine/test_loop_doors.py::test_labels_are_never_replaced[values of others]
running/engine/test_loop_doors.py::test_losses_of_tokens_are_exact[2]
running/engine/test_loop_doors.py::test_ranks_begin_with_the_same_weights
running/engine/test_lost_peers.py::test_a_run_of_given_batches_names_the_rank[within-killed]
running/engine/test_own_loop_guide.py::test_other_loops_run[stoppable]
running/engine/test_own_samples.py::test_memory_that_runs_out
running/engine/test_own_samples.py::test_refused_on_all_ranks
running/engine/test_plain.py::test_a_plain_module_equals_one_process[by hand-ddp-2]
running/engine/test_plain.py::test_what_cannot_be_right_is_refused[a mean]
running/engine/test_pretrained.py::test_the_first_loss_is_that_of_transformers[bert]
running/engine/test_resume.py::test_a_damaged_newest_is_passed_over
running/engine/test_resume.py::test_no_state_is_believed
running/methods/test_methods.py::test_a_layer_equals_one_process[1-12]
running/methods/test_methods.py::test_bytes_on_the_wire_are_the_formula[2-2]
running/methods/test_methods.py::test_half_types_are_no_worse_than_one_process
running/methods/test_methods.py::test_kept_bytes_are_the_formula[2-5]
running/native/test_exactness.py::test_dropout_does_not_depend_on_the_plan[bert]
running/native/test_faults.py::test_a_rank_stopped_in_an_action_is_named[exchange]
running/native/test_strategies.py::test_any_strategies_equal_one_process[3]
running/native/test_strategies.py::test_named_strategies_equal_one_process[3]
running/native/test_strategies.py::test_other_models_equal_one_process[gpt]
running/ops/test_triton_kernels.py::test_kernels_give_what_plain_operators_do
running/trainers/test_grpo.py::test_equals_the_plain_trainer[a reference, several updates]
running/trainers/test_grpo.py::test_equals_the_plain_trainer[fsdp2]
running/trainers/test_trainer.py::test_equals_one_process[ddp]
running/trainers/test_trainer.py::test_goes_on_without_the_state_of_planning[of no plans]
running/trainers/test_trl.py::test_equals_one_process[rewards, fsdp2]
running/trainers/test_trl.py::test_equals_one_process[sft]
test_names.py::test_a_public_class_is_defined_once
test_names.py::test_no_method_is_named_outside_its_facts
test_readme.py::test_the_example_of_the_docs_home_runs
test_readme.py::test_the_python_session_runs
test_readme.py::test_the_shown_output_is_what_the_command_prints
"""
"""What CI runs however long it takes: one test of each front end, of each kind of fault, and of
what the README says."""


def chosen(times: Path, listed: Iterable[str] = ()) -> list[str]:
    """The names of the tests that are too slow for CI, given a JUnit file of their times and those
    that are ``listed`` now."""
    of_function, timed = defaultdict[str, list[tuple[float, str]]](list), set[str]()
    for case in ElementTree.parse(times).iter("testcase"):
        folder = case.get("classname", "").removeprefix("tests.").replace(".", "/")
        name = f"{folder}.py::{case.get('name')}"
        of_function[name.partition("[")[0]].append((float(case.get("time", 0)), name))
        timed.add(name)
    always, slow = set(ALWAYS.split("\n")), set(listed) - timed
    assert always - {""} <= timed
    for variants in of_function.values():
        quick = [own for own in variants if own[0] <= VARIANT_S]
        one = max(quick) if quick else min(variants)
        slow |= {
            name
            for seconds, name in variants
            if seconds > SHORT_S and (name != one[1] or seconds > LONGEST_S) and name not in always
        }
    return sorted(slow)


if __name__ == "__main__":
    listed = LIST.read_text(encoding="utf-8").splitlines()
    LIST.write_text("\n".join([*chosen(Path(sys.argv[1]), listed), ""]), encoding="utf-8")
