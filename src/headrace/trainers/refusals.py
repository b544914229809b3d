"""What a trainer of transformers cannot be combined with, refused by name before its first step.

Each of these works with the trainer alone: a second way to spread sequences, a sampler of pairs, a
user's override of a method that plans. With planned steps it would be ignored without a word, or
would divide a loss twice.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from headrace.errors import SpecError

__all__ = ["Kind", "kind_of", "require_base", "require_combinable", "unknown_methods"]

Kind = Literal["sums", "sft", "pairs", "scores", "policy"]
"""How a trainer makes its loss: ``sums`` over tokens (``sft``: those of TRL's SFTTrainer), the
log-probabilities of ``pairs`` of sequences, the ``scores`` of sequences, or completions that a
``policy`` samples itself."""

_TRL: dict[str, Kind] = {
    "SFTTrainer": "sft",
    "DPOTrainer": "pairs",
    "RewardTrainer": "scores",
    "GRPOTrainer": "policy",
}
"""The kinds of TRL's trainers that are known, by the names of their classes."""

_PLANNED = (
    "get_train_dataloader",
    "get_batch_samples",
    "training_step",
    "floating_point_ops",
)
"""Methods of transformers' Trainer that planned steps replace."""


def require_base(base: Any) -> None:
    """Raise SpecError unless ``base`` is transformers' Trainer, a class made of it, or a known one
    of TRL, and overrides no method that planned steps replace."""
    import transformers

    if not (isinstance(base, type) and issubclass(base, transformers.Trainer)):
        name = base.__name__ if isinstance(base, type) else type(base).__name__
        raise SpecError(
            "hr.trainer",
            got=name,
            wanted="transformers.Trainer or a class made of it",
            hint="give the class, not a trainer: hr.trainer(Trainer)(model=..., args=...)",
        )
    kind_of(base)
    if own := unknown_methods(base):
        raise SpecError(
            f"hr.trainer({base.__name__})",
            got=f"a {own[0]} of its own",
            wanted="that of transformers' Trainer, in whose place steps are planned",
            hint="override compute_loss; or derive from what hr.trainer gives, and call super()",
        )


def unknown_methods(base: type) -> list[str]:
    """The names of methods that planned steps replace although ``base``, or a user's class that it
    derives from, overrides them: these overrides would never be called."""
    overridden = list[str]()
    for name in _PLANNED:
        owner = next(kind for kind in base.__mro__ if name in vars(kind))  # defines the method
        if not owner.__module__.startswith(("transformers.", "trl.trainer.")):
            overridden.append(name)
    return overridden


def kind_of(base: type) -> Kind:
    """How a trainer makes its loss. Raises SpecError for trainers of TRL that are not known."""
    for kind in base.__mro__:
        if not kind.__module__.startswith("trl."):
            continue
        if kind.__name__ in _TRL:
            return _TRL[kind.__name__]
        if kind.__name__ != "_BaseTrainer":  # the base class of all of TRL's trainers
            raise SpecError(
                f"hr.trainer({base.__name__})",
                got=f"TRL's {kind.__name__}",
                wanted=f"transformers' Trainer, or TRL's {', '.join(_TRL)}",
                hint="hr.attach takes batches that a loop of your own makes: "
                "docs/guides/given-batches.md",
            )
    return "sums"


def require_combinable(trainer: Any, kind: Kind, *, budget: bool) -> None:
    """Raise SpecError for what a trainer asks for that planned steps cannot give; ``budget`` says
    whether its steps are cut by a number of tokens."""
    args = trainer.args
    # ``got`` is the text to show, or true: then ``what`` names the argument whose value is shown.
    # It is false where there is nothing to refuse.
    for what, got, hint in (
        *_of_ranks(trainer),
        *_of_steps(trainer, budget=budget),
        *_of_trl(trainer, kind, budget=budget),
    ):
        if got:
            raise SpecError(
                what,
                got=got if isinstance(got, str) else getattr(args, what, got),
                wanted="none beside planned steps",
                hint=hint,
            )


def _of_ranks(trainer: Any) -> list[tuple[str, Any, str]]:
    """Checks for other ways to spread a model over ranks, as triples (name of the option, what was
    found or a false value where it is not used, hint for the error)."""
    args, accelerator = trainer.args, trainer.accelerator
    mesh = getattr(accelerator, "parallelism_config", None)
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    sizes = {
        name: getattr(mesh, name, 1) or 1
        for name in ("cp_size", "sp_size", "tp_size", "dp_replicate_size")
    }
    # The tensor degree of a model that transformers has split.
    tp_size = getattr(trainer.model, "_tp_size", None) or getattr(trainer.model, "tp_size", None)
    return [
        ("deepspeed", trainer.is_deepspeed_enabled and "DeepSpeed", "use DDP or FSDP2"),
        *(
            (name, size > 1 and f"{name}={size}", "plans say which ranks share a sequence")
            for name, size in sizes.items()
        ),
        ("tensor parallel model", (tp_size or 1) > 1 and str(tp_size), "use DDP or FSDP2"),
        (
            "fsdp",
            plugin is not None and getattr(plugin, "fsdp_version", 1) != 2 and "FSDP1",
            'say fsdp_config={"version": 2}',
        ),
        (
            "fsdp",
            bool(args.fsdp) and plugin is None and f"devices of type {accelerator.device.type}",
            "Accelerate passes it over there, and every rank would hold all weights: leave it out",
        ),
        ("n_gpu", args.n_gpu > 1 and f"{args.n_gpu} in one process", "start it by torchrun"),
        (
            "model",
            getattr(trainer, "is_distributed_loading_by_transformers", False)
            and "sharded when it was loaded",
            "load it whole: Trainer shards it by fsdp=",
        ),
        (
            "model parallel",
            trainer.is_model_parallel and "layers on several devices of a process",
            "load it without device_map",
        ),
    ]


def _of_steps(trainer: Any, *, budget: bool) -> list[tuple[str, Any, str]]:
    """Checks for arguments that change how a step is cut or computed, as triples (name of the
    option, what was found or a false value where it is not used, hint for the error)."""
    args = trainer.args
    optim = str(getattr(args.optim, "value", args.optim))
    config = args.accelerator_config
    return [
        ("fp16", args.fp16, "its losses are scaled before the backward: use bf16"),
        ("torch_compile", args.torch_compile, "leave it out: packs have other shapes every step"),
        (
            "neftune_noise_alpha",
            args.neftune_noise_alpha is not None and str(args.neftune_noise_alpha),
            "its noise depends on how far a batch is padded, and plans pad nothing",
        ),
        (
            "auto_find_batch_size",
            args.auto_find_batch_size,
            "plans fit memory, and a step that runs out of it is planned again",
        ),
        (
            "optim",
            ("lomo" in optim or "layerwise" in optim) and optim,
            "it updates weights within a backward, before all micro-batches are done",
        ),
        (
            "accelerator_config split_batches",
            config.split_batches and "True",
            "say per_device_train_batch_size",
        ),
        ("use_liger_kernel", args.use_liger_kernel, "it replaces forwards that are spread"),
        (
            "gradient_accumulation_steps",
            budget and args.gradient_accumulation_steps > 1,
            "with batch_tokens= a step has as many samples as its budget holds: say 1",
        ),
        (
            "debug",
            bool(args.debug) and "underflow_overflow",
            "its hooks take parts of a batch for batches",
        ),
    ]


def _of_trl(trainer: Any, kind: Kind, *, budget: bool) -> list[tuple[str, Any, str]]:
    """Checks for arguments of TRL's trainers and of their models, as triples (name of the option,
    what was found or a false value where it is not used, hint for the error). Empty for a trainer
    of transformers."""
    args, found = trainer.args, list[tuple[str, Any, str]]()
    if kind == "sums":
        return found
    offloads = getattr(args, "activation_offloading", False)
    found.append(("activation_offloading", offloads, "plans choose what is recomputed"))
    if getattr(trainer, "aux_loss_enabled", False):
        found.append(
            (
                "router_aux_loss_coef",
                str(trainer.router_aux_loss_coef),
                "the loss of the router is a mean over the tokens of one rank: set it to 0",
            )
        )
    if getattr(trainer, "_is_vision_dataset", False) or getattr(trainer, "_is_vlm", False):
        found.append(("model", "one of vision and language", "token numbers alone are spread"))
    if kind == "sft":
        wrapped = args.packing and args.packing_strategy == "wrapped"
        found.append(
            (
                "packing_strategy",
                wrapped and "wrapped",
                "it cuts documents into rows of one length, in which they see each other: nothing "
                "is left to plan by; say 'bfd', or packing=False, as plans pack anew",
            )
        )
    if kind != "sft":
        drops = [
            name
            for name, module in trainer.model.named_modules()
            if isinstance(module, torch.nn.Dropout) and module.p > 0
        ]
        found.append(
            (
                "dropout",
                bool(drops) and f"{drops[0]} of the model" if drops else False,
                "log-probabilities are computed twice, and must be the same: disable_dropout=True",
            )
        )
    if kind == "policy":
        found.append(
            (
                "batch_tokens",
                budget and "a budget",
                "a step has the completions of its prompts: say per_device_train_batch_size",
            )
        )
    return found
