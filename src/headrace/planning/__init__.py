"""From the lengths of a batch to a plan, with a lower bound of every other plan.

problem     what is planned for (:mod:`headrace.planning.problem`)
prices      what a sequence takes on each scheme: ``priced``, ``batch``; from a model's costs
            ``layer_choice``, ``mixtures``, ``fixed_methods``; from published ones ``published``
bounds      what no plan beats: ``bounds``, in lockstep ``wave_bounds``
generators  what drafts schedules: the protocol ``generators``; ``static``, ``side_by_side`` (with
            ``filling``), ``nested``, ``waves`` (with ``exact_waves``)
search      ``search`` asks them, packs the best drafts (``packing``, ``staged_packing``), improves
            (``improvement``) and times them (``model_source``, ``formula_source``)
explain     why the plan is as it is (``explain``)

Planners of others are in :mod:`headrace.planners`, one floor above.
"""

from headrace.planning.generators import Draft, Generator, Known, Role
from headrace.planning.nested import Nested
from headrace.planning.problem import Problem
from headrace.planning.search import GENERATORS, plan
from headrace.planning.side_by_side import SideBySide
from headrace.planning.static import Homogeneous, Static
from headrace.planning.waves import Waves

__all__ = [
    "GENERATORS",
    "Draft",
    "Generator",
    "Homogeneous",
    "Known",
    "Nested",
    "Problem",
    "Role",
    "SideBySide",
    "Static",
    "Waves",
    "plan",
]
