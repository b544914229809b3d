"""Losses that users make of a part's results: each is exact, or refused by name on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, fft
from torch.distributions import Categorical
from torch.nn import functional as f

import headrace as hr
from headrace.adopt import own_losses
from headrace.errors import ModelError
from ranks import run_ranks
from running.adopt.foreign import VOCABULARY, drawn, gpt

TOKENS = 48  # of which 32 have labels, which is no number of one rank
EXACT = 1e-10

Rest = Mapping[str, Tensor]
"""Columns of a batch, of this rank's tokens."""


def logged(x: Tensor, labels: Tensor) -> Tensor:
    """The logarithms of the probabilities [b, s] of labels; of any where one is ignored."""
    return x.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]


def quarters(x: Tensor) -> Tensor:
    """Numbers from 0 to 3 in turn, one for each token [s]."""
    return torch.arange(x.shape[1]) % 4


class Squares(torch.autograd.Function):
    """A function of Python, into which the graph does not see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square().sum()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g * ctx.saved_tensors[0]


def chunked_ce(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    flat, lab = x.flatten(0, 1), labels.flatten()
    t = 0
    for a, b in zip(flat.split(7), lab.split(7), strict=True):
        t = t + f.cross_entropy(a, b, reduction="sum")
    return t / count


def chunked_slices(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    t = 0
    for i in range(0, x.shape[1], 5):
        t = t + f.cross_entropy(
            x[:, i : i + 5].flatten(0, 1), labels[:, i : i + 5].flatten(), reduction="sum"
        )
    return t / count


def cat_chunks(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    per = torch.cat(
        [
            f.cross_entropy(c.flatten(0, 1), d.flatten(), reduction="none").view(c.shape[:2])
            for c, d in zip(x.split(6, 1), labels.split(6, 1), strict=True)
        ],
        1,
    )
    return (per.square() * (labels >= 0)).sum() / count


def stack_rows(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return (
        torch.stack(
            [f.cross_entropy(a, b, reduction="sum") for a, b in zip(x, labels, strict=True)]
        ).sum()
        / count
    )


def two_heads(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    t = 0
    for k in range(2):
        t = t + (logged(x * (k + 1), labels) * (labels >= 0)).sum()
    return -t / count


def clipped_ratio(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    new = logged(x, labels)
    old = rest["old"]
    adv = rest["adv"]
    r = (new - old).exp()
    m = labels >= 0
    return -(torch.min(r * adv, r.clamp(0.8, 1.2) * adv) * m).sum() / count


def policy_and_entropy(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    new = logged(x, labels)
    old = rest["old"]
    adv = rest["adv"]
    lr = new - old
    r = lr.exp()
    m = labels >= 0
    kl = (-lr).exp() - 1 + lr
    ent = -(x.softmax(-1) * x.log_softmax(-1)).sum(-1)
    pg = torch.maximum(-adv * r, -adv * torch.clamp(r, 0.8, 1.2))
    return ((pg + 0.1 * kl - 0.01 * ent) * m).sum() / count


def masked_index(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    m = labels >= 0
    return (
        -(x[m].log_softmax(-1).gather(1, labels[m][:, None])[:, 0] * rest["adv"][m]).sum() / count
    )


def two_masked(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    m = labels >= 0
    a = x[m].square().sum(-1)
    b = f.cross_entropy(x[m], labels[m], reduction="none")
    return (a.sqrt() * b).sum() / count


def value(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    v = x[..., 0]
    c = rest["old"] + (v - rest["old"]).clamp(-0.2, 0.2)
    return (
        0.5
        * (torch.max((v - rest["adv"]) ** 2, (c - rest["adv"]) ** 2) * (labels >= 0)).sum()
        / count
    )


def distil(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return (
        f.kl_div((x / 2).log_softmax(-1), (rest["t"] / 2).softmax(-1), reduction="none")
        .sum(-1)
        .mul(labels >= 0)
        .sum()
        * 4
        / count
    )


def distil2(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return (
        f.kl_div(
            (x / 2).log_softmax(-1).flatten(0, 1),
            (rest["t"] / 2).log_softmax(-1).flatten(0, 1),
            reduction="sum",
            log_target=True,
        )
        / count
    )


def divergence_of_both(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    p, q = x.log_softmax(-1), rest["t"].log_softmax(-1)
    m = torch.logsumexp(torch.stack([p, q]) - torch.log(torch.tensor(2.0, dtype=p.dtype)), 0)
    return (
        f.kl_div(m, p, log_target=True, reduction="none")
        + f.kl_div(m, q, log_target=True, reduction="none")
    ).sum(-1).mul(labels >= 0).sum() / count


def zloss(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return (
        f.cross_entropy(x.transpose(1, 2), labels, reduction="sum")
        + 1e-4 * (x.logsumexp(-1) ** 2 * (labels >= 0)).sum()
    ) / count


def focal(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    c = -logged(x, labels)
    return (((1 - (-c).exp()) ** 2 * c) * (labels >= 0)).sum() / count


def smooth(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return (
        f.cross_entropy(x.view(-1, 61), labels.view(-1), label_smoothing=0.1, reduction="sum")
        / count
    )


def weighted(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return (
        f.cross_entropy(
            x.reshape(-1, 61),
            labels.reshape(-1),
            weight=torch.linspace(1, 2, 61).to(x),
            reduction="sum",
        )
        / count
    )


def poly_loss(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    ce = f.cross_entropy(x.flatten(0, 1), labels.flatten(), reduction="none")
    return (ce + 1 - (-ce).exp())[labels.flatten() >= 0].sum() / count


def mse(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return f.mse_loss(x[..., :3], rest["t"][..., :3], reduction="sum") / count


def huber(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return f.smooth_l1_loss(x, rest["t"], reduction="none").mean(-1).sum() / count


def bce(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return (
        f.binary_cross_entropy_with_logits(x[..., 0], (labels > 3).to(x), reduction="none")
        .mul(rest["adv"])
        .sum()
        / count
    )


def margin(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    s = x.softmax(-1)
    top = s.topk(2, -1).values
    return ((top[..., 0] - top[..., 1]).relu() * (labels >= 0)).sum() / count


def cos(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return (1 - f.cosine_similarity(x, rest["t"], dim=-1)).sum() / count


def norm_feat(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return (f.normalize(x, dim=-1) * f.normalize(rest["t"], dim=-1)).sum() / count


def einsum(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return torch.einsum("bsv,vk->bsk", x, torch.ones(61, 4).to(x)).square().sum() / count


def einsum2(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return torch.einsum("bsv,bsv->bs", x, rest["t"]).tanh().sum() / count


def weights_of_rows(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return (
        (logged(x, labels) * (labels >= 0)).sum(1) * torch.tensor([1.0, 3.0]).to(x)
    ).sum() / count


def mean_of_rows(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return -(logged(x, labels) * (labels >= 0)).sum(-1).mean() / count


def in_single(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return (
        f.cross_entropy(x.float().double().flatten(0, 1), labels.flatten(), reduction="sum") / count
    )


def softcap(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return (
        f.cross_entropy((30 * torch.tanh(x / 30)).flatten(0, 1), labels.flatten(), reduction="sum")
        / count
    )


def chosen(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return torch.where(labels >= 0, -logged(x, labels), torch.zeros_like(x[..., 0])).sum() / count


def filled(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return logged(x, labels).masked_fill(labels < 0, 0.0).square().sum() / count


def scatter_back(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    out = torch.zeros(labels.numel(), dtype=x.dtype)
    m = (labels >= 0).flatten()
    out[m] = f.cross_entropy(x.flatten(0, 1)[m], labels.flatten()[m], reduction="none")
    return (out.view_as(labels) * rest["adv"]).sum() / count


def nonzero(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    i = (labels >= 0).flatten().nonzero()[:, 0]
    return (
        f.cross_entropy(x.flatten(0, 1).index_select(0, i), labels.flatten()[i], reduction="sum")
        / count
    )


def reshaped(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return x.view(2, -1, 1, 61).permute(0, 2, 1, 3).contiguous().view(-1, 61).square().sum() / count


def heads(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return x[..., :60].view(*x.shape[:2], 4, 15).softmax(-1).std(-1).mean(-1).sum() / count


def layernorm(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return (f.layer_norm(x, (61,)) * rest["t"]).sum() / count


def bilinear(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return (
        torch.bmm(x.flatten(0, 1)[:, None], rest["t"].flatten(0, 1)[:, :, None]).square().sum()
        / count
    )


def mixture(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    y = x[..., :60].unflatten(-1, (3, 20))
    w = x[..., 60:61].expand(*x.shape[:2], 3).softmax(-1)
    return -torch.logsumexp(w.log() + y.log_softmax(-1)[..., 0], -1).sum() / count


def in_order(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return x.sort(-1).values.diff(dim=-1).square().sum() / count


def ordinal(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return x.softmax(-1).cumsum(-1).square().sum() / count


def log1p(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return torch.log1p(x.square()).sum((0, 1, 2)) / count


def of_python(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return Squares.apply(x) / count


def projected(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return f.gelu(x @ torch.ones(61, 8, dtype=x.dtype)).sum() / count


def rows_apart(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return sum(r.square().sum() for r in x.unbind(0)) / count


def halves_of_features(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    a, b = x[..., :60].chunk(2, -1)
    return (a * b).sum() / count


def tokens_loop(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return (
        sum(f.cross_entropy(x[:, i], labels[:, i], reduction="sum") for i in range(x.shape[1]))
        / count
    )


def margins_of_classes(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    c = x.gather(-1, labels.clamp(min=0)[..., None])
    return ((1 - (c - x)).clamp(min=0) * (labels >= 0)[..., None]).sum() / count


def ent_reg(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return torch.special.entr(x.softmax(-1)).sum() / count


def norms_off_one(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return (x.norm(dim=-1) - 1).square().sum() / count


def entropies(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return Categorical(logits=x).entropy().sum() / count


def by_a_distribution(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return -(Categorical(logits=x).log_prob(labels.clamp(min=0)) * (labels >= 0)).sum() / count


def gauss(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return (
        f.gaussian_nll_loss(x[..., 0], rest["adv"], f.softplus(x[..., 1]), reduction="sum") / count
    )


def in_halves(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype).sum() / count


def logits_masked(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    m = torch.zeros(61, dtype=torch.bool)
    m[5] = True
    return (
        f.cross_entropy(
            x.masked_fill(m, -1e9).flatten(0, 1),
            torch.where(labels == 5, -100, labels).flatten(),
            reduction="sum",
        )
        / count
    )


def set_in_place(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    y = x.clone()
    y[..., 7] = -30.0
    return y.logsumexp(-1).sum() / count


def scaled_in_place(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    y = x * 1
    y /= 2.0
    y += 1
    return y.square().sum() / count


def take_along(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return (
        torch.take_along_dim(x, labels.clamp(min=0)[..., None], -1).squeeze(-1).exp().sum() / count
    )


def topk_logits(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    v, i = rest["t"].topk(5, -1)
    return -(v.softmax(-1) * x.log_softmax(-1).gather(-1, i)).sum(-1).mul(labels >= 0).sum() / count


def weights_of_sequences(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    ce = f.cross_entropy(x.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    return ((ce * rest["adv"]).sum(-1) / torch.tensor([7.0, 9.0], dtype=x.dtype)).mean()


def mapped(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return torch.vmap(torch.vmap(lambda a, b: (a - b).square().sum()))(x, rest["t"]).sum() / count


def triple(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return (
        f.triplet_margin_loss(
            x.flatten(0, 1), rest["t"].flatten(0, 1), -rest["t"].flatten(0, 1), reduction="sum"
        )
        / count
    )


def cdist_codes(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return torch.cdist(x.flatten(0, 1), torch.eye(61, dtype=x.dtype)[:5]).min(-1)[0].sum() / count


def attn_feat(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    y = x[..., :60].view(-1, 4, 15)
    return f.scaled_dot_product_attention(y, y, y).square().sum() / count


def conv_feat(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return (
        f.conv1d(x.flatten(0, 1)[:, None], torch.ones(1, 1, 3, dtype=x.dtype)).square().sum()
        / count
    )


def outer_feat(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return (x[..., :4, None] * x[..., None, :4]).square().sum() / count


def inverses(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    eye = torch.eye(4, dtype=x.dtype)
    return torch.linalg.det(x[..., :4].tanh().unsqueeze(-1) * eye + 9 * eye).log().sum() / count


def windows(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return x.unfold(-1, 3, 1).sum(-1).square().sum() / count


def complex_parts(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return torch.view_as_real(torch.complex(x, x.tanh())).prod(-1).sum() / count


def diagonals(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return (x[..., :5, None] * x[..., None, :5]).diagonal(0, -1, -2).sqrt().sum() / count


def put_back(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    kept, own = labels >= 0, torch.zeros(labels.shape, dtype=x.dtype)
    own[kept] = logged(x[kept], labels[kept])
    return ((own - rest["old"]).exp() * rest["adv"] * kept).sum() / count


def put_back_by_mask(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    kept = labels >= 0
    own = torch.zeros(labels.shape, dtype=x.dtype).masked_scatter(kept, x[..., 0][kept])
    return own.exp().sum() / count


def features_in_place(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    y = x.clone()
    y[..., 0] = y[..., 1].tanh()
    return y.square().sum() / count


def results_in_place(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return x.div_(2.0).logsumexp(-1).sum() / count


def masks_in_two_forms(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    kept, values = labels >= 0, x[..., 1].flatten()
    rows, places = kept.nonzero(as_tuple=True)
    own = logged(x[kept], labels[kept]) * values[kept.flatten()] * x[rows, places][:, 2]
    return own.sum() / count


def pieces_of_two(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    pairs = zip(x.split(5, 1), x.tanh().split(5, 1), strict=True)
    return sum((a * b).sum() for a, b in pairs) / count  # type: ignore[return-value]


def slices_used_twice(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    total = x.new_zeros(())
    for at in range(0, x.shape[1], 5):
        total = total + x[:, at : at + 5].square().sum() + x[:, at : at + 5].tanh().sum()
    return total / count


def stacked_tokens(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    each = torch.stack([x[:, at].tanh() for at in range(x.shape[1])], 1)
    return (each * x).sum() / count


def class_prior(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    prior = torch.full((VOCABULARY,), 1 / VOCABULARY, dtype=x.dtype)
    return -(x.log_softmax(-1) * prior).sum() / count


def polygammas(x: Tensor, labels: Tensor, count: int, rest: Rest) -> Tensor:
    return torch.polygamma(1, x.square() + 1).sum() / count


RIGHT: dict[str, Callable[[Tensor, Tensor, int, Rest], Tensor]] = {
    each.__name__: each
    for each in (
        chunked_ce,
        chunked_slices,
        cat_chunks,
        stack_rows,
        two_heads,
        clipped_ratio,
        policy_and_entropy,
        masked_index,
        two_masked,
        value,
        distil,
        distil2,
        divergence_of_both,
        zloss,
        focal,
        smooth,
        weighted,
        poly_loss,
        mse,
        huber,
        bce,
        margin,
        cos,
        norm_feat,
        einsum,
        einsum2,
        weights_of_rows,
        mean_of_rows,
        in_single,
        softcap,
        chosen,
        filled,
        scatter_back,
        nonzero,
        reshaped,
        heads,
        layernorm,
        bilinear,
        mixture,
        in_order,
        ordinal,
        log1p,
        of_python,
        projected,
        rows_apart,
        halves_of_features,
        tokens_loop,
        margins_of_classes,
        ent_reg,
        norms_off_one,
        entropies,
        by_a_distribution,
        gauss,
        in_halves,
        logits_masked,
        set_in_place,
        scaled_in_place,
        take_along,
        topk_logits,
        weights_of_sequences,
        mapped,
        triple,
        cdist_codes,
        attn_feat,
        conv_feat,
        outer_feat,
        inverses,
        polygammas,
        put_back,
        put_back_by_mask,
        features_in_place,
        results_in_place,
        masks_in_two_forms,
        pieces_of_two,
        slices_used_twice,
        stacked_tokens,
        class_prior,
        windows,
        complex_parts,
        diagonals,
    )
}
SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.square().sum() / 96,
    "index_add": lambda x: (
        torch.zeros(2, 4, x.shape[2]).to(x).index_add(1, quarters(x), x.square()).sum()
    ),
    "row sums": lambda x: (
        torch.zeros(2)
        .to(x)
        .index_add(0, torch.arange(2).repeat_interleave(x.shape[1]), x.square().sum(-1).flatten())
        .sum()
    ),
    "fft features": lambda x: fft.rfft(x, dim=2).abs().sum(),
    "einsum": lambda x: torch.einsum("bsd,bsd->", x, x),
    "cosine": lambda x: f.cosine_similarity(x, x.roll(1, 2), dim=2).sum(),
    "dice features": lambda x: (2 * x.sigmoid().sum(-1) / (x.sigmoid().sum(-1) + 1)).sum(),
    "sum then scale": lambda x: (x.sum(1) * 3 / 96).sum(),
    "sum then matmul": lambda x: (x.square().sum(1) @ torch.ones(61, 3).to(x)).sum(),
    "sum then index": lambda x: x.square().sum(1)[:, 3].sum(),
    "renorm": lambda x: (10 * x).renorm(2, 1, 1.0).sum(),
    "mean of two rows": lambda x: f.kl_div(
        x.log_softmax(-1), torch.full_like(x, 1 / 61), reduction="batchmean"
    ),
}
WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "the next of those picked": lambda x: (
        (
            x[:, (torch.arange(x.shape[1]) + 1).clamp(max=x.shape[1] - 1)][x[..., 0] > 0]
            - x[x[..., 0] > 0]
        )
        .square()
        .sum()
    ),
    "weights of each row": lambda x: (
        x.square() * ((x[..., :1] > 0) / (x[..., :1] > 0).sum(1, keepdim=True)).to(x).detach()
    ).sum(),
    "cumsum": lambda x: x.cumsum(1).square().sum() / 96,
    "logcumsumexp": lambda x: x.logcumsumexp(1).sum() / 96,
    "cumprod": lambda x: (x * 0.1).cumprod(1).sum(),
    "cummax": lambda x: x.cummax(1)[0].sum(),
    "index_add then square": lambda x: (
        torch.zeros(2, 4, x.shape[2]).to(x).index_add(1, quarters(x), x).square().sum()
    ),
    "scatter_add then square": lambda x: (
        torch.zeros(2, 4, x.shape[2])
        .to(x)
        .scatter_add(1, quarters(x)[None, :, None].expand_as(x), x)
        .square()
        .sum()
    ),
    "scatter mean": lambda x: (
        torch.zeros(2, 4, x.shape[2])
        .to(x)
        .scatter_reduce(1, quarters(x)[None, :, None].expand_as(x), x, "mean")
        .sum()
    ),
    "scatter amax": lambda x: (
        torch.zeros(2, 4, x.shape[2])
        .to(x)
        .scatter_reduce(1, quarters(x)[None, :, None].expand_as(x), x, "amax")
        .sum()
    ),
    "index_reduce": lambda x: (
        torch.zeros(2, 4, x.shape[2]).to(x).index_reduce(1, quarters(x), x, "amax").sum()
    ),
    "fft": lambda x: fft.fft(x, dim=1).abs().sum(),
    "rfft": lambda x: fft.rfft(x, dim=1).abs().sum(),
    "diff": lambda x: x.diff(dim=1).square().sum(),
    "pad shift": lambda x: (x - f.pad(x, (0, 0, 1, 0))[:, :-1]).square().sum(),
    "cat shift": lambda x: (
        (x - torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)).square().sum()
    ),
    "cat zero": lambda x: (
        torch.cat([x.new_zeros(2, 1, x.shape[2]), x], 1).diff(dim=1).square().sum()
    ),
    "unfold": lambda x: x.unfold(1, 3, 1).sum(-1).square().sum(),
    "cov": lambda x: torch.cov(x.flatten(0, 1).T).square().sum(),
    "corrcoef": lambda x: torch.corrcoef(x.flatten(0, 1).T).square().sum(),
    "gram": lambda x: (x.transpose(1, 2) @ x).square().sum(),
    "einsum gram": lambda x: torch.einsum("bsd,bse->bde", x, x).square().sum(),
    "einsum sum": lambda x: torch.einsum("bsd->bd", x).square().sum(),
    "tensordot": lambda x: torch.tensordot(x, x, dims=([0, 1], [0, 1])).square().sum(),
    "trapezoid": lambda x: torch.trapezoid(x, dim=1).sum(),
    "quantile": lambda x: x.quantile(0.5, dim=1).sum(),
    "nanmean": lambda x: x.square().nanmean(1).sum(),
    "aminmax": lambda x: (lambda r: (r[1] - r[0]).sum())(x.aminmax(dim=1)),
    "segment_reduce": lambda x: torch.segment_reduce(
        x[0].contiguous(), "mean", lengths=torch.tensor([4, x.shape[1] - 4])
    ).sum(),
    "normalize tokens": lambda x: f.normalize(x, dim=1).square().sum(-1)[..., None].mul(x).sum(),
    "dist": lambda x: x.dist(x * 2),
    "cdist": lambda x: torch.cdist(x, x).sum(),
    "prod": lambda x: (x * 0.1).prod(1).sum(),
    "take": lambda x: x.take(torch.tensor([0, 5])).sum(),
    "gather first": lambda x: x.gather(1, torch.zeros(2, 1, x.shape[2], dtype=torch.long)).sum(),
    "cosine tokens": lambda x: f.cosine_similarity(x, x.roll(1, 2), dim=1).sum(),
    "mse mean": lambda x: f.mse_loss(x, torch.zeros_like(x)),
    "smooth l1": lambda x: f.smooth_l1_loss(x, torch.zeros_like(x)),
    "huber": lambda x: f.huber_loss(x, torch.zeros_like(x)),
    "soft margin": lambda x: f.soft_margin_loss(x, torch.ones_like(x)),
    "margin ranking": lambda x: f.margin_ranking_loss(
        x.sum(-1).flatten(), x.sum(-1).flatten() * 0.5, torch.ones(x[..., 0].numel()).to(x)
    ),
    "multi margin": lambda x: f.multi_margin_loss(
        x.flatten(0, 1), torch.zeros(x[..., 0].numel(), dtype=torch.long)
    ),
    "multilabel": lambda x: f.multilabel_soft_margin_loss(
        x.flatten(0, 1), torch.ones_like(x.flatten(0, 1))
    ),
    "bce": lambda x: f.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
    "bce probs": lambda x: f.binary_cross_entropy(x.sigmoid(), torch.ones_like(x)),
    "kl mean": lambda x: f.kl_div(x.log_softmax(-1), torch.full_like(x, 1 / 61)),
    "poisson": lambda x: f.poisson_nll_loss(x, torch.ones_like(x)),
    "gaussian": lambda x: f.gaussian_nll_loss(x, torch.zeros_like(x), torch.ones_like(x)),
    "ce probs": lambda x: f.cross_entropy(
        x.flatten(0, 1), torch.full_like(x.flatten(0, 1), 1 / 61)
    ),
    "ce class weights": lambda x: f.cross_entropy(
        x.flatten(0, 1), torch.arange(x[..., 0].numel()) % 3, weight=torch.linspace(1, 2, 61).to(x)
    ),
    "ce smoothing": lambda x: f.cross_entropy(
        x.flatten(0, 1), torch.zeros(x[..., 0].numel(), dtype=torch.long), label_smoothing=0.1
    ),
    "nll": lambda x: f.nll_loss(
        x.log_softmax(-1).flatten(0, 1), torch.zeros(x[..., 0].numel(), dtype=torch.long)
    ),
    "focal": lambda x: ((1 - x.softmax(-1)[..., 0]) ** 2 * -x.log_softmax(-1)[..., 0]).mean(),
    "triplet": lambda x: f.triplet_margin_loss(x, x * 0.5, x.roll(1, 2)),
    "cosine emb": lambda x: f.cosine_embedding_loss(
        x.flatten(0, 1), x.flatten(0, 1).roll(1, 1), torch.ones(x[..., 0].numel())
    ),
    "dice": lambda x: 2 * x.sigmoid().sum() / (x.sigmoid().sum() + 1),
    "dice rows": lambda x: (2 * x.sigmoid().sum(1) / (x.sigmoid().sum(1) + 1)).sum(),
    "entropy of mean": lambda x: (
        -(x.softmax(-1).mean((0, 1)) * x.softmax(-1).mean((0, 1)).log()).sum()
    ),
    "contrast": lambda x: f.cross_entropy(x[0] @ x[0].T, torch.arange(x.shape[1]), reduction="sum"),
    "attention pool": lambda x: ((x[..., :1].softmax(1)) * x).sum(),
    "layer_norm tokens": lambda x: (
        f.layer_norm(x.transpose(1, 2), (x.shape[1],)).square().mul(x.transpose(1, 2)).sum()
    ),
    "batch_norm": lambda x: (
        f.batch_norm(x.transpose(1, 2), None, None, training=True).mul(x.transpose(1, 2)).sum()
    ),
    "instance_norm": lambda x: f.instance_norm(x.transpose(1, 2)).mul(x.transpose(1, 2)).sum(),
    "group_norm": lambda x: f.group_norm(x.transpose(1, 2), 1).mul(x.transpose(1, 2)).sum(),
    "rms tokens": lambda x: (
        f.rms_norm(x.transpose(1, 2), (x.shape[1],)).mul(x.transpose(1, 2)).sum()
    ),
    "max pool": lambda x: f.max_pool1d(x.transpose(1, 2), 2).sum(),
    "adaptive": lambda x: f.adaptive_avg_pool1d(x.transpose(1, 2), 1).sum(),
    "lp pool": lambda x: f.lp_pool1d(x.transpose(1, 2), 2, 2).sum(),
    "interpolate": lambda x: (
        f.interpolate(x.transpose(1, 2), scale_factor=0.5, mode="linear").square().sum()
    ),
    "fold": lambda x: f.unfold(x[:, None], (3, 1)).sum(1).square().sum(),
    "var": lambda x: x.var(1).sum(),
    "std all": lambda x: x.std(),
    "logsumexp": lambda x: x.logsumexp(1).sum(),
    "norm": lambda x: x.norm(),
    "matrix norm": lambda x: torch.linalg.matrix_norm(x).sum(),
    "svd": lambda x: torch.linalg.svdvals(x).sum(),
    "det": lambda x: torch.linalg.slogdet(x.transpose(1, 2)[:, :5] @ x[..., :5])[1].sum(),
    "median": lambda x: x.median(1)[0].sum(),
    "sort": lambda x: (x.sort(1)[0] * torch.arange(x.shape[1])[None, :, None]).sum(),
    "topk": lambda x: x.topk(2, 1)[0].sum(),
    "last": lambda x: x[:, -1].sum(),
    "every second": lambda x: x[:, ::2].sum(),
    "narrow": lambda x: x.narrow(1, 0, 5).sum(),
    "chunk": lambda x: x.chunk(2, 1)[0].sum(),
    "tensor_split": lambda x: x.tensor_split(2, 1)[0].sum(),
    "unbind": lambda x: x.unbind(1)[0].sum(),
    "select": lambda x: x.select(1, 0).sum(),
    "index_select": lambda x: x.index_select(1, torch.tensor([0, 1])).sum(),
    "place weights": lambda x: (x * torch.arange(x.shape[1])[None, :, None]).sum(),
    "sum then exp": lambda x: (x.sum() / 96).exp(),
    "sum then sq": lambda x: (x.sum(1) / 20).square().sum(),
    "sum then clamp": lambda x: x.sum((1, 2)).clamp(min=0).sum(),
    "sum then relu": lambda x: x.sum((1, 2)).relu().sum(),
    "sum then where": lambda x: (lambda s: torch.where(s > 0, s, -2 * s).sum())(x.sum((1, 2))),
    "sum then abs": lambda x: x.sum((1, 2)).abs().sum(),
    "sum then tanh": lambda x: (x.sum((1, 2)) / 20).tanh().sum(),
    "sum then softmax": lambda x: (x.sum(1) / 20).softmax(-1).square().sum(),
    "sum then log": lambda x: x.sigmoid().sum(1).log().sum(),
    "sum then sin": lambda x: x.sum(1).sin().sum(),
    "sum then gelu": lambda x: f.gelu(x.sum(1)).sum(),
    "sum then silu": lambda x: f.silu(x.sum(1)).sum(),
    "sum then elu": lambda x: f.elu(x.sum(1)).sum(),
    "sum then leaky": lambda x: f.leaky_relu(x.sum(1)).sum(),
    "sum then hardtanh": lambda x: f.hardtanh(x.sum(1)).sum(),
    "sum then mish": lambda x: f.mish(x.sum(1)).sum(),
    "sum then cos sim": lambda x: f.cosine_similarity(
        x.sum(1), torch.ones_like(x[:, 0]), dim=-1
    ).sum(),
    "sum then ce": lambda x: f.cross_entropy(x.sum(1) / 20, torch.zeros(2, dtype=torch.long)),
    "sum then layer_norm": lambda x: (
        f.layer_norm(x.sum(1), (x.shape[2],)) * x.sum(1).detach()
    ).sum(),
    "sum then norm": lambda x: x.sum(1).norm(dim=-1).sum(),
    "sum then linear": lambda x: (x.sum(1) @ torch.ones(61, 3).to(x)).square().sum(),
    "sum then matmul self": lambda x: (x.sum(1) @ x.sum(1).T).sum(),
    "sum then outer": lambda x: torch.outer(x.sum(1)[0], x.sum(1)[1]).sum(),
    "sum then dot": lambda x: torch.dot(x.sum(1)[0], x.sum(1)[1]),
    "sum then bmm": lambda x: torch.bmm(x.sum(1)[:, None], x.sum(1)[:, :, None]).sum(),
    "sum then addcmul": lambda x: torch.addcmul(x.sum(1), x.sum(1), x.sum(1)).sum(),
    "sum then atan": lambda x: x.sum(1).atan().sum(),
    "sum then erf": lambda x: x.sum(1).erf().sum(),
    "sum then sinh": lambda x: (x.sum(1) / 20).sinh().sum(),
    "sum then softplus": lambda x: f.softplus(x.sum(1)).sum(),
    "sum then max": lambda x: x.sum(1).amax(-1).sum(),
    "sum then logsumexp": lambda x: x.sum(1).logsumexp(-1).sum(),
    "sum then cumprod": lambda x: (x.sum(1) / 20).cumprod(-1).sum(),
    "sum then prod": lambda x: (x.sum(1) / 20).prod(-1).sum(),
    "sum then std": lambda x: x.sum(1).std(-1).sum(),
    "sum then var": lambda x: x.sum(1).var(-1).sum(),
    "sum then dist": lambda x: x.sum(1).dist(torch.zeros_like(x[:, 0])),
    "sum then hinge": lambda x: f.hinge_embedding_loss(
        x.sum(1), -torch.ones_like(x[:, 0]), reduction="sum"
    ),
    "sum then mse": lambda x: f.mse_loss(x.sum(1), torch.ones_like(x[:, 0]), reduction="sum"),
    "sum then bce": lambda x: f.binary_cross_entropy(
        (x.sum(1) / 20).sigmoid(), torch.ones_like(x[:, 0]), reduction="sum"
    ),
    "sum then kl": lambda x: f.kl_div(
        (x.sum(1) / 20).log_softmax(-1), torch.full_like(x[:, 0], 1 / 61), reduction="sum"
    ),
    "baddbmm": lambda x: (
        torch.baddbmm(torch.zeros(2, 61, 61).to(x), x.transpose(1, 2), x).square().sum()
    ),
    "addmm": lambda x: torch.addmm(torch.zeros(61, 61).to(x), x[0].T, x[0]).square().sum(),
    "mv": lambda x: (x[0].T @ x[0, :, 0]).square().sum(),
    "matmul consts": lambda x: (torch.ones(3, x.shape[1]).to(x) @ x).square().sum(),
    "bilinear": lambda x: torch.einsum("bsd,btd->bst", x, x).square().sum(),
    "sdpa": lambda x: f.scaled_dot_product_attention(x, x, x).square().sum(),
    "ctc": lambda x: f.ctc_loss(
        x.transpose(0, 1).log_softmax(-1),
        torch.ones(2, 3, dtype=torch.long),
        torch.full((2,), x.shape[1]),
        torch.full((2,), 3),
    ),
    "pixel": lambda x: torch.nn.functional.embedding_bag(
        torch.arange(x.shape[1])[None], x[0], mode="mean"
    ).sum(),
    "stack of sums sq": lambda x: torch.stack([x[0].sum(), x[1].sum()]).square().sum(),
    "view over": lambda x: x.reshape(2, -1).softmax(-1).square().sum(),
    "view mean": lambda x: x.reshape(-1).square().mean(),
    "permute mean": lambda x: x.permute(2, 0, 1).square().mean((1, 2)).sum(),
    "swapaxes": lambda x: x.swapaxes(0, 1).square().mean(0).sum(),
    "movedim": lambda x: x.movedim(1, -1).square().mean(-1).sum(),
    "unflatten": lambda x: x.flatten(0, 1).unflatten(0, (2, -1)).square().mean(1).sum(),
    "mT": lambda x: x.mT.square().mean(-1).sum(),
    "expand": lambda x: x[:, None].expand(2, 3, x.shape[1], 61).square().mean(2).sum(),
    "repeat": lambda x: x.repeat(1, 2, 1).square().mean(1).sum(),
    "complex": lambda x: torch.view_as_real(torch.complex(x, x)).square().mean(1).sum(),
    "float": lambda x: x.float().square().mean(1).sum().double(),
    "rows of mean": lambda x: torch.stack([r.square().mean() for r in x]).sum(),
    "loop tokens": lambda x: sum(x[:, i].square().mean() for i in range(x.shape[1])) / x.shape[1],
    "vmap": lambda x: torch.vmap(lambda r: r.square().mean())(x).sum(),
}


def _parts(run: Any) -> tuple[Tensor, Tensor, int, Rest]:
    """A part's logits [b, s_r, V], labels, the targets of the step, and other columns."""
    part = run.shard(_batch())
    known = {name: part.inputs[name] for name in part.inputs if name not in ("labels", *part.rest)}
    return run(**known)[0], part.labels, part.targets, part.rest


def _batch() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)
    shape = (2, TOKENS)
    return {
        **drawn(2, TOKENS),
        "old": -torch.rand(shape, generator=draw, dtype=torch.float64) - 1,
        "adv": torch.randn(shape, generator=draw, dtype=torch.float64),
        "t": torch.randn((*shape, VOCABULARY), generator=draw, dtype=torch.float64),
    }


def _judged(names: list[str], kind: str) -> dict[str, float | str]:
    """For each loss by its name how far the sum over ranks is from one process, relative, with its
    gradients, or what is said of it."""
    own_losses._OFTEN = 1 << 20  # each backward is looked at
    model = gpt()
    plain, batch = copy.deepcopy(model), _batch()
    run = hr.compile(model)
    found = dict[str, float | str]()
    for name in names:
        model.zero_grad(), plain.zero_grad()
        x, labels, count, rest = _parts(run)
        whole = plain(batch["ids"])[0]
        try:
            if kind == "labels":
                own, wanted = (
                    RIGHT[name](x, labels, count, rest),
                    RIGHT[name](whole, batch["labels"], int((batch["labels"] >= 0).sum()), batch),
                )
            else:
                table = SUMS if kind == "sums" else WRONG
                own, wanted = table[name](x), table[name](whole)
            run.backward(own)
        except ModelError as error:
            found[name] = str(error)
            continue
        off = [abs(float(run.add_up(own)) / float(wanted.detach()) - 1)]
        wanted.backward()
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None
            assert other.grad is not None
            off.append(float((mine.grad - other.grad).abs().max() / other.grad.abs().max()))
        found[name] = max(off)
    return found


@pytest.mark.parametrize("kind", ["labels", "sums"])
def test_losses_that_are_sums_over_tokens_are_exact(kind: str) -> None:
    """Catches the refusal of what people write, and numbers that are off."""
    names = list(RIGHT if kind == "labels" else SUMS)
    for found in run_ranks(2, _judged, names, kind):
        for name in names:
            off = found[name]
            assert isinstance(off, float), (name, off)
            assert off < (1e-6 if name in SINGLE else EXACT), name


def test_losses_that_are_none_are_refused() -> None:
    """Catches every function of tokens with others, and of sums over those of one rank."""
    for found in run_ranks(2, _judged, list(WRONG), "wrong"):
        silent = [name for name in WRONG if not str(found[name]).startswith("loss of a part: got ")]
        assert not silent


SINGLE = {"in_single", "in_halves"}
"""Those that round to single precision."""
