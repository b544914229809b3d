"""What work costs: seconds and bytes as values that planners and simulators ask.

As ``hr.costs`` it gives them: :func:`roofline`, :func:`profile`, :func:`load`, :func:`published`.
"""

from headrace.costs.cost_model import CostModel, ExchangeCost, OptionCost
from headrace.costs.fingerprint import fingerprint_difference, fingerprint_of
from headrace.costs.library import load, profile, published, roofline
from headrace.costs.quadratic import FitError, Linear, Quadratic, fit_linear, fit_quadratic
from headrace.costs.sources.formulas import FORMULA_METHODS, Speeds
from headrace.costs.sources.roofline import roofline_costs
from headrace.costs.sources.synthetic_costs import group_sizes_of, synthetic_costs

__all__ = [
    "FORMULA_METHODS",
    "CostModel",
    "ExchangeCost",
    "FitError",
    "Linear",
    "OptionCost",
    "Quadratic",
    "Speeds",
    "fingerprint_difference",
    "fingerprint_of",
    "fit_linear",
    "fit_quadratic",
    "group_sizes_of",
    "load",
    "profile",
    "published",
    "roofline",
    "roofline_costs",
    "synthetic_costs",
]
