"""ParaDySe's hybrid costs of single documents, beside the quadratics that planners use."""

from headrace.costs.paradyse.hybrid import TARGETS, HybridModel, Pair, Target, fit_hybrid, fit_pair
from headrace.costs.paradyse.polynomial import Polynomial, fit_polynomial
from headrace.costs.paradyse.steps import Steps, fit_steps, need_scikit_learn

__all__ = [
    "TARGETS",
    "HybridModel",
    "Pair",
    "Polynomial",
    "Steps",
    "Target",
    "fit_hybrid",
    "fit_pair",
    "fit_polynomial",
    "fit_steps",
    "need_scikit_learn",
]
