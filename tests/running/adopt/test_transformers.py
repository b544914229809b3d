"""Models of transformers with sequence parallelism, by the command that anyone would try first."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import headrace as hr
from headrace.adopt import attention_registry, token_model
from headrace.adopt import labels as head
from headrace.adopt.gradients import gradient_error
from headrace.adopt.token_model import TokenModel
from headrace.cli import main, verify_model
from headrace.cli.foreign_models import foreign_model
from headrace.errors import DataError, ModelError
from headrace.native.counted import ByteCounter
from ranks import run_ranks
from running.adopt.foreign import gpt
from spread import whole

transformers = pytest.importorskip("transformers")

EXACT = 1e-10


def drawn(rows: int, tokens: int, seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 97, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.masked_fill(ids % 3 == 0, -100)}


def gradients(run: TokenModel, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, float]:
    """(all gradients in one, the loss) of all ranks together."""
    run.model.zero_grad()
    loss = run(**run.shard(batch).inputs).loss
    run.backward(loss)
    total = run.add_up(loss)
    found = [p.grad for p in run.model.parameters() if p.grad is not None]
    whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in found]
    return torch.cat([g.flatten() for g in whole]), float(total)


@pytest.mark.parametrize(
    "kind",
    ["llama", "deepseek_v3", "running.adopt.foreign:gpt", *map(whole, ("gpt2", "bert", "opt"))],
)
def test_verified(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches whatever makes losses or gradients differ from one process': rows, packed documents,
    padding and ranks without a label; and a tiny model with heads that its type cannot run with."""
    assert main(["verify", kind, "--ranks", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["exact"]
    assert {case["batch"] for case in found["cases"]} == {
        "rows",
        "packed",
        "padded",
        "half ignored",
        "own loss",
        "evaluation",
        *(["left padded"] if ":" not in kind else []),
        *(["long"] if kind in ("llama", "deepseek_v3") else []),
    }
    kept = {
        case["recompute"]: case["kept_bytes"]
        for case in found["cases"]
        if (case["batch"], case["exchange"]) == ("rows", "ulysses")
    }
    assert kept["full"] < kept["attention"] < kept["none"]


def wrong_batches(kind: str = "llama") -> set[str]:
    """The batches that ``verify`` finds wrong on one rank."""
    return {
        case.batch
        for case in verify_model._cases(kind, 1, 0, None)
        if not max(case.loss_error, case.gradient_error) <= 1e-5
    }


def change_gradients(
    patch: pytest.MonkeyPatch, change: Callable[[torch.nn.Parameter], None]
) -> None:
    """Plant a mistake in the gradient of the last norm of spread models."""
    backward = TokenModel.backward

    def planted(self: TokenModel, loss: torch.Tensor) -> None:
        backward(self, loss)
        change(self.inner.model.norm.weight)

    patch.setattr(TokenModel, "backward", planted)


def test_verify_finds_a_gradient_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches parameters without a gradient that are left out of the comparison."""
    assert wrong_batches() == set()
    change_gradients(monkeypatch, lambda weight: setattr(weight, "grad", None))
    assert "rows" in wrong_batches()


def test_verify_finds_a_gradient_that_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches comparisons that are never true."""
    change_gradients(monkeypatch, lambda weight: weight.grad.fill_(float("nan")))
    assert "rows" in wrong_batches()


def test_an_error_is_relative_to_its_own_tensor() -> None:
    """Catches a small tensor whose error a large one hides, and rounding that is taken for one."""
    large, small = torch.tensor([1000.0]), torch.tensor([1e-2])
    assert gradient_error([large, small * 1.01], [large, small]) > 1e-5
    assert gradient_error([large, small * 0], [large, small * 1e-12]) < 1e-12
    assert gradient_error([large, None], [large, small * 0]) == 0
    assert gradient_error([small * 0], [small * 0]) == 0


def test_verify_looks_at_training_and_at_long_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches mistakes of one mode, and windows that no row is as long as."""

    def wrong(window: Callable[[bool], int]) -> set[str]:
        planted = lambda module, *_: (module.is_causal, window(module.training))  # noqa: E731
        monkeypatch.setattr(attention_registry, "_mask_seen", planted)
        return wrong_batches()

    assert wrong(lambda training: 0) == set()
    assert wrong(lambda training: 0 if training else 3) == {"evaluation"}
    assert wrong(lambda training: 100) == {"long"}
    found = wrong(lambda training: 3 if training else 0)
    assert {"rows", "packed", "long"} <= found
    assert "evaluation" not in found


def test_verify_compares_the_own_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a loss of the model that nobody looks at."""
    call = TokenModel.__call__

    def planted(self: TokenModel, **inputs: Any) -> Any:
        outputs = call(self, **inputs)
        if outputs.loss is not None:
            outputs.loss = outputs.loss * 1.01
        return outputs

    monkeypatch.setattr(TokenModel, "__call__", planted)
    assert wrong_batches() == {"own loss", "left padded"}


def test_verify_pads_on_the_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches padding before the tokens that they see."""
    documents = token_model.documents_of

    def planted(batch: Any, tokens: str) -> Any:
        mask = batch.get("attention_mask")
        seen = mask is None or bool(mask[:, 0].all())
        return documents(batch if seen else {tokens: batch[tokens]}, tokens)

    monkeypatch.setattr(token_model, "documents_of", planted)
    assert wrong_batches() == {"left padded"}


@pytest.mark.parametrize(
    ("kind", "has"),
    [
        ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("smollm3", {"no_rope_layers": [1, 0]}),
        ("deepseek_v3", {"first_k_dense_replace": 1}),
        ("falcon", {}),
        ("diffllama", {}),
        ("hunyuan_v1_dense", {}),
        ("gemma3", {}),
        whole("qwen3_5", {}),
        whole("llama4", {}),
        whole("xlm", {}),
        whole("nemotron", {}),
    ],
)
def test_tiny_models_have_every_kind_of_layer(kind: str, has: dict[str, Any]) -> None:
    """Catches types of which no small model was made, and layers of a kind that none of it has."""
    model = foreign_model(kind, 0)
    for name, value in has.items():
        assert getattr(model.config, name) == value
    assert model.training
    assert sum(p.numel() for p in model.parameters()) < 1e7


def test_a_type_of_which_no_small_model_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches tracebacks of constructors of others."""
    assert main(["verify", "reformer", "--ranks", "1"]) == 2
    assert "MODULE:FUNCTION" in capsys.readouterr().err


def losses_alone(kind: str, how: str, backend: str | None) -> list[float]:
    """Errors of gradients, the loss and the loss of an evaluation where no logits are made."""
    model, plain = (foreign_model(kind, 0).double() for _ in range(2))
    if how == "fsdp2":
        for part in (*model.model.layers, model.lm_head, model):
            fully_shard(part)
    called = DistributedDataParallel(model) if how == "ddp" else model
    batch = drawn(2, 19, 3)
    run, usual = hr.compile(called, logits=False, backend=backend), hr.compile(plain)
    found, wanted = gradients(run, batch), gradients(usual, batch)
    with torch.no_grad():
        outputs = run(**run.shard(batch).inputs)
        again = float(run.add_up(outputs.loss))
        assert outputs.logits is None
        ids = {"input_ids": batch["input_ids"]}
        assert run(**run.shard(ids).inputs).logits.shape[-1] == model.config.vocab_size
    off = (found[0] - wanted[0]).abs().max() / wanted[0].abs().max()
    return [float(off), abs(found[1] - wanted[1]), abs(again - wanted[1])]


@pytest.mark.parametrize(
    ("ranks", "kind", "how", "backend"),
    [
        (2, "llama", "fsdp2", None),
        (3, "bert", "ddp", None),
        whole(1, "gpt2", "alone", None),
        whole(2, "llama", "alone", "aot_eager"),
        whole(4, "qwen3", "ddp", None),
    ],
)
def test_losses_without_logits(ranks: int, kind: str, how: str, backend: str | None) -> None:
    """Catches chunks that are left out or weighed otherwise, a head whose weights are gathered at
    another time, and logits that are gone where no loss is made."""
    timeout_s = 60.0 if backend is None else 300.0
    for errors in run_ranks(ranks, losses_alone, kind, how, backend, timeout_s=timeout_s):
        assert max(errors) < EXACT


def test_logits_that_are_more_than_those_of_a_head() -> None:
    """Catches a loss of logits that the model would have changed, and a model without a head."""
    run = hr.compile(foreign_model("granite", 0), logits=False)
    run.inner.config.logits_scaling = 3.0
    with pytest.raises(ModelError, match="changes after its head"):
        run(**run.shard(drawn(1, 12, 0)).inputs)
    with pytest.raises(ModelError, match="a linear one"):
        hr.compile(gpt(), logits=False)


def test_no_logits_are_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches memory that grows by the vocabulary with every token."""
    monkeypatch.setattr(head, "HEAD_CHUNK_TOKENS", 16)
    peaks = {}
    for logits in (True, False):
        run = hr.compile(foreign_model("llama", 0), logits=logits)
        for tokens in (256, 512):
            shard = run.shard(drawn(1, tokens, 0))
            with ByteCounter() as counter:
                run.backward(run(**shard.inputs).loss)
                peaks[logits, tokens] = counter.look()[1]
    grown = {logits: (peaks[logits, 512] - peaks[logits, 256]) / 256 for logits in (True, False)}
    assert grown[True] - grown[False] > 2 * 4 * run.inner.config.vocab_size


def test_two_forwards_before_a_backward() -> None:
    """Catches blocks that are computed again with the documents of the batch that came last."""

    def work() -> float:
        run = hr.compile(foreign_model("llama", 0).double(), recompute="full")
        plain = hr.compile(foreign_model("llama", 0).double())
        batches = [
            drawn(1, 12, 0) | {"position_ids": torch.arange(12)[None] % part} for part in (4, 12)
        ]
        grads = []
        for model in (run, plain):
            shards = [model.shard(batch) for batch in batches]
            model.backward(sum(model(**shard.inputs).loss for shard in shards))
            grads.append(torch.cat([p.grad.flatten() for p in model.model.parameters()]))
        return float((grads[0] - grads[1]).abs().max() / grads[1].abs().max())

    assert max(run_ranks(1, work)) < 1e-6  # norms of transformers are single precision


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "kind",
    [
        "mistral",
        "qwen2",
        "qwen3",
        "gemma3_text",
        "modernbert",
        "roberta",
        "phi3",
        "olmo2",
        "mixtral",
        "llama4_text",
        "gpt_oss",
    ],
)
def test_more_are_verified(kind: str) -> None:
    """Catches windows one token off, places that begin elsewhere, and more."""
    assert main(["verify", kind, "--ranks", "2", "4"]) == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches graphs that know lengths or exchanges."""
    flags = ["--ranks", "2", "--backend", "aot_eager", "--json"]
    assert main(["verify", "llama", *flags]) == 0
    cases = json.loads(capsys.readouterr().out)["cases"]
    plain = [case for case in cases if case["recompute"] == "none"]
    assert plain[-1]["compiles"] <= 3
    kept = {
        case["recompute"]: case["kept_bytes"]
        for case in cases
        if (case["batch"], case["exchange"]) == ("rows", "ulysses")
    }
    assert kept["full"] < kept["attention"] < kept["none"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_inductor() -> None:
    """Catches strides that a compiler takes on trust, and a vocabulary smaller than is drawn."""
    assert (
        main(
            [
                "verify",
                "running.adopt.foreign:gpt",
                "--ranks",
                "2",
                "--backend",
                "inductor",
                "--tolerance",
                "1e-12",
            ]
        )
        == 0
    )


def with_padding_inside() -> float:
    """How far logits are from one process' where rows have the padding's number among tokens and at
    their ends, which RoBERTa passes over when it counts places."""
    model, plain = foreign_model("roberta", 0).eval(), foreign_model("roberta", 0).eval()
    padding = int(model.config.pad_token_id)  # type: ignore[union-attr]
    ids = drawn(2, 21, 3)["input_ids"]
    mask = torch.ones_like(ids)
    ids[0, 5], ids[1, 17:], mask[1, 17:] = padding, padding, 0
    run = hr.compile(model)
    batch = {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad():
        found = run.gather(run(**run.shard(batch).inputs).logits)
        wanted = plain(**batch).logits
    off = (found - wanted).abs() * mask[..., None]
    with pytest.raises(DataError, match="the padding's number"):
        run.shard({"input_ids": ids, "position_ids": torch.arange(21)[None].repeat(2, 1)})
    return float(off.max() / wanted.abs().max())


@pytest.mark.parametrize("ranks", [2, whole(3)])
def test_places_pass_over_padding(ranks: int) -> None:
    """Catches places that count tokens which the model itself passes over."""
    assert max(run_ranks(ranks, with_padding_inside)) < EXACT


def test_a_model_that_fails_by_itself_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a traceback of torch where the plain model cannot run."""
    assert main(["verify", "xglm", "--ranks", "1"]) == 2
    assert "forward of XGLMForCausalLM on 13 tokens: got RuntimeError" in capsys.readouterr().err


def errors_of(kind: str, exchange: str) -> dict[str, float]:
    """How far each gradient is from that of one process, relative to the largest of its kind."""
    model, plain = foreign_model(kind, 0), foreign_model(kind, 0)
    batch = drawn(2, 29, 1)  # longer than windows and chunks of small models
    run = hr.compile(model, exchange=exchange)  # type: ignore[arg-type]
    loss = run(**run.shard(batch).inputs).loss
    run.backward(loss)
    run.add_up(loss)
    plain(**batch).loss.backward()
    pairs = zip(model.named_parameters(), plain.parameters(), strict=True)
    grads = [(name, p.grad, other.grad) for (name, p), other in pairs if other.grad is not None]
    return {
        name: float((mine - wanted).abs().max() / wanted.abs().max().clamp(min=1e-9))
        for name, mine, wanted in grads
        if mine is not None and float(wanted.abs().max()) > 1e-9
    }


@pytest.mark.parametrize(
    ("kind", "exchange", "ranks"),
    [
        ("gpt_oss", "ulysses", 3),
        ("gpt_oss", "ring", 2),
        whole("gpt_oss", "gather", 4),
        whole("gpt_oss", "2d", 4),
        ("llama4_text", "ring", 2),
        whole("llama4_text", "ulysses", 4),
        whole("llama4_text", "gather", 3),
    ],
)
def test_sinks_and_chunks(kind: str, exchange: str, ranks: int) -> None:
    """Catches sinks that take no share, those of other ranks' heads, gradients of sinks that count
    for one rank's rows, and chunks that begin at a rank's first token."""
    for errors in run_ranks(ranks, errors_of, kind, exchange, timeout_s=100):
        assert max(errors.values()) < 1e-5  # softmax and norms of theirs are single precision
        if kind == "gpt_oss":
            assert sum("sinks" in name for name in errors) == 2


def capped(softcap: float) -> torch.nn.Module:
    """A Gemma 2 whose scores are large beside ``softcap``."""
    model = foreign_model("gemma2", 0)
    for name, parameter in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            parameter.data *= 16
    for module in model.modules():
        if hasattr(module, "attn_logit_softcapping"):
            module.attn_logit_softcapping = softcap
    return model


def capped_errors(exchange: str, level: Any, backend: Any) -> dict[str, float]:
    """How far the loss and the gradients of a Gemma 2 with bounded scores are from one process."""
    batch = drawn(2, 29, 1)
    run = hr.compile(capped(0.05), exchange=exchange, recompute=level, backend=backend)  # type: ignore[arg-type]
    got, loss = gradients(run, batch)
    plain = capped(0.05)
    wanted_loss = plain(**batch).loss
    wanted_loss.backward()
    wanted = torch.cat([p.grad.flatten() for p in plain.parameters()])  # type: ignore[union-attr]
    free, _ = gradients(hr.compile(capped(1e9)), batch)
    assert float((free - wanted).abs().max() / wanted.abs().max()) > 1e-3, "the bound is not felt"
    return {
        "gradients": float((got - wanted).abs().max() / wanted.abs().max()),
        "loss": abs(loss - float(wanted_loss.detach())),
    }


@pytest.mark.parametrize(
    ("exchange", "ranks", "level", "backend"),
    [
        ("ulysses", 1, "attention", None),
        ("ulysses", 3, "none", None),
        ("ring", 2, "attention", None),
        ("gather", 2, "full", None),
        whole("2d", 4, "none", None),
        whole("ring", 2, "none", "aot_eager"),
    ],
)
def test_bounded_scores(exchange: str, ranks: int, level: Any, backend: Any) -> None:
    """Catches bounds that are left out, on one rank's heads or in a backward, or are of scores
    before they are scaled."""
    for errors in run_ranks(ranks, capped_errors, exchange, level, backend, timeout_s=100):
        assert max(errors.values()) < 1e-5  # softmax and norms of theirs are single precision


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("t5", "causal or masked language"),
        ("qwen3_next", "linear_attention"),
        ("bloom", "no attention that was replaced"),
    ],
)
def test_refused(kind: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches models whose tokens meet in ways that are not known, run all the same."""
    assert main(["verify", kind, "--ranks", "1"]) == 2
    assert says in capsys.readouterr().err


def test_names_that_are_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches tracebacks."""
    for name in ("lama", "no.module:make", "json:nothing", "json:dumps"):
        assert main(["verify", name, "--ranks", "1"]) == 2
    assert "did you mean" in capsys.readouterr().err


def test_under_fsdp2_with_blocks_computed_again() -> None:
    """Catches gradients divided once too often, and attention or its traffic repeated."""

    class Attends(TorchDispatchMode):
        times = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.times += func is torch.ops.headrace.attend.default
            return func(*args, **(kwargs or {}))

    def work() -> tuple[float, list[int]]:
        batch, times = drawn(2, 26, 1), []
        wanted, loss = gradients(hr.compile(foreign_model("llama", 0)), batch)
        worst = 0.0
        for level in (None, "attention", "full"):
            model = foreign_model("llama", 0).train()
            run = hr.compile(model, recompute=level)
            run.shard(batch)
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
            with Attends() as counted:
                got, found = gradients(run, batch)
            times.append(counted.times)
            off = float((got - wanted).abs().max() / wanted.abs().max())
            worst = max(worst, off, abs(found - loss))
        return worst, times

    for worst, times in run_ranks(2, work):
        assert worst < 1e-6
        assert times == [2, 2, 4]


def test_dropout_and_masks_are_refused() -> None:
    """Catches dropout that differs from one process', in a model that was sharded in evaluation
    too, and masks that say nothing."""
    model = foreign_model("llama", 0).eval()
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    run, batch = hr.compile(model), drawn(1, 20, 0)
    shard = run.shard(batch)
    model.train()
    with pytest.raises(ModelError, match="dropout"):
        run(**shard.inputs)
    model.eval()
    with pytest.raises(ModelError, match="mask"):
        run(**shard.inputs, attention_mask=torch.zeros(1, 1, 20, 20))


def test_half_precision() -> None:
    """Catches types that differ between queries, keys and values under autocast."""

    def work() -> float:
        batch, model = drawn(2, 24, 2), foreign_model("llama", 0).float()
        run = hr.compile(model)
        with torch.autocast("cpu", torch.bfloat16):
            loss = run(**run.shard(batch).inputs).loss
            alone = foreign_model("llama", 0).float()(**batch, use_cache=False).loss
        run.backward(loss)
        return abs(float(run.add_up(loss)) - float(alone))

    assert max(run_ranks(2, work)) < 2e-2


def test_results_as_a_tuple() -> None:
    """Catches a loss that is lost where results are no object."""
    run, batch = hr.compile(foreign_model("llama", 0)), drawn(1, 20, 0)
    loss = run(**run.shard(batch).inputs, return_dict=False)[0]
    whole = run(**run.shard(batch).inputs).loss
    assert float(loss.detach()) == pytest.approx(float(whole.detach()))
