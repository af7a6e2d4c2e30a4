"""The training loss: cross entropy, drafting, and the indexer's alignment.

    loss = CE(trunk) + mtp_weight * sum_j w_j (0.8 KL(trunk || draft_j) + 0.2 CE(draft_j)) / sum_j w_j
         + KL(attention || indexer)

Draft step j of row t predicts token t + j + 1, and imitates the trunk's distribution at row t + j. The indexer is
trained as in DeepSeek-V3.2's report: its scores, as a softmax, should equal the attention it serves; gradients stop at
its inputs. We differ in one point: heads and layers that share a choice are combined by their maximum, not their mean,
because one head that looks far back would drown in the mean, and top-k must keep what any head needs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .model import MtpOutput, TinyModel, TrunkOutput, attention_probs

STEP_WEIGHTS = (1.0, 0.8, 0.6, 0.45, 0.35)
SOFT_SHARE = 0.8
MIN_IMPORTANCE = 0.2  # of a row for the indexer; rows that write a reply count 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """What one part of the training computes.

    Attributes:
        length: Positions of a row.
        num_rows: Rows of a batch.
        num_draft_steps: MTP steps trained.
        align_indexer: Train the indexers.
        sparse: Attend to the selected positions only.
    """

    length: int
    num_rows: int
    num_draft_steps: int
    align_indexer: bool
    sparse: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses:
    """Scalars with gradients, and the expert loads of all sparse layers with the MTP layer's last."""

    trunk: Tensor
    drafting: Tensor
    alignment: Tensor
    loads_LE: Tensor


class Objective:
    """Computes the losses of a batch; `compiled` fuses the passes over the vocabulary."""

    def __init__(self, model: TinyModel, *, compiled: bool) -> None:
        self._model = model
        self._hard: Callable[..., Tensor] = _hard_loss
        self._draft: Callable[..., Tensor] = _draft_loss
        if compiled:
            self._hard = torch.compile(_hard_loss, dynamic=False)
            self._draft = torch.compile(_draft_loss, dynamic=False)

    def __call__(self, ids: Tensor, weights: Tensor, phase: Phase, generator: torch.Generator) -> Losses:
        """Run trunk and MTP on ids [B, length + EXTRA_TOKENS] and give the losses."""
        model, length, steps = self._model, phase.length, phase.num_draft_steps
        trunk = model.trunk(ids[:, :length], sparse=phase.sparse)
        logits = model.logits(trunk.hidden_BSH)
        trunk_loss = self._hard(logits, ids[:, 1 : length + 1], weights[:, 1 : length + 1])

        probes = _probe_rows(length - steps, length // 4, generator, ids.device)
        mtp = model.mtp(ids, trunk.hidden_BSH, probes, num_steps=steps, sparse=phase.sparse)
        teacher = logits.detach()
        draft_losses = [
            self._draft(
                model.logits(mtp.first_BSH[:, :-1]), teacher[:, 1:], ids[:, 2 : length + 1], weights[:, 2 : length + 1]
            )
        ]
        for step, g in enumerate(mtp.recycled, start=2):
            target = probes + step + 1
            draft_losses.append(
                self._draft(model.logits(g), teacher[:, probes + step], ids[:, target], weights[:, target])
            )
        step_weights = STEP_WEIGHTS[: len(draft_losses)]
        drafting = sum(w * loss for w, loss in zip(step_weights, draft_losses, strict=True)) / sum(step_weights)

        alignment = trunk_loss.new_zeros(())
        if phase.align_indexer:
            alignment = self._alignment(trunk, mtp, probes, weights)
        return Losses(
            trunk=trunk_loss,
            drafting=torch.as_tensor(drafting),
            alignment=alignment,
            loads_LE=torch.cat([trunk.loads_LE[1:], mtp.load_E[None]]),
        )

    def alignment(self, ids: Tensor, weights: Tensor, phase: Phase, generator: torch.Generator) -> Tensor:
        """Give the indexers' loss alone; the rest of the model runs without gradients."""
        length, steps = phase.length, phase.num_draft_steps
        probes = _probe_rows(length - steps, length // 2, generator, ids.device)
        with torch.no_grad():
            trunk = self._model.trunk(ids[:, :length], sparse=phase.sparse)
            mtp = self._model.mtp(ids, trunk.hidden_BSH, probes, num_steps=steps, sparse=phase.sparse)
        return self._alignment(trunk, mtp, probes, weights)

    def _alignment(self, trunk: TrunkOutput, mtp: MtpOutput, probes: Tensor, weights: Tensor) -> Tensor:
        """Mean over indexers of KL(attention || softmax of index scores) on half of the probe rows.

        Both sides cover the whole context, also where attention itself is sparse: a position that the indexer missed
        would otherwise never be missed again.
        """
        model = self._model
        rows = probes[::2]
        importance = weights[:, rows + 1].clamp_min(MIN_IMPORTANCE)
        divergences = []
        full = [i for i, kind in enumerate(model.config.indexer_types) if kind == "full"]
        for first, stop in zip(full, [*full[1:], model.config.num_layers], strict=True):
            attention = attention_probs(trunk.projected[first], rows)
            for index in range(first + 1, stop):
                attention = torch.maximum(attention, attention_probs(trunk.projected[index], rows))
            scores = model.row_scores(trunk.projected[first], model.layer(first), rows)
            divergences.append(_divergence(attention, scores, rows, importance))
        attention = attention_probs(mtp.projected, rows)
        for probs in mtp.recycled_probs:
            attention = torch.maximum(attention, probs[:, ::2])
        scores = model.row_scores(mtp.projected, model.mtp_layer, rows)
        divergences.append(_divergence(attention, scores, rows, importance))
        return torch.stack(divergences).mean()


def _probe_rows(stop: int, count: int, generator: torch.Generator, device: torch.device) -> Tensor:
    return torch.randperm(stop - 1, generator=generator)[:count].sort().values.to(device)


def _hard_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def _draft_loss(logits: Tensor, teacher: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    log_draft, log_teacher = logits.log_softmax(-1), teacher.log_softmax(-1)
    soft = (log_teacher.exp() * (log_teacher - log_draft)).sum(-1)
    hard = -log_draft.gather(-1, targets[..., None])[..., 0]
    return ((SOFT_SHARE * soft + (1 - SOFT_SHARE) * hard) * weights).sum() / weights.sum()


def _divergence(attention_BTS: Tensor, scores_BTS: Tensor, rows_T: Tensor, importance_BT: Tensor) -> Tensor:
    attention_BTS = attention_BTS / attention_BTS.sum(-1, keepdim=True).clamp_min(1e-6)
    hidden = torch.arange(scores_BTS.shape[-1], device=rows_T.device) > rows_T[:, None]
    log_index = scores_BTS.masked_fill(hidden, -1e9).log_softmax(-1)
    log_attention = attention_BTS.clamp_min(1e-9).log()
    divergence_BT = (attention_BTS * (log_attention - log_index)).sum(-1)
    return (divergence_BT * importance_BT).sum() / importance_BT.sum()
