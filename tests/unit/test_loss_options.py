"""PolicyGradientOptions: presets are the files of configs/loss; what does not fit is one clear error."""

from __future__ import annotations

import math

import pytest

from nemotron_ultra.config.compose import options as option_files
from nemotron_ultra.config.compose import read_yaml
from nemotron_ultra.config.loss import PolicyGradientOptions
from nemotron_ultra.errors import ConfigError

preset = PolicyGradientOptions.preset


def test_presets_are_the_files_and_the_default_is_equation_3():
    assert set(option_files("loss")) == {
        *("grpo", "dapo", "dr_grpo", "gspo", "cispo", "reinforce", "ultra_rlvr"),
        *("mopd_paper", "mopd_recipe", "mopd_reinforce"),
    }
    for name, file in option_files("loss").items():
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in read_yaml(file).items()}
        chosen = preset(name)
        assert {key: getattr(chosen, key) for key in values} == values
    assert preset("mopd_paper") == PolicyGradientOptions()
    assert preset("mopd_paper", tis=(0.2, 5)).icepop is None


BAD = {
    "clip: got [0.28, 0.2]": {"clip": (0.28, 0.2)},
    "clip: got [1.2, 0.8]": {"clip": (1.2, 0.8)},
    "clip: got [-0.2, 0.2]": {"clip": (-0.2, 0.2)},
    "clip: got [0.2, nan]": {"clip": (0.2, math.nan)},
    "icepop: got [5, 0.5]": {"icepop": (5, 0.5)},
    "tis: got [-1, 2]": {"tis": (-1, 2), "icepop": None},
    "sequence_mask: got [1.1, 0.9]": {"sequence_mask": (1.1, 0.9)},
    "tis, icepop: both are set": {"tis": (0, 2), "icepop": (0.5, 5)},
    "dual_clip: got 0.5": {"dual_clip": 0.5},
    "cispo: needs a ratio, got ratio=none": {"cispo": True, "ratio": "none"},
    "cispo: needs an upper bound": {"cispo": True, "clip": None},
    "dual_clip: has no effect with cispo": {"cispo": True, "dual_clip": 3},
    "cispo_cap: has no effect without cispo": {"cispo_cap": 5, "clip": None},
    "cispo_cap: takes the place of clip": {"cispo_cap": 5, "cispo": True},
    "clip: has no effect with ratio=none": {"ratio": "none"},
    "weight_level: sequence has no effect": {"weight_level": "sequence", "icepop": None},
    "row_length: row_sum divides by it": {"reduction": "row_sum"},
    "row_length: has no effect with reduction=token_mean": {"row_length": 10},
    "reduction": {"reduction": "token-mean"},
    "kl_coefficient": {"kl_coefficient": -1},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_options_are_one_clear_error(message):
    if "tis" not in BAD[message]:
        with pytest.raises(ConfigError, match="1 mistake") as caught:
            preset("mopd_paper", **BAD[message])
        assert message in str(caught.value)
    with pytest.raises(ValueError) as raised:
        PolicyGradientOptions(**BAD[message])
    assert message in str(raised.value)


def test_an_unknown_preset_or_key_names_the_nearest():
    with pytest.raises(ConfigError, match=r"no preset 'dapoo' \(did you mean 'dapo'\?\)"):
        preset("dapoo")
    with pytest.raises(ConfigError, match=r"clips: unknown key.*did you mean 'clip'.*allowed: ratio, clip, "):
        preset("grpo", clips=(0.2, 0.2))
