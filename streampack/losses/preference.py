"""Losses of preferences: DPO and its kin over pairs of log-probabilities, Bradley-Terry over pairs of scores."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from streampack.validation import require

FORMS = ("sigmoid", "ipo", "hinge")


class PreferenceLoss(nn.Module):
    """Loss of each pair of a chosen and a rejected answer, from their log-probabilities, and the answers' rewards.

    Called as torchtune's ``DPOLoss`` and ``RSOLoss``, which it equals for ``"sigmoid"`` and ``"hinge"``, and needs no
    torchtune. With ``h = beta * ((chosen - rejected) - (reference_chosen - reference_rejected)) - margin``:

    - ``"sigmoid"``: ``-log(sigmoid(h))``, DPO (Rafailov et al. 2023, arXiv 2305.18290);
    - ``"hinge"``: ``max(0, 1 - h)``, RSO and SLiC (Liu et al. 2023, arXiv 2309.06657);
    - ``"ipo"``: ``(h / beta - 1 / (2 * beta)) ** 2`` (Azar et al. 2023, arXiv 2310.12036). As TRL computes it, it has
      ``length_normalized=True``.

    SimPO (Meng et al. 2024, arXiv 2405.14734) is ``PreferenceLoss(beta=2.0, margin=1.0, reference_free=True,
    length_normalized=True)``.

    >>> logps = [torch.tensor([-3.0]), torch.tensor([-5.0]), torch.tensor([-4.0]), torch.tensor([-5.0])]
    >>> losses, chosen_rewards, rejected_rewards = PreferenceLoss(beta=0.5)(*logps)
    >>> losses, chosen_rewards, rejected_rewards  # -log(sigmoid(0.5))
    (tensor([0.4741]), tensor([0.5000]), tensor([0.]))

    Args:
        form: ``"sigmoid"``, ``"ipo"`` or ``"hinge"``.
        beta: the weight of the log-probabilities; the larger, the nearer the policy stays to the reference.
        label_smoothing: the fraction of pairs whose order is taken to be wrong, below 0.5: the loss is the mean over
            both orders (Mitchell 2023, "conservative DPO").
        margin: by how much the reward of the chosen answer is to be higher; not for ``"ipo"``.
        reference_free: leave the reference out: its log-probabilities count as 0.
        length_normalized: whether log-probabilities are means over an answer's trained tokens, instead
            of sums. The recipe does so; the class computes the same with both.

    Raises:
        ValueError: for an unknown form, or a number out of range.
    """

    def __init__(
        self,
        *,
        form: str = "sigmoid",
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        margin: float = 0.0,
        reference_free: bool = False,
        length_normalized: bool = False,
    ) -> None:
        super().__init__()
        require(form, "form", FORMS)
        if not beta > 0:
            raise ValueError(f"beta={beta} is no weight; give a number above 0, such as 0.1")
        if not 0 <= label_smoothing < 0.5:
            raise ValueError(
                f"label_smoothing={label_smoothing} is no fraction of wrong pairs; give a number from 0 to below 0.5"
            )
        if margin < 0 or (margin and form == "ipo"):
            raise ValueError(
                f"margin={margin} with form={form!r}; give 0, or a positive number with 'sigmoid' or 'hinge'"
            )
        self.form = form
        self.beta = beta
        self.label_smoothing = label_smoothing
        self.margin = margin
        self.reference_free = reference_free
        self.length_normalized = length_normalized

    def forward(
        self,
        policy_chosen_logps: torch.Tensor,
        policy_rejected_logps: torch.Tensor,
        reference_chosen_logps: torch.Tensor,
        reference_rejected_logps: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return losses, and without gradients the rewards of chosen and of rejected answers, each ``[pairs]``."""
        chosen, rejected = policy_chosen_logps, policy_rejected_logps
        if not self.reference_free:
            chosen, rejected = chosen - reference_chosen_logps, rejected - reference_rejected_logps
        logits = self.beta * (chosen - rejected)
        losses = self._losses(logits)
        if self.label_smoothing:
            losses = (1 - self.label_smoothing) * losses + self.label_smoothing * self._losses(-logits)
        return losses, self.beta * chosen.detach(), self.beta * rejected.detach()

    def _losses(self, logits: torch.Tensor) -> torch.Tensor:
        if self.form == "ipo":
            return (logits / self.beta - 1 / (2 * self.beta)).square()
        if self.form == "hinge":
            return F.relu(1 + self.margin - logits)
        return -F.logsigmoid(logits - self.margin)


def bradley_terry_losses(
    chosen: torch.Tensor, rejected: torch.Tensor, *, margin: torch.Tensor | float = 0.0
) -> torch.Tensor:
    """Return ``-log(sigmoid(chosen - rejected - margin))`` of each pair of scores, the loss of a reward model.

    By Bradley and Terry, 1952; with a margin for each pair by Touvron et al. 2023, arXiv 2307.09288. A score is the
    number of the model's head at an answer's last token::

        scores = last_values(model(**inputs(batch)).squeeze(-1), batch).flatten()
        chosen, rejected = pair_of(batch)
        losses = bradley_terry_losses(scores[chosen], scores[rejected])

    >>> bradley_terry_losses(torch.tensor([1.0]), torch.tensor([0.0]))
    tensor([0.3133])

    Args:
        chosen: ``[pairs]``, scores of chosen answers.
        rejected: ``[pairs]``, scores of rejected answers.
        margin: by how much the chosen one is to be higher, ``[pairs]`` or one number.
    """
    return -F.logsigmoid(chosen - rejected - margin)
