"""PolicyGradientOptions: every knob of the policy-gradient loss of `objectives/policy_gradient.py`.

theta is the policy that is trained, prox the learner at the start of the update, behav the policy that
sampled the token (report 3.3.1).
"""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import model_validator

from nemotron_ultra.config.base import NonNegativeReal, PositiveReal, Real, config
from nemotron_ultra.errors import ConfigError


@config
class PolicyGradientOptions:
    """The defaults are the preset mopd_paper: equation (3) of the report."""

    ratio: Literal["token", "sequence", "forced", "none"] = "token"
    """token: theta / prox; sequence: its geometric mean over the row (GSPO); forced: exactly 1 with a live
    gradient, prox being theta; none: log theta stands in its place (REINFORCE)."""
    clip: tuple[Real, Real] | None = (0.2, 0.2)
    """[low, high]: the ratio is clipped to 1 - low .. 1 + high; low = 1 means no lower bound; null: no
    clip."""
    dual_clip: PositiveReal | None = None
    """A term of negative advantage is at least this many times the advantage (dual clip); above 1; null:
    off."""
    cispo: bool = False
    """The clipped ratio without gradient weighs A log theta (CISPO), in place of min(r A, clip(r) A)."""
    cispo_cap: PositiveReal | None = None
    """Largest ratio of CISPO, an absolute number; takes the place of `clip`."""
    tis: tuple[Real, Real] | None = None
    """[low, high]: the weight prox / behav is clamped to these bounds; [0, .inf] leaves it as it is."""
    icepop: tuple[Real, Real] | None = (0.5, 5.0)
    """[low, high], inclusive: tokens whose weight prox / behav lies outside give nothing, others keep it."""
    sequence_mask: tuple[Real, Real] | None = None
    """[low, high], inclusive: rows whose geometric mean of prox / behav lies outside give nothing; the tokens
    of other rows keep their weight, as tis or icepop leave it."""
    weight_level: Literal["token", "sequence"] = "token"
    """sequence: every token carries its row's geometric mean of prox / behav."""
    row_error: PositiveReal | None = None
    """Rows whose mean of exp|log behav - log prox| is above this give nothing; null: off."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of KL(theta, reference)."""
    kl_coefficient: NonNegativeReal = 0.0
    """Factor of the KL term; 0 leaves it out."""
    kl_gradient: Literal["direct", "score", "prox", "behavior"] = "score"
    """Factor of the KL term with a live gradient: direct none; score theta / sg theta, which adds the
    score-function gradient; prox theta / prox; behavior theta / behav."""
    kl_clamp: tuple[PositiveReal, PositiveReal] | None = (20.0, 10.0)
    """Largest size of the log ratio and of the estimate in the KL term; null: no clamp."""
    reduction: Literal["token_mean", "row_mean", "row_sum"] = "token_mean"
    """token_mean: over all trained tokens of the global batch, masked ones included; row_mean: mean over all
    rows of the mean over their tokens; row_sum: sum of the row over row_length, mean over all rows
    (Dr.GRPO)."""
    row_length: PositiveReal | None = None
    """Constant that row_sum divides by: the longest response in tokens."""

    @classmethod
    def preset(cls, name: str, **changes: Any) -> PolicyGradientOptions:
        """The options of configs/loss/NAME.yaml with some fields changed.

        Naming tis or icepop alone sets the preset's other one aside. Raises ConfigError for an unknown name
        (with the nearest one) and for values that do not fit.
        """
        from nemotron_ultra.config import check, compose  # they import this module by way of RunConfig

        files = compose.options("loss")
        if name not in files:
            raise ConfigError(
                f"loss: no preset '{name}'{check.nearest(name, files)}", allowed=", ".join(files)
            )
        values = compose.read_yaml(files[name])
        for one, other in (("tis", "icepop"), ("icepop", "tis")):
            if changes.get(one) is not None:
                values[other] = None
        return check.checked(cls, values | changes)

    @property
    def weighted(self) -> bool:
        """Whether a weight prox / behav multiplies the policy term."""
        return any(bounds is not None for bounds in (self.tis, self.icepop, self.sequence_mask))

    @model_validator(mode="after")
    def _consistent(self) -> PolicyGradientOptions:
        problems = [*self._bounds(), *self._contradictions()]
        if problems:
            raise ValueError(" | ".join(problems))
        return self

    def _bounds(self) -> list[str]:
        found = []
        if self.clip is not None:
            low, high = self.clip
            if not (0 <= low <= 1 and 0 <= high < math.inf and (low <= high or low == 1)):
                found.append(
                    f"clip: got [{low:g}, {high:g}]; allowed: [low, high], 0 <= low <= high and low at "
                    "most 1, for the bounds 1 - low and 1 + high; low = 1 means no lower bound"
                )
        for name in ("tis", "icepop", "sequence_mask"):
            bounds = getattr(self, name)
            if bounds is not None and not (0 <= bounds[0] <= bounds[1] and bounds[0] < math.inf):
                found.append(
                    f"{name}: got [{bounds[0]:g}, {bounds[1]:g}]; allowed: [low, high] with 0 <= low <= high"
                )
        if self.dual_clip is not None and self.dual_clip <= 1:
            found.append(
                f"dual_clip: got {self.dual_clip:g}; allowed: a number above 1, 3 is customary, or null"
            )
        return found

    def _contradictions(self) -> list[str]:
        """Options that would have no effect, or two effects, are refused."""
        found = []
        if self.tis is not None and self.icepop is not None:
            found.append(
                "tis, icepop: both are set; one weight is clamped or masked: set one of them to null"
            )
        if self.cispo and self.ratio not in ("token", "sequence"):
            found.append(f"cispo: needs a ratio, got ratio={self.ratio}; use ratio=token or sequence")
        elif self.cispo and self.clip is None and self.cispo_cap is None:
            found.append("cispo: needs an upper bound; set clip or cispo_cap")
        if self.cispo and self.dual_clip is not None:
            found.append("dual_clip: has no effect with cispo; set it to null")
        if self.cispo_cap is not None and not self.cispo:
            found.append("cispo_cap: has no effect without cispo; set it to null or cispo to true")
        if self.cispo_cap is not None and self.clip is not None:
            found.append("cispo_cap: takes the place of clip; set one of them to null")
        if self.ratio == "none" and not self.cispo:
            found += [
                f"{name}: has no effect with ratio=none; set it to null"
                for name in ("clip", "dual_clip")
                if getattr(self, name) is not None
            ]
        if self.weight_level == "sequence" and not self.weighted:
            found.append("weight_level: sequence has no effect without tis, icepop or sequence_mask")
        if self.reduction == "row_sum" and self.row_length is None:
            found.append("row_length: row_sum divides by it; set it to the longest response in tokens")
        if self.reduction != "row_sum" and self.row_length is not None:
            found.append(f"row_length: has no effect with reduction={self.reduction}; set it to null")
        return found
